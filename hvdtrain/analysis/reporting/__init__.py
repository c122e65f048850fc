"""The report on output directories: runs.py reads them, groups.py combines seeds, pictures.py draws,
page.py writes the HTML, table.py the comma-separated values."""
