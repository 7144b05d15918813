"""Who may start now: the gates of the node, the launch, and the terminal states."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import gpu_inventory, telemetry
from supervisord.core.messages import Launch, Severity
from supervisord.core.model import Engine, Failed, FailedKind, Reason, Starting, Stopping, Waiting
from supervisord.core.turn import Turn

GATE_RECHECK_S: Final = 5.0
"""How often a closed outside gate is looked at again."""

LOOK_AGAIN_S: Final = 0.5
"""How soon an engine looks again when a neighbour was just looking at an outside gate."""

INTERNAL_RECHECK_S: Final = 60.0
"""A gate inside the node opens by an event; this is only the net below it."""

QUIET_GATES: Final = frozenset({"max_parallel_starts", "gpu_busy_starting"})
"""Gates that the node's own work closes: nothing is wrong."""

GPU_GATES: Final = frozenset({"driver_not_ready", "gpu_missing", "gpu_quarantined", "gpu_memory_held"})

INTERNAL_GATES: Final = QUIET_GATES | GPU_GATES
"""Gates that open by what the core hears, and are looked at in every turn."""


def admit(turn: Turn, engine: Engine) -> None:
    """Start a wanted engine, or let it wait at a gate of the node."""
    if turn.node.ending:
        return
    phase = engine.phase
    outside = phase if isinstance(phase, Waiting) and phase.reason.code not in INTERNAL_GATES else None
    blocked = _internal_gate(turn, engine)
    if blocked is None:
        _launch(turn, engine, outside)
    elif outside is not None and _internal_gate(turn, engine, lookers=False) is None:
        turn.put(replace(engine, phase=replace(outside, recheck_at=turn.now + LOOK_AGAIN_S)))
    else:
        wait(turn, engine, blocked, turn.now + INTERNAL_RECHECK_S)


def _launch(turn: Turn, engine: Engine, outside: Waiting | None) -> None:
    """Who waits `outside` stays visibly waiting while the gates there are looked at again: no flapping in status."""
    generation = engine.generation + 1
    gpus = gpu_inventory.named(turn.node.gpus, engine.spec.gpus)
    known = len(gpus) == len(engine.spec.gpus) > 0
    counts_lost = turn.node.telemetry.cuda_counts_lost
    places = gpu_inventory.places(turn.node.gpus, gpus, counts_lost=counts_lost) if known else None
    engine = replace(
        engine,
        launching=generation,
        sample=None,
        ready_since=None,
        warmup=None,
        watch=None,
        left=None,
        devices=tuple(gpu.uuid for gpu in gpus) if known else (),
        places=places or (),
        strange_bytes={},
        gpu_bytes=None,
        placed=False,
        app_xids=(),
    )
    if outside is not None:
        turn.put(replace(engine, phase=replace(outside, recheck_at=give_up_at(turn, engine))))
    else:
        turn.enter(engine, Starting(progress_at=turn.now, give_up_at=give_up_at(turn, engine)))
    turn.do(Launch(engine.spec.name, generation, places))


def admit_waiting(turn: Turn) -> None:
    """Let in who waits at a gate of the node; called when a step may have opened one."""
    for engine in turn.engines():
        phase = engine.phase
        if isinstance(phase, Waiting) and phase.reason.code in INTERNAL_GATES:
            still = _internal_gate(turn, engine)
            if still != phase.reason:
                admit(turn, engine)


def give_up_at(turn: Turn, engine: Engine) -> float:
    """When a start that begins now has taken too long in all."""
    return turn.now + engine.spec.start_timeout_max_s


def _internal_gate(turn: Turn, engine: Engine, *, lookers: bool = True) -> Reason | None:
    """The gates that the core itself knows of; without `lookers`, engines that wait at an outside gate do not count.

    vLLM profiles free GPU memory while it starts: two at once on one GPU corrupt each other, often silently (measured:
    3 of 3 pairs on an H200, two of them without an error).
    """
    others = [e for e in turn.engines() if e.spec.name != engine.spec.name]
    starting = [e for e in others if _starts(e, lookers=lookers)]
    closed = gpu_inventory.gate(turn, engine)
    if closed is not None:
        return closed
    gpus = turn.node.gpus
    sharing = [e for e in others if gpu_inventory.share(gpus, engine, e)] if engine.spec.gpus else []
    stuck = next((e for e in sharing if isinstance(e.phase, Failed) and e.live), None)
    if stuck is not None:
        text = f"processes of engine {stuck.spec.name} on the same GPU cannot be ended; mend that, then reset it"
        return Reason("gpu_quarantined", text)
    holder = next((e for e in sharing if e in starting or isinstance(e.phase, Stopping)), None)
    if holder is not None:
        return Reason(
            "gpu_busy_starting",
            f"engine {holder.spec.name} is {holder.state.value} on the same GPU; one at a time, or both lose KV cache",
        )
    closed = gpu_inventory.memory_gate(turn, engine)
    if closed is not None:
        return closed
    limit = turn.node.spec.supervisor.max_parallel_starts
    if len(starting) >= limit:
        return Reason("max_parallel_starts", f"{len(starting)} engines are starting, max_parallel_starts is {limit}")
    return None


def _starts(engine: Engine, *, lookers: bool) -> bool:
    """The launch of one who waits at an outside gate is, as far as we know, no more than another look at that."""
    if engine.launching is None:
        return isinstance(engine.phase, Starting)
    return lookers or not isinstance(engine.phase, Waiting)


def wait(turn: Turn, engine: Engine, reason: Reason, recheck_at: float) -> None:
    """Wait at a gate; said once for as long as the reason stays the same."""
    old = engine.phase
    quiet = reason.code in QUIET_GATES or (reason.code == "driver_not_ready" and telemetry.looking(turn.node))
    if not (isinstance(old, Waiting) and _same(old.reason, reason)):
        turn.record(
            "waiting",
            engine,
            f"{engine.spec.name} waits: {reason.message}",
            severity=Severity.NOTICE if quiet else Severity.WARNING,
            reason=reason,
        )
    turn.enter(engine, Waiting(reason, recheck_at))
    if reason.code in GPU_GATES:
        telemetry.hurry(turn)


def _same(old: Reason, new: Reason) -> bool:
    """Whether there is nothing new to say: how much memory is held changes with every look."""
    return old == new or old.code == new.code == "gpu_memory_held"


def fail(turn: Turn, engine: Engine, kind: FailedKind, message: str) -> None:
    """Enter a terminal state that only a human or a changed configuration clears."""
    turn.enter(engine, Failed(kind, message))
    turn.record(
        "failed",
        engine,
        f"{engine.spec.name} failed ({kind.value}): {message}",
        severity=Severity.CRITICAL if kind is FailedKind.UNKILLABLE else Severity.ERROR,
        reason=kind.value,
    )
