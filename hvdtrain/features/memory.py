"""--memory: the peak memory of each part of training, the largest over the ranks.

On a GPU, what torch has allocated and reserved. torch keeps one peak, so it is read and set back where one part ends:
in logged steps, and between epochs. That waits for nothing. On a CPU, the process's peak so far at the end of each part:
the kernel's own is never set back.
"""

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step
from hvdtrain.output.rank_times import set_back_peaks

PARTS = ("between_epochs", "unlogged_steps", "gradients", "update")  # in the order in which they first end


class Memory(Feature):
    """Records an event at each logged step: the parts that have ended since the last one."""

    def __init__(self, engine: Engine, device: torch.device):
        self._engine, self._device = engine, device
        self._peaks = dict.fromkeys(PARTS, (0, 0))  # bytes allocated and reserved; on a CPU, resident and 0
        self._largest: dict[str, int] = {}  # over the ranks and events, for the last line
        self._logged, self._begins = False, True  # the current step; the next step is the first since an evaluation

    def prepare(self, run: Run) -> None:
        self._run = run
        for optimizer in run.shared().prepared.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._end("gradients"))
            optimizer.register_step_post_hook(lambda *_: self._end("update"))

    def _end(self, part: str, always: bool = False) -> None:
        if self._logged or always:
            before, (allocated, reserved) = self._peaks[part], set_back_peaks(self._device)
            self._peaks[part] = max(before[0], allocated), max(before[1], reserved)

    def before_step(self, step: Step) -> None:
        if step.logged or self._begins:
            self._end("between_epochs" if self._begins else "unlogged_steps", always=True)
        self._logged, self._begins = step.logged, step.last

    def after_step(self, step: Step) -> None:
        if not step.logged:
            return
        self._end("update")
        self._logged = False
        mine = torch.tensor([self._peaks[part] for part in PARTS], dtype=torch.int64)
        rows = self._engine.all_gather(mine, "memory").amax(0).tolist()
        peaks = {part: row for part, row in zip(PARTS, rows, strict=True) if row[0]}
        self._peaks = dict.fromkeys(PARTS, (0, 0))
        fields = {f"{part}_bytes": row[0] for part, row in peaks.items()}
        if reserved := max(row[1] for row in rows):
            fields["reserved_bytes"] = reserved
        for name, value in fields.items():
            self._largest[name] = max(value, self._largest.get(name, 0))
        self._run.event("memory", step=step.number, **fields)

    def close(self, *, failed: bool) -> None:
        if self._largest and not failed:
            peaks = [f"{name[:-6].replace('_', ' ')} {value / 1e9:.2f} GB" for name, value in self._largest.items()]
            kind = "on a GPU" if self._device.type == "cuda" else "of a process, so far"
            self._run.say(f"peak memory {kind}: {', '.join(peaks)}")
