"""The report on output directories: runs.py and reading.py read them, seeds.py combines the seeds of a configuration,
pictures.py and curves.py draw, page.py writes the HTML, table.py the comma-separated values."""
