"""Checks of the GPUs themselves, from one look by NVML and from what the daemon knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from supervisord.core import persistence
from supervisord.core.gpu_inventory import MIG, find, label
from supervisord.core.gpu_samples import LOST, GpuReading
from supervisord.core.model import Gpu
from supervisord.doctor.facts import Facts, Unknown, cards
from supervisord.doctor.findings import Finding, count, fail, listed, not_checked, ok, warn
from supervisord.gpu.protocol import Depths

_RESET: Final = 'reset it at the next occasion (docs/gpus.md: "To reset a GPU")'
_ACTIONS: Final = {
    1: ("a reset", 'docs/gpus.md: "To reset a GPU"'),
    2: ("a reboot of this machine", "reboot"),
    3: ("its peer traffic to be drained", "stop the engines that share it with other GPUs, then reset it"),
    4: ("to be drained and reset", 'stop its engines; docs/gpus.md: "To reset a GPU"'),
}
"""By NVML field 230: what is asked for, and what to do."""


def present(facts: Facts) -> Iterator[Finding]:
    """Whether every GPU that there is, or that an engine names, answers."""
    if not facts.needs_driver:
        return
    if isinstance(facts.gpus, Unknown) or facts.gpus.sweep.problem is not None:
        yield not_checked("NVML does not say which there are (check nvml)")
        return
    spared = _spared(facts)
    for reading in spared.values():
        yield not_checked("in quarantine, so it is not asked (check gpu_quarantine)", subject=_name(reading))
    known = facts.inventory | {
        uuid: Gpu(uuid, pci_id=reading.pci_id, index=reading.index) for uuid, reading in spared.items()
    }
    silent = [reading for reading, _ in facts.readings if reading.error is not None and reading.uuid not in spared]
    for reading in silent:
        code, lost = reading.error, reading.error in LOST
        remedy = "reboot, perhaps power off; look at its seat and power" if lost else "nvidia-smi; dmesg | grep -i nvrm"
        yield fail(f"it does not answer (NVML code {code}{': lost' if lost else ''})", remedy, _name(reading))
    on_bus = len(cards(facts.box))
    if on_bus > len(facts.readings):
        text = f"the PCI bus has {count(on_bus, 'NVIDIA GPU')}, NVML shows {len(facts.readings)}"
        yield fail(text, "dmesg | grep -i nvrm says why the driver left it out")
    wanting = False
    for spec in facts.gpu_engines:
        missing = [name for name in spec.gpus if not name.upper().startswith(MIG) and not find(known, name)]
        if missing:
            wanting = True
            remedy = "nvidia-smi -L shows what is there; correct gpus of the engine"
            yield fail(f"GPU {listed(missing)} is not there, or does not answer", remedy, f"engine {spec.name}")
    if not silent and not wanting and on_bus <= len(facts.readings):
        names = [reading.name for reading, _ in facts.readings if reading.uuid not in spared]
        if names or not spared:
            yield ok(", ".join(_counted(names)) or "NVML lists no GPU")


def _spared(facts: Facts) -> dict[str, GpuReading]:
    """GPUs that no call touched, since the daemon has them in quarantine; the probe calls them lost."""
    if isinstance(facts.daemon, Unknown):
        return {}
    bad = {gpu.get("uuid") for gpu in facts.daemon["gpus"] if gpu.get("quarantined") and gpu.get("pci_id")}
    return {reading.uuid: reading for reading, _ in facts.readings if reading.error is not None and reading.uuid in bad}


def quarantine(facts: Facts) -> Iterator[Finding]:
    """What the daemon has found out about GPUs since it began to look."""
    if isinstance(facts.daemon, Unknown):
        if facts.readings:
            yield not_checked("only the daemon knows of faults that it saw earlier")
        return
    bad = [gpu for gpu in facts.daemon["gpus"] if gpu.get("quarantined")]
    for gpu in bad:
        why = "; ".join(str(reason.get("message")) for reason in gpu.get("reasons") or [] if isinstance(reason, dict))
        uuid = gpu.get("uuid")
        yield fail(f"quarantined: {why}", f"when that is mended: vllm-supervisor gpu clear {uuid}", f"GPU {uuid}")
    if not bad and facts.daemon["gpus"]:
        yield ok("the daemon has no GPU in quarantine")


def memory(facts: Facts) -> Iterator[Finding]:
    """Errors of memory: uncorrected ones, rows to be remapped, pages to be retired."""
    known = [(reading, depth) for reading, depth in facts.readings if reading.error is None]
    found = [finding for reading, depth in known for finding in _memory_of(reading, depth)]
    yield from found
    if known and not found:
        blind = all(reading.ecc_uncorrected is None for reading, _ in known)
        yield ok("these GPUs count no memory errors (no ECC)" if blind else "no memory errors, no rows to be remapped")


def _memory_of(reading: GpuReading, depth: Depths) -> Iterator[Finding]:
    if reading.remap_failed:
        yield fail("a broken row of memory could not be remapped", "have it replaced", _name(reading))
    if reading.remap_pending:
        yield warn("a row of memory is to be remapped", _RESET, _name(reading))
    if depth.retired_pending:
        yield warn("a page of memory is to be retired", _RESET, _name(reading))
    if reading.ecc_uncorrected:
        text = f"{reading.ecc_uncorrected} uncorrectable memory errors since the driver was loaded"
        yield warn(text, f"nvidia-smi -q -d ECC,ROW_REMAPPER; {_RESET}", _name(reading))


def recovery(facts: Facts) -> Iterator[Finding]:
    """What the driver asks for."""
    told = [reading for reading, _ in facts.readings if reading.recovery_action is not None]
    for reading in told:
        if reading.recovery_action:
            unknown = f"recovery action {reading.recovery_action}", "nvidia-smi -q says which"
            wanted, remedy = _ACTIONS.get(reading.recovery_action, unknown)
            yield fail(f"the driver asks for {wanted}", remedy, _name(reading))
    if told and not any(reading.recovery_action for reading in told):
        yield ok("the driver asks for no reset and no reboot")


def mig(facts: Facts) -> Iterator[Finding]:
    """Engines must name a MIG device where MIG is on, and a whole GPU where it is off."""
    split = [reading for reading, _ in facts.readings if reading.mig]
    if not split:
        wanted = [spec for spec in facts.gpu_engines if any(name.upper().startswith(MIG) for name in spec.gpus)]
        for spec in wanted if facts.readings else ():
            yield fail(
                "it names a MIG device, and MIG is on nowhere", "nvidia-smi -mig 1 -i GPU", f"engine {spec.name}"
            )
        if not wanted and any(reading.mig is not None for reading, _ in facts.readings):
            yield ok("MIG is off")
        return
    for reading in split:
        inventory = facts.inventory
        whole = [
            spec.name
            for spec in facts.gpu_engines
            if any((gpu := find(inventory, name)) is not None and gpu.uuid == reading.uuid for name in spec.gpus)
        ]
        if whole:
            text = f"MIG is on, and engine {listed(whole)} names the whole GPU: CUDA sees none there"
            yield fail(
                text, f"name MIG devices (nvidia-smi -L), or: nvidia-smi -mig 0 -i {reading.index}", _name(reading)
            )
        else:
            yield ok("MIG is on; no engine names the whole GPU", _name(reading))


def persistence_mode(facts: Facts) -> Iterator[Finding]:
    """Whether persistence mode is as the configuration wants it."""
    right = 0
    for gpu in facts.inventory.values():
        wanted, why = persistence.wanted(gpu, facts.node.gpu)
        actual = gpu.reading.persistence if gpu.reading is not None else None
        if wanted is None or actual is None or wanted is actual:
            right += 1
            continue
        word = {True: "on", False: "off"}
        text = f"persistence mode is {word[actual]} and wanted {word[wanted]} ({why})"
        remedy = "the daemon sets it while it runs as root; without it: vllm-supervisor gpu persistence"
        yield warn(text, remedy, label(gpu))
    if right and right == len(facts.inventory):
        yield ok("persistence mode is as the configuration wants it")


def nvlink(facts: Facts) -> Iterator[Finding]:
    """NVLinks, where there are any: one that is down halves what several GPUs of one engine can exchange."""
    linked = [(reading, depth) for reading, depth in facts.readings if depth.nvlinks]
    partly = [(reading, depth) for reading, depth in linked if 0 < (depth.nvlinks_up or 0) < (depth.nvlinks or 0)]
    for reading, depth in partly:
        text = f"{depth.nvlinks_up} of {depth.nvlinks} NVLinks are up; fewer bridges than the card takes look the same"
        yield warn(
            text, f"nvidia-smi nvlink -s -i {reading.index}; look at the bridge, then reset the GPU", _name(reading)
        )
    spread = [spec.name for spec in facts.gpu_engines if len(spec.gpus) > 1]
    up = [reading for reading, depth in linked if depth.nvlinks_up]
    if linked and not partly:
        yield ok(f"all NVLinks of {len(up)} GPUs are up" if up else "the GPUs could have NVLink, and are not connected")
    elif spread and facts.readings and not linked:
        yield ok(f"no NVLink here: the GPUs of engine {listed(spread)} talk over PCIe")


def _name(reading: GpuReading) -> str:
    return f"GPU {reading.index} ({reading.uuid or 'UUID unknown'})"


def _counted(names: list[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        number = names.count(name)
        yield f"{number} x {name}" if number > 1 else name
