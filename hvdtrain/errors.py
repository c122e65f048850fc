"""The one exception that users cause."""


class UserError(Exception):
    """Bad input or a bad environment: one line that names the remedy. The process ends with exit code 2.

    everywhere: every rank is sure to raise it too (the same flags, or agreed between them), so that rank 0 alone says it.
    """

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere
