"""Stands in for the package's command: the same daemon, which kills itself at a step that a test names.

A step is one action that the loop performs ("action"), or one write of the state file ("save"). The file PLAN says
which to die at, counted from when it appeared, and how: {"kind": "action", "at": 3, "how": "after"}. It goes with the
daemon, so that the next one lives. STEPS gets the name of each step that was died at.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, "/usr/lib/vllm-supervisor")

from supervisord.cli import main
from supervisord.core.messages import Action
from supervisord.core.model import Node
from supervisord.effects import NodeEffects
from supervisord.state import StateFile

PLAN: Final = Path("/run/crash-plan")
STEPS: Final = Path("/run/crash-steps")
LOOKS: Final = frozenset({"MeasureProgress", "Probe", "Record", "SweepGpus"})
"""What only looks or tells comes at any time and leaves nothing behind: not counted."""
DRAIN_S: Final = 20.0

_counted = 0


def due(kind: str, name: str) -> str | None:
    """Count one step. How to die at it; None: not at this one."""
    global _counted  # noqa: PLW0603 - one daemon, one count
    try:
        plan: dict[str, Any] = json.loads(PLAN.read_text(encoding="utf-8"))
    except FileNotFoundError:
        _counted = 0
        return None
    if plan["kind"] != kind:
        return None
    _counted += 1
    if _counted < plan["at"]:
        return None
    with STEPS.open("a", encoding="utf-8") as steps:
        steps.write(f"{name}\n")
    return str(plan["how"])


def die() -> None:
    """End as by kill -9."""
    PLAN.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def drain(effects: NodeEffects, *lanes: object) -> None:
    """Wait until all that was begun on these lanes is done."""
    for lane in lanes:
        done = threading.Event()
        effects._lanes.submit(lane, done.set)
        done.wait(DRAIN_S)


_perform, _save = NodeEffects.perform, StateFile.save


def perform(self: NodeEffects, action: Action, node: Node) -> None:
    """Before: what was decided is on the disk, nothing of it done. After: it is done, and nobody has heard of it."""
    name = type(action).__name__
    how = due("action", name) if name not in LOOKS else None
    if how == "before":
        drain(self, "state")
        die()
    _perform(self, action, node)
    if how == "after":
        drain(self, "state", ("engine", getattr(action, "engine", "")))
        die()


def save(self: StateFile, *what: Any) -> None:
    """Before: what was decided is not on the disk, and may have been done."""
    if due("save", "save") is not None:
        die()
    _save(self, *what)


setattr(NodeEffects, "perform", perform)  # noqa: B010 - in the place of a method
setattr(StateFile, "save", save)  # noqa: B010 - the same

if __name__ == "__main__":
    sys.exit(main())
