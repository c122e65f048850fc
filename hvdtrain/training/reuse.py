"""Notices a model's output that is kept from one loop over `step.batches()` to the next in the same step.

With one micro-batch that is right. With several, the variable holds only the last one's, for every micro-batch of the next
loop: a GAN's `fake`, for instance.
"""

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hvdtrain.engines.errors import UserError


class Outputs:
    """The outputs of a step's models in each loop. models: those that the script calls."""

    def __init__(self, models: Sequence[nn.Module], step: int):
        self._models, self._step, self._loop = models, step, 0
        self._made: list[tuple[int, weakref.ref[Tensor]]] = []  # loop, output
        self._remove: list[Callable[[], None]] = []

    def begin(self, loop: int) -> None:
        """Watch the models until `end`. loop: its number in the step."""
        self._loop = loop
        for model in self._models:
            hooks = model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after)
            self._remove += [hook.remove for hook in hooks]

    def end(self) -> None:
        """Watch the models no longer."""
        while self._remove:
            self._remove.pop()()

    def _before(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        """Raise UserError if one of `inputs` is the output of an earlier loop, also if it was detached."""
        kept = {}
        for loop, reference in self._made:
            output = reference()
            if output is not None and output.numel():
                kept[output.untyped_storage().data_ptr()] = loop
        for one in inputs:
            if isinstance(one, Tensor) and kept.get(one.untyped_storage().data_ptr(), self._loop) != self._loop:
                raise UserError(
                    f"step {self._step}: a model got an output of the loop before, which is that of its last micro-batch: "
                    "compute it again in this loop, or make both updates from one loop over step.batches()"
                )

    def _after(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if isinstance(output, Tensor):
            self._made.append((self._loop, weakref.ref(output)))
