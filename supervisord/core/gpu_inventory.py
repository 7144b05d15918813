"""Which GPUs an engine means, what it may claim of them, and whether it may start there now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from supervisord.core import gpu_claims, telemetry
from supervisord.core.gpu_samples import GpuProcess, GpuReading
from supervisord.core.model import Engine, Gpu, Node, Reason
from supervisord.core.turn import Turn

STRANGE_MAX: Final = 512 << 20
"""More memory than this that belongs to no process is somebody's: a rest, or a tenant whose processes are not told."""
CLAIM_SLACK: Final = 0.01
"""Of the whole memory: NVML counts a little more than CUDA sees."""
_GIB: Final = 1 << 30
MIG: Final = "MIG-"
_NO_GPU: Final = re.compile(
    r"no cuda gpus are available|cuda unknown error|invalid device ordinal|free memory on device|out of memory",
    re.IGNORECASE,
)
"""What vLLM says where its GPU is not there, or where it is full."""


# --- naming -----------------------------------------------------------------------------------------------------------


def normal_pci_id(text: str) -> str:
    """A PCI id as the kernel writes it: 00000000:1B:00.0 and 1b:00.0 become 0000:1b:00.0."""
    found = re.fullmatch(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?", text)
    if found is None:
        return text.lower()
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function or 0}".lower()


def find(gpus: Mapping[str, Gpu], name: str) -> Gpu | None:
    """The GPU that a name of the configuration or of an operator means: UUID, PCI id (who answers first) or index."""
    known = next((gpu for uuid, gpu in gpus.items() if uuid.lower() == name.lower()), None)
    if known is not None:
        return known
    if ":" in name:
        pci_id = normal_pci_id(name)
        there = sorted(gpus.values(), key=lambda gpu: gpu.absent_since is not None)
        return next((gpu for gpu in there if gpu.pci_id == pci_id), None)
    return _by_index(gpus, int(name)) if name.isdecimal() else None


def _by_index(gpus: Mapping[str, Gpu], index: int) -> Gpu | None:
    """NVML counts on over a lost GPU: then the place among all that are known is what the index meant before.

    One that was replaced has no PCI id, and no place any more.
    """
    here = [gpu for gpu in gpus.values() if gpu.pci_id]
    if all(gpu.absent_since is None for gpu in here):
        return next((gpu for gpu in here if gpu.index == index), None)
    order = sorted(here, key=lambda gpu: (gpu.pci_id, gpu.uuid))
    return order[index] if index < len(order) else None


def named(gpus: Mapping[str, Gpu], names: Iterable[str]) -> list[Gpu]:
    """The GPUs that some names mean; those that are not known are left out."""
    found = (find(gpus, name) for name in names)
    return [gpu for gpu in found if gpu is not None]


def named_twice(gpus: Mapping[str, Gpu], names: Iterable[str]) -> Reason | None:
    """Whether some names mean one GPU twice (its index and its UUID): no engine can have it for two ranks."""
    name_of: dict[str, str] = {}
    for name in names:
        gpu = find(gpus, name)
        if gpu is None:
            continue
        if gpu.uuid in name_of:
            text = f"gpus names {label(gpu)} twice, as {name_of[gpu.uuid]} and as {name}: correct gpus"
            return Reason("gpu_missing", text)
        name_of[gpu.uuid] = name
    return None


def of_engine(gpus: Mapping[str, Gpu], engine: Engine) -> list[Gpu]:
    """The GPUs that an engine runs on, or would run on; those that are not known are left out."""
    return named(gpus, engine.devices if engine.live and engine.devices else engine.spec.gpus)


def share(gpus: Mapping[str, Gpu], one: Engine, other: Engine) -> bool:
    """Whether one that is to be started and another have a GPU in common; by name where GPUs are not known."""
    if set(one.spec.gpus) & set(other.spec.gpus):
        return True
    mine = {gpu.uuid for gpu in named(gpus, one.spec.gpus)}
    return any(gpu.uuid in mine for gpu in of_engine(gpus, other))


