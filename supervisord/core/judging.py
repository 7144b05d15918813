"""From evidence to the least harmful deed: runs the rules over every look at a ready engine and acts on the strongest.

Order of harm: tell, look closer, drain, replace when the node allows it, restart gracefully, kill. A rule that is being
confirmed makes the engine be looked at every second; transitions are told, ticks are not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import ending, voluntary, watch
from supervisord.core.messages import CanaryEnded, KeepEvidence, Probe, SendCanary, Severity
from supervisord.core.model import After, Engine, ExitClass, LastExit, Ready, Reason
from supervisord.core.rules import Finding, Remedy, blocks, hanging, service
from supervisord.core.samples import Sample
from supervisord.core.turn import Turn

CONFIRM_EVERY_S: Final = 1.0

HARM: Final = (Remedy.TELL, Remedy.CONFIRM, Remedy.DRAIN, Remedy.REPLACE, Remedy.RESTART, Remedy.KILL)
"""From the least to the most."""

DEEDS: Final = {
    Remedy.DRAIN: "drained",
    Remedy.REPLACE: "replaced",
    Remedy.RESTART: "restarted",
    Remedy.KILL: "killed and started again",
}

CONFIRMED_BY_CANARY: Final = frozenset({"free_blocks", "unreachable", "unresponsive"})
"""While one of these is looked into, canaries follow each other instead of waiting for a quiet minute."""


def on_sampled(turn: Turn, engine: Engine, phase: Ready, sample: Sample) -> None:
    """Judge a look at a ready engine."""
    seen = engine.watch if engine.watch is not None else watch.Watch(moved_at=turn.now)
    seen = watch.looked(seen, sample)
    seen = watch.blocks_looked(seen, sample, low=blocks.is_low(engine.spec, sample))
    engine = _with_pool(turn.put(replace(engine, watch=seen, sample=sample)), sample)
    _judge(turn, turn.put(engine), phase, sample)


def _with_pool(engine: Engine, sample: Sample) -> Engine:
    """Remember the size of the KV pool as a good start's, unless it is a shortfall."""
    pool, good = sample.pool_blocks, engine.good_blocks
    if pool is None or pool == good or blocks.is_short(pool, good):
        return engine
    return replace(engine, good_blocks=pool, shortfall_retried=False)


def findings(engine: Engine, sample: Sample, now: float) -> list[Finding]:
    """What every rule says, the strongest first; equal ones in the order below."""
    seen, spec = engine.watch, engine.spec
    if seen is None:
        return []
    found = (
        hanging.engine_dead(seen),
        hanging.unreachable(seen, spec, now),
        hanging.stalled(seen, sample, spec),
        hanging.unresponsive(seen, spec),
        blocks.free_blocks(seen, sample, spec),
        blocks.kv_shortfall(sample.pool_blocks, engine.good_blocks, sample, spec),
        service.garbage(seen),
        service.slo(seen, spec),
    )
    return sorted((one for one in found if one is not None), key=lambda one: -HARM.index(one.remedy))


def _judge(turn: Turn, engine: Engine, phase: Ready, sample: Sample) -> None:
    found = findings(engine, sample, turn.now)
    _tell(turn, engine, phase, found)
    strongest = found[0] if found else None
    confirming = strongest is not None and strongest.remedy is not Remedy.TELL
    reasons = tuple(one.reason for one in found)
    next_look_at = turn.now + CONFIRM_EVERY_S if confirming else None
    engine = turn.enter(engine, replace(phase, found=reasons, next_look_at=next_look_at))
    if strongest is not None:
        _act(turn, engine, strongest)
    after = turn.engine(engine.spec.name)
    if after is not None:
        consider_canary(turn, after)


def _tell(turn: Turn, engine: Engine, phase: Ready, found: list[Finding]) -> None:
    """Tell what began and what ended, once each."""
    before = {reason.code for reason in phase.found}
    name = engine.spec.name
    for one in found:
        if one.reason.code not in before:
            text = f"{name} is degraded: {one.reason.message}"
            turn.record("degraded", engine, text, severity=Severity.WARNING, reason=one.reason, **dict(one.numbers))
    now = {one.reason.code for one in found}
    for reason in phase.found:
        if reason.code not in now:
            text = f"{name}: {reason.code} is over; it was: {reason.message}"
            turn.record("recovered", engine, text, severity=Severity.NOTICE, reason=reason)


