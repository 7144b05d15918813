"""What the driver's error numbers (Xid) mean for who goes on: NVIDIA's catalog, as far as it decides something."""

from __future__ import annotations

from enum import Enum
from typing import Final


class XidClass(Enum):
    """What an Xid asks for."""

    APPLICATION = "application"
    """A process made a mistake, or was ended by another fault: evidence for how its engine ends."""
    RESET = "reset"
    """The GPU has to be reset."""
    REBOOT = "reboot"
    """The GPU is gone until the machine is started anew."""
    WORKFLOW = "workflow"
    """Somebody has to look: memory or NVLink."""
    NOTICE = "notice"
    """Told, nothing more."""


_CLASSES: Final = {
    XidClass.APPLICATION: (13, 31, 32, 43, 45, 68, 69, 94),
    XidClass.RESET: (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143),
    XidClass.REBOOT: (79,),
    XidClass.WORKFLOW: (48, 74),
}
_BY_NUMBER: Final = {number: kind for kind, numbers in _CLASSES.items() for number in numbers}

GSP: Final = (119, 120)
"""The GPU's own processor is dead: every call for that GPU waits 45 s for it, in the kernel."""

REMEDIES: Final = {
    XidClass.RESET: "reset it (vllm-supervisor gpu release, then nvidia-smi --gpu-reset -i {gpu}) or reboot",
    XidClass.REBOOT: "it is gone until the machine is rebooted, perhaps powered off; look at its seat and its power",
    XidClass.WORKFLOW: "look at nvidia-smi -q -i {gpu} (ECC, NVLink) and at the vendor's advice; often a reset helps",
}

NAMES: Final = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup",
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapped",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    154: "recovery action changed",
}

RECOVERY_CHANGED: Final = 154
RECOVERY: Final = {
    1: "reset it (vllm-supervisor gpu release, then nvidia-smi --gpu-reset -i {gpu})",
    2: "reboot the machine",
    3: "drain its peer-to-peer work: stop what uses it, then look again",
    4: "stop what uses it, then reset it (vllm-supervisor gpu release, nvidia-smi --gpu-reset -i {gpu})",
}
"""NVML field 230, GPU recovery action; 0 is none."""


def class_of(xid: int | None) -> XidClass:
    """What a number asks for; no number at all is a GPU that fell off the bus."""
    if xid is None:
        return XidClass.REBOOT
    return _BY_NUMBER.get(xid, XidClass.NOTICE)


def name_of(xid: int | None) -> str:
    """The number in words, for people."""
    if xid is None:
        return "fallen off the bus"
    name = NAMES.get(xid)
    return f"Xid {xid}" if name is None else f"Xid {xid} ({name})"
