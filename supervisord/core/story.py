"""What happened to an engine last, so that a tired person understands it in ten seconds.

What was seen, which rule, its numbers against its thresholds, what was done, how it is now, what to do: a dozen lines.
Times of lines are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from supervisord.core import advice, status, story_texts
from supervisord.core.classify import SIGNAL_NAMES
from supervisord.core.incident import Event, Incident, Number, between, last_incident
from supervisord.core.model import After, Backoff, Draining, Engine, Failed, Ready, Stopped, Waiting

EVENTS: Final = 500
"""So many of the newest events of an engine tell its story."""

_STEPS_MAX: Final = 4
_TEXT_MAX: Final = 320
_MINUTE_S: Final = 60.0
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Line:
    """`section` is SEEN, RULE, DONE, NOW or DO."""

    section: str
    text: str
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Story:
    """`rule`: the code of what decided, None if nothing ever did. `outcome`: the engine's state, or "gone"."""

    engine: str
    headline: str
    rule: str | None
    outcome: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Scene:
    """What a story is made of. `now` (monotonic) is `wall` (epoch)."""

    name: str
    engine: Engine | None
    now: float
    wall: float

    def at(self, moment: float) -> float:
        return self.wall - (self.now - moment)


def tell(name: str, events: Sequence[Event], engine: Engine | None, now: float, wall: float) -> Story:
    """The story of an engine from its events, oldest first, as far as they go back.

    `engine` is the engine as it is, None when it is not configured any more; `now` (monotonic) is `wall` (epoch).
    """
    scene = _Scene(name, engine, now, wall)
    incident = last_incident(events)
    outcome = engine.state.value if engine is not None else "gone"
    if incident is None:
        lines = (*_now(scene, None), *_to_do(scene, None))
        return Story(name, _uneventful(scene), None, outcome, lines)
    lines = (
        *_seen(incident),
        *_rule(scene, incident),
        *_done(scene, incident),
        *_now(scene, incident),
        *_to_do(scene, incident),
    )
    ago = _span(max(0.0, wall - incident.trigger.at))
    headline = f"{ago} ago: {_cause(scene, incident.trigger)}; {_outcome(scene, incident)}"
    return Story(name, headline, _code(incident.trigger), outcome, lines)


def document(story: Story, stamp: Callable[[float], str]) -> dict[str, Any]:
    """A story for programs; `stamp` writes epoch seconds as RFC 3339 in UTC."""
    return {
        "engine": story.engine,
        "headline": story.headline,
        "rule": story.rule,
        "outcome": story.outcome,
        "lines": [
            {"section": line.section, "at": None if line.at is None else stamp(line.at), "text": line.text}
            for line in story.lines
        ],
    }


# --- the headline -----------------------------------------------------------------------------------------------------


def _cause(scene: _Scene, trigger: Event) -> str:
    match trigger.kind:
        case "exited":
            return f"{scene.name} ended by itself ({_how(trigger.numbers)})"
        case "requested":
            return _short(trigger.message)
        case "waiting":
            return f"{scene.name} met a closed gate ({trigger.reason})"
        case "failed":
            return f"{scene.name} could not be started ({trigger.reason})"
        case "leftover":
            return f"an earlier daemon left {scene.name} behind"
        case _:
            return f"{scene.name} was ended ({trigger.reason or trigger.kind})"


def _how(exited: Mapping[str, Number]) -> str:
    code, signal, kind = exited.get("code"), exited.get("signal"), exited.get("exit_class")
    if isinstance(signal, int):
        return f"{SIGNAL_NAMES.get(signal, f'signal {signal}')}, {kind}"
    return f"exit code {'unknown' if code is None else code}, {kind}"


def _outcome(scene: _Scene, incident: Incident) -> str:
    ready = incident.first("ready")
    phase = scene.engine.phase if scene.engine is not None else None
    if ready is not None and isinstance(phase, Ready | None):
        return f"ready {_span(between(incident.trigger, ready))} later"
    if scene.engine is None:
        return "not configured any more"
    if isinstance(phase, Failed):
        return f"it has {_state(scene.engine)}"
    state = scene.engine.state.value
    return story_texts.STATES.get(state, f"it is {state}")


def _uneventful(scene: _Scene) -> str:
    engine = scene.engine
    if engine is not None and engine.restarts == 0:
        return f"{scene.name} was never restarted"
    return f"nothing is on record about a restart of {scene.name}"


# --- what was seen ----------------------------------------------------------------------------------------------------


def _seen(incident: Incident) -> Iterator[Line]:
    trigger = incident.trigger
    yield Line("SEEN", _short(trigger.message), trigger.at)
    if len(incident.row) > 1:
        within = _span(between(incident.row[0], trigger))
        yield Line("SEEN", f"{len(incident.row)} times in a row within {within}, and never ready in between")
        return
    life = _life(incident)
    for kind, word in (("ready", "ready"), ("spawned", "started")):
        since = next((event for event in life if event.kind == kind), None)
        if since is not None:
            yield Line("SEEN", f"generation {trigger.generation}, {word} {_span(between(since, trigger))} before")
            return


