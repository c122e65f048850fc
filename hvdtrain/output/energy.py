"""Measures the energy used by training: CPUs by RAPL (Linux powercap), NVIDIA GPUs by NVML, if available.

Sources: docs.kernel.org/power/powercap/powercap.html (energy_uj, max_energy_range_uj); NVIDIA's NVML reference
(nvmlDeviceGetTotalEnergyConsumption). Only CPU packages are counted: their subdomains (cores, graphics) and "psys", which
contains the packages, would be counted twice. A package's energy includes other processes and idle cores.
"""

import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.engines.base import Engine

# HVDTRAIN_POWERCAP: another directory instead of /sys/class/powercap, which containers hide, but may mount elsewhere.
ROOT, VARIABLE = Path("/sys/class/powercap"), "HVDTRAIN_POWERCAP"
READ_EVERY = 10.0  # seconds: the counters of packages wrap around within minutes
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


Found = tuple[dict[str, Counter], str]  # counters by name, or the reason why there are none


def integer_in(file: Path) -> int:
    """Return the number in `file`. Raises OSError, ValueError."""
    return int(file.read_text())


def packages(root: Path | None = None) -> Found:
    """Return a counter for each CPU package of this host."""
    root = root or Path(os.environ.get(VARIABLE) or ROOT)
    counters: dict[str, Counter] = {}
    for zone in sorted(root.glob("intel-rapl:*")):  # also the name on AMD CPUs
        try:
            name = (zone / "name").read_text() if (zone / "name").exists() else ""
            if re.fullmatch(r"intel-rapl:\d+", zone.name) and name.startswith("package"):
                span = integer_in(zone / "max_energy_range_uj")
                counters[zone.name] = Counter(functools.partial(integer_in, zone / "energy_uj"), 1e-6, span)
        except PermissionError:  # a sum over some of the packages would be wrong
            return {}, f"{root}/*/energy_uj can be read by root only (CVE-2020-8694): allow it with chmod a+r"
        except (OSError, ValueError) as error:
            return {}, f"{zone} cannot be read ({error})"
    return counters, "" if counters else f"{root} has no processor packages"


def gpus(engine: Engine) -> Found:
    """Return an NVML counter for each GPU that this rank uses."""
    if engine.device.type != "cuda":
        return {}, ""
    try:
        import pynvml
    except ImportError:
        return {}, "nvidia-ml-py is missing: pip install 'hvdtrain[energy]'"
    devices = range(torch.cuda.device_count()) if engine.name == "dataparallel" else [engine.device]
    counters: dict[str, Counter] = {}
    try:
        pynvml.nvmlInit()
        for device in devices:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            counters[uuid] = Counter(functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1e-3)
    except Exception as error:  # pynvml has an exception class for each error code
        return {}, f"NVML: {error}"
    return counters, ""


class Energy(NamedTuple):
    """Energy of all ranks in joules. complete: False if some counter may have missed energy."""

    cpu: float
    gpu: float
    complete: bool = True

    def fields(self, prefix: str = "energy") -> dict[str, object]:
        """Return the fields for a record."""
        parts = {"": self.cpu + self.gpu, "_cpu": self.cpu, "_gpu": self.gpu}
        fields: dict[str, object] = {f"{prefix}{part}_joules": round(value, 3) for part, value in parts.items()}
        return fields if self.complete else fields | {f"{prefix}_incomplete": True}


class Meter:
    """Measures the energy of this rank's GPUs and, on the first rank of each host, of the host's CPUs, since its creation.

    A thread reads the counters, if there are any. Creating it is a collective, because only one rank reads each counter.
    """

    def __init__(self, engine: Engine):
        cpu, no_cpu = packages() if engine.local_rank == 0 else ({}, "")
        gpu, no_gpu = gpus(engine)
        host = socket.gethostname()
        rows = engine.all_gather_object([host, len(cpu), list(gpu), no_cpu, no_gpu], "energy")
        earlier = {(there, name) for there, _, names, *_ in rows[: engine.rank] for name in names}
        # If ranks share a GPU, only the first one counts it.
        self._cpu, self._gpu = [*cpu.values()], [c for name, c in gpu.items() if (host, name) not in earlier]
        reasons = [f"{what}: {why}" for row in rows for what, why in zip(("CPU", "GPU"), row[3:], strict=True) if why]
        self.about: dict[str, object] = dict(  # for the record: what is measured and what is not
            cpu_packages=sum(row[1] for row in rows),
            gpus=len({(row[0], name) for row in rows for name in row[2]}),
            not_measured=list(dict.fromkeys(reasons)),
        )
        self.measures = bool(self.about["cpu_packages"] or self.about["gpus"])  # the same on all ranks
        self._lock = threading.Lock()
        self._closing = threading.Event()
        if self._cpu or self._gpu:
            threading.Thread(target=self._keep_reading, name="energy", daemon=True).start()

    def _keep_reading(self) -> None:
        while not self._closing.wait(READ_EVERY):
            self._update()

    def _update(self) -> None:
        with self._lock:
            for counter in (*self._cpu, *self._gpu):
                counter.update()

    def total(self, engine: Engine) -> Energy | None:
        """Return the energy of all ranks; None if no rank can measure. A collective."""
        if not self.measures:
            return None
        self._update()
        incomplete = not all(counter.complete for counter in (*self._cpu, *self._gpu))
        mine = [sum(c.joules for c in self._cpu), sum(c.joules for c in self._gpu), float(incomplete)]
        cpu, gpu, incomplete_ranks = engine.sum(torch.tensor(mine, dtype=torch.float64), "energy.total").tolist()
        return Energy(cpu, gpu, not incomplete_ranks)

    def close(self) -> None:
        """Stop reading the counters."""
        self._closing.set()


def said(about: object) -> str:
    """Return a record's `energy` field as text: "measured: 2 CPU packages and 4 GPUs", "not measured: CPU: ..."."""
    if not isinstance(about, dict):
        return ""
    counts = {name: about.get(key) for key, name in (("cpu_packages", "CPU package"), ("gpus", "GPU"))}
    parts = [f"{n} {name}{'s'[: n > 1]}" for name, n in counts.items() if isinstance(n, int) and n > 0]
    lines = [f"measured: {' and '.join(parts)}"] if parts else []
    missing = about.get("not_measured")
    lines += [f"not measured: {'; '.join(map(str, missing))}"] if isinstance(missing, list) and missing else []
    return "; ".join(lines)
