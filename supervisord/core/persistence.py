"""Persistence mode of GPUs: what the policy wants for each, and reconciling that with what is.

The flag is set again when somebody else changes it (nvidia-persistenced does at its start), three times; then it is
told. An attempt that failed is repeated three times an hour, unless it needs root or the GPU does not support it.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from supervisord.core import gpu_inventory
from supervisord.core.gpu_samples import GpuReading
from supervisord.core.messages import PersistenceSet, SetPersistence, Severity
from supervisord.core.model import Gpu, Persistence
from supervisord.core.spec import GpuSpec
from supervisord.core.turn import Turn

HELD_FOR_S: Final = 3600.0
"""What was left as set for so long is no conflict: nvidia-persistenced is restarted now and then."""
REVERTED_MAX: Final = 3
"""Somebody who undoes it so often means it."""
RETRY_S: Final = HELD_FOR_S / REVERTED_MAX
"""Between attempts after one that failed."""
NO_ANSWER: Final = -1
_FINAL: Final = {3: "this GPU does not support it", 4: "it needs root"}
_ERRORS: Final = {**_FINAL, NO_ANSWER: "the driver never answered"}

DEFAULTS: Final[dict[tuple[str, str], bool]] = {
    ("ampere", "geforce"): False,
    ("ada", "geforce"): True,
    ("ada", "professional"): True,
    ("ada", "datacenter"): True,
    ("ampere", "professional"): True,
    ("ampere", "datacenter"): True,
    ("hopper", "datacenter"): True,
    ("hopper", "professional"): True,
    ("blackwell", "professional"): True,
    ("blackwell", "datacenter"): True,
    ("volta", "datacenter"): True,
    ("turing", "datacenter"): True,
}
"""By generation and class, with `persistence = "auto"`; everything else is left as it is."""

_WORDS: Final = {"on": True, "off": False}


def wanted(gpu: Gpu, spec: GpuSpec) -> tuple[bool | None, str]:
    """What a GPU's persistence mode should be (None: leave it), and why. The most exact override holds."""
    word: str = spec.persistence
    why = f'gpu.persistence = "{word}"'
    overrides = spec.persistence_override
    exact = [name for name in overrides if name == gpu.uuid]
    exact += [name for name in overrides if ":" in name and gpu_inventory.normal_pci_id(name) == gpu.pci_id]
    exact += [name for name in overrides if ":" not in name and fnmatchcase(gpu.name, name)]
    if exact:
        word, why = overrides[exact[0]], f'persistence_override."{exact[0]}"'
    if word == "auto":
        value = DEFAULTS.get((gpu.generation, gpu.kind))
        default = f"default for {gpu.generation or 'unknown'} {gpu.kind or 'unknown'}"
        return value, default if value is not None else f"{default}: left as it is"
    return _WORDS.get(word), why


def reconcile(turn: Turn, gpu: Gpu) -> None:
    """Compare what is with what should be; called for each GPU that a sweep has seen."""
    old, reading = gpu.persistence, gpu.reading
    if reading is None or gpu.absent_since is not None:
        return
    value, why = wanted(gpu, turn.node.spec.gpu)
    new = replace(old, wanted=value, why=why, asked=False)
    if (value, why) != (old.wanted, old.why):
        new = replace(new, sets=0, told="")
    if reading.persistence is None or value is None or reading.persistence is value:
        held = new.set_at is not None and turn.now - new.set_at >= HELD_FOR_S
        _keep(turn, gpu, replace(new, told="", sets=0 if held else new.sets, set_at=None if held else new.set_at))
        return
    if old.asked:
        # A sweep that was asked for later is answered: the probe ended over it, and the next one may do so too.
        on_set(turn, PersistenceSet(gpu.uuid, value, NO_ANSWER))
        return
    hindrance = _last_failure(turn, new) or obstacle(gpu, reading, new)
    if hindrance is not None:
        if hindrance != new.told:
            text = f"{gpu_inventory.label(gpu)}: persistence mode is {_word(reading.persistence)}, {why} wants"
            text += f" {_word(value)}; left: {hindrance}"
            kind = "persistence_conflict" if new.sets >= REVERTED_MAX else "persistence_drift"
            turn.record(kind, None, text, severity=Severity.NOTICE, gpu=gpu.uuid)
            new = replace(new, told=hindrance)
    else:
        turn.do(SetPersistence(turn.node.telemetry.helper, gpu.uuid, value))
        new = replace(new, asked=True)
    _keep(turn, gpu, new)


def _last_failure(turn: Turn, seen: Persistence) -> str | None:
    """What came of the last attempt, while there must be no other one; None: there may be."""
    if not seen.told.startswith("refused"):
        return None
    final = seen.told in {_refused(why) for why in _FINAL.values()}
    due = turn.now >= (seen.set_at or 0.0) + RETRY_S
    # With a probe that hangs in the driver for good, a second one may hang too: then all GPUs are lost from sight.
    return None if due and not final and turn.node.telemetry.stuck == 0 else seen.told


def _refused(why: str) -> str:
    return f"refused ({why})"


def obstacle(gpu: Gpu, reading: GpuReading, seen: Persistence) -> str | None:
    """Why it is not set now though it differs from what `seen` wants, in words; None: it may be set."""
    if gpu.quarantine is not None:
        return "it is quarantined, and persistence mode on would block a reset"
    if seen.sets >= REVERTED_MAX:
        return f"somebody has changed it back {REVERTED_MAX} times (nvidia-persistenced?)"
    if reading.mig:
        return "MIG is on"
    if gpu.kind in {"integrated", "superchip"}:
        return "on a GPU that shares memory with the CPU it is never changed"
    if seen.wanted is False and reading.processes != ():
        return "processes use it"
    return None


def _keep(turn: Turn, gpu: Gpu, new: Persistence) -> None:
    if new != gpu.persistence:
        turn.node = replace(turn.node, gpus={**turn.node.gpus, gpu.uuid: replace(gpu, persistence=new)})


def on_set(turn: Turn, seen: PersistenceSet) -> None:
    """It was tried. The next sweep reads it back."""
    gpu = turn.node.gpus.get(seen.uuid)
    if gpu is None:
        return
    old, label = gpu.persistence, gpu_inventory.label(gpu)
    if seen.error is None:
        turn.record(
            "persistence_set",
            None,
            f"{label}: persistence mode set to {_word(seen.on)} ({old.why})",
            severity=Severity.NOTICE,
            gpu=gpu.uuid,
        )
        _keep(turn, gpu, replace(old, asked=False, sets=old.sets + 1, set_at=turn.now))
        return
    why = _ERRORS.get(seen.error, f"NVML code {seen.error}")
    told = _refused(why)
    if told != old.told:
        text = f"{label}: cannot set persistence mode to {_word(seen.on)}: {why}; it stays as it is"
        turn.record("persistence_drift", None, text, severity=Severity.WARNING, gpu=gpu.uuid)
    _keep(turn, gpu, replace(old, asked=False, told=told, set_at=turn.now))


def _word(on: bool) -> str:
    return "on" if on else "off"
