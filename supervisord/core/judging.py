"""From evidence to the least harmful deed: runs the rules over every look at a ready engine and acts on the strongest.

Order of harm: tell, look closer, drain, replace when the node allows it, restart gracefully, kill. A rule that is being
confirmed makes the engine be looked at every second; transitions are told, ticks are not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisord.core import ending, gpu_inventory, telemetry, voluntary, watch
from supervisord.core.messages import CanaryEnded, KeepEvidence, Probe, SendCanary, Severity
from supervisord.core.model import After, Draining, Engine, Node, Ready, Reason
from supervisord.core.rules import Finding, Remedy, blocks, creep, hanging, service
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

EVIDENCE_BEFORE: Final = frozenset({Remedy.RESTART, Remedy.KILL})

CONFIRMED_BY_CANARY: Final = frozenset({"free_blocks", "unreachable", "unresponsive"})
"""While one of these is looked into, canaries follow each other instead of waiting for a quiet minute."""


def on_sampled(turn: Turn, engine: Engine, phase: Ready, sample: Sample) -> None:
    """Judge a look at a ready engine."""
    seen = engine.watch if engine.watch is not None else watch.Watch(since=turn.now, moved_at=turn.now)
    if seen.since < engine.since:
        seen = watch.renewed(seen, turn.now)
    seen = watch.looked(seen, sample)
    seen = watch.blocks_looked(seen, sample, low=blocks.is_low(engine.spec, sample, seen.low_since))
    baseline = engine.warmup.memory_bytes if engine.warmup is not None else None
    seen = watch.memory_looked(seen, sample, engine.spec.restart, baseline_bytes=baseline)
    gpus = [] if telemetry.blind(turn.node) else gpu_inventory.of_engine(turn.node.gpus, engine)
    busy = service.utilization_percent(gpus)
    seen = watch.utilization_looked(seen, sample, busy, engine.spec.slo)
    text = None if seen.told_limit else blocks.limit_text(engine.spec, sample)
    if text is not None:
        turn.record("free_blocks_rule", engine, f"{engine.spec.name}: {text}")
        seen = replace(seen, told_limit=True)
    engine = turn.put(_with_pool(replace(engine, watch=seen, sample=sample), blocks.believed_pool(seen)))
    _judge(turn, engine, phase, seen, sample)


def _with_pool(engine: Engine, pool: int | None) -> Engine:
    """Remember the size of the KV pool as a good start's, unless it is a shortfall."""
    good = engine.good_blocks
    if pool is None or blocks.is_short(pool, good):
        return engine
    # The largest pool of this plan: one that shrinks a little at each start would otherwise never be short.
    largest = pool if good is None else max(pool, good)
    if (largest, False) == (good, engine.shortfall_retried):
        return engine
    return replace(engine, good_blocks=largest, shortfall_retried=False)


def findings(node: Node, engine: Engine, seen: watch.Watch, sample: Sample) -> list[Finding]:
    """What every rule says, the strongest first; equal ones in the order below."""
    spec, gpus = engine.spec, gpu_inventory.of_engine(node.gpus, engine)
    found = (
        hanging.engine_dead(seen),
        hanging.unreachable(seen, sample, spec),
        hanging.stalled(seen, sample, spec),
        hanging.unresponsive(seen, sample, spec),
        blocks.free_blocks(seen, sample, spec),
        creep.gpu_creep(
            seen.gpu, spec.restart, sample.at, capacity_bytes=gpu_inventory.capacity_bytes(node.gpus, engine)
        ),
        creep.host_creep(seen.host, spec.restart, sample.at, capacity_bytes=sample.host_limit_bytes),
        blocks.kv_shortfall(seen, sample, spec, engine.good_blocks),
        service.garbage(seen),
        service.slo(seen, spec),
        service.idle_gpus(seen, spec, sample.at),
        *service.of_gpus(gpus, telemetry.trouble(node) if spec.gpus else None),
    )
    return sorted((one for one in found if one is not None), key=lambda one: -HARM.index(one.remedy))


def _unseen(found: tuple[Reason, ...], sample: Sample) -> list[Reason]:
    """Reasons that this look could not see, whether they still hold: they are neither over nor stronger."""
    blind = set() if sample.ranks else {"stalled"}
    if sample.free_blocks is None or sample.pending is None:
        blind |= {"free_blocks", "kv_pressure"}
    return [reason for reason in found if reason.code in blind]


def _judge(turn: Turn, engine: Engine, phase: Ready, seen: watch.Watch, sample: Sample) -> None:
    found = [_permitted(turn, engine, one) for one in findings(turn.node, engine, seen, sample)]
    codes = {one.reason.code for one in found}
    reasons = [one.reason for one in found]
    reasons += [reason for reason in _unseen(phase.found, sample) if reason.code not in codes]
    _tell(turn, engine, phase, found, reasons)
    confirming = any(one.remedy is Remedy.CONFIRM for one in found)
    next_look_at = turn.now + CONFIRM_EVERY_S if confirming else None
    if (tuple(reasons), next_look_at) != (phase.found, phase.next_look_at):
        phase = replace(phase, found=tuple(reasons), next_look_at=next_look_at)
        engine = turn.enter(engine, phase)
    strongest = max(found, key=lambda one: HARM.index(one.remedy), default=None)
    if strongest is not None and strongest.remedy in DEEDS:
        _act(turn, engine, strongest)
    else:
        _consider_canary(turn, engine, phase, seen, sample)


