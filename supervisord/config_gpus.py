"""Checks of a configuration that concern GPUs: how they are named, who shares one, and which of them this machine has.

An inventory is what the daemon knows of the GPUs, by UUID. Without one names are compared as they are spelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from supervisord.config_problems import Finding, shown
from supervisord.core import gpu_claims, persistence
from supervisord.core.gpu_inventory import MIG, find, label
from supervisord.core.model import Gpu
from supervisord.core.spec import EngineSpec, GpuSpec, NodeSpec

GPU_INDEX: Final = re.compile(r"[0-9]{1,3}", re.ASCII)

_UUID: Final = re.compile(r"(GPU|MIG)-[0-9a-f][0-9a-f/-]{3,}|MIG-GPU-[0-9a-f][0-9a-f/-]{3,}", re.IGNORECASE)
_PCI: Final = re.compile(r"(?:([0-9a-f]{4}|[0-9a-f]{8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_ROUNDING: Final = 1e-6

Inventory = Mapping[str, Gpu]
_Claim = Callable[[EngineSpec], float | None]


def identity(name: str) -> str | None:
    """The same text for every spelling of one UUID, PCI id or index; None: it is none of these."""
    if (pci := _PCI.fullmatch(name)) is not None:
        domain, bus, device, function = pci.groups()
        return f"{int(domain or '0', 16):08x}:{bus}:{device}.{function}".lower()
    if GPU_INDEX.fullmatch(name):
        return str(int(name))
    return name.lower() if _UUID.fullmatch(name) else None


# --- by their spelling ------------------------------------------------------------------------------------------------


def too_much(spec: NodeSpec) -> Iterator[Finding]:
    """Engines of one GPU that start by themselves and say that they claim more of it than there is."""
    yield from _over(_sharing(spec, _spelled), gpu_claims.stated)


def perhaps_too_much(spec: NodeSpec) -> Iterator[Finding]:
    """The same where one of them does not say it, and vLLM's default is assumed."""
    groups = _sharing(spec, _spelled)
    yield from _over([group for group in groups if _sum(group, gpu_claims.stated) is None], gpu_claims.assumed)


def unchecked(spec: NodeSpec) -> Iterator[Finding]:
    """Engines that may share a GPU, since they name theirs in different ways, and would not fit on one together."""
    engines = [engine for engine in spec.engines.values() if engine.autostart and engine.gpus]
    mixed = [
        engine
        for engine in engines
        if any(_kinds(engine) != _kinds(other) and _sum([engine, other], gpu_claims.assumed) for other in engines)
    ]
    if mixed:
        names = " and ".join(engine.name for engine in mixed)
        message = (
            f"{names} name their GPUs in different ways (UUID, PCI id, index): whether some of them share one, and "
            "claim more of its memory than there is, cannot be checked without a daemon that knows the GPUs"
        )
        yield Finding(("engine", mixed[-1].name, "gpus"), message, "name all of them by UUID (nvidia-smi -L)")


def _kinds(engine: EngineSpec) -> frozenset[str]:
    return frozenset("PCI id" if ":" in name else "index" if name.isdecimal() else "UUID" for name in engine.gpus)


# --- by the GPUs of this machine --------------------------------------------------------------------------------------


def _nowhere(_engine: str, _gpu: str) -> bool:
    return False


def unknown(spec: NodeSpec, gpus: Inventory, there: Callable[[str, str], bool] = _nowhere) -> Iterator[Finding]:
    """GPUs that engines name and this machine does not have. `there`: whether an engine's GPU is known otherwise."""
    for engine in spec.engines.values():
        for name in engine.gpus:
            if find(gpus, name) is None and not name.upper().startswith(MIG) and not there(engine.name, name):
                known = ", ".join(map(label, gpus.values())) or "none"
                at = ("engine", engine.name, "gpus")
                yield Finding(at, "there is no such GPU on this machine", f"known: {known}", shown(name))


def too_much_here(spec: NodeSpec, gpus: Inventory) -> Iterator[Finding]:
    """What `too_much` finds only when it is known which GPU each name means."""
    yield from _over(_found_here(spec, gpus), gpu_claims.stated)


def perhaps_too_much_here(spec: NodeSpec, gpus: Inventory) -> Iterator[Finding]:
    """The same for `perhaps_too_much`."""
    groups = _found_here(spec, gpus)
    yield from _over([group for group in groups if _sum(group, gpu_claims.stated) is None], gpu_claims.assumed)


def unused_overrides(spec: GpuSpec, gpus: Inventory) -> Iterator[Finding]:
    """Overrides of the persistence mode that hold for no GPU of this machine."""
    for name, mode in spec.persistence_override.items():
        alone = GpuSpec(persistence="leave", persistence_override={name: "on"})
        if not any(persistence.wanted(gpu, alone)[0] for gpu in gpus.values()):
            known = ", ".join(f"{label(gpu)} {gpu.name}".rstrip() for gpu in gpus.values()) or "none"
            at = ("gpu", "persistence_override", name)
            yield Finding(at, "it means no GPU of this machine", f"known: {known}", shown(mode))


def _found_here(spec: NodeSpec, gpus: Inventory) -> list[list[EngineSpec]]:
    """Engines that share a GPU, without the groups that share its name already."""

    def resolved(name: str) -> str:
        gpu = find(gpus, name)
        return _spelled(name) if gpu is None else gpu.uuid

    by_name = _sharing(spec, _spelled)
    return [group for group in _sharing(spec, resolved) if group not in by_name]


# --- claims -----------------------------------------------------------------------------------------------------------


def _spelled(name: str) -> str:
    return identity(name) or name


def _sharing(spec: NodeSpec, meaning: Callable[[str], str]) -> list[list[EngineSpec]]:
    """Groups of engines that start by themselves and have a GPU in common."""
    users: dict[str, list[EngineSpec]] = {}
    for engine in spec.engines.values():
        if engine.autostart:
            for gpu in dict.fromkeys(map(meaning, engine.gpus)):
                users.setdefault(gpu, []).append(engine)
    together = {tuple(engine.name for engine in using): using for using in users.values() if len(using) > 1}
    return list(together.values())


def _sum(engines: list[EngineSpec], claim: _Claim) -> float | None:
    """What engines claim of one GPU together, if that is more than there is. Unknown parts count as none."""
    total = sum(part for part in map(claim, engines) if part is not None)
    return total if total > 1.0 + _ROUNDING else None


def _over(groups: list[list[EngineSpec]], claim: _Claim) -> Iterator[Finding]:
    for engines in groups:
        if _sum(engines, claim) is not None:
            names = " and ".join(engine.name for engine in engines)
            claims = " + ".join("?" if part is None else f"{part:g}" for part in map(claim, engines))
            message = f"{names} share a GPU and claim {claims} of its memory, more than there is"
            remedy = "set args.gpu-memory-utilization of each so that they fit, or autostart = false for one of them"
            yield Finding(("engine", engines[-1].name, "gpus"), message, remedy)
