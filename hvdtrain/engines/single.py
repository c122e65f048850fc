"""The engines with one process: `serial` on one device, `dataparallel` on all GPUs of this machine."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.engines import gpu
from hvdtrain.engines.base import Engine, Reduction


class SerialEngine(Engine):
    """An engine with one rank. Every collective returns its input."""

    name = "serial"

    def __init__(self, *, tuning: bool, rank: int, size: int, launcher: str) -> None:
        super().__init__(tuning=tuning, rank=0, size=1, launcher=launcher)
        self.description = self.name
        self.local_rank, self.local_size = 0, 1

    def choose_device(self, wanted: str) -> torch.device:
        return gpu.take_gpu(0) if gpu.usable_gpus(wanted) else torch.device("cpu")

    def broadcast_model(self, model: nn.Module) -> None:
        pass

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def all_reduce_(self, tensor: Tensor, op: str, name: str) -> None:
        pass

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        return tensor.unsqueeze(0)

    def begin(self, kind: str, tensor: Tensor, lengths: Sequence[int], name: str) -> Callable[[], Tensor]:
        return lambda: tensor

    def broadcast_(self, tensor: Tensor, name: str) -> None:
        pass

    def shutdown(self) -> None:
        pass


class DataParallelEngine(SerialEngine):
    """Trains with `nn.DataParallel`: each batch is split over the GPUs, and the gradients are summed on the first GPU.

    `--batch-size` is the batch size over all GPUs.
    """

    name = "dataparallel"

    def choose_device(self, wanted: str) -> torch.device:
        device = super().choose_device(wanted)
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        if gpus > 1:
            self.description = f"dataparallel over {gpus} GPUs"
        else:
            self.description = "dataparallel, serially"
            self.notes.append(f"dataparallel found {gpus} GPU{'s'[: gpus != 1]}: it runs as serial does")
        return device

    def distribute_model(self, model: nn.Module, reduction: Reduction) -> nn.Module:
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            return nn.DataParallel(model)
        return model
