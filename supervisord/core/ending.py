"""From running to gone: drain, SIGTERM, SIGKILL, and what follows when nothing of the engine is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import admission, gpu_claims, gpu_inventory, policy, telemetry
from supervisord.core.classify import SIGKILL, SIGNAL_NAMES, classify
from supervisord.core.lifecycle import MEMORY_BACK_S
from supervisord.core.messages import Abandon, Exited, KeepEvidence, Probe, Sampled, Severity, Sweep, Swept, Terminate
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    ExitClass,
    Failed,
    FailedKind,
    LastExit,
    Ready,
    Reason,
    Starting,
    State,
    Stopped,
    Stopping,
    Warming,
)
from supervisord.core.rules.blocks import is_low
from supervisord.core.turn import Turn

REPEAT_TERM_S: Final = 2.0
"""vLLM swallows a SIGTERM while its engine initialises (3 of 3, CPU and CUDA); a second one ends it."""

UNKILLABLE_AFTER_S: Final = 30.0
"""What lives this long after SIGKILL sits in the kernel; normal is under 0.3 s, 9 s for GPU memory of a killed rank."""

MEMORY_BLIND_S: Final = 2.0
"""So long GPU memory is given to come back where nobody can see it."""

LAUNCH_HANGS: Final = "its launch is never answered: the disk or the process table hangs; mend that, then reset it"

SWEEP_AGAIN_S: Final = 1.0
DRAIN_LOOK_S: Final = 1.0


def stop(turn: Turn, engine: Engine, after: After, cause: Reason, *, at_once: bool = True) -> None:
    """Begin to end a live engine. Not `at_once`: a ready engine drains first."""
    phase, spec = engine.phase, engine.spec
    if isinstance(phase, Stopping):
        turn.put(replace(engine, phase=replace(phase, after=after, cause=cause)))
        return
    if isinstance(phase, Ready | Draining) and not at_once and spec.drain_timeout_s > 0:
        drain(turn, engine, after, cause)
        return
    engine = _blamed(turn, engine, after, cause)
    initialising = engine.warm_generation != engine.generation
    turn.record("stopping", engine, f"{spec.name} is stopping: {cause.message}", severity=Severity.NOTICE, reason=cause)
    kill_at = turn.now + spec.stop_timeout_s
    turn.enter(
        engine,
        Stopping(
            after=after,
            cause=cause,
            kill_at=kill_at,
            give_up_at=kill_at + UNKILLABLE_AFTER_S,
            repeat_at=turn.now + REPEAT_TERM_S if initialising else None,
        ),
    )
    turn.do(Abandon(spec.name, engine.generation))
    if engine.launching is None:
        turn.do(Terminate(spec.name, engine.generation))


def _blamed(turn: Turn, engine: Engine, after: After, cause: Reason) -> Engine:
    """An engine that has served and is ended for a failure: budget and back-off read that from its last exit."""
    if after is not After.CRASH or not isinstance(engine.phase, Ready | Draining):
        return engine
    last = LastExit(ExitClass.CRASH, None, None, turn.now, engine.generation, cause.message)
    return replace(engine, last_exit=last)


def drain(turn: Turn, engine: Engine, after: After, cause: Reason, *, recoverable: bool = False) -> None:
    """Take a ready engine out of traffic until nothing is in flight; one that is draining to an end keeps its time."""
    phase = engine.phase
    if isinstance(phase, Draining) and phase.until is not None:
        turn.put(replace(engine, phase=replace(phase, after=after, cause=cause, recoverable=False)))
        return
    hold = after is After.HOLD
    until = None if hold else turn.now + engine.spec.drain_timeout_s
    limit = "until told otherwise" if hold else f"up to {engine.spec.drain_timeout_s:g} s"
    turn.record(
        "draining",
        engine,
        f"{engine.spec.name} is draining {limit}: {cause.message}",
        severity=Severity.NOTICE,
        reason=cause,
    )
    turn.enter(engine, Draining(after, until, cause, turn.now + DRAIN_LOOK_S, recoverable))
    if not hold:
        turn.do(Probe(engine.spec.name, engine.generation))


def on_drain_sample(turn: Turn, engine: Engine, phase: Draining, seen: Sampled) -> None:
    """Nothing in flight, seen when no gateway sends any more: go on."""
    sample = seen.sample
    idle = sample.running == 0 and sample.waiting == 0
    if phase.after is After.HOLD or not idle or sample.at < engine.since + engine.spec.drain_min_s:
        return
    if phase.recoverable and is_low(engine.spec, sample) is False and engine.running_plan_id == engine.plan_id:
        turn.enter(engine, Ready(engine.lasting))
        text = f"{engine.spec.name} is ready again: its blocks are free now that nothing is in flight"
        turn.record("ready", engine, text, severity=Severity.NOTICE, reason=phase.cause, free=sample.free_blocks)
        return
    stop(turn, engine, phase.after, phase.cause)


def evidence_file(engine: Engine, code: str) -> str:
    """Where KeepEvidence puts what it collects, seen from the state directory."""
    return f"evidence/{engine.spec.name}.{engine.generation}.{code}.txt"


def kill(turn: Turn, engine: Engine, after: After, cause: Reason, *, keep: bool = False) -> None:
    """End an engine without asking it: for one that cannot answer any more. `keep` evidence of it before."""
    numbers: dict[str, str] = {}
    if keep and engine.launching is None:
        turn.do(KeepEvidence(engine.spec.name, engine.generation, cause.code))
        numbers["evidence"] = evidence_file(engine, cause.code)
    text = f"{engine.spec.name} is killed: {cause.message}"
    turn.record("killing", engine, text, severity=Severity.WARNING, reason=cause, **numbers)
    engine = _blamed(turn, engine, after, cause)
    turn.do(Abandon(engine.spec.name, engine.generation))
    phase = Stopping(after, cause, kill_at=turn.now, give_up_at=turn.now + UNKILLABLE_AFTER_S)
    if engine.launching is None:
        _sweep(turn, engine, phase)
    else:
        turn.enter(engine, phase)


def on_late_spawn(turn: Turn, engine: Engine, phase: Stopping) -> None:
    """It was told to stop between the decision and the spawn: it is stopped now, or killed if that is due already."""
    if turn.now >= phase.kill_at:
        _sweep(turn, engine, replace(phase, exited=False, give_up_at=turn.now + UNKILLABLE_AFTER_S))
    else:
        turn.put(replace(engine, phase=replace(phase, repeat_at=turn.now + REPEAT_TERM_S)))
        turn.do(Terminate(engine.spec.name, engine.generation))


def _sweep(turn: Turn, engine: Engine, phase: Stopping) -> None:
    turn.enter(engine, replace(phase, sweeping=True, sweep_at=None, repeat_at=None))
    turn.do(Sweep(engine.spec.name, engine.generation))


def on_exited(turn: Turn, engine: Engine, seen: Exited) -> None:
    """The main process is gone. Children may live (A24): sweep before anything else."""
    phase, name = engine.phase, engine.spec.name
    engine = replace(engine, process=None)
    if isinstance(phase, Stopping):
        _exited_while_stopping(turn, engine, phase, seen)
        return
    if isinstance(phase, Failed) and phase.kind is FailedKind.UNKILLABLE:
        turn.put(engine)
        turn.do(Sweep(name, engine.generation))
        return
    if not isinstance(phase, Starting | Warming | Ready | Draining):
        return
    if seen.stopped_by is not None:
        _stopped_outside(turn, engine, seen, seen.stopped_by)
        return
    answered = not isinstance(phase, Starting) or engine.warm_generation == engine.generation
    evidence = (*engine.app_xids, *seen.tail)
    kind, advice = classify(seen.code, seen.signal, evidence, oom_killed=seen.oom_killed, answered=answered)
    refused = gpu_claims.refused_in(seen.tail) if kind is ExitClass.RESOURCE else None
    if refused is not None:
        engine = replace(engine, refused_claim=(engine.running_plan_id or "", refused))
    if isinstance(phase, Starting) and gpu_inventory.doubted(turn, engine, seen.tail):
        advice += "; a GPU is lost, so it may have been given a wrong one: CUDA's numbers are now counted the other way"
    cause = Reason("exited", f"{_how(seen)} ({kind.value}): {advice}")
    engine = replace(engine, last_exit=LastExit(kind, seen.code, seen.signal, turn.now, engine.generation, advice))
    alone = "" if _is_unseen(engine) else "by itself "
    turn.record(
        "exited",
        engine,
        f"{name} ended {alone}while {_state(engine).value}: {cause.message}",
        severity=Severity.ERROR,
        reason="exited",
        exit_class=kind.value,
        code=seen.code,
        signal=seen.signal,
    )
    after = After.CRASH
    if isinstance(phase, Draining):
        after = After.STOP if phase.after is After.HOLD else phase.after
        if phase.after is After.HOLD:
            engine = replace(engine, wanted=False)
    turn.do(Abandon(name, engine.generation))
    give_up_at = turn.now + UNKILLABLE_AFTER_S
    _sweep(turn, engine, Stopping(after, cause, kill_at=turn.now, give_up_at=give_up_at, exited=True))


def _is_unseen(engine: Engine) -> bool:
    """It was left by an earlier daemon, and ended before it answered this one, nobody knows how."""
    last = engine.last_exit
    known = last is None or last.code is not None or last.signal is not None
    return engine.left is not None and not known


def _exited_while_stopping(turn: Turn, engine: Engine, phase: Stopping, seen: Exited) -> None:
    if phase.gone_at is not None:
        turn.put(engine)
        return
    asked = phase.after is not After.CRASH
    if asked:
        engine = replace(engine, last_exit=_asked_exit(engine, phase.cause, seen.code, seen.signal, turn.now))
    turn.put(engine)
    if not phase.sweeping:
        give_up_at = min(phase.give_up_at, turn.now + UNKILLABLE_AFTER_S)
        _sweep(turn, engine, replace(phase, exited=True, give_up_at=give_up_at))
    else:
        turn.put(replace(engine, phase=replace(phase, exited=True)))


def _stopped_outside(turn: Turn, engine: Engine, seen: Exited, by: str) -> None:
    """Somebody stopped or restarted it past the daemon: that counts as an operator's wish, and costs no budget."""
    name = engine.spec.name
    text = f"stopped by {by}; start it again with: vllm-supervisor start {name}"
    if seen.again:
        text = f"ended by {by}, and is started again; vllm-supervisor restart {name} would let its requests finish"
    cause = Reason("stopped_outside", text)
    turn.record("stopping", engine, f"{name} was {cause.message}", severity=Severity.NOTICE, reason=cause)
    last_exit = _asked_exit(engine, cause, seen.code, seen.signal, turn.now)
    engine = replace(engine, wanted=seen.again, last_exit=last_exit)
    turn.do(Abandon(name, engine.generation))
    after, give_up_at = After.START if seen.again else After.STOP, turn.now + UNKILLABLE_AFTER_S
    _sweep(turn, engine, Stopping(after, cause, kill_at=turn.now, give_up_at=give_up_at, exited=True))


