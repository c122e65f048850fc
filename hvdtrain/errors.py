"""The one exception that users cause."""


class UserError(Exception):
    """Bad input or a bad environment: one line that names the remedy. The process ends with exit code 2."""