def _permitted(turn: Turn, engine: Engine, finding: Finding) -> Finding:
    """A voluntary restart happens when the node allows it, for a shortfall once; otherwise it is told, and why."""
    if finding.remedy is Remedy.DRAIN:
        why = voluntary.last_of_group(turn, engine)
    elif finding.remedy is Remedy.REPLACE:
        retried = engine.shortfall_retried and finding.reason.code == "kv_shortfall"
        closed = voluntary.closed(turn, engine, urgent=finding.urgent, waives_budget=finding.waives_budget)
        why = "a restart did not help" if retried else closed
    else:
        return finding
    if why is None:
        return finding
    reason = Reason(finding.reason.code, f"{finding.reason.message}; not done: {why}")
    return replace(finding, reason=reason, remedy=Remedy.TELL)


def _tell(turn: Turn, engine: Engine, phase: Ready, found: list[Finding], reasons: list[Reason]) -> None:
    """Tell what began and what ended, once each."""
    before = {reason.code for reason in phase.found}
    name = engine.spec.name
    for one in found:
        if one.reason.code not in before:
            text = f"{name} is degraded: {one.reason.message}"
            turn.record("degraded", engine, text, severity=Severity.WARNING, reason=one.reason, **dict(one.numbers))
    now = {reason.code for reason in reasons}
    for reason in phase.found:
        if reason.code not in now:
            text = f"{name}: {reason.code} is over; it was: {reason.message}"
            turn.record("recovered", engine, text, severity=Severity.NOTICE, reason=reason)


def _act(turn: Turn, engine: Engine, finding: Finding) -> None:
    name, reason = engine.spec.name, finding.reason
    text = f"{name}: {reason.message}: it is {DEEDS[finding.remedy]}"
    numbers = dict(finding.numbers)
    if finding.remedy in EVIDENCE_BEFORE:
        numbers["evidence"] = ending.evidence_file(engine, reason.code)
    turn.record("verdict", engine, text, severity=Severity.ERROR, reason=reason, **numbers)
    if finding.remedy in EVIDENCE_BEFORE:
        turn.do(KeepEvidence(name, engine.generation, reason.code))
    match finding.remedy:
        case Remedy.KILL:
            ending.kill(turn, engine, After.CRASH, reason)
        case Remedy.RESTART:
            ending.stop(turn, engine, After.CRASH, reason, at_once=False)
        case Remedy.DRAIN:
            ending.drain(turn, engine, After.CRASH, reason, recoverable=True)
        case _:
            retried = engine.shortfall_retried or reason.code == "kv_shortfall"
            engine = turn.put(replace(engine, replacing=True, shortfall_retried=retried))
            ending.stop(turn, engine, After.START, reason, at_once=False)


# --- canaries ---------------------------------------------------------------------------------------------------------


def _consider_canary(turn: Turn, engine: Engine, phase: Ready, seen: watch.Watch, sample: Sample) -> None:
    """Send one if it is time."""
    spec = engine.spec
    confirming = any(reason.code in CONFIRMED_BY_CANARY for reason in phase.found)
    busy = watch.pending(seen, sample) is True
    if watch.canary_due(seen, spec, turn.now, confirming=confirming, busy=busy):
        turn.put(replace(engine, watch=watch.canary_sent(seen, turn.now)))
        turn.do(SendCanary(spec.name, engine.generation, watch.stillest(seen)))


def on_canary_ended(turn: Turn, engine: Engine, seen: CanaryEnded) -> None:
    """Remember how a canary ended; the next look judges it."""
    old, name = engine.watch, engine.spec.name
    if old is None or not isinstance(engine.phase, Ready | Draining) or old.canary.sent_at is None:
        return
    if not seen.evidence:
        remembered = watch.canary_turned_away(old, turn.now)
    elif seen.possible:
        remembered = watch.canary_ended(old, turn.now, ok=seen.ok, sane=seen.sane, detail=seen.detail)
    else:
        remembered = watch.canary_impossible(old)
        text = f"{name} cannot be asked for a completion ({seen.detail}): it is judged by its counters alone"
        turn.record("canary_impossible", engine, text, severity=Severity.WARNING)
    turn.put(replace(engine, watch=remembered))
    if isinstance(engine.phase, Ready):
        turn.do(Probe(name, engine.generation))


def on_clock(turn: Turn, engine: Engine) -> None:
    """A closer look is due, or the canary has outlived a deadline."""
    phase, seen, spec = engine.phase, engine.watch, engine.spec
    if not isinstance(phase, Ready):
        return
    look = False
    if seen is not None:
        outlived = watch.canary_outlived(seen, spec.probe, turn.now)
        look = outlived is not seen
        engine = turn.put(replace(engine, watch=outlived)) if look else engine
    if phase.next_look_at is not None and turn.now >= phase.next_look_at:
        turn.enter(engine, replace(phase, next_look_at=turn.now + CONFIRM_EVERY_S))
        look = True
    if look:
        turn.do(Probe(spec.name, engine.generation))
