"""The training, as a script sees it: `from hvdtrain import training` has the names for users."""
