"""The exceptions that end a run in one line, without a traceback."""

import itertools
import re

LONGEST_ERROR = 2000  # characters


def one_line(text: object) -> str:
    """Return `text` as one line that a terminal may show: names and values in files are not trusted.

    Control characters are shown as Python writes them, and the middle of a long text is left out.
    """
    line = str(text)
    if len(line) > LONGEST_ERROR:
        line = f"{line[: LONGEST_ERROR // 2]} [...] {line[-LONGEST_ERROR // 2 :]}"
    line = " ".join(line.splitlines())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def why(error: Exception) -> str:
    """Return the message of an error as one line, without object addresses, so that it is the same on every rank."""
    message = getattr(error, "strerror", None) or str(error.args[0] if error.args else "")
    return message.partition("\n")[0].partition(" @ ")[0].partition(" <")[0] or type(error).__name__


def of_a_program(error: BaseException) -> str:
    """Return type and message of an error that a program has raised; of one in a DataLoader worker, without the traceback
    that torch writes into its message."""
    text = str(error)
    if worker := re.match(r"Caught \w+ (in DataLoader worker process \d+)\.\n", text):
        last = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
        return f"{' '.join(itertools.dropwhile(lambda line: line.startswith(' '), last))} ({worker[1]})"
    return f"{type(error).__name__}: {text}"


class UserError(Exception):
    """Invalid input or environment. The message is one line that names the remedy; the exit code is 2.

    everywhere: all ranks raise the same error (they have the same flags, or have agreed on it), so only rank 0 prints it.
    """

    exit_code = 2

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(one_line(message))
        self.everywhere = everywhere


class Failure(Exception):
    """Training cannot continue. Rank 0 prints the reason in one line; the exit code is 1.

    everywhere: all ranks raise it together. Otherwise this rank prints it, and the others are told that it has failed.
    """

    exit_code = 1

    def __init__(self, message: str, *, everywhere: bool = True):
        super().__init__(one_line(message))
        self.everywhere = everywhere
