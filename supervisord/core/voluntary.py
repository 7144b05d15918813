"""The node's budget of voluntary restarts: those that nobody needs this minute (shortfall, creep, maintenance).

One at a time, never the last ready engine of a replica group while another is down, and only while the engine's
maintenance window is open, if it has one. Restarts of sick engines never wait for this.
"""

from __future__ import annotations

from supervisord.core.model import Engine, Ready
from supervisord.core.turn import Turn


def closed(turn: Turn, engine: Engine) -> str | None:
    """Why a voluntary restart of this engine has to wait, in words; None: it may happen now."""
    spec = engine.spec
    others = [other for other in turn.engines() if other.spec.name != spec.name]
    if spec.restart.maintenance_window and (engine.window_until is None or turn.now >= engine.window_until):
        return f"its maintenance window is closed ({spec.restart.maintenance_window})"
    under_way = next((other.spec.name for other in others if other.replacing), None)
    if under_way is not None:
        return f"{under_way} is being replaced, one at a time"
    if spec.replica_group is not None:
        group = [o for o in others if o.spec.replica_group == spec.replica_group and o.wanted]
        down = next((other.spec.name for other in group if not isinstance(other.phase, Ready)), None)
        if down is not None:
            return f"{down} of its replica group {spec.replica_group} is not ready"
    return None