def _life(incident: Incident) -> list[Event]:
    """What was told of the generation that the trigger is about, from its spawn on; nothing if that has ended before.

    It is ready since it was so first: a daemon that takes it over tells that once more.
    """
    mine = [event for event in incident.before if event.generation == incident.trigger.generation]
    begun = next((at for at in reversed(range(len(mine))) if mine[at].kind in {"spawned", "stopped"}), 0)
    return [] if mine and mine[begun].kind == "stopped" else mine[begun:]


# --- which rule -------------------------------------------------------------------------------------------------------


def _rule(scene: _Scene, incident: Incident) -> Iterator[Line]:
    trigger, failed = incident.trigger, incident.first("failed")
    if trigger.kind != "failed":
        yield Line("RULE", _trigger_rule(trigger, failed))
    if failed is not None:
        yield Line("RULE", _meaning(failed.reason or failed.kind))
    numbers = _numbers(scene, incident)
    if numbers:
        yield Line("RULE", numbers)


def _code(trigger: Event) -> str:
    return "operator" if trigger.kind == "requested" else trigger.reason or trigger.kind


def _meaning(code: str) -> str:
    text = advice.meaning(code) or story_texts.UNKNOWN
    return f"{code}: {story_texts.NO_RULE if code in advice.ASKED else ''}{text}"


def _trigger_rule(trigger: Event, failed: Event | None) -> str:
    code = _code(trigger)
    if trigger.kind == "waiting":
        return f"{code}: {story_texts.GATE}"
    text = _meaning(code)
    kind = trigger.numbers.get("exit_class")
    if isinstance(kind, str) and failed is None:
        text += f"; {kind}: {_exit(kind)[1]}"
    return text


def _exit(kind: str) -> tuple[str, str, str]:
    """What is said of a class of exits; of one that this version does not know, what holds for most."""
    return advice.EXITS.get(kind, advice.EXITS["crash"])


def _numbers(scene: _Scene, incident: Incident) -> str:
    """The numbers against their thresholds, as they were recorded: of the budget for an exit, of its rule otherwise."""
    trigger = incident.trigger
    if trigger.kind == "exited" or "restarts_in_window" in trigger.numbers:
        return _budget(scene, incident)
    told = _told(incident)
    return ", ".join(
        f"{name} {_plain(value)}" for name, value in told.items() if name not in _NO_NUMBERS and value is not None
    )


def _told(incident: Incident) -> Mapping[str, Number]:
    """What was recorded with what set it off, or with the verdict just before that."""
    trigger = incident.trigger
    told = [event for event in (trigger, *reversed(incident.before)) if event.generation == trigger.generation]
    return next((event.numbers for event in told if event.reason == trigger.reason and event.numbers), {})


def _budget(scene: _Scene, incident: Incident) -> str:
    counted = [event for event in (*incident.before, *incident.events) if "restarts_in_window" in event.numbers]
    mine = [event for event in counted if event.id >= incident.row[0].id]
    if not mine:
        return ""
    numbers = mine[-1].numbers
    used, most = numbers.get("restarts_in_window"), numbers.get("max_restarts")
    window = f" in {scene.engine.spec.restart.max_restarts_window_s:g} s" if scene.engine is not None else ""
    failures = numbers.get("failures")
    return f"restarts{window}: {_plain(used)}, max_restarts is {_plain(most)}; failures in a row: {_plain(failures)}"


def _plain(value: Number) -> str:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


# --- what was done ----------------------------------------------------------------------------------------------------


def _done(scene: _Scene, incident: Incident) -> Iterator[Line]:
    """The steps; of many the first and the last ones."""
    steps = []
    for event in incident.events:
        trigger = event is incident.trigger
        text = _step(scene, event, trigger=trigger) if not trigger or event.kind in _TRIGGER_STEPS else ""
        evidence = _told(incident).get("evidence") if trigger and text else None
        if evidence is not None:
            text += story_texts.EVIDENCE.format(file=evidence)
        if text:
            steps.append(Line("DONE", text, event.at))
    left_out = len(steps) - _STEPS_MAX
    if left_out > 0:
        more = f"{left_out + 1} more steps: vllm-supervisor events --engine {scene.name}"
        steps = [steps[0], Line("DONE", more), *steps[2 - _STEPS_MAX :]]
    yield from steps or [Line("DONE", "nothing was started")]


