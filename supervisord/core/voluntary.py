"""The node's budget of voluntary restarts: those that nobody needs this minute (shortfall, creep, maintenance).

One at a time, never the last ready engine of a replica group while another is down, and only while the engine's
maintenance window is open, if it has one. Restarts of sick engines never wait for this.
"""

from __future__ import annotations

from typing import Final

from supervisord.core.model import Engine, State
from supervisord.core.turn import Turn

DONE_WITH: Final = frozenset({State.STOPPED, State.FAILED})
"""A replacement that ended here is over: nobody waits for it."""


def closed(turn: Turn, engine: Engine, *, urgent: bool = False, waives_budget: bool = False) -> str | None:
    """Why a voluntary restart of this engine has to wait, in words; None: it may happen now.

    `urgent`: memory ends within half an hour, a window is not waited for. `waives_budget`: within ten minutes, nor is
    anything else: the crash would come first.
    """
    spec = engine.spec
    if waives_budget:
        return None
    shut = engine.window_until is None or turn.now >= engine.window_until
    if spec.restart.maintenance_window and shut and not urgent:
        return f"its maintenance window is closed ({spec.restart.maintenance_window})"
    others = (other for other in turn.engines() if other.spec.name != spec.name)
    under_way = next((o.spec.name for o in others if o.replacing and o.state not in DONE_WITH), None)
    if under_way is not None:
        return f"{under_way} is being replaced, one at a time"
    return last_of_group(turn, engine)


def last_of_group(turn: Turn, engine: Engine) -> str | None:
    """Why this engine must not leave traffic by our choice: no other of its replica group is ready."""
    group, name = engine.spec.replica_group, engine.spec.name
    others = [o for o in turn.engines() if o.spec.name != name and o.spec.replica_group == group and o.wanted]
    if group is None or not others or any(o.state is State.READY for o in others):
        return None
    return f"it is the last ready engine of its replica group {group}"