def _act(turn: Turn, engine: Engine, strongest: Finding) -> None:
    reason, remedy = strongest.reason, strongest.remedy
    if remedy is Remedy.KILL:
        _verdict(turn, engine, strongest)
        turn.do(KeepEvidence(engine.spec.name, engine.generation, reason.code))
        ending.kill(turn, _blamed(turn, engine, reason), After.CRASH, reason)
    elif remedy is Remedy.RESTART:
        _verdict(turn, engine, strongest)
        turn.do(KeepEvidence(engine.spec.name, engine.generation, reason.code))
        ending.stop(turn, _blamed(turn, engine, reason), After.CRASH, reason, at_once=False)
    elif remedy is Remedy.DRAIN:
        _verdict(turn, engine, strongest)
        ending.drain(turn, _blamed(turn, engine, reason), After.CRASH, reason, recoverable=True)
    elif remedy is Remedy.REPLACE and not engine.shortfall_retried and voluntary.closed(turn, engine) is None:
        _verdict(turn, engine, strongest)
        engine = turn.put(replace(engine, replacing=True, shortfall_retried=True))
        ending.stop(turn, engine, After.START, reason, at_once=False)


def _verdict(turn: Turn, engine: Engine, finding: Finding) -> None:
    text = f"{engine.spec.name}: {finding.reason.message}: it is {DEEDS[finding.remedy]}"
    numbers = dict(finding.numbers)
    turn.record("verdict", engine, text, severity=Severity.ERROR, reason=finding.reason, **numbers)


def _blamed(turn: Turn, engine: Engine, reason: Reason) -> Engine:
    """The last exit that this will be, so that budget and back-off count it as a failure."""
    last = LastExit(ExitClass.CRASH, None, None, turn.now, engine.generation, reason.message)
    return turn.put(replace(engine, last_exit=last))


# --- canaries ---------------------------------------------------------------------------------------------------------


def consider_canary(turn: Turn, engine: Engine) -> None:
    """Send one if it is time."""
    phase, seen, spec = engine.phase, engine.watch, engine.spec
    if not isinstance(phase, Ready) or seen is None:
        return
    confirming = any(reason.code in CONFIRMED_BY_CANARY for reason in phase.found)
    pending = engine.sample.pending if engine.sample is not None else None
    moving = turn.now - seen.moved_at < spec.probe.canary_after_s and not (confirming and not pending)
    if not moving and watch.canary_due(seen, spec.probe, turn.now, confirming=confirming):
        turn.put(replace(engine, watch=watch.canary_sent(seen, turn.now)))
        turn.do(SendCanary(spec.name, engine.generation))


def on_canary_ended(turn: Turn, engine: Engine, seen: CanaryEnded) -> None:
    """Remember how a canary ended; the next look judges it."""
    if engine.watch is None or not isinstance(engine.phase, Ready):
        return
    if not seen.possible:
        remembered = watch.canary_impossible(engine.watch)
    else:
        remembered = watch.canary_ended(engine.watch, turn.now, ok=seen.ok, sane=seen.sane)
    turn.put(replace(engine, watch=remembered))
    turn.do(Probe(engine.spec.name, engine.generation))


def on_clock(turn: Turn, engine: Engine) -> None:
    """A closer look is due, or the canary has outlived a deadline."""
    phase, seen, spec = engine.phase, engine.watch, engine.spec
    if not isinstance(phase, Ready):
        return
    if seen is not None:
        outlived = watch.canary_outlived(seen, spec.probe, turn.now)
        if outlived is not seen:
            engine = turn.put(replace(engine, watch=outlived))
            turn.do(Probe(spec.name, engine.generation))
    if phase.next_look_at is not None and turn.now >= phase.next_look_at:
        turn.enter(engine, replace(phase, next_look_at=turn.now + CONFIRM_EVERY_S))
        turn.do(Probe(spec.name, engine.generation))
