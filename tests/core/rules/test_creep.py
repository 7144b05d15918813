"""Leaks are found with their pace and their end; what only looks like one for a while is not.

`CREEP_SERIES=1000` runs the rates of docs/creep.md.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from supervisord.core.memory import HOUR_S, MIB, UNSEEN, MemoryWatch, observed
from supervisord.core.messages import WindowOpened
from supervisord.core.model import Ready, State
from supervisord.core.rules import Finding, Remedy
from supervisord.core.rules.creep import gpu_creep, host_creep
from supervisord.core.spec import RestartSpec
from supervisord.core.status import of
from tests.core.looks import look, rank, see, serving
from tests.core.play import T0, Play
from tests.core.rules import memory_series
from tests.core.rules.memory_series import HARMLESS, LEAK_MIB_PER_H, LEAKS, LOOK_EVERY_S, told_after_h

SPEC = RestartSpec()
COUNT = int(os.environ.get("CREEP_SERIES", "8"))
WITHIN_6_H = {"120 MB/h, noise": 0.99, "120 MB/h in pieces, noise": 0.99, "120 MB/h, wandering load": 0.5}
FALSE_MAX = 0.005
"""And one, because of a few series that says nothing."""


@cache
def leaking(mib_per_h: float, hours: float) -> MemoryWatch:
    watch = UNSEEN
    for at_s, used in memory_series.looks(lambda t: mib_per_h * t / HOUR_S, hours):
        watch = observed(watch, at_s, used, None, SPEC)
    return watch


def found(rule: Any, mib_per_h: float, hours: float, capacity_mib: float | None = None) -> Finding | None:
    capacity = None if capacity_mib is None else int(capacity_mib * MIB)
    finding: Finding | None = rule(leaking(mib_per_h, hours), SPEC, hours * HOUR_S, capacity_bytes=capacity)
    return finding


# --- what it says -----------------------------------------------------------------------------------------------------


def test_a_leak_of_120_mb_per_hour_is_told_with_its_end() -> None:
    finding = found(gpu_creep, LEAK_MIB_PER_H, 6, capacity_mib=22_000)
    assert finding is not None
    assert finding.reason.code == "gpu_creep"
    assert finding.reason.message == (
        "GPU memory grows by 114 MiB/h, seen over 5.7 h (creep_mib_per_h 60, creep_window_s 3600), and is 629 MiB "
        "above its level after the start (creep_margin_mib 512); exhausted in about 11.5 h at this pace"
    )
    assert (finding.remedy, finding.urgent, finding.waives_budget) == (Remedy.REPLACE, False, False)
    assert finding.numbers == {
        "slope_mib_per_h": 114.4,
        "limit_mib_per_h": 60.0,
        "span_s": 20400,
        "growth_mib": 629.4,
        "margin_mib": 512.0,
        "exhausted_in_s": pytest.approx(41310, abs=60),
    }


def test_host_memory_is_only_told_and_without_a_limit_there_is_no_end() -> None:
    finding = found(host_creep, LEAK_MIB_PER_H, 6)
    assert finding is not None
    assert (finding.reason.code, finding.remedy) == ("host_creep", Remedy.TELL)
    assert finding.reason.message.endswith("(creep_margin_mib 512)")
    assert finding.numbers["exhausted_in_s"] is None


@pytest.mark.parametrize(
    ("left_min", "urgent", "waived", "host"),
    [(31, False, False, Remedy.TELL), (29, True, False, Remedy.REPLACE), (9, True, True, Remedy.REPLACE)],
)
def test_near_the_end_nothing_is_waited_for(left_min: float, urgent: bool, waived: bool, host: Remedy) -> None:
    end_mib = 20_000 + LEAK_MIB_PER_H * (6 + left_min / 60)
    for rule, remedy in ((gpu_creep, Remedy.REPLACE), (host_creep, host)):
        finding = found(rule, LEAK_MIB_PER_H, 6, capacity_mib=end_mib)
        assert finding is not None
        assert (finding.remedy, finding.urgent, finding.waives_budget) == (remedy, urgent, waived)
        assert f"exhausted in about {left_min:.0f} min" in finding.reason.message


def test_a_young_engine_may_grow_more_unless_its_end_is_near() -> None:
    assert found(gpu_creep, 1000, 1.5) is None
    assert found(gpu_creep, 1000, 1.5, capacity_mib=30_000) is None
    assert found(gpu_creep, 1000, 1.5, capacity_mib=21_900) is not None


@pytest.mark.parametrize(("mib_per_h", "hours"), [(50, 30), (LEAK_MIB_PER_H, 4), (-100, 10), (100_000, 0.9)])
def test_too_slow_too_little_or_too_short_is_nothing(mib_per_h: float, hours: float) -> None:
    assert found(gpu_creep, mib_per_h, hours) is None
    assert found(gpu_creep, mib_per_h, hours, capacity_mib=0) is None


def test_what_was_not_looked_at_for_long_is_unknown() -> None:
    watch, seen_s = leaking(LEAK_MIB_PER_H, 6), 6 * HOUR_S
    assert host_creep(watch, SPEC, seen_s + 840, capacity_bytes=None) is not None
    assert host_creep(watch, SPEC, seen_s + 960, capacity_bytes=None) is None
    assert host_creep(UNSEEN, SPEC, seen_s, capacity_bytes=None) is None


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHIN_6_H)
def test_leaks_are_found_within_six_hours(name: str) -> None:
    told = [told_after_h(LEAKS[name](random.Random(f"{name} {seed}")), 6, SPEC) for seed in range(COUNT)]
    assert sum(hours is not None for hours in told) >= WITHIN_6_H[name] * COUNT


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_bounded_is_not_called_a_leak(name: str) -> None:
    told = [told_after_h(HARMLESS[name](random.Random(f"{name} {seed}")), 12, SPEC) for seed in range(COUNT)]
    assert sum(hours is not None for hours in told) <= 1 + FALSE_MAX * COUNT


# --- a ready engine ---------------------------------------------------------------------------------------------------


def grow(play: Play, hours: float, mib_per_h: float = LEAK_MIB_PER_H, awake: bool = True) -> Play:
    """Looks at an engine whose host memory grows."""
    begin = play.now
    for step in range(1, int(hours * HOUR_S / LOOK_EVERY_S) + 1):
        at = begin + step * LOOK_EVERY_S
        used = int((20_000 + mib_per_h * (at - T0) / HOUR_S) * MIB)
        see(play, _look(at, used, awake))
    return play


def _look(at: float, used: int, awake: bool) -> Any:
    return replace(look(at), ranks=(rank(steps=at, awake=awake),), host_bytes=used, host_at=at)


def test_a_ready_engine_is_degraded_once_and_its_pace_is_in_status() -> None:
    play = grow(serving(), 6)
    assert [reason.code for reason in play.phase(Ready).reasons] == ["host_creep"]
    memory = of(play.node, play.now, 0.0, str)["engines"][0]["memory"]
    assert memory["host_creep_mib_per_h"] == 114.4
    assert play.engine().state is State.READY


def test_sleep_begins_anew() -> None:
    play = grow(serving(), 2)
    assert (watch := play.engine().watch) is not None
    assert watch.host.trend is not None
    for awake in (False, True):
        see(play, _look(play.now + 30, 90_000 * MIB, awake))
        assert (watch := play.engine().watch) is not None
        assert (watch.host.trend, watch.host.lows) == (None, ())


def _with_gpu(play: Play, watch: MemoryWatch) -> Play:
    engine = play.engine()
    assert engine.watch is not None
    moved = replace(watch, seen_at=play.now)
    play.node = replace(play.node, engines={"a": replace(engine, watch=replace(engine.watch, gpu=moved))})
    return play


def test_gpu_memory_that_creeps_replaces_the_engine_when_its_window_opens() -> None:
    play = see(serving(restart={"maintenance_window": "0 3 * * * 2h"}), look(T0 + 1))
    _with_gpu(play, leaking(LEAK_MIB_PER_H, 6))
    see(play, look(T0 + 2)).says("degraded")
    assert "not done: its maintenance window is closed" in play.phase(Ready).reasons[0].message
    play.see(WindowOpened("a", 7200.0))
    see(play, look(play.now + 1)).is_(State.DRAINING)
    assert play.record("verdict").reason == "gpu_creep"
    assert (play.engine().replacing, play.engine().shortfall_retried) == (True, False)


def test_a_shortfall_that_a_restart_did_not_help_does_not_hold_it_back() -> None:
    play = see(serving(), look(T0 + 1))
    play.node = replace(play.node, engines={"a": replace(play.engine(), shortfall_retried=True, good_blocks=10**6)})
    _with_gpu(play, leaking(LEAK_MIB_PER_H, 6))
    see(play, look(T0 + 2)).is_(State.DRAINING)
