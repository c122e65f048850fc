"""A module of a program, with states of its own: test_carried.py."""

COUNT = 0


class Stop:
    def __init__(self) -> None:
        self.best = 9.0

    def __call__(self, value: float) -> None:
        self.best = min(self.best, value)


STOP = Stop()


def count() -> None:
    global COUNT
    COUNT += 1
