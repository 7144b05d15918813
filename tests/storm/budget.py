"""Afterwards: whether restarts kept their back-off and their budget. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from supervisord.core.incident import Event
from tests.storm.ledger import BEGINNINGS, Span, Start, Told, within

STARTING = frozenset({"start", "stop", "restart", "reset"})
"""What an operator may ask for that ends a back-off; a drain of what does not run is refused."""
CLOCK_SLACK_S = 0.05
ASKED_S = 5.0
"""A line of the log is seen within this, and so says no more than about when it was asked."""
TURN_S = 5.0
"""The loop turns at least so often."""

NO_FAILURE = frozenset({"operator", "daemon_ending", "reload", "gpu_fault", "port_held", "leftover"})
"""Reasons of ends that cost no budget; `leftover`: of an earlier daemon."""
NO_BUDGET = frozenset({"resource", "external"})
"""Classes of exits that cost none."""


def too_hasty(
    history: Iterable[Event],
    backoff_max_s: float,
    turns: Sequence[float],
    log: Sequence[Told],
    forgotten: Sequence[Span] = (),
) -> list[str]:
    """Starts before their back-off was over, and back-offs shorter than a spent budget demands.

    `turns`: when the loop took up what it decided on. An event is noted later than that, on a machine that is short of
    breath or by a daemon that was frozen in between by much, and the back-off counts from the decision. It goes on
    under the next daemon, unless it was decided when that one may not have heard of it (`forgotten`).
    """
    asked = [
        (told.at, told.document.get("engine"))
        for told in log
        if told.document["kind"] == "requested" and told.document.get("reason") in STARTING
    ]
    due: dict[str, tuple[float, float]] = {}
    wrong = []
    for event in history:
        name = event.engine or ""
        if event.kind == "restart":
            delay_s = _number(event, "delay_s")
            due[name] = (_decided(event.now, turns), delay_s)
            over = _number(event, "restarts_in_window") > _number(event, "max_restarts")
            if over and delay_s < backoff_max_s:
                wrong.append(f"{name} has spent its budget and is started again after {delay_s} s: {event.message}")
        elif event.kind == "requested" and event.reason in STARTING:
            due.pop(name, None)
        elif event.kind == "daemon_ending":
            due.clear()  # the next daemon starts whatever is wanted
        elif event.kind == "daemon_started":
            due = {engine: known for engine, known in due.items() if not within(known[0], forgotten)}
        elif event.kind == "spawned" and name in due:
            decided, delay_s = due.pop(name)
            # A request may be missing in the history: a daemon was killed before it had written that.
            released = any(who == name and decided <= at <= event.now + ASKED_S for at, who in asked)
            if event.now < decided + delay_s - CLOCK_SLACK_S and not released:
                wrong.append(f"{name} was started {event.now - decided:.2f} s after it was told to wait {delay_s} s")
    return wrong


def _number(event: Event, name: str) -> float:
    value = event.numbers[name]
    assert isinstance(value, int | float), event
    return value


def _decided(noted: float, turns: Sequence[float]) -> float:
    """The turn that an event is of: the last one before it, unless that is not in the history."""
    before = bisect_right(turns, noted)
    turn = turns[before - 1] if before else noted
    return turn if turn > noted - TURN_S else noted


@dataclass(frozen=True)
class Rule:
    """What the victims are configured with."""

    max_restarts: int
    window_s: float
    backoff_max_s: float


def overspent(
    starts: Iterable[Start],
    log: Sequence[Told],
    last_seen: Mapping[tuple[str, int], float],
    rule: Rule,
    forgotten: Sequence[Span] = (),
) -> list[str]:
    """Starts that came too soon after too many. They are counted as the engines recorded them; the log only excuses.

    An engine without an excuse that was started more than `max_restarts` + 1 times within the window waits as long as
    it can: the daemon counts failures, and the first of them may be out of its window already. `forgotten`: when a
    daemon was killed and may not have saved what it had counted.
    """
    wrong = []
    excused = _Excuses(log)
    by_engine: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        by_engine[start.engine].append(start)
    for name, own in by_engine.items():
        counted: list[float] = []
        own.sort(key=lambda start: start.generation)
        for before, start in pairwise(own):
            excuse = excused.between(name, before.generation, start.generation)
            if excuse == "reset":
                counted.clear()
            ended = last_seen.get((name, before.generation), before.at)
            if excuse is not None or within(ended, forgotten):
                continue
            counted.append(start.at)
            recent = sum(at > start.at - rule.window_s for at in counted)
            waited_s = start.at - ended
            if recent > rule.max_restarts + 1 and waited_s < rule.backoff_max_s - CLOCK_SLACK_S:
                wrong.append(
                    f"{name} was started {recent} times in {rule.window_s:g} s, "
                    f"and generation {start.generation} only {waited_s:.2f} s after the end of the last one"
                )
    return wrong


class _Excuses:
    """What was told between the beginnings of two generations."""

    def __init__(self, log: Sequence[Told]) -> None:
        self._log = log
        self._begun: dict[tuple[str, int], int] = {}
        for number, (_, line) in enumerate(log):
            if line["kind"] in BEGINNINGS and line.get("engine"):
                self._begun.setdefault((line["engine"], line.get("generation") or 0), number)

    def between(self, engine: str, first: int, second: int) -> str | None:
        """Why the second one need not keep a budget; "reset": what was counted is forgotten too.

        An end that came while no daemon ran, nobody knows how, is not said to have come by itself, and costs none.
        """
        begin, end = self._begun.get((engine, first)), self._begun.get((engine, second))
        if begin is None or end is None:
            return "nobody told of it"
        lines = [line for _, line in self._log[begin + 1 : end] if line.get("engine") in {None, engine}]
        kinds = {line["kind"] for line in lines}
        if any(line["kind"] == "requested" and line.get("reason") == "reset" for line in lines):
            return "reset"
        if {"failed", "reconfigured"} <= kinds:
            return "reset"
        for line in lines:
            unseen = line["kind"] == "exited" and "ended by itself" not in line["event"]
            if unseen or line["kind"] == "requested" or line.get("exit_class") in NO_BUDGET:
                return str(line["kind"])
            ends = line["kind"] in {"stopping", "killing", "draining"} and line.get("reason") in NO_FAILURE
            if ends or line["kind"] in {"daemon_ending", "leftover"}:
                return str(line.get("reason") or line["kind"])
        return None
