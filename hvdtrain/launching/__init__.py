"""How ranks start and end: launchers, ranks forked from one process, exit codes. Does not import torch."""
