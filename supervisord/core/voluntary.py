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


def closed(turn: Turn, engine: Engine) -> str | None:
    """Why a voluntary restart of this engine has to wait, in words; None: it may happen now."""
    spec = engine.spec
    others = [other for other in turn.engines() if other.spec.name != spec.name]
    if spec.restart.maintenance_window and (engine.window_until is None or turn.now >= engine.window_until):
        return f"its maintenance window is closed ({spec.restart.maintenance_window})"
    under_way = next((o.spec.name for o in others if o.replacing and o.state not in DONE_WITH), None)
    if under_way is not None:
        return f"{under_way} is being replaced, one at a time"
    if spec.replica_group is None:
        return None
    group = [o for o in others if o.spec.replica_group == spec.replica_group and o.wanted]
    if group and not any(o.state is State.READY for o in group):
        return f"it is the last ready engine of its replica group {spec.replica_group}"
    return None
