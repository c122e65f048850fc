"""From output directories to a page: runs.py reads them, pictures.py draws, page.py writes the HTML."""
