"""The engines. Each runs data-parallel training in a different way and implements `Engine`."""