def _asked_exit(engine: Engine, cause: Reason, code: int | None, number: int | None, now: float) -> LastExit:
    """How one ended that was told to: for a fault of its GPU, or because somebody asked for it."""
    if cause.code == "gpu_fault":
        return LastExit(ExitClass.HARDWARE, code, number, now, engine.generation, cause.message)
    return LastExit(ExitClass.STOPPED, code, number, now, engine.generation, "asked for")


def _state(engine: Engine) -> State:
    """Of one that was adopted and did not answer yet: as the earlier daemon knew it."""
    left = engine.left if isinstance(engine.phase, Starting) else None
    return left.state if left is not None else engine.state


def _how(seen: Exited) -> str:
    if seen.signal is not None:
        return f"killed by {SIGNAL_NAMES.get(seen.signal, f'signal {seen.signal}')}"
    if seen.code is not None:
        return f"exit code {seen.code}"
    return "ended, exit code unknown"


def on_swept(turn: Turn, engine: Engine, seen: Swept) -> None:
    """Either nothing is left, or something does not die."""
    phase = engine.phase
    if isinstance(phase, Failed) and phase.kind is FailedKind.UNKILLABLE and not seen.remaining:
        if engine.removed:
            _forget(turn, engine)
            return
        text = "its processes are gone now; reset it to start it again"
        turn.put(replace(engine, process=None, phase=replace(phase, message=text, gone=True)))
        turn.record("unkillable_gone", engine, f"{engine.spec.name}: {text}", severity=Severity.NOTICE)
    if not isinstance(phase, Stopping) or engine.launching is not None:
        return
    if seen.remaining:
        turn.put(replace(engine, phase=replace(phase, sweeping=False, sweep_at=turn.now + SWEEP_AGAIN_S)))
        return
    if engine.process is not None and not phase.exited and phase.after is not After.CRASH:
        # The news of its exit comes after that of the sweep, when nobody waits for it any more.
        last = _asked_exit(engine, phase.cause, None, SIGKILL, turn.now)
        if last.kind is ExitClass.STOPPED:
            last = replace(last, advice="asked for; it did not end by itself, SIGKILL")
        engine = replace(engine, last_exit=last)
    _await_memory(turn, replace(engine, process=None), phase)


