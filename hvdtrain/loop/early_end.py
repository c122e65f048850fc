"""What would end a training early, in silence or with another rank blamed: it is said in one line, where it is called."""

import contextlib
from collections.abc import Callable, Iterator

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import Failure, UserError


class LeftEarly(Failure):
    """The program has called sys.exit() without an error: on one rank, or by the same line on all."""


@contextlib.contextmanager
def refused(engine: Engine, place: Callable[[], str]) -> Iterator[None]:
    """Context manager around the program's part of the training block. place: called for where in the training it is."""
    with contextlib.ExitStack() as stack:
        for module, name in engine.ending_calls():
            whole = getattr(module, name)
            stack.callback(setattr, module, name, whole)
            setattr(module, name, _refusal(name, whole))
        try:
            yield
        except SystemExit as left:
            if not (left.code is None or (isinstance(left.code, int) and left.code & 0xFF == 0)):  # 256 ends with 0
                raise
            remedy = "end the loops by `break`, or call sys.exit() after the block of training.start()"
            message = f"sys.exit() {place()}, without a result: {remedy}"
            raise LeftEarly(message, everywhere=False) from None


def _refusal(name: str, whole: Callable[..., object]) -> Callable[..., object]:
    def refuse(*arguments: object, **named: object) -> object:
        if arguments or named:  # destroy_process_group(group) of the program's own group: allowed
            return whole(*arguments, **named)
        remedy = "leave it out: hvdtrain does so at the end"
        raise UserError(f"{name}() during training, which the other ranks continue: {remedy}")

    return refuse
