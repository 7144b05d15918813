"""What operators ask: start, stop, restart, drain, reset, a new configuration, the end of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from supervisord.core import admission, ending, gpu_inventory, gpus, telemetry
from supervisord.core.messages import (
    Answer,
    EndRequested,
    GpuOp,
    GpuRequested,
    Op,
    Reconfigured,
    Reply,
    Requested,
    Severity,
    Sweep,
)
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    Failed,
    FailedKind,
    Node,
    Ready,
    Reason,
    Starting,
    Stopped,
    Stopping,
    Waiting,
    Warming,
)
from supervisord.core.spec import NodeSpec
from supervisord.core.turn import Turn


def on_requested(turn: Turn, seen: Requested) -> None:
    """Answer one request; what it sets in motion goes on after the answer."""
    engine = turn.engine(seen.engine)
    if engine is None or (engine.removed and seen.op is not Op.RESET):
        known = ", ".join(e.spec.name for e in turn.engines() if not e.removed) or "none"
        _reply(
            turn, seen, Answer.UNKNOWN_ENGINE, f"cannot {seen.op.value} {seen.engine}: no such engine (known: {known})"
        )
        return
    if turn.node.ending:
        _reply(turn, seen, Answer.REFUSED, f"cannot {seen.op.value} {seen.engine}: the daemon is shutting down")
        return
    turn.record(
        "requested",
        engine,
        f"{seen.op.value} of {seen.engine} requested by {seen.actor}{' (now)' if seen.at_once else ''}",
        severity=Severity.NOTICE,
        reason=seen.op.value,
        actor=seen.actor,
    )
    OPS[seen.op](turn, engine, seen)


def _reply(turn: Turn, seen: Requested, answer: Answer, message: str) -> None:
    turn.do(Reply(seen.request, answer, message))


def _accept(turn: Turn, seen: Requested, message: str) -> None:
    _reply(turn, seen, Answer.ACCEPTED, message)


def _refuse_failed(turn: Turn, engine: Engine, seen: Requested) -> bool:
    if not isinstance(engine.phase, Failed):
        return False
    name = engine.spec.name
    text = f"cannot {seen.op.value} {name}: it failed ({engine.phase.kind.value}): {engine.phase.message}. "
    _reply(turn, seen, Answer.REFUSED, f"{text}Mend that, then: vllm-supervisor reset {name}")
    return True


def _start(turn: Turn, engine: Engine, seen: Requested) -> None:
    name, phase = engine.spec.name, engine.phase
    if _refuse_failed(turn, engine, seen):
        return
    engine = turn.put(replace(engine, wanted=True))
    match phase:
        case Stopped() | Backoff():
            admission.admit(turn, replace(engine, failures=0))
            _accept(turn, seen, f"{name} is being started")
        case Waiting():
            _accept(turn, seen, f"{name} is wanted already; it waits: {phase.reason.message}")
        case Draining() if engine.running_plan_id != engine.plan_id:
            cause = Reason("operator", f"start requested by {seen.actor}; its launch plan has changed")
            ending.stop(turn, engine, After.START, cause, at_once=False)
            _accept(turn, seen, f"{name} is restarted: its launch plan has changed")
        case Draining():
            turn.enter(engine, Ready(engine.lasting))
            turn.record("ready", engine, f"{name} is ready: its drain was taken back", severity=Severity.NOTICE)
            _accept(turn, seen, f"{name} takes traffic again")
        case Stopping():
            turn.put(replace(engine, phase=replace(phase, after=After.START)))
            _accept(turn, seen, f"{name} is started again as soon as it has stopped")
        case _:
            _accept(turn, seen, f"{name} is {engine.state.value} already")


def _stop(turn: Turn, engine: Engine, seen: Requested) -> None:
    name, phase = engine.spec.name, engine.phase
    cause = Reason("operator", f"stop requested by {seen.actor}")
    engine = turn.put(replace(engine, wanted=False))
    match phase:
        case Stopped():
            _accept(turn, seen, f"{name} is stopped already")
            return
        case Failed(kind=FailedKind.UNKILLABLE):
            _accept(turn, seen, f"{name} is not wanted any more, but its processes do not end: {phase.message}")
            return
        case Draining(after=After.STOP):
            # Asked twice: the second time means now (A25).
            ending.stop(turn, engine, After.STOP, cause)
        case _ if engine.live:
            ending.stop(turn, engine, After.STOP, cause, at_once=seen.at_once)
        case _:
            turn.enter(engine, Stopped())
            turn.record("stopped", engine, f"{name} is stopped", severity=Severity.NOTICE, reason=cause)
            _accept(turn, seen, f"{name} is stopped")
            return
    _accept(turn, seen, f"{name} is being stopped")


def _restart(turn: Turn, engine: Engine, seen: Requested) -> None:
    name, phase = engine.spec.name, engine.phase
    if _refuse_failed(turn, engine, seen):
        return
    closed = gpu_inventory.gate(turn, engine) if engine.live and not seen.at_once else None
    if closed is not None:
        text = (
            f"cannot restart {name}: it could not be started again: {closed.message}. It goes on as it is; --now forces"
        )
        _reply(turn, seen, Answer.REFUSED, f"{text} it")
        return
    cause = Reason("operator", f"restart requested by {seen.actor}")
    engine = turn.put(replace(engine, wanted=True))
    if engine.live:
        ending.stop(turn, engine, After.START, cause, at_once=seen.at_once)
    elif not isinstance(phase, Waiting):
        admission.admit(turn, replace(engine, failures=0))
    _accept(turn, seen, f"{name} is being restarted")


def _drain(turn: Turn, engine: Engine, seen: Requested) -> None:
    name = engine.spec.name
    match engine.phase:
        case Ready():
            ending.drain(turn, engine, After.HOLD, Reason("operator", f"drain requested by {seen.actor}"))
            _accept(turn, seen, f"{name} takes no new traffic; start, stop or restart ends that")
        case Draining():
            _accept(turn, seen, f"{name} is draining already")
        case _:
            _reply(turn, seen, Answer.REFUSED, f"cannot drain {name}: it is {engine.state.value}, not ready")


def _reset(turn: Turn, engine: Engine, seen: Requested) -> None:
    """Forget failures and budget; a failed engine that is wanted starts again."""
    name, phase = engine.spec.name, engine.phase
    engine = turn.put(replace(engine, failures=0, restart_times=()))
    match phase:
        case Failed(kind=FailedKind.UNKILLABLE):
            cause = Reason("operator", f"reset requested by {seen.actor}")
            give_up_at = turn.now + ending.UNKILLABLE_AFTER_S
            after = After.START if engine.wanted else After.STOP
            turn.enter(engine, Stopping(after, cause, turn.now, give_up_at, exited=True, sweeping=True))
            turn.do(Sweep(name, engine.generation))
            _accept(turn, seen, f"{name}: looking for what is left of it")
        case Failed() if engine.wanted:
            admission.admit(turn, engine)
            _accept(turn, seen, f"{name} is being started")
        case Failed():
            turn.enter(engine, Stopped())
            _accept(turn, seen, f"{name} is reset")
        case Backoff():
            admission.admit(turn, engine)
            _accept(turn, seen, f"{name} is being started")
        case _:
            _accept(turn, seen, f"{name}: failures and restart budget are reset")


OPS: Final[Mapping[Op, Callable[[Turn, Engine, Requested], None]]] = {
    Op.START: _start,
    Op.STOP: _stop,
    Op.RESTART: _restart,
    Op.DRAIN: _drain,
    Op.RESET: _reset,
}


def on_gpu_requested(turn: Turn, seen: GpuRequested) -> None:
    """Answer a request about GPUs."""
    node = turn.node
    if telemetry.off(node) and seen.op is GpuOp.RELEASE:
        text = f"cannot {seen.op.value} GPUs: this machine has no NVIDIA driver, and no engine needs one"
        turn.do(Reply(seen.request, Answer.REFUSED, text))
        return
    if seen.op is GpuOp.RELEASE:
        on = [engine.spec.name for engine in turn.engines() if engine.live and engine.spec.gpus]
        text = f"NVML is closed for {telemetry.RELEASE_S / 60:g} min, so that a GPU can be reset"
        if on:
            text += f"; running engines keep their GPUs open: {', '.join(on)}"
        telemetry.release(turn)
        turn.record("gpu_released", None, f"{text} (by {seen.actor})", severity=Severity.NOTICE, actor=seen.actor)
        turn.do(Reply(seen.request, Answer.ACCEPTED, text))
        return
    name = seen.gpu or ""
    gpu = gpu_inventory.find(node.gpus, name) or gpu_inventory.find(node.unseen_gpus, name)
    if gpu is None and gpus.is_closed_unseen(node):
        turn.do(Reply(seen.request, Answer.ACCEPTED, gpus.reopen(turn, name, seen.actor)))
        return
    if gpu is None:
        known = ", ".join(gpu_inventory.label(one) for one in node.gpus.values()) or "none"
        text = f"cannot clear GPU {seen.gpu}: it is not known (known: {known})"
        turn.do(Reply(seen.request, Answer.UNKNOWN_ENGINE, text))
        return
    turn.do(Reply(seen.request, Answer.ACCEPTED, gpus.clear(turn, gpu, seen.actor)))


def on_end_requested(turn: Turn, seen: EndRequested) -> None:
    """The daemon ends, and every engine with it unless they are kept. Asked again: without waiting for anything.

    What was on its way is left there too: the next daemon finds it and goes on.
    """
    again = turn.node.ending
    turn.node = replace(turn.node, ending=True)
    if seen.keep:
        turn.node = replace(turn.node, keeping=True)
        running = ", ".join(engine.spec.name for engine in turn.engines() if engine.live)
        text = f"ending ({seen.cause}): engines run on ({running or 'none'})"
        turn.record("daemon_ending", None, text, severity=Severity.NOTICE)
        return
    cause = Reason("daemon_ending", f"the daemon is ending ({seen.cause})")
    turn.record("daemon_ending", None, f"ending ({seen.cause}){': at once' if again else ''}", severity=Severity.NOTICE)
    for engine in turn.engines():
        match engine.phase:
            case Stopping(gone_at=float()):
                ending.conclude(turn, engine, engine.phase)
            case Stopping(exited=False, sweeping=False) | Draining() if again:
                ending.kill(turn, engine, After.STOP, cause)
            case Stopping() | Draining(after=After.STOP) | Failed() | Stopped():
                pass
            case _ if engine.live:
                ending.stop(turn, engine, After.STOP, cause, at_once=False)
            case _:
                turn.enter(engine, Stopped())


def on_reconfigured(turn: Turn, seen: Reconfigured) -> None:
    """Apply a validated configuration: only engines whose launch plan changed are restarted, and that is said first."""
    old, new = turn.node, seen.spec
    for name, text in changes(old, new, seen.plan_ids).items():
        turn.record("reconfigured", turn.engine(name), f"{name}: {text}", severity=Severity.NOTICE)
    turn.node = replace(turn.node, spec=new, config_error=None)
    if not telemetry.needed(turn) and any(engine.gpus for engine in new.engines.values()):
        telemetry.boot(turn, nvidia=True)
    cause = Reason("reload", f"the configuration was reloaded by {seen.actor}")
    for engine in turn.engines():
        if engine.spec.name not in new.engines:
            _remove(turn, engine, cause)
    for name, spec in new.engines.items():
        known = turn.engine(name)
        if known is None:
            fresh = Engine(spec=spec, plan_id=seen.plan_ids[name], since=turn.now, wanted=spec.autostart)
            turn.put(fresh)
            if spec.autostart:
                admission.admit(turn, fresh)
        elif known.removed:
            _bring_back(turn, replace(known, spec=spec, plan_id=seen.plan_ids[name], removed=False))
        else:
            _change(turn, replace(known, spec=spec, plan_id=seen.plan_ids[name]), known, cause)
    if seen.request is not None:
        turn.do(Reply(seen.request, Answer.ACCEPTED, "the configuration is applied"))


def changes(node: Node, new: NodeSpec, plan_ids: Mapping[str, str]) -> dict[str, str]:
    """What a reload would do, engine by engine; engines that it leaves alone are not named."""
    told: dict[str, str] = {}
    known = {name: engine for name, engine in node.engines.items() if not engine.removed}
    for name, engine in known.items():
        if name not in new.engines:
            told[name] = "is no longer configured: it is stopped and forgotten"
        elif plan_ids[name] != engine.plan_id:
            how = "it is restarted" if _runs(engine) else "used at the next start"
            if isinstance(engine.phase, Failed) and engine.phase.kind is not FailedKind.UNKILLABLE and engine.wanted:
                how = "it is started again"
            told[name] = f"its launch plan changed: {how}"
        elif new.engines[name] != engine.spec:
            told[name] = "its settings changed: applied without a restart"
    told |= dict.fromkeys((name for name in new.engines if name not in known), "is new")
    return told


def held(node: Node, new: NodeSpec, name: str) -> bool:
    """Whether an engine stays drained over a reload until an operator decides: then nobody need wait for it."""
    phase = node.engines[name].phase if name in node.engines and name in new.engines else None
    return isinstance(phase, Draining) and phase.after is After.HOLD


def _runs(engine: Engine) -> bool:
    """Whether a changed plan means a restart now: it runs or is being launched, and is not on its way out."""
    return engine.live and isinstance(engine.phase, Starting | Warming | Ready | Waiting)


def _remove(turn: Turn, engine: Engine, cause: Reason) -> None:
    engine = turn.put(replace(engine, removed=True, wanted=False))
    if engine.live:
        if not isinstance(engine.phase, Failed):
            ending.stop(turn, engine, After.STOP, cause, at_once=False)
    else:
        turn.forget(engine.spec.name)


def _bring_back(turn: Turn, engine: Engine) -> None:
    """Configured again while what ran before is still on its way out: it is started when that is gone."""
    phase, wanted = engine.phase, engine.spec.autostart
    if wanted and isinstance(phase, Draining | Stopping):
        engine = replace(engine, phase=replace(phase, after=After.START))
    turn.put(replace(engine, wanted=wanted))


def _change(turn: Turn, engine: Engine, old: Engine, cause: Reason) -> None:
    changed = engine.plan_id != old.plan_id
    if engine.spec.restart.maintenance_window != old.spec.restart.maintenance_window:
        engine = replace(engine, window_until=None)
    engine = turn.put(engine)
    match engine.phase:
        case Failed(kind=FailedKind.CONFIG | FailedKind.CRASH_LOOP) if engine.spec != old.spec or changed:
            engine = turn.put(replace(engine, failures=0, restart_times=()))
            if engine.wanted:
                admission.admit(turn, engine)
            else:
                turn.enter(engine, Stopped())
        case _ if changed and _runs(engine):
            ending.stop(turn, engine, After.START, cause, at_once=False)
        case _:
            pass