def label(gpu: Gpu) -> str:
    """What people call it."""
    return f"GPU {gpu.uuid}" if gpu.index is None else f"GPU {gpu.index} ({gpu.uuid})"


def places(gpus: Mapping[str, Gpu], chosen: Iterable[Gpu], *, counts_lost: bool = False) -> tuple[int, ...]:
    """CUDA's numbers of some GPUs that answer, by PCI id (CUDA_DEVICE_ORDER=PCI_BUS_ID).

    Their places among those that answer or, if it `counts_lost`, among all that NVML lists. No source says which of
    both CUDA does while a GPU is lost: `counts_lost_gpus` learns it from engines.
    """
    order = sorted((gpu.pci_id, gpu.uuid) for gpu in gpus.values() if gpu.absent_since is None)
    place_of = {uuid: place for place, (_, uuid) in enumerate(order)}
    return tuple(gpu.index if counts_lost and gpu.index is not None else place_of[gpu.uuid] for gpu in chosen)


def counts_lost_gpus(gpus: Mapping[str, Gpu], engine: Engine, landed: Iterable[Gpu]) -> bool | None:
    """Whether CUDA counts lost GPUs, as the GPUs show that an engine has `landed` on; None: they do not show it."""
    for gpu in landed:
        of_all, of_answering = (places(gpus, [gpu], counts_lost=lost)[0] in engine.places for lost in (True, False))
        if of_all != of_answering:
            return of_all
    return None


def doubted(turn: Turn, engine: Engine, tail: Iterable[str]) -> bool:
    """Whether an engine that ends with these words may have been given the lost GPU, or somebody else's.

    One that ends so is not seen on a wrong GPU: from now on CUDA is taken to count the other way.
    """
    seen = turn.node.telemetry
    gpus = [gpu for gpu in named(turn.node.gpus, engine.devices) if gpu.absent_since is None]
    if engine.placed or not gpus or len(gpus) < len(engine.places) or not any(map(_NO_GPU.search, tail)):
        return False
    now = places(turn.node.gpus, gpus, counts_lost=seen.cuda_counts_lost)
    other = places(turn.node.gpus, gpus, counts_lost=not seen.cuda_counts_lost)
    if engine.places != now or now == other:
        return False
    turn.node = replace(turn.node, telemetry=replace(seen, cuda_counts_lost=not seen.cuda_counts_lost))
    return True


def capacity_bytes(gpus: Mapping[str, Gpu], engine: Engine) -> int | None:
    """What an engine's memory can grow to before its fullest GPU is full; None: unknown (on a GB10, always)."""
    readings = [gpu.reading for gpu in of_engine(gpus, engine)]
    free = [reading.free_bytes for reading in readings if reading is not None and reading.free_bytes is not None]
    if engine.gpu_bytes is None or not free or len(free) < len(readings):
        return None
    return engine.gpu_bytes + len(free) * min(free)


# --- gates ------------------------------------------------------------------------------------------------------------


def gate(turn: Turn, engine: Engine) -> Reason | None:
    """Why an engine cannot be started on its GPUs now; None: it can, or nobody can know.

    A probe that fails for a moment changes nothing. One that is unresponsive closes the gate only where new processes
    could not use a GPU either.
    """
    node, names = turn.node, engine.spec.gpus
    if not names or telemetry.off(node) or names[0].startswith(MIG):
        return None
    closed = telemetry.closed(node)
    if closed is not None:
        return Reason("driver_not_ready", closed.message)
    twice = named_twice(node.gpus, names)
    if twice is not None:
        return twice
    reasons = (_gate(node, name) for name in names)
    return next((reason for reason in reasons if reason is not None), None)


