"""From output directories to a page: runs.py reads them (files: reading.py), seeds.py folds seeds of one configuration,
pictures.py and curves.py draw, page.py writes the HTML, table.py the comma-separated values."""
