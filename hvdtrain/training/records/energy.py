"""Measures the energy used by training: CPUs by RAPL (Linux powercap), NVIDIA GPUs by NVML, if available.

Sources: docs.kernel.org/power/powercap/powercap.html (energy_uj, max_energy_range_uj); NVIDIA's NVML reference
(nvmlDeviceGetTotalEnergyConsumption). Only CPU packages are counted: their subdomains (cores, graphics) and "psys", which
contains the packages, would be counted twice. A package's energy includes other processes and idle cores.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdtrain.engines.base import Engine

# HVDTRAIN_POWERCAP: another directory instead of /sys/class/powercap, which containers hide, but may mount elsewhere.
ROOT, VARIABLE = Path("/sys/class/powercap"), "HVDTRAIN_POWERCAP"
READ_EVERY = 10.0  # seconds
MOST_WATTS = 600.0  # maximum power of a package: determines how soon a counter may wrap around twice


class Counter:
    """Measures energy in joules since its creation, from a monotonic hardware counter.

    read: returns the counter's value, in units of `unit` joules. span: value after which it wraps around to 0; None: never.
    """

    def __init__(self, read: Callable[[], int], unit: float, span: int | None = None):
        self._read, self._unit, self._span = read, unit, span
        self._last, self._at = read(), time.monotonic()
        self.joules, self.complete = 0.0, True

    def update(self) -> None:
        """Read the counter."""
        now = time.monotonic()
        try:
            value = self._read()
        except Exception:  # an unloaded driver or an unmounted directory must not end training
            self.complete = False
            return
        if self._span is not None and (now - self._at) * MOST_WATTS > self._span * self._unit:
            self.complete = False  # it may have wrapped around more than once
        if value < self._last:
            self.complete &= self._span is not None
            self._last -= self._span or self._last  # without a span, the counter was reset: count from 0
        self.joules += (value - self._last) * self._unit
        self._last, self._at = value, now


class Found(NamedTuple):
    """The available counters, or the reason why there are none."""

    counters: list[Counter]
    names: list[str]
    why: str = ""


def packages(root: Path | None = None) -> Found:
    """Return a counter for each CPU package of this host."""
    root = root or Path(os.environ.get(VARIABLE) or ROOT)
    counters, names = [], []
    for zone in sorted(root.glob("intel-rapl:*")):  # also the name on AMD CPUs
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if not re.fullmatch(r"intel-rapl:\d+", zone.name) or not name.startswith("package"):
            continue
        try:
            span = int((zone / "max_energy_range_uj").read_text())
            counters.append(Counter(partial(whole_number, zone / "energy_uj"), 1e-6, span))
            names.append(name)
        except PermissionError:  # a sum over some of the packages would be wrong
            return Found(
                [], [], f"{root}/*/energy_uj can be read by root only (CVE-2020-8694): allow it with chmod a+r"
            )
        except (OSError, ValueError) as error:
            return Found([], [], f"{zone} cannot be read ({error})")
    return Found(counters, names, "" if names else f"{root} has no processor packages")


def whole_number(path: Path) -> int:
    """Return the integer in a file. Raises OSError, ValueError."""
    return int(path.read_text())


def gpus(uuids: Sequence[str]) -> Found:
    """Return an NVML counter for each GPU in `uuids`."""
    if not uuids:
        return Found([], [])
    try:
        import pynvml
    except ImportError:
        return Found([], [], "nvidia-ml-py is missing: pip install 'hvdtrain[energy]'")
    try:
        pynvml.nvmlInit()
        counters = [gpu(pynvml, uuid) for uuid in uuids]
    except Exception as error:  # pynvml has an exception class for each error code
        return Found([], [], f"NVML: {error}")
    return Found(counters, list(uuids))


def gpu(pynvml: Any, uuid: str) -> Counter:
    """Return the energy counter of a GPU. Raises pynvml's exceptions."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return Counter(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 1e-3)


def uuids_of(engine: Engine) -> list[str]:
    """Return the UUIDs of the GPUs that this rank uses."""
    if engine.device.type != "cuda":
        return []
    places = range(torch.cuda.device_count()) if engine.name == "dataparallel" else [engine.device]
    return [str(torch.cuda.get_device_properties(place).uuid) for place in places]