def _await_memory(turn: Turn, engine: Engine, phase: Stopping) -> None:
    """Nothing of the engine lives: its GPU memory has to come back before anything else happens on those GPUs."""
    node = turn.node
    if node.ending or not engine.devices or telemetry.off(node):
        conclude(turn, engine, phase)
        return
    patience_s = MEMORY_BLIND_S if telemetry.blind(node) else MEMORY_BACK_S
    gone = replace(phase, sweeping=False, sweep_at=None, gone_at=turn.now, give_up_at=turn.now + patience_s)
    turn.enter(engine, gone)
    telemetry.hasten(turn, turn.now)


def _memory_stays(turn: Turn, engine: Engine, phase: Stopping) -> None:
    """It did not come back, or nobody can say: the gate before the next start holds whoever needs it."""
    rest = gpu_inventory.held(turn.node.gpus, engine)
    if rest is not None and not telemetry.blind(turn.node):
        turn.record(
            "gpu_memory_stays",
            engine,
            f"{engine.spec.name} is gone for {MEMORY_BACK_S:g} s and {rest} did not come back: somebody else holds it, "
            "or the driver lost it (nvidia-smi, dmesg)",
            severity=Severity.ERROR,
            reason="gpu_memory_held",
        )
    conclude(turn, engine, phase)


