"""What one sweep over the GPUs saw, as NVML tells it. None is unknown or unsupported, never zero.

Identity is the UUID, with the PCI id for what only the kernel names; an index is a matter of the moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MEMORY_V1 = 1
MEMORY_V2 = 2

LOST: Final = frozenset({15, 16})
"""NVML codes that say of one GPU that it is of no use: lost, and reset required. All others may be anybody's fault."""


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Which GPU is meant, for a probe that may not ask it: its index counts until one has seen it itself."""

    uuid: str
    pci_id: str
    index: int | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU. `engine`, `generation`: whose it is, when it is ours."""

    pid: int
    used_bytes: int | None
    name: str = ""
    engine: str | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU in one sweep.

    `error`: the NVML code that every call for this GPU failed with (15 lost, 16 reset required, 999 unknown), None: it
    answers.
    `problems`: NVML codes of single values that failed otherwise than by being unsupported, by name of the field.
    `unsupported`: names of the fields that this GPU or driver does not have.
    """

    uuid: str
    pci_id: str
    """Domain of four hexadecimal digits, lower case: 0000:1b:00.0."""
    index: int
    """NVML's, which is the order of PCI ids."""
    name: str = ""
    architecture: int | None = None
    """NVML_DEVICE_ARCH_*: 4 Pascal, 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell, 13 Rubin."""
    compute: tuple[int, int] | None = None
    brand: int | None = None
    error: int | None = None
    problems: Mapping[str, int] = field(default_factory=dict)
    unsupported: frozenset[str] = frozenset()
    # The fast group.
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    memory_version: int | None = None
    """MEMORY_V2 counts what the driver keeps for itself apart, MEMORY_V1 as used."""
    processes: tuple[GpuProcess, ...] | None = None
    persistence: bool | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    clock_reasons: int | None = None
    """Bits NVML_CLOCKS_EVENT_REASON_*."""
    # The slow group: None in a fast sweep as well.
    energy_j: float | None = None
    """Since the driver was loaded. This call alone takes 3 ms on an H200."""
    mig: bool | None = None
    ecc_uncorrected: int | None = None
    """Volatile: since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: int | None = None
    """NVML field 230: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset."""


@dataclass(frozen=True, slots=True)
class GpuSweep:
    """All GPUs at one time (monotonic seconds, when the sweep began).

    `problem`: the NVML code that initialising or counting failed with (9 driver not loaded, 12 no library, 18 library
    and driver do not match, 4 no permission, 999 unknown); then there are no readings.
    """

    at: float
    gpus: tuple[GpuReading, ...] = ()
    problem: int | None = None
    slow: bool = False
    driver: str = ""
    took_ms: float = 0.0
    xids_watched: frozenset[str] = frozenset()
    """UUIDs of the GPUs whose Xids NVML tells as they come."""