def _gate(node: Node, name: str) -> Reason | None:
    gpu, unresponsive = find(node.gpus, name), node.telemetry.unresponsive
    quarantine = gpu or find(node.unseen_gpus, name)
    if quarantine is not None and quarantine.quarantine is not None:
        text = f"{label(quarantine)} is quarantined: {quarantine.quarantine.message}"
        return Reason("gpu_quarantined", f"{text}; then: vllm-supervisor gpu clear {quarantine.uuid}")
    if gpu is None and not unresponsive:
        known = ", ".join(label(one) for one in node.gpus.values()) or "none"
        return Reason("gpu_missing", f"there is no GPU {name} on this machine (known: {known})")
    if gpu is None:
        text = f"NVML does not answer: nobody can tell the index of {name}"
        return Reason("driver_not_ready", text) if ":" in name else None
    if gpu.absent_since is not None:
        return Reason("gpu_missing", f"{label(gpu)} does not answer")
    error = gpu.reading.error if gpu.reading is not None else None
    if error is not None and (not unresponsive or error in telemetry.LASTING):
        return Reason("driver_not_ready", f"{label(gpu)}: {telemetry.no_driver(error).message}")
    return None


def memory_gate(turn: Turn, engine: Engine) -> Reason | None:
    """Whether what an engine will claim is free on each of its GPUs; who holds the rest is named."""
    node = turn.node
    if telemetry.off(node) or node.telemetry.unresponsive:
        return None  # what was free when it was last seen may be long ago
    closed = (_memory(engine, gpu) for gpu in named(node.gpus, engine.spec.gpus))
    return next((reason for reason in closed if reason is not None), None)


def _memory(engine: Engine, gpu: Gpu) -> Reason | None:
    """With less free memory than it will claim, vLLM refuses to start."""
    part, reading = gpu_claims.of(engine), gpu.reading
    if part is None or reading is None or reading.free_bytes is None or reading.total_bytes is None:
        return None
    if reading.free_bytes >= (part - CLAIM_SLACK) * reading.total_bytes:
        return None
    text = (
        f"{label(gpu)} has {reading.free_bytes / _GIB:.1f} GiB free, {engine.spec.name} will claim "
        f"{part * reading.total_bytes / _GIB:.1f} GiB (gpu-memory-utilization {part:g})"
    )
    holders = sorted(reading.processes or (), key=lambda process: -(process.used_bytes or 0))
    return Reason("gpu_memory_held", f"{text}; {_holder(holders[0])}" if holders else text)


def _holder(process: GpuProcess) -> str:
    size = "memory" if process.used_bytes is None else f"{process.used_bytes / _GIB:.1f} GiB"
    whose = f"engine {process.engine}" if process.engine is not None else process.name or "unknown"
    return f"pid {process.pid} ({whose}) holds {size}"


# --- memory that has to come back -------------------------------------------------------------------------------------


def held(gpus: Mapping[str, Gpu], engine: Engine) -> str | None:
    """What of a gone engine is still on its GPUs, in words; None: everything came back, or nobody can tell.

    Memory of no process is its own only if processes are told here (its own were), and no tenant hides there whose
    memory might have grown.
    """
    for gpu in of_engine(gpus, engine):
        reading = gpu.reading
        if reading is None or gpu.absent_since is not None:
            continue
        for process in reading.processes or ():
            if process.engine == engine.spec.name:
                return f"{_mib(process.used_bytes)} of its pid {process.pid} on {label(gpu)}"
        before, now = engine.strange_bytes.get(gpu.uuid) if engine.placed else None, strange_bytes(reading)
        if before is not None and before <= STRANGE_MAX and now is not None and now - before > STRANGE_MAX:
            return f"{_mib(now - before)} of no process on {label(gpu)}"
    return None


def strange_bytes(reading: GpuReading) -> int | None:
    """Memory in use that no process is listed with (contexts on their way out, the driver's own); None: unknown."""
    if reading.used_bytes is None or reading.processes is None:
        return None
    known = [process.used_bytes for process in reading.processes]
    return reading.used_bytes - sum(used for used in known if used is not None) if None not in known else None


def _mib(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / (1 << 20):,.0f} MiB"
