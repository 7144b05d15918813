"""Incidents as transcripts: what is observed and what is decided, with times, reviewed as diffs.

A file in tests/data/transcripts holds the configuration (`given`), the observations (`>>`, as Python) and, generated,
all that follows: the clock when it is due, actions (`<<`), what is told (`..`) and state changes (`==`). Sweeps of GPUs
are answered at once with what `Cards` said last, and are not shown.

TRANSCRIPTS=write writes them anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from supervisord.core import durable, messages, model
from supervisord.core import node as reducer
from supervisord.core.gpu_samples import GpuReading, GpuSweep
from supervisord.core.messages import Action, Booted, Due, GpusSwept, Observation, Record, Reply, SweepGpus, What
from supervisord.core.model import Node
from supervisord.core.spec import EngineSpec
from tests.core.invariants import Step, check
from tests.core.play import (
    BAD,
    GOOD,
    PROBING,
    card,
    cards_of,
    engine_spec,
    foreign,
    holds,
    mine,
    new_node,
    node_spec,
    plan_ids,
    process,
)

FILES: Final = sorted((Path(__file__).parents[1] / "data" / "transcripts").glob("*.txt"))
INPUT: Final = re.compile(r"^ *(?P<at>\d+\.\d{3}) >> (?!clock$)(?P<what>.*)$")


class NewDaemon(Booted):
    """The daemon was killed, and the next one starts from what was saved and what it finds."""


class Cards:
    """From now on sweeps see these."""

    def __init__(self, cards: tuple[GpuReading, ...]) -> None:
        self.cards = cards


NAMES: Final[dict[str, Any]] = {
    **{name: value for module in (messages, model) for name, value in vars(module).items() if name[0].isupper()},
    "NewDaemon": lambda *found: NewDaemon(found),
    "engine": engine_spec,
    "process": process,
    "Cards": lambda *cards: Cards(cards),
    "card": card,
    "holds": holds,
    "mine": mine,
    "foreign": foreign,
    "GOOD": GOOD,
    "BAD": BAD,
}


class Telling:
    """One transcript under way."""

    def __init__(self, engines: list[EngineSpec]) -> None:
        self.spec = node_spec(*engines)
        self.node: Node = new_node(self.spec)
        self.cards = cards_of(self.spec)

    def until(self, end: float) -> Iterator[str]:
        """What the clock causes up to and including `end`."""
        while (at := reducer.wakeup(self.node)) is not None and at <= end:
            asked_before = self.node.telemetry.number
            lines = list(self.step(Due(What.CLOCK), at))
            if lines or self.node.telemetry.number == asked_before:
                yield f"{at:9.3f} >> clock"
                yield from lines

    def see(self, seen: Observation | Cards, at: float) -> Iterator[str]:
        """What an observation causes."""
        if isinstance(seen, Cards):
            self.cards = seen.cards
            return
        if isinstance(seen, NewDaemon):
            known = durable.save(self.node)
            engines = durable.restore(self.spec, plan_ids(self.spec), known, at, same_boot=True, spawned={})
            self.node = Node(spec=self.spec, engines=engines)
            seen = Booted(seen.found)
        yield from self.step(seen, at)

    def step(self, seen: Observation, at: float) -> Iterator[str]:
        before = self.node
        self.node, actions = reducer.step(before, seen, at)
        check(Step(before, seen, at, self.node, actions))
        yield from (f"{'':9} {line(action)}" for action in actions if not isinstance(action, PROBING))
        for name, engine in self.node.engines.items():
            old = before.engines.get(name)
            if old is None or old.state is not engine.state:
                yield f"{'':9} == {name} is {engine.state.value}"
        yield from (f"{'':9} == {name} is forgotten" for name in before.engines if name not in self.node.engines)
        for asked in actions:
            if isinstance(asked, SweepGpus):
                sweep = GpuSweep(at, self.cards, slow=asked.slow, driver="580.1")
                yield from self.step(GpusSwept(asked.helper, asked.number, sweep), at)


def line(action: Action) -> str:
    """One action, for eyes."""
    match action:
        case Record():
            return f".. {action.severity.name.lower()} {action.kind}: {action.message}"
        case Reply():
            return f"<< reply {action.request}, {action.answer.value}: {action.message}"
        case _:
            fields = [getattr(action, name) for name in action.__dataclass_fields__]
            return " ".join(
                [
                    "<<",
                    type(action).__name__,
                    *(str(value) for value in fields if value is not False and value is not None),
                ]
            )


def tell(text: str) -> str:
    """The transcript with everything that follows from its input."""
    given, told = [], list[str]()
    telling: Telling | None = None
    for written in text.splitlines():
        found = INPUT.match(written)
        if written.startswith("given "):
            given.append(eval(written.removeprefix("given "), NAMES))
        if written.startswith(("given ", "#")) or not written:
            told.append(written)
        elif found is not None:
            telling = telling or Telling(given)
            at = float(found["at"])
            told += telling.until(at - 0.0005)
            told.append(f"{at:9.3f} >> {found['what']}")
            told += telling.see(eval(found["what"], NAMES), at)
    return "\n".join(told) + "\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_transcript(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    told = tell(text)
    if os.environ.get("TRANSCRIPTS") == "write":
        file.write_text(told, encoding="utf-8")
    assert told == text or os.environ.get("TRANSCRIPTS") == "write"


def test_there_are_transcripts() -> None:
    assert len(FILES) >= 5
