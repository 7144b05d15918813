"""What an earlier daemon left: taken over as it is, or ended; never doubled.

The launcher says what lives. What the earlier daemon knew of it (`durable`) goes on from there: since when it is ready,
what it needed for that, an operator's drain, the end that it was on its way to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import admission, ending, gpu_inventory
from supervisord.core.messages import Adopt, Severity, WatchPort
from supervisord.core.model import After, Backoff, Draining, Engine, Found, Reason, Starting, State
from supervisord.core.spec import EngineSpec
from supervisord.core.turn import Turn

ANSWER_S: Final = 10.0
"""One whose start has taken too long by now may have begun to answer while no daemon looked."""


def take_over(turn: Turn, found: Found) -> None:
    """Adopt it when it is wanted as it is, otherwise end it: gracefully if it may still serve."""
    engine = _known(turn, found)
    turn.do(Adopt(found.engine, engine.generation))
    text = f"{found.engine}: an earlier daemon left generation {found.generation} ({', '.join(found.leftovers)})"
    why = _unwanted(turn, engine, found)
    if why is None:
        _adopt(turn, engine, text)
        return
    left = engine.left
    if found.process is None and _held(engine):
        engine = replace(engine, wanted=False)
    after = After.START if engine.wanted else After.STOP
    if engine.wanted and left is not None and left.after is After.CRASH:
        after = After.CRASH
    turn.record("leftover", engine, f"{text}; ended: {why.message}", severity=Severity.WARNING)
    cause = replace(why, message=f"left by an earlier daemon, {why.message}") if why.code == "leftover" else why
    if found.process is None:
        turn.put(engine)
        ending.kill(turn, engine, after, cause)
        return
    serves = engine.warm_generation == engine.generation and left is not None and left.state is not State.STOPPING
    if serves and cause.code != "gpu_fault" and engine.spec.drain_timeout_s > 0:
        ending.drain(turn, engine, after, cause)
    else:
        ending.stop(turn, turn.put(engine), after, cause)


def begin(turn: Turn, engine: Engine) -> None:
    """Start a wanted engine of which nothing lives; one that an operator had drained stays down.

    A back-off goes on: a daemon that dies again and again must not start what fails each time at once.
    """
    left = engine.left
    if left is not None and left.until is not None and left.cause is not None and turn.now < left.until:
        turn.enter(replace(engine, left=None), Backoff(left.until, left.cause))
        return
    if not _held(engine):
        admission.admit(turn, engine)
        return
    text = f"{engine.spec.name} was drained by an operator and has ended meanwhile: it is not started by itself"
    turn.record("stopped", turn.put(replace(engine, wanted=False)), text, severity=Severity.NOTICE)


def _held(engine: Engine) -> bool:
    return engine.left is not None and engine.left.after is After.HOLD


def _known(turn: Turn, found: Found) -> Engine:
    """The engine with what lives of it. Of a generation that was not saved nothing is known."""
    engine = turn.engine(found.engine)
    if engine is None:
        spec = EngineSpec(name=found.engine, model="", port=1)
        engine = Engine(spec=spec, plan_id="", since=turn.now, removed=True)
    if found.generation != engine.generation or engine.left is None:
        engine = replace(engine, left=None, ready_since=None, warmup=None, watch=None, app_xids=())
    return replace(
        engine,
        generation=max(found.generation, engine.generation),
        process=found.process,
        running_plan_id=found.plan_id,
    )


def _unwanted(turn: Turn, engine: Engine, found: Found) -> Reason | None:
    """Why it has to end; None: it is wanted as it runs."""
    if found.process is None:
        return Reason("leftover", "its main process is gone")
    if not engine.wanted or (found.plan_id != engine.plan_id and not _held(engine)):
        return Reason("leftover", "it is not wanted as it runs")
    faults = (
        Reason("gpu_fault", f"{gpu_inventory.label(gpu)} is quarantined: {gpu.quarantine.message}")
        for gpu in gpu_inventory.named(turn.node.gpus, engine.devices or engine.spec.gpus)
        if gpu.quarantine is not None
    )
    fault = next(faults, None)
    if fault is not None:
        return fault
    return engine.left.cause if engine.left is not None and not _held(engine) else None


def _adopt(turn: Turn, engine: Engine, text: str) -> None:
    left, now = engine.left, turn.now
    if left is not None and left.after is After.HOLD and left.cause is not None:
        told = f"{text}; adopted, and still drained: {left.cause.message}"
        turn.record("adopted", engine, told, severity=Severity.NOTICE)
        drained = Draining(After.HOLD, None, left.cause, now + ending.DRAIN_LOOK_S)
        engine = turn.enter(replace(engine, left=None), drained)
        turn.put(replace(engine, since=left.since))
        return
    turn.record("adopted", engine, f"{text}; adopted", severity=Severity.NOTICE)
    since = left.since if left is not None and left.state is State.STARTING else now
    give_up_at = max(since + engine.spec.start_timeout_max_s, now + ANSWER_S)
    engine = turn.enter(engine, Starting(now, give_up_at))
    turn.put(replace(engine, since=since))
    turn.do(WatchPort(engine.spec.name, engine.generation))