_STEPS: Final[Mapping[str, str]] = {
    "exited": "SIGKILL to whatever it left behind",
    "draining": "out of traffic; requests in flight may finish",
    "stopping": "SIGTERM",
    "stopped": "stopped: nothing of it is left",
    "unkillable_gone": "its processes are gone now",
    "adopted": "taken over by a daemon that started anew",
    "leftover": "to be taken over or ended",
    "removed": "forgotten: it is no longer configured",
}
_NO_NUMBERS: Final = frozenset({"actor", "evidence"})
_TRIGGER_STEPS: Final = frozenset({"exited", "draining", "stopping", "killing", "restart"})


def _step(scene: _Scene, event: Event, *, trigger: bool) -> str:
    """What was done, in a few words; empty for what only happened."""
    match event.kind:
        case "restart":
            delay_s = event.numbers.get("delay_s")
            if isinstance(delay_s, float) and delay_s > 0:
                return f"start again after a back-off of {_span(delay_s)}"
            return "start again at once"
        case "spawned":
            return f"generation {event.generation} started, pid {event.numbers.get('pid')}"
        case "killing" if trigger:
            return "SIGKILL to all of it"
        case "waiting":
            return f"waits: {event.reason}"
        case "requested" | "killing" | "drain_timeout" | "gpu_memory_stays":
            return _short(event.message.removeprefix(f"{scene.name} "))
        case kind:
            return _STEPS.get(kind, "")


# --- how it is now, and what to do ------------------------------------------------------------------------------------


def _now(scene: _Scene, incident: Incident | None) -> Iterator[Line]:
    engine = scene.engine
    ready = incident.first("ready") if incident is not None else None
    if engine is None:
        if ready is not None:
            yield Line("NOW", f"it was ready again as generation {ready.generation}", ready.at)
        yield Line("NOW", "it is not configured any more")
        return
    told = "; ".join(reason.message for reason in status.reasons(engine, scene.now))
    spent = _span(max(0.0, scene.now - engine.since))
    if isinstance(engine.phase, Ready):
        text = f"ready for {spent}, generation {engine.generation}{_warmth(engine)}"
        yield Line("NOW", text, scene.at(engine.since))
        if told:
            yield Line("NOW", _short(f"degraded: {told}"))
        return
    text = f"{_state(engine)} for {spent}"
    if isinstance(engine.phase, Backoff):
        text += f", started again in {_span(max(0.0, engine.phase.until - scene.now))}"
    if told and (incident is None or told not in incident.trigger.message):
        text += f": {told}"
    yield Line("NOW", _short(text), scene.at(engine.since))


def _state(engine: Engine) -> str:
    phase = engine.phase
    return f"failed ({phase.kind.value})" if isinstance(phase, Failed) else engine.state.value


def _warmth(engine: Engine) -> str:
    warmup = engine.warmup
    if warmup is None or warmup.first_ms is None or warmup.settled_ms is None:
        return ""
    return f": first answer {warmup.first_ms:.0f} ms, settled {warmup.settled_ms:.0f} ms after {warmup.rounds} rounds"


def _to_do(scene: _Scene, incident: Incident | None) -> Iterator[Line]:
    """What a person can do, a line for each reason if there are several."""
    name, engine = scene.name, scene.engine
    match None if engine is None else engine.phase:
        case None:
            texts = [story_texts.GONE]
        case Failed(kind=kind):
            texts = [advice.to_do(kind.value, name)]
        case Waiting(reason=reason):
            texts = [advice.to_do(reason.code, name) or story_texts.WAIT]
        case Backoff():
            texts = [story_texts.BACKOFF.format(name=name)]
        case Stopped():
            texts = [story_texts.START.format(name=name)]
        case Draining(after=After.HOLD):
            texts = [story_texts.HELD.format(name=name)]
        case Ready(reasons=()):
            texts = [_if_again(scene, incident)]
        case Ready(reasons=reasons):
            unknown = story_texts.DEGRADED.format(name=name)
            found = {reason.code: advice.to_do(reason.code, name) or unknown for reason in reasons}
            texts = [f"{code}: {text}" for code, text in found.items()] if len(found) > 1 else list(found.values())
        case _:
            texts = [story_texts.FOLLOW.format(name=name)]
    yield from (Line("DO", text) for text in texts)


def _if_again(scene: _Scene, incident: Incident | None) -> str:
    """It is well now; what happened may happen again."""
    trigger = incident.trigger if incident is not None else None
    code = None if trigger is None else _code(trigger)
    if trigger is None or code is None or code in advice.ASKED:
        return story_texts.WELL
    kind = trigger.numbers.get("exit_class")
    text = _exit(kind)[2].format(name=scene.name) if isinstance(kind, str) else advice.to_do(code, scene.name)
    return story_texts.WELL if not text or text == advice.NOTHING else story_texts.AGAIN.format(advice=text)


def _span(seconds: float) -> str:
    """A time span with two figures that matter."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    left, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if parts or count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 3]}..."
