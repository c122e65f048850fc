"""The exceptions that end a run in one line, without a traceback."""


class UserError(Exception):
    """Invalid input or environment. The message is one line that names the remedy; the exit code is 2.

    everywhere: all ranks raise the same error (they have the same flags, or have agreed on it), so only rank 0 prints it.
    """

    exit_code = 2

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


class Failure(Exception):
    """Training cannot continue. All ranks raise it together; rank 0 prints the reason in one line. The exit code is 1."""

    exit_code = 1
    everywhere = True
