"""The exceptions that end a run in one line, without a traceback."""


class UserError(Exception):
    """Bad input or a bad environment: one line that names the remedy. The process ends with exit code 2.

    everywhere: every rank is sure to raise it too (the same flags, or agreed between them), so that rank 0 alone says it.
    """

    exit_code = 2

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


class Failure(Exception):
    """Training cannot go on, and every rank knows it and raises this: rank 0 says why in one line. Exit code 1."""

    exit_code = 1
    everywhere = True
