"""Restarts that nobody needs this minute: one at a time, in the window, never the last of a group."""

from __future__ import annotations

from typing import Any

import pytest

from supervisord.core import voluntary
from supervisord.core.messages import Op
from supervisord.core.model import Failed, FailedKind, Ready, Reason, Stopped, Waiting
from supervisord.core.turn import Turn
from tests.core.looks import spec
from tests.core.play import T0, Play, launching


def fleet(**groups: str | None) -> Play:
    """Engines that are all ready, by their replica group."""
    play = launching(*(spec(name=name, replica_group=group) for name, group in groups.items()))
    for name in groups:
        play.up(name)
    return play


def closed(play: Play, name: str = "a", *, after: float = 0.0) -> str | None:
    return voluntary.closed(Turn(play.node, play.now + after), play.engine(name))


def test_open_by_default() -> None:
    assert closed(fleet(a=None)) is None
    assert closed(fleet(a=None, b=None)) is None
    assert closed(fleet(a="g")) is None
    assert closed(fleet(a="g", b="g")) is None


def test_only_while_the_window_is_open() -> None:
    play = launching(spec(restart={"maintenance_window": "0 3 * * * 2h"})).up()
    assert closed(play) == "its maintenance window is closed (0 3 * * * 2h)"
    play.change(window_until=T0 + 100.0)
    assert closed(play, after=99.9) is None
    assert closed(play, after=100.0) is not None


def test_memory_that_ends_soon_waits_for_less() -> None:
    play = launching(spec(restart={"maintenance_window": "0 3 * * * 2h"}), spec(name="b")).up("a").up("b")
    play.change("b", replacing=True)
    turn, engine = Turn(play.node, play.now), play.engine()
    assert voluntary.closed(turn, engine) == "its maintenance window is closed (0 3 * * * 2h)"
    assert voluntary.closed(turn, engine, urgent=True) == "b is being replaced, one at a time"
    assert voluntary.closed(turn, engine, urgent=True, waives_budget=True) is None


def test_one_at_a_time() -> None:
    play = fleet(a=None, b=None).change("b", replacing=True)
    assert closed(play) == "b is being replaced, one at a time"
    assert closed(play, "b") is None, "it does not wait for itself"


@pytest.mark.parametrize("phase", [Stopped(), Failed(FailedKind.CONFIG, "x")])
def test_nobody_waits_for_a_replacement_that_needs_a_human(phase: Any) -> None:
    assert closed(fleet(a=None, b=None).change("b", replacing=True, phase=phase)) is None


DOWN = Waiting(Reason("port_held", "x"), T0 + 5)


def test_never_the_last_ready_one_of_its_group() -> None:
    play = fleet(a="g", b="g", c="h").change("b", phase=DOWN)
    assert closed(play) == "it is the last ready engine of its replica group g"
    assert closed(play, "c") is None


def test_another_ready_one_is_enough() -> None:
    assert closed(fleet(a="g", b="g", c="g").change("b", phase=DOWN)) is None


def test_what_is_not_wanted_does_not_count() -> None:
    play = fleet(a="g", b="g")
    play.ask(Op.STOP, "b", now=True)
    assert closed(play) is None
    assert isinstance(play.engine().phase, Ready)
