"""The reducer: one observation in, a new node and the actions out. Everything is decided here and below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from supervisord.core import (
    admission,
    adoption,
    ending,
    gpu_faults,
    gpus,
    judging,
    persistence,
    requests,
    starting,
    telemetry,
)
from supervisord.core.lifecycle import deadlines
from supervisord.core.messages import (
    Action,
    AnnounceReady,
    Booted,
    CanaryEnded,
    Due,
    EndRequested,
    EngineObservation,
    Exited,
    Finish,
    GateClosed,
    GpuHelperEnded,
    GpuRequested,
    GpusSwept,
    MeasureProgress,
    Observation,
    PersistenceSet,
    PortAnswered,
    PortForeign,
    Probe,
    Progressed,
    Reconfigured,
    Requested,
    Sampled,
    Spawned,
    SpawnFailed,
    Swept,
    WarmedUp,
    WarmupNoted,
    What,
    WindowOpened,
    XidSeen,
)
from supervisord.core.model import (
    After,
    Draining,
    Engine,
    Failed,
    Node,
    Ready,
    Starting,
    State,
    Stopped,
    Waiting,
)
from supervisord.core.turn import Turn

HOST_EVERY_S: Final = 30.0
"""Host memory is a scan of /proc; leaks take hours, so it is measured less often than the engine is asked."""

SETTLED: Final = frozenset({State.READY, State.FAILED, State.STOPPED, State.WAITING})
"""An engine in one of these does not hold back READY=1 any more."""


def step(node: Node, seen: Observation, now: float) -> tuple[Node, tuple[Action, ...]]:
    """Decide. Pure: no I/O, no clock, no randomness; `now` is monotonic seconds and never goes back."""
    turn = Turn(node, now)
    NODE_HANDLERS.get(type(seen), _on_engine)(turn, seen)
    admission.admit_waiting(turn)
    _announce(turn)
    if turn.node.ending and (turn.node.keeping or not _holds_up(turn)):
        turn.do(Finish())
    return turn.result()


def _holds_up(turn: Turn) -> bool:
    return any(engine.live and not isinstance(engine.phase, Failed) for engine in turn.engines())


def wakeup(node: Node) -> float | None:
    """When `Due(CLOCK)` has to come at the latest (monotonic seconds); None: nothing is timed."""
    times = [at for engine in node.engines.values() for at in deadlines(engine)]
    others = (node.announce_ready_at, telemetry.deadline(node.telemetry))
    times += [at for at in others if at is not None]
    return min(times, default=None)


def _boot(turn: Turn, seen: Booted) -> None:
    turn.node = replace(turn.node, announce_ready_at=turn.now + turn.node.spec.supervisor.ready_timeout_s)
    telemetry.boot(turn, nvidia=seen.nvidia)
    for left in seen.found:
        adoption.take_over(turn, left)
    for engine in turn.engines():
        if engine.wanted and isinstance(engine.phase, Stopped):
            adoption.begin(turn, engine)


def _due(turn: Turn, seen: Due) -> None:
    match seen.what:
        case What.CLOCK:
            telemetry.on_clock(turn)
            for engine in turn.engines():
                starting.on_clock(turn, engine)
                ending.on_clock(turn, engine)
                judging.on_clock(turn, engine)
        case What.POLL:
            telemetry.on_poll(turn)
            for engine in turn.engines():
                _poll(turn, engine)
        case _:
            pass  # the watchdog is fed after every turn


def _poll(turn: Turn, engine: Engine) -> None:
    match engine.phase:
        case Starting() if engine.launching is None:
            turn.do(MeasureProgress(engine.spec.name, engine.generation))
        case Ready() | Draining():
            sample = engine.sample
            host_at = sample.host_at if sample is not None else None
            host = host_at is None or turn.now >= host_at + HOST_EVERY_S
            turn.do(Probe(engine.spec.name, engine.generation, host))
        case _:
            pass


def _on_engine(turn: Turn, seen: EngineObservation) -> None:
    engine = turn.engine(seen.engine)
    if engine is None:
        return
    of_launch = isinstance(seen, Spawned | GateClosed | SpawnFailed)
    expected = engine.launching if of_launch else engine.generation
    # A launch is asked for when nothing of the last generation lives: what is heard of that one afterwards is old.
    if seen.generation != expected or of_launch is (engine.launching is None):
        return
    HANDLERS[type(seen)](turn, engine, seen)


def _on_sampled(turn: Turn, engine: Engine, seen: Sampled) -> None:
    phase = engine.phase
    if not isinstance(phase, Ready | Draining):
        return
    sample, old = seen.sample, engine.sample
    if old is not None and sample.at <= old.at:
        return
    if old is not None and sample.host_bytes is None:
        sample = replace(sample, host_bytes=old.host_bytes, host_at=old.host_at, host_limit_bytes=old.host_limit_bytes)
    if old is not None and sample.version is None:
        sample = replace(sample, version=old.version)
    if isinstance(phase, Ready):
        judging.on_sampled(turn, engine, phase, sample)
    else:
        ending.on_drain_sample(turn, turn.put(replace(engine, sample=sample)), phase, seen)


def _open_window(turn: Turn, seen: WindowOpened) -> None:
    engine = turn.engine(seen.engine)
    if engine is not None:
        turn.put(replace(engine, window_until=turn.now + seen.for_s))


HANDLERS: Final[Mapping[type[EngineObservation], Callable[[Turn, Engine, Any], None]]] = {
    Spawned: starting.on_spawned,
    GateClosed: starting.on_gate_closed,
    SpawnFailed: starting.on_spawn_failed,
    PortAnswered: starting.on_port_answered,
    PortForeign: starting.on_port_foreign,
    Progressed: starting.on_progressed,
    WarmupNoted: starting.on_warmup_noted,
    WarmedUp: starting.on_warmed_up,
    Sampled: _on_sampled,
    CanaryEnded: judging.on_canary_ended,
    Exited: ending.on_exited,
    Swept: ending.on_swept,
}


NODE_HANDLERS: Final[Mapping[type, Callable[[Turn, Any], None]]] = {
    Booted: _boot,
    Due: _due,
    Requested: requests.on_requested,
    Reconfigured: requests.on_reconfigured,
    EndRequested: requests.on_end_requested,
    WindowOpened: _open_window,
    GpusSwept: gpus.on_swept,
    GpuHelperEnded: telemetry.on_ended,
    XidSeen: gpu_faults.on_xid,
    PersistenceSet: persistence.on_set,
    GpuRequested: requests.on_gpu_requested,
}
"""What is about the node; everything else is about one engine."""


def _announce(turn: Turn) -> None:
    """READY=1 when the daemon runs and every autostart engine has settled, or when `ready_timeout_s` has passed."""
    at = turn.node.announce_ready_at
    if at is None:
        return
    settled = all(_has_settled(turn.node, e) for e in turn.engines() if e.spec.autostart and not e.removed)
    if settled or turn.now >= at:
        turn.node = replace(turn.node, announce_ready_at=None)
        turn.do(AnnounceReady())


def _has_settled(node: Node, engine: Engine) -> bool:
    """Who only waits for the first look at the GPUs has not found out anything yet; who is drained stays so."""
    phase = engine.phase
    if isinstance(phase, Draining):
        return phase.after is After.HOLD
    looking = isinstance(phase, Waiting) and phase.reason.code == "driver_not_ready" and telemetry.unseen(node)
    return engine.state in SETTLED and not looking
