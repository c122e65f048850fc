"""The report on output directories: runs.py reads them, pictures.py draws, page.py writes the HTML."""
