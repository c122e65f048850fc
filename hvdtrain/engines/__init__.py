"""One file per way of running data-parallel training; each offers one `Engine`."""