def conclude_unspawned(turn: Turn, engine: Engine) -> None:
    """A launch that was overtaken by a stop came to nothing."""
    if isinstance(engine.phase, Stopping):
        conclude(turn, engine, engine.phase)


def conclude(turn: Turn, engine: Engine, phase: Stopping) -> None:
    """Nothing of the engine lives: go on with what was to follow."""
    name = engine.spec.name
    if engine.removed:
        _forget(turn, engine)
        return
    took_s = turn.now - engine.since
    if phase.after is After.STOP or turn.node.ending or not engine.wanted:
        turn.enter(engine, Stopped())
        turn.record(
            "stopped",
            engine,
            f"{name} is stopped after {took_s:.1f} s: nothing of it is left",
            severity=Severity.NOTICE,
            reason=phase.cause,
            took_s=round(took_s, 3),
        )
    elif phase.after is After.START:
        admission.admit(turn, replace(engine, failures=0))
    else:
        after_failure(turn, engine, phase.cause)


def _forget(turn: Turn, engine: Engine) -> None:
    name = engine.spec.name
    turn.record("removed", engine, f"{name} is gone: it is no longer configured", severity=Severity.NOTICE)
    turn.forget(name)


def after_failure(turn: Turn, engine: Engine, cause: Reason) -> None:
    """Nothing lives, and nobody asked for that: class and budget decide when it is started again."""
    spec, last = engine.spec.restart, engine.last_exit
    kind = last.kind if last is not None else ExitClass.CRASH
    if kind is ExitClass.CONFIG:
        admission.fail(turn, engine, FailedKind.CONFIG, last.advice if last else cause.message)
        return
    steady = engine.ready_since is not None and turn.now - engine.ready_since >= spec.backoff_reset_after_s
    failures = 1 if steady else engine.failures + 1
    if kind is ExitClass.RESOURCE:
        # Back to the gates: the port or the memory is somebody else's, so it costs no budget.
        delay_s = max(admission.GATE_RECHECK_S, policy.backoff_delay_s(spec, failures, engine.spec.name))
        admission.wait(turn, replace(engine, failures=failures), cause, turn.now + delay_s)
        return
    if kind is ExitClass.EXTERNAL:
        delay_s = policy.external_delay_s(spec, failures, engine.spec.name)
        _back_off(turn, replace(engine, failures=failures), cause, delay_s)
        return
    # What ended the daemon before this one may have ended it as well (a container, a control group).
    unseen = cause.code == "exited" and _is_unseen(engine)
    times = policy.within_window(engine.restart_times, spec, turn.now)
    times = times if unseen else (*times, turn.now)
    engine = replace(engine, failures=failures, restart_times=times)
    if len(times) <= spec.max_restarts:
        _back_off(turn, engine, cause, policy.backoff_delay_s(spec, failures, engine.spec.name))
    elif unseen or engine.good_plan_id == engine.plan_id:
        # It worked with this very plan: never give a node up for good, but do not hammer it.
        _back_off(turn, engine, cause, spec.backoff_max_s)
    else:
        text = (
            f"{len(times)} failures in {spec.max_restarts_window_s:g} s (max_restarts = {spec.max_restarts}) "
            f"and never ready with this configuration; last: {cause.message}"
        )
        admission.fail(turn, engine, FailedKind.CRASH_LOOP, text)


