"""From output directories to a page: runs.py reads them (files: reading.py), pictures.py and curves.py draw, page.py writes
the HTML."""
