"""GPUs as the daemon knows them, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from supervisord.core import gpu_kinds
from supervisord.core.gpu_samples import GpuProcess, GpuReading
from supervisord.core.model import Gpu, Persistence, Reason

MIB = 1 << 20
GIB = 1 << 30

H200 = {"name": "NVIDIA H200", "architecture": 9, "total_bytes": 143_771 * MIB}
RTX_3090 = {"name": "NVIDIA GeForce RTX 3090", "architecture": 7, "total_bytes": 24_576 * MIB}
GB10 = {"name": "NVIDIA GB10", "architecture": 10, "compute": (12, 1)}


def gpu(index: int, used_gib: float | None, *processes: GpuProcess, **fields: Any) -> Gpu:
    """One that answers. Fields of Gpu, and those of GpuReading as `reading`."""
    values: dict[str, Any] = {
        **H200,
        "temperature_c": 41.0,
        "power_w": 312.4,
        "utilization_percent": 97.0,
        "persistence": True,
    }
    values |= {"processes": processes, **fields.pop("reading", {})}
    total = values.get("total_bytes")
    if used_gib is not None:
        values["used_bytes"] = int(used_gib * GIB)
        values["free_bytes"] = None if total is None else total - values["used_bytes"]
    uuid, pci_id = f"GPU-5135c0de-{index:04x}-4000-8000-{index:012x}", f"0000:{0x1B + 0x10 * index:02x}:00.0"
    reading = GpuReading(uuid, pci_id, index, **values)
    kind = gpu_kinds.kind_of(reading.name, reading.architecture, reading.compute, reading.brand)
    known = {
        "pci_id": pci_id,
        "index": index,
        "name": reading.name,
        "generation": kind.generation,
        "kind": kind.gpu_class,
        "persistence": Persistence(wanted=True, why=f"default for {kind.generation} {kind.gpu_class}"),
    }
    return Gpu(uuid, reading=reading, **{**known, **fields})


def of_engine(name: str, pid: int, gib: float | None) -> GpuProcess:
    """A process of one of our engines."""
    return GpuProcess(pid, None if gib is None else int(gib * GIB), "VLLM::EngineCor", name, 1)


SOUND = gpu(0, 59.8, of_engine("qwen", 4711, 50.1), of_engine("qwen", 4712, 8.0), GpuProcess(999, GIB, "python3"))
IDLE = gpu(1, 0.01, reading={"utilization_percent": 0.0, "temperature_c": 29.0, "power_w": 76.0})
HOT = gpu(
    2,
    22.1,
    of_engine("llama", 5000, 21.9),
    reading={**RTX_3090, "temperature_c": 92.0},
    reasons=(Reason("gpu_throttled", "it runs slower (hardware thermal slowdown, 92 C); look at cooling and power"),),
    persistence=Persistence(wanted=False, why="default for ampere geforce", told="processes use it"),
    xids={"13": 2, "31": 1},
)
LOST = gpu(
    3,
    None,
    absent_since=5.0,
    quarantine=Reason("gpu_fault", "Xid 79 (fallen off the bus): it is gone until the machine is rebooted"),
    xids={"79": 1, "None": 1},
)
UNIFIED = gpu(
    4,
    None,
    of_engine("small", 6000, None),
    reading={**GB10, "power_w": None, "persistence": None},
    persistence=Persistence(why="default for blackwell integrated: left as it is"),
)
REMEMBERED = Gpu(
    "GPU-5135c0de-0005-4000-8000-000000000005",
    pci_id="0000:6b:00.0",
    quarantine=Reason("gpu_recovery", "the driver asks for a recovery: reboot the machine"),
)
"""By a daemon that has not seen it itself."""
MIXED = (SOUND, IDLE, HOT, LOST, UNIFIED, REMEMBERED)