def _back_off(turn: Turn, engine: Engine, cause: Reason, delay_s: float) -> None:
    turn.record(
        "restart",
        engine,
        f"{engine.spec.name} is started again {f'in {delay_s:.1f} s' if delay_s > 0 else 'at once'}: {cause.message}",
        severity=Severity.WARNING,
        reason=cause,
        delay_s=round(delay_s, 3),
        failures=engine.failures,
        max_restarts=engine.spec.restart.max_restarts,
        restarts_in_window=len(engine.restart_times),
    )
    if delay_s > 0:
        turn.enter(engine, Backoff(turn.now + delay_s, cause))
    else:
        admission.admit(turn, engine)


def on_clock(turn: Turn, engine: Engine) -> None:
    """Deadlines of draining, stopping and back-off."""
    phase, name = engine.phase, engine.spec.name
    match phase:
        case Backoff() if turn.now >= phase.until:
            admission.admit(turn, engine)
        case Draining() if phase.until is not None and turn.now >= phase.until:
            turn.record(
                "drain_timeout",
                engine,
                f"{name} still has requests in flight after {engine.spec.drain_timeout_s:g} s (drain_timeout_s)",
                severity=Severity.WARNING,
            )
            stop(turn, engine, phase.after, phase.cause)
        case Draining() if turn.now >= phase.next_look_at:
            turn.put(replace(engine, phase=replace(phase, next_look_at=turn.now + DRAIN_LOOK_S)))
            turn.do(Probe(name, engine.generation))
        case Stopping():
            _stopping_clock(turn, engine, phase)
        case _:
            pass


def _stopping_clock(turn: Turn, engine: Engine, phase: Stopping) -> None:
    name = engine.spec.name
    if phase.gone_at is not None:
        blind = telemetry.blind(turn.node)
        patience_at = turn.now + MEMORY_BLIND_S if blind else phase.gone_at + MEMORY_BACK_S
        if turn.now >= (phase.give_up_at if blind else patience_at):
            _memory_stays(turn, engine, phase)
        elif blind is (patience_at < phase.give_up_at):
            # It was lost from sight, or is seen again.
            turn.put(replace(engine, phase=replace(phase, give_up_at=patience_at)))
    elif turn.now >= phase.give_up_at:
        text = (
            f"still there {UNKILLABLE_AFTER_S:g} s after SIGKILL; nothing is started in its place. "
            "Look at its state (ps -o pid,stat,wchan), mend the cause or reboot, then reset it"
        )
        admission.fail(turn, engine, FailedKind.UNKILLABLE, text if engine.launching is None else LAUNCH_HANGS)
    elif phase.sweep_at is not None:
        if turn.now >= phase.sweep_at:
            _sweep(turn, engine, phase)
    elif phase.sweeping or phase.exited or engine.launching is not None:
        return
    elif turn.now >= phase.kill_at:
        turn.record(
            "killing",
            engine,
            f"{name} did not end within {engine.spec.stop_timeout_s:g} s after SIGTERM (stop_timeout_s): SIGKILL",
            severity=Severity.WARNING,
        )
        _sweep(turn, engine, phase)
    elif phase.repeat_at is not None and turn.now >= phase.repeat_at:
        turn.put(replace(engine, phase=replace(phase, repeat_at=turn.now + REPEAT_TERM_S)))
        turn.do(Terminate(name, engine.generation))
