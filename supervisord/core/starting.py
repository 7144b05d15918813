"""From wanted to ready: gates, launch, progress, warm-up."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import admission, ending
from supervisord.core.messages import (
    Abandon,
    GateClosed,
    PortAnswered,
    PortForeign,
    Probe,
    Progressed,
    Severity,
    Spawned,
    SpawnFailed,
    Sweep,
    WarmedUp,
    WarmUp,
    WarmupNoted,
    WatchPort,
)
from supervisord.core.model import (
    After,
    Engine,
    ExitClass,
    FailedKind,
    LastExit,
    Ready,
    Reason,
    Starting,
    State,
    Stopping,
    Waiting,
    Warming,
    Warmup,
)
from supervisord.core.turn import Turn
from supervisord.core.watch import Watch

PROGRESS_BYTES: Final = 1024 * 1024
"""Less than this, read or allocated since the last sign of progress, is housekeeping (heartbeats of helpers)."""

WARMUP_GRACE_S: Final = 10.0
"""The warm-up ends itself at its timeout; this much later we stop waiting for its word."""


def on_spawned(turn: Turn, engine: Engine, seen: Spawned) -> None:
    """The process runs: from now on this generation exists."""
    engine = turn.put(
        replace(
            engine,
            generation=seen.generation,
            launching=None,
            process=seen.process,
            running_plan_id=engine.plan_id,
        )
    )
    turn.record(
        "spawned",
        engine,
        f"{engine.spec.name} started: generation {engine.generation}, pid {seen.process.pid}",
        pid=seen.process.pid,
    )
    phase = engine.phase
    if isinstance(phase, Stopping):
        ending.on_late_spawn(turn, engine, phase)
    elif isinstance(phase, Starting | Waiting):
        turn.enter(engine, Starting(progress_at=turn.now, give_up_at=admission.give_up_at(turn, engine)))
        turn.do(WatchPort(engine.spec.name, engine.generation))
    else:
        # Given up on long ago (unkillable): what appears now must not live.
        turn.do(Sweep(engine.spec.name, engine.generation))


def on_gate_closed(turn: Turn, engine: Engine, seen: GateClosed) -> None:
    """The world is not ready for this launch: wait; it costs no budget."""
    engine = turn.put(replace(engine, launching=None))
    if isinstance(engine.phase, Starting | Waiting):
        admission.wait(turn, engine, Reason(seen.code, seen.message), turn.now + admission.GATE_RECHECK_S)
    else:
        ending.conclude_unspawned(turn, engine)


def on_spawn_failed(turn: Turn, engine: Engine, seen: SpawnFailed) -> None:
    """Nothing was spawned, and waiting alone does not help."""
    engine = turn.put(replace(engine, launching=None))
    if not isinstance(engine.phase, Starting | Waiting):
        ending.conclude_unspawned(turn, engine)
    elif seen.kind is ExitClass.CONFIG:
        admission.fail(turn, engine, FailedKind.CONFIG, seen.message)
    else:
        exit_ = LastExit(seen.kind, None, None, turn.now, engine.generation, seen.message)
        ending.after_failure(turn, turn.put(replace(engine, last_exit=exit_)), Reason("spawn_failed", seen.message))


def on_port_answered(turn: Turn, engine: Engine, _: PortAnswered) -> None:
    """`/health` is 200: warm up, or be ready if there is nothing to warm."""
    if not isinstance(engine.phase, Starting):
        return
    took_s = turn.now - engine.since
    turn.record("answering", engine, f"{engine.spec.name} answers after {took_s:.1f} s", took_s=round(took_s, 3))
    if not engine.spec.warmup.enabled or engine.warm_generation == engine.generation:
        become_ready(turn, engine, engine.lasting)
        return
    turn.enter(engine, Warming(give_up_at=turn.now + engine.spec.warmup.timeout_s + WARMUP_GRACE_S))
    turn.do(WarmUp(engine.spec.name, engine.generation))


def on_port_foreign(turn: Turn, engine: Engine, seen: PortForeign) -> None:
    """Somebody else shares our port: this engine can never be trusted to get its own traffic."""
    if isinstance(engine.phase, Starting):
        message = f"port {engine.spec.port} is answered by {seen.holder}, not by this engine"
        exit_ = LastExit(ExitClass.RESOURCE, None, None, turn.now, engine.generation, message)
        ending.stop(turn, turn.put(replace(engine, last_exit=exit_)), After.CRASH, Reason("port_held", message))


def on_progressed(turn: Turn, engine: Engine, seen: Progressed) -> None:
    """Growth moves the start deadline; repeated lines and CPU time do not (A10)."""
    phase = engine.phase
    if not isinstance(phase, Starting):
        return
    old, new = phase.progress, seen.progress
    if old is None:
        turn.put(replace(engine, phase=replace(phase, progress=new)))
        return
    grown = (
        new.read_bytes >= old.read_bytes + PROGRESS_BYTES
        or new.memory_bytes >= old.memory_bytes + PROGRESS_BYTES
        or new.log_lines > old.log_lines
    )
    if grown:
        best = replace(
            new,
            read_bytes=max(new.read_bytes, old.read_bytes),
            memory_bytes=max(new.memory_bytes, old.memory_bytes),
            log_lines=max(new.log_lines, old.log_lines),
        )
        turn.put(replace(engine, phase=replace(phase, progress=best, progress_at=turn.now)))


def on_gpu_memory(turn: Turn, engine: Engine, used_bytes: int) -> Engine:
    """GPU memory that grows is progress too: weights may come from the page cache, without a byte read."""
    phase = engine.phase
    if not isinstance(phase, Starting):
        return engine
    if phase.gpu_bytes is None:
        return turn.put(replace(engine, phase=replace(phase, gpu_bytes=used_bytes)))
    if used_bytes < phase.gpu_bytes + PROGRESS_BYTES:
        return engine
    return turn.put(replace(engine, phase=replace(phase, gpu_bytes=used_bytes, progress_at=turn.now)))


def on_warmup_noted(turn: Turn, engine: Engine, seen: WarmupNoted) -> None:
    """Show where the warm-up is."""
    if isinstance(engine.phase, Warming):
        turn.put(replace(engine, phase=replace(engine.phase, note=seen.note)))


def on_warmed_up(turn: Turn, engine: Engine, seen: WarmedUp) -> None:
    """The warm-up ended: ready, or what `warmup.on_failure` says."""
    if not isinstance(engine.phase, Warming):
        return
    before = engine.warmup
    engine = turn.put(replace(engine, warmup=seen.warmup))
    problem = seen.warmup.problem
    if problem is None:
        become_ready(turn, engine, ())
    elif engine.spec.warmup.on_failure == "restart" and problem.code != "warmup_refused":
        _fail_start(turn, replace(engine, warmup=before), problem)
    else:
        become_ready(turn, engine, (problem,))


def become_ready(turn: Turn, engine: Engine, reasons: tuple[Reason, ...]) -> None:
    """Open the engine for traffic; one that was ready under an earlier daemon goes on being so."""
    left = engine.left if engine.left is not None and engine.left.state is State.READY else None
    known = engine.watch if left is not None and engine.watch is not None else Watch(turn.now, turn.now)
    engine = turn.enter(
        replace(
            engine,
            ready_since=turn.now if left is None or engine.ready_since is None else engine.ready_since,
            watch=replace(known, since=turn.now, moved_at=turn.now),
            left=None,
            replacing=False,
            good_blocks=engine.good_blocks if engine.good_plan_id == engine.running_plan_id else None,
            good_plan_id=engine.running_plan_id,
            warm_generation=engine.generation,
        ),
        Ready(reasons),
    )
    if left is not None:
        engine = turn.put(replace(engine, since=left.since))
    _tell_ready(turn, engine, reasons, engine.warmup if left is None else None)
    turn.do(Probe(engine.spec.name, engine.generation, host=True))


def _tell_ready(turn: Turn, engine: Engine, reasons: tuple[Reason, ...], warmup: Warmup | None) -> None:
    """`warmup`: the one that was just done."""
    text = f"{engine.spec.name} is ready"
    if warmup is not None and warmup.first_ms is not None and warmup.settled_ms is not None:
        text += f": first answer {warmup.first_ms:.0f} ms, settled {warmup.settled_ms:.0f} ms"
        text += f" after {warmup.rounds} rounds"
    if reasons:
        text += f"; degraded: {reasons[0].message}"
    turn.record(
        "ready",
        engine,
        text,
        severity=Severity.WARNING if reasons else Severity.NOTICE,
        reason=reasons[0] if reasons else None,
        first_ms=warmup.first_ms if warmup else None,
        settled_ms=warmup.settled_ms if warmup else None,
        rounds=warmup.rounds if warmup else None,
    )


def _fail_start(turn: Turn, engine: Engine, reason: Reason) -> None:
    """A start that went wrong while its process still runs."""
    exit_ = LastExit(ExitClass.CRASH, None, None, turn.now, engine.generation, reason.message)
    ending.stop(turn, turn.put(replace(engine, last_exit=exit_)), After.CRASH, reason)


def on_clock(turn: Turn, engine: Engine) -> None:
    """Deadlines of waiting, starting and warming."""
    phase, spec = engine.phase, engine.spec
    match phase:
        case Waiting() if turn.now >= phase.recheck_at:
            if engine.launching is None:
                admission.admit(turn, engine)
            else:
                admission.fail(turn, engine, FailedKind.UNKILLABLE, ending.LAUNCH_HANGS)
        case Starting() if turn.now >= phase.give_up_at:
            text = f"not answering after {spec.start_timeout_max_s:g} s in all (start_timeout_max_s)"
            _fail_start(turn, engine, Reason("start_timeout", text))
        case Starting() if turn.now >= phase.progress_at + spec.start_timeout_s:
            text = f"no progress for {spec.start_timeout_s:g} s (start_timeout_s): nothing read, no memory, no new line"
            _fail_start(turn, engine, Reason("start_timeout", text))
        case Warming() if turn.now >= phase.give_up_at:
            text = f"warm-up did not end within {spec.warmup.timeout_s:g} s (warmup.timeout_s)"
            if spec.warmup.on_failure == "restart":
                _fail_start(turn, engine, Reason("warmup_timeout", text))
            else:
                turn.do(Abandon(spec.name, engine.generation))
                become_ready(turn, engine, (Reason("warmup_timeout", text),))
        case _:
            pass