class Energy(NamedTuple):
    """Energy of all ranks in joules. complete: False if some counter may have missed energy."""

    cpu: float
    gpu: float
    complete: bool = True

    def fields(self, prefix: str = "energy") -> dict[str, object]:
        """Return the fields for a record."""
        parts = {
            f"{prefix}_joules": self.cpu + self.gpu,
            f"{prefix}_cpu_joules": self.cpu,
            f"{prefix}_gpu_joules": self.gpu,
        }
        rounded: dict[str, object] = {name: round(value, 3) for name, value in parts.items()}
        return rounded if self.complete else rounded | {f"{prefix}_incomplete": True}


class Meter:
    """Measures the energy of this rank's GPUs and, on the first rank of each host, of the host's CPUs, since its creation.

    It has no thread: call `keep` about once a minute. Creating it is a collective, because only one rank reads each counter.
    """

    def __init__(self, engine: Engine):
        cpu = packages() if engine.local_rank == 0 else Found([], [])
        try:
            uuids = uuids_of(engine)
            gpu = gpus(uuids)
        except (RuntimeError, AttributeError) as error:
            uuids, gpu = [], Found([], [], f"torch does not tell which GPU this is ({error})")
        mine = (socket.gethostname(), len(cpu.names), cpu.why, gpu.names, gpu.why)
        rows = engine.all_gather_object(mine, "energy")
        earlier = {(host, name) for host, _, _, names, _ in rows[: engine.rank] for name in names}
        shared = [
            (mine[0], name) in earlier for name in gpu.names
        ]  # if ranks share a GPU, only the first one counts it
        self._cpu = cpu.counters
        self._gpu = [counter for counter, taken in zip(gpu.counters, shared, strict=True) if not taken]
        self._read_at = time.monotonic()
        self.about = about(rows)
        self.measures = bool(self.about["cpu_packages"] or self.about["gpus"])  # the same on all ranks

    def keep(self) -> None:
        """Read the counters if the last reading is too old: those of packages wrap around within minutes."""
        if self.measures and time.monotonic() - self._read_at > READ_EVERY:
            self._update()

    def _update(self) -> None:
        self._read_at = time.monotonic()
        for counter in (*self._cpu, *self._gpu):
            counter.update()

    def row(self) -> list[list[float]]:
        """Return this rank's measurements, as rows to be summed over ranks; empty if no rank can measure."""
        if not self.measures:
            return []
        self._update()
        complete = all(counter.complete for counter in (*self._cpu, *self._gpu))
        return [[joules(self._cpu), joules(self._gpu)], [float(not complete), 0.0]]

    def total(self, engine: Engine) -> Energy | None:
        """Return the energy of all ranks; None if no rank can measure. A collective."""
        if not self.measures:
            return None
        return summed(engine.sum(torch.tensor(self.row(), dtype=torch.float64), "energy.total").tolist())


def joules(counters: Iterable[Counter]) -> float:
    """Return the sum of the counters in joules."""
    return sum(counter.joules for counter in counters)


def summed(rows: Sequence[Sequence[float]]) -> Energy:
    """Convert the sum of `Meter.row` over ranks to an Energy."""
    return Energy(rows[0][0], rows[0][1], not rows[1][0])


def about(rows: Sequence[tuple[str, int, str, list[str], str]]) -> dict[str, Any]:
    """Return for the record what is measured and what is not.

    rows: for each rank (host, number of packages, reason if none, GPUs, reason if none).
    """
    missing: dict[str, list[str]] = {}
    for host, _, no_cpu, _, no_gpu in rows:
        for what, why in (("CPU", no_cpu), ("GPU", no_gpu)):
            if why and host not in missing.setdefault(f"{what}: {why}", []):
                missing[f"{what}: {why}"].append(host)
    hosts = len({host for host, *_ in rows})
    return dict(
        cpu_packages=sum(count for _, count, *_ in rows),
        gpus=len({(host, name) for host, _, _, names, _ in rows for name in names}),
        not_measured=[why if len(on) == hosts else f"{why} (on {', '.join(on)})" for why, on in missing.items()],
    )


def said(about: Any) -> str:
    """Return a record's `energy` field as text: "measured: 2 CPU packages and 4 GPUs", "not measured: CPU: ..."."""
    if not isinstance(about, dict):
        return ""
    parts = []
    for key, name in (("cpu_packages", "CPU package"), ("gpus", "GPU")):
        if isinstance(count := about.get(key), int) and count > 0:
            parts.append(f"{count} {name}{'s'[: count > 1]}")
    missing = about.get("not_measured")
    lines = [f"measured: {' and '.join(parts)}"] if parts else []
    lines += [f"not measured: {'; '.join(map(str, missing))}"] if isinstance(missing, list) and missing else []
    return "; ".join(lines)
