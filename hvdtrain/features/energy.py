"""--energy: the joules that the job's GPUs use, as NVIDIA's driver counts them (NVML), read at logged steps.

Ranks that share a GPU count it once. A GPU's figure is of the whole board, whoever uses it.
"""

import socket
from collections.abc import Callable

import torch

from hvdtrain.engines.base import Engine
from hvdtrain.engines.errors import UserError
from hvdtrain.loop.feature import Feature
from hvdtrain.loop.run import Run
from hvdtrain.loop.step import Step


class Energy(Feature):
    """Records an event at each logged step: of all GPUs, since the last one. Raises UserError where NVML counts none."""

    def __init__(self, engine: Engine):
        """A collective."""
        self._engine = engine
        with engine.raising_together("energy"):
            uuid, self._read = counter(engine.device)
        places = engine.all_gather_object(f"{socket.gethostname()} {uuid}", "energy")
        self._counts, self._gpus = places.index(places[engine.rank]) == engine.rank, len(set(places))
        self._joules = self._samples = 0.0  # in all
        self._since, self._counted, self._of_epoch = self._read(), 0, 0.0

    def prepare(self, run: Run) -> None:
        self._run = run
        run.metrics_logger.notes.append(self._note)

    def after_step(self, step: Step) -> None:
        self._counted += step.count
        if not step.logged:
            return
        now = self._read() if self._counts else self._since
        mine = torch.tensor([(now - self._since) / 1000], dtype=torch.float64)
        joules = float(self._engine.sum(mine, "energy"))
        self._run.event("energy", step=step.number, joules=joules, joules_per_sample=joules / max(self._counted, 1))
        self._since, self._joules, self._samples = now, self._joules + joules, self._samples + self._counted
        self._counted, self._of_epoch = 0, self._of_epoch + joules

    def _note(self) -> str:
        """Return what the line of an epoch says: since the one before."""
        joules, self._of_epoch = self._of_epoch, 0.0
        return f"{joules:,.0f} J"

    def close(self, *, failed: bool) -> None:
        if self._samples and not failed:
            gpus = f"{self._gpus} GPU{'s'[: self._gpus > 1]}"
            self._run.say(f"energy of {gpus}: {self._joules:,.0f} J, {self._joules / self._samples:.3g} J per sample")


def counter(device: torch.device) -> tuple[str, Callable[[], int]]:
    """Return the UUID of a GPU, and a function that reads its millijoules since the driver was loaded. Raises UserError."""
    remedy = "leave --energy out"
    if device.type != "cuda":
        raise UserError(f"--energy: no NVIDIA GPU here (device {device.type}): {remedy}")
    try:
        import pynvml
    except ImportError as error:
        raise UserError(f"--energy needs a package: pip install 'hvdtrain[energy]' ({error})") from error
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:  # no driver, or a GPU older than Volta, or a slice of one
        raise UserError(f"--energy: NVML counts none for {uuid} ({error}): {remedy}") from error
    return uuid, lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
