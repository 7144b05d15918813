"""Looks in, deeds out: the strongest finding is acted on, everything else is told once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core.messages import (
    Abandon,
    CanaryEnded,
    Due,
    Exited,
    KeepEvidence,
    Op,
    Probe,
    Reconfigured,
    Record,
    Sampled,
    SendCanary,
    Sweep,
    Swept,
    Terminate,
    What,
    WindowOpened,
)
from supervisord.core.model import After, Draining, Ready, Reason, Sample, State
from supervisord.core.samples import RankMetrics
from supervisord.core.watch import Canary, Watch
from tests.core.looks import canary, look, missing, page, rank, see, serving, spec, stated
from tests.core.play import BAD, T0, Play, launching

LITERAL: dict[str, Any] = {"free_blocks_min": 100, "free_blocks_for_s": 2, "backoff_initial_s": 0}


def codes(play: Play, engine: str = "a") -> list[str]:
    return [reason.code for reason in play.phase(Ready, engine).reasons]


def told(play: Play) -> list[tuple[str, str | None]]:
    return [(record.kind, record.reason) for record in play.told]


# --- a verdict --------------------------------------------------------------------------------------------------------


def test_a_kill_leaves_evidence_first_and_counts_as_a_failure() -> None:
    play = serving(restart={"backoff_initial_s": 0})
    see(play, page(T0 + 1, health_status=503)).does().says("degraded")
    assert (codes(play), play.phase(Ready).next_look_at) == (["engine_dead"], T0 + 2)
    see(play, page(T0 + 2, health_status=503)).does(KeepEvidence, Abandon, Sweep).says("verdict", "killing")
    verdict = play.record("verdict")
    assert verdict.message == ("a: /health answered 503 2 times in a row (2 decide): it is killed and started again")
    evidence = "evidence/a.1.engine_dead.txt"
    assert (verdict.reason, verdict.numbers) == ("engine_dead", {"looks": 2, "looks_max": 2, "evidence": evidence})
    assert KeepEvidence("a", 1, "engine_dead") in play.actions
    last = play.engine().last_exit
    assert last is not None
    assert (last.kind.value, last.code, last.generation) == ("crash", None, 1)
    play.see(Exited("a", 1, None, 9), after=0.1).see(Swept("a", 1), after=0.1)
    assert play.engine().launching == 2
    assert (play.engine().failures, len(play.engine().restart_times)) == (1, 1)
    assert play.engine().last_exit == last


def leak(play: Play) -> Play:
    """No metrics, and `/health` states too few blocks, confirmed."""
    for at in (1, 2, 3):
        see(play, stated(T0 + at, 99))
    return play


def test_a_graceful_restart_drains_and_is_under_the_budget() -> None:
    play = leak(serving(restart={**LITERAL, "max_restarts": 0}))
    play.does(KeepEvidence, Probe).says("verdict", "draining").is_(State.DRAINING)
    assert play.phase(Draining).after is After.CRASH
    assert play.engine().last_exit is None, "it has not ended yet"
    see(play, stated(T0 + 4, 99, running=0, waiting=0)).does(Abandon, Terminate).is_(State.STOPPING)
    last = play.engine().last_exit
    assert last is not None
    assert last.advice.startswith("99 KV blocks free for 2 s (free_blocks_min 100)")
    play.see(Exited("a", 1, 0, None), after=1).see(Swept("a", 1)).is_(State.BACKOFF)
    assert play.record("restart").numbers["max_restarts"] == 0
    assert play.record("restart").numbers["delay_s"] == 300.0, "it was ready with this plan, so slowly, never given up"


def test_without_a_drain_it_is_stopped_at_once() -> None:
    play = leak(serving(restart=LITERAL, drain_timeout_s=0))
    play.does(KeepEvidence, Abandon, Terminate).is_(State.STOPPING)
    assert play.engine().last_exit is not None


def test_a_drain_that_takes_too_long_ends_in_the_same_restart() -> None:
    play = leak(serving(restart=LITERAL, drain_timeout_s=5))
    while play.engine().state is State.DRAINING:
        play.wake()
    assert play.engine().state is State.STOPPING
    assert play.engine().last_exit is not None
    play.see(Exited("a", 1, 0, None)).see(Swept("a", 1))
    assert play.engine().failures == 1


def test_the_strongest_finding_is_acted_on() -> None:
    play = serving(restart=LITERAL)
    for at in (1, 2):
        see(play, stated(T0 + at, 99))
    see(play, stated(T0 + 3, 99, health_status=503))
    assert play.engine().state is State.DRAINING, "one 503 only confirms, the blocks decide"
    play = serving(restart=LITERAL)
    see(play, stated(T0 + 1, 99))
    see(play, stated(T0 + 2, 99, health_status=503))
    see(play, stated(T0 + 3, 99, health_status=503)).is_(State.STOPPING)
    assert play.record("verdict").reason == "engine_dead"


# --- what is told -----------------------------------------------------------------------------------------------------


def test_transitions_are_told_ticks_are_not() -> None:
    play = serving(restart={"free_blocks_min": 100, "free_blocks_for_s": 5})
    see(play, look(T0 + 1, steps=1, running=4, free_blocks=3)).says().does()
    see(play, look(T0 + 5, steps=2, running=4, free_blocks=3)).says()
    see(play, look(T0 + 6, steps=3, running=4, free_blocks=3)).says("degraded").does()
    assert play.record("degraded").reason == "kv_pressure"
    assert play.phase(Ready).next_look_at is None, "load is not looked into"
    see(play, look(T0 + 10, steps=4, running=4, free_blocks=2)).says()
    assert play.phase(Ready).reasons[0].message.startswith("2 of 1000 KV blocks free for 9 s")
    see(play, look(T0 + 15, steps=5, running=4, free_blocks=500)).says("recovered")
    assert play.record("recovered").message.startswith("a: kv_pressure is over; it was: 2 of 1000 KV blocks free")
    assert codes(play) == []


def test_a_look_that_cannot_see_it_does_not_end_it() -> None:
    play = serving(restart={"free_blocks_min": 100, "free_blocks_for_s": 0})
    for at in (1, 2, 5):
        see(play, look(T0 + at, steps=at / 10, running=4, free_blocks=3))
    see(play, missing(T0 + 10)).says()
    see(play, look(T0 + 15, steps=2, running=4, free_blocks=None)).says("free_blocks_rule")
    assert codes(play) == ["kv_pressure"]
    see(play, look(T0 + 20, steps=3, running=4, free_blocks=None, waiting=None)).says()
    assert codes(play) == ["kv_pressure"]
    see(play, look(T0 + 25, steps=4)).says("recovered")


def test_a_stall_is_told_and_its_end_too() -> None:
    play = serving()
    see(play, look(T0 + 1, running=1))
    see(play, look(T0 + 61, running=1)).says("degraded")
    assert play.phase(Ready).next_look_at == T0 + 62
    see(play, missing(T0 + 62)).says()
    assert codes(play) == ["stalled"]
    see(play, look(T0 + 63, steps=11, running=1)).says("recovered")
    assert "for 60 s" in play.record("recovered").message


def test_the_limit_of_free_blocks_is_said_once() -> None:
    play = serving()
    see(play, missing(T0 + 1)).says()
    see(play, look(T0 + 2)).says("free_blocks_rule")
    assert play.record("free_blocks_rule").message == (
        "a: fewer than 50 of 1000 free KV blocks are too few (free_blocks_min is not set)"
    )
    see(play, look(T0 + 3)).says()


def test_reasons_of_the_warm_up_stay_beside_those_of_the_rules() -> None:
    play = serving()
    play.change(phase=replace(play.phase(Ready), lasting=(BAD.problem or Reason("", ""),)))
    see(play, page(T0 + 1, health_status=503))
    assert codes(play) == ["warmup_failed", "engine_dead"]
    see(play, look(T0 + 2)).says("free_blocks_rule", "recovered")
    assert codes(play) == ["warmup_failed"]


# --- looks ------------------------------------------------------------------------------------------------------------


def test_a_rule_being_confirmed_is_looked_at_every_second() -> None:
    play = see(serving(), page(T0 + 1, health_status=503))
    assert play.wakeup == T0 + 2
    play.wake().does(Probe)
    assert play.wakeup == T0 + 3
    see(play, look(T0 + 2.5))
    assert play.wakeup is None


def test_old_and_doubled_looks_are_dropped() -> None:
    play = see(serving(), page(T0 + 10, health_status=503))
    before = play.node
    for at in (T0 + 10, T0 + 9):
        see(play, page(at, health_status=503)).does_nothing()
    assert play.node is before


def test_looks_before_it_is_ready_are_not_judged() -> None:
    play = launching(spec()).spawn()
    see(play, page(T0 + 1, health_status=503)).does_nothing()


def test_an_engine_without_a_memory_gets_one() -> None:
    play = serving().change(watch=None)
    play.clock().does()
    see(play, look(T0 + 1))
    assert play.engine().watch is not None


def test_the_clock_without_a_memory_still_looks() -> None:
    play = see(serving(), page(T0 + 1, health_status=503)).change(watch=None)
    play.wake().does(Probe)


# --- canaries ---------------------------------------------------------------------------------------------------------


def quiet(play: Play, until: float) -> Play:
    """Looks every 5 s at an engine where nothing moves."""
    at = play.now
    while at < until:
        at = min(at + 5, until)
        see(play, look(at))
    return play


def test_a_canary_after_a_quiet_minute_and_never_two() -> None:
    play = serving()
    see(play, look(T0 + 1)).does()
    quiet(play, T0 + 60.9).does()
    see(play, look(T0 + 61)).does(SendCanary)
    quiet(play, T0 + 80)
    assert not [action for action in play.actions if isinstance(action, SendCanary)]
    canary(play, after=0.5).does(Probe)
    seen = play.engine().watch
    assert seen is not None
    assert (seen.canary.sent_at, seen.canary.ok_at) == (None, T0 + 80.5)


def test_three_deadlines_outlived_are_a_wedge_that_looks_idle() -> None:
    play = quiet(serving(), T0 + 65)
    sent = next(record for record in [play.engine().watch] if record)
    assert sent.canary.sent_at is not None
    for number in (1, 2, 3):
        while play.engine().watch and play.engine().watch.canary.failures < number:  # type: ignore[union-attr]
            play.wake()
        assert Probe("a", 1) in play.actions
        see(play, look(play.now + 0.1))
    play.is_(State.STOPPING)
    assert play.record("verdict").reason == "unresponsive"
    assert play.now == pytest.approx((sent.canary.sent_at or 0) + 90.1)


def test_movement_forgives_failed_canaries() -> None:
    play = quiet(serving(), T0 + 65)
    canary(play, ok=False)
    see(play, look(T0 + 66))
    assert codes(play) == ["unresponsive"]
    see(play, look(T0 + 67, steps=11)).says("recovered")


def test_an_engine_that_cannot_be_asked_is_said_once_and_left_alone() -> None:
    play = quiet(serving(), T0 + 65)
    canary(play, ok=False, possible=False).says("canary_impossible").does(Probe)
    assert play.record("canary_impossible").message == (
        "a cannot be asked for a completion (HTTP 401): it is judged by its counters alone"
    )
    quiet(play, T0 + 5000)
    assert play.engine().state is State.READY
    assert [kind for kind, _ in told(play)].count("canary_impossible") == 1


def asked(play: Play, looks: range, one: Callable[[float], Sample]) -> list[SendCanary]:
    """The canaries that are sent over these looks."""
    sent: list[SendCanary] = []
    for at in looks:
        see(play, one(T0 + at))
        sent += [action for action in play.actions if isinstance(action, SendCanary)]
    return sent


def test_a_canary_that_is_turned_away_is_no_evidence_and_another_follows() -> None:
    play = serving()
    assert asked(play, range(1, 70, 5), look) == [SendCanary("a", 1)]
    ended = CanaryEnded("a", 1, ok=False, sane=False, detail="HTTP 429", evidence=False)
    play.see(ended, after=1).does(Probe).says()
    remembered = play.engine().watch
    assert remembered is not None
    assert (remembered.canary.failures, remembered.canary.possible, remembered.canary.sent_at) == (0, True, None)
    assert asked(play, range(70, 140, 5), look) == [SendCanary("a", 1)]


def test_a_canary_is_meant_for_the_rank_that_stands_still() -> None:
    def look_at_two(at: float) -> Sample:
        return page(at, rank(0), rank(1, running=2))

    assert asked(serving(), range(1, 70, 5), look_at_two) == [SendCanary("a", 1, 1)]


def test_a_mass_cancel_leaves_stale_gauges_that_a_canary_clears() -> None:
    play = serving()
    see(play, look(T0 + 5, steps=11, running=32, waiting=90, free_blocks=2))
    for at in range(10, 70, 5):
        see(play, look(T0 + at, steps=11, running=32, waiting=90, free_blocks=2))
    assert play.engine().watch.canary.sent_at == T0 + 65  # type: ignore[union-attr]
    canary(play, after=0.2)
    see(play, look(T0 + 66, steps=12))
    assert (play.engine().state, codes(play)) == (State.READY, [])


def test_a_canary_that_nobody_sent_changes_nothing() -> None:
    play = see(serving(), look(T0 + 1))
    canary(play).does_nothing()
    play.change(watch=None)
    canary(play).does_nothing()


def test_a_canary_that_ends_during_a_drain_is_not_outstanding_after_it() -> None:
    play = quiet(serving(), T0 + 65)
    play.ask(Op.DRAIN)
    canary(play, after=1).does()
    play.ask(Op.START).is_(State.READY)
    quiet(play, play.now + 300)
    assert play.engine().state is State.READY


def test_a_canary_that_hangs_over_a_drain_starts_its_clock_anew() -> None:
    play = quiet(serving(), T0 + 65)
    play.ask(Op.DRAIN).see(Due(What.CLOCK), after=600)
    play.ask(Op.START)
    see(play, look(play.now + 1))
    assert play.engine().watch.canary == Canary(sent_at=play.now)  # type: ignore[union-attr]
    play.wake()
    see(play, look(play.now + 0.1)).is_(State.READY)
    assert codes(play) == ["unresponsive"]


def test_evidence_from_before_a_drain_is_none_after_it() -> None:
    play = see(serving(), missing(T0 + 1, "refused"))
    play.ask(Op.DRAIN)
    play.see(Due(What.CLOCK), after=600).ask(Op.START)
    see(play, missing(play.now + 1, "refused")).is_(State.READY)


# --- free blocks over several looks -----------------------------------------------------------------------------------


def test_a_leak_while_idle_is_confirmed_by_canaries_and_restarted() -> None:
    play = serving(restart={"free_blocks_min": 100})
    steps = count(11)
    while play.engine().state is State.READY:
        sent = [action for action in play.actions if isinstance(action, SendCanary)]
        if sent:
            canary(play, after=0.2)
            see(play, look(play.now, steps=next(steps), free_blocks=9))
        else:
            watch = play.engine().watch
            known = watch.ranks[0].odometer[0] if watch and watch.ranks else 10.0
            see(play, look(play.now + 1, steps=known, free_blocks=9))
        assert play.now < T0 + 100
    play.is_(State.DRAINING)
    assert play.record("verdict").reason == "free_blocks"
    assert play.now >= T0 + 61
    assert play.record("verdict").numbers["free"] == 9


def test_one_dip_is_nothing() -> None:
    play = serving(restart={"free_blocks_min": 100})
    for at in range(5, 600, 5):
        see(play, look(T0 + at, steps=at, free_blocks=99 if at % 25 == 0 else 100))
    assert play.engine().state is State.READY


def press(play: Play, seconds: int, free: int = 3) -> Play:
    """So many seconds of load with few free blocks, a look each second."""
    for _ in range(seconds):
        if play.engine().state is State.READY:
            at = play.now + 1
            see(play, look(at, steps=at, running=9, free_blocks=free))
    return play


def test_under_load_drain_takes_it_out_and_back() -> None:
    play = press(serving(restart={"free_blocks_min": 100, "under_load": "drain", "free_blocks_for_s": 5}), 10)
    play.does(Probe).says("verdict", "draining").is_(State.DRAINING)
    assert play.phase(Draining).recoverable
    see(play, look(play.now + 1, steps=1, running=2, free_blocks=500)).is_(State.DRAINING)
    see(play, look(play.now + 1, steps=2, free_blocks=999)).is_(State.READY).says("ready")
    assert play.engine().last_exit is None
    see(play, look(play.now + 1, steps=2))
    assert codes(play) == []


def test_the_last_ready_of_a_group_is_not_drained_for_pressure() -> None:
    keys: dict[str, Any] = {"restart": {"free_blocks_min": 100, "under_load": "drain", "free_blocks_for_s": 2}}
    play = launching(spec(name="a", replica_group="g", **keys), spec(name="b", replica_group="g")).up("a")
    press(play, 4).is_(State.READY)
    assert play.phase(Ready).reasons[0].message.endswith("not done: it is the last ready engine of its replica group g")


def test_under_load_drain_restarts_what_does_not_recover() -> None:
    play = press(serving(restart={"free_blocks_min": 100, "under_load": "drain", "free_blocks_for_s": 5}), 10)
    see(play, look(play.now + 1, steps=1, free_blocks=3)).is_(State.STOPPING)
    assert play.engine().last_exit is not None


@pytest.mark.parametrize("op", [Op.STOP, Op.RESTART])
def test_an_operator_s_word_outranks_the_recovery(op: Op) -> None:
    play = press(serving(restart={"free_blocks_min": 100, "under_load": "drain", "free_blocks_for_s": 5}), 10)
    play.ask(op)
    see(play, look(play.now + 1, steps=2, free_blocks=999)).is_(State.STOPPING)


def test_a_changed_plan_outranks_the_recovery() -> None:
    play = press(serving(restart={"free_blocks_min": 100, "under_load": "drain", "free_blocks_for_s": 5}), 10)
    play.see(Reconfigured(play.node.spec, {"a": "p2"}, "uid 0"))
    see(play, look(play.now + 1, steps=2, free_blocks=999)).is_(State.STOPPING)


def test_under_load_restart_is_the_literal_rule() -> None:
    play = press(serving(restart={"free_blocks_min": 100, "under_load": "restart", "free_blocks_for_s": 5}), 10)
    play.is_(State.DRAINING)
    assert (play.phase(Draining).recoverable, play.record("verdict").reason) == (False, "free_blocks")


def test_a_page_that_is_missed_under_load_does_not_make_the_rule_literal() -> None:
    """A proxy states free blocks in /health; the busy engine's metrics time out now and then."""
    play = serving(restart=LITERAL)
    for _ in range(30):
        see(play, replace(look(play.now + 5, steps=play.now, running=9), free_blocks=3, free_stated=True))
        see(play, stated(play.now + 5, 3))
    assert (play.engine().state, codes(play)) == (State.READY, ["kv_pressure"])


# --- the pool ---------------------------------------------------------------------------------------------------------


def start_with(play: Play, blocks: int) -> Play:
    for _ in range(3):
        see(play, look(play.now + 5, total_blocks=blocks, free_blocks=blocks - 1))
    return play


def again(play: Play) -> Play:
    """It stops, and comes up again."""
    play.see(Exited("a", play.engine().generation, 0, None), after=1)
    return play.see(Swept("a", play.engine().generation)).up()


def test_a_shortfall_costs_one_restart_and_no_more() -> None:
    play = start_with(serving(), 1000)
    assert play.engine().good_blocks == 1000
    play.ask(Op.RESTART, now=True)
    start_with(again(play), 100).is_(State.DRAINING)
    assert (play.record("verdict").reason, play.engine().replacing) == ("kv_shortfall", True)
    assert play.phase(Draining).after is After.START
    see(play, look(play.now + 1, total_blocks=100)).is_(State.STOPPING)
    start_with(again(play), 100).is_(State.READY)
    assert (play.engine().replacing, play.engine().failures, play.engine().restart_times) == (False, 0, ())
    assert play.phase(Ready).reasons[0].message.endswith("; not done: a restart did not help")
    assert play.phase(Ready).next_look_at is None
    assert play.engine().good_blocks == 1000
    play.ask(Op.RESTART, now=True)
    start_with(again(play), 990)
    assert (play.engine().good_blocks, play.engine().shortfall_retried, codes(play)) == (1000, False, [])


def test_one_odd_page_is_no_pool() -> None:
    play = start_with(serving(), 1000)
    see(play, look(play.now + 5, total_blocks=7))
    see(play, look(play.now + 5, total_blocks=10**9))
    start_with(play, 1000)
    assert (play.engine().state, play.engine().good_blocks) == (State.READY, 1000)


def test_another_plan_has_another_pool() -> None:
    play = start_with(serving(), 1000).see(Reconfigured(serving().node.spec, {"a": "p2"}, "uid 0"))
    see(play, look(play.now + 1))
    start_with(again(play), 100).is_(State.READY)
    assert (play.engine().good_blocks, codes(play)) == (100, [])


def test_a_replacement_waits_for_its_window_and_says_so() -> None:
    window = {"maintenance_window": "0 3 * * * 2h"}
    play = start_with(serving(restart=window), 1000)
    play.ask(Op.RESTART, now=True)
    start_with(again(play), 100).is_(State.READY)
    assert play.phase(Ready).reasons[0].message.endswith("; not done: its maintenance window is closed (0 3 * * * 2h)")
    play.see(WindowOpened("a", 7200.0))
    play.see(WindowOpened("b", 7200.0))
    see(play, look(play.now + 5, total_blocks=100)).is_(State.DRAINING)


# --- nothing but fresh, repeated, positive evidence -------------------------------------------------------------------


def harmless(play: Play) -> None:
    assert play.engine().state is State.READY
    assert not [a for a in play.actions if isinstance(a, Sweep | Terminate | KeepEvidence)]
    assert "verdict" not in [kind for kind, _ in told(play)]


numbers = st.none() | st.integers(0, 10**6)
counters = st.none() | st.integers(0, 10**6).map(float)
gaps = st.floats(0.01, 2000.0)


@st.composite
def odd_ranks(draw: st.DrawFn) -> RankMetrics:
    return RankMetrics(
        rank=draw(st.integers(0, 3)),
        running=draw(numbers),
        waiting=draw(numbers),
        awake=draw(st.none() | st.booleans()),
        kv_usage=draw(st.none() | st.floats(0, 1)),
        total_blocks=draw(numbers),
        free_blocks=draw(numbers),
        iterations=draw(counters),
        prompt_tokens=draw(counters),
        generation_tokens=draw(counters),
    )


@st.composite
def odd_looks(draw: st.DrawFn) -> Sample:
    """Anything that the probe could ever make of what an engine, a proxy or a stranger answers."""
    ranks = tuple({one.rank: one for one in draw(st.lists(odd_ranks(), max_size=3))}.values())
    status = draw(st.sampled_from([None, 200, 200, 404, 500, 503]))
    return Sample(
        at=0.0,
        health_status=status,
        health_error=draw(st.sampled_from(["timeout", "malformed", "refused"])) if status is None else None,
        running=draw(numbers),
        waiting=draw(numbers),
        total_blocks=draw(numbers),
        free_blocks=draw(numbers),
        metrics_ok=draw(st.booleans()),
        ranks=ranks,
        pool_blocks=draw(numbers),
        free_stated=draw(st.booleans()),
    )


kinds = st.sampled_from(["healthy", "odd", "missing", "malformed", "bare", "copy", "canary", "clock"])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(kinds, gaps, odd_looks()), max_size=40), st.sampled_from(["wait", "drain", "restart"]))
def test_missing_stale_doubled_reordered_and_garbage_looks_do_no_harm(
    steps: list[tuple[str, float, Sample]], under_load: str
) -> None:
    """A healthy engine, seen through all kinds of noise; no two looks that make things up follow each other."""
    play = serving(restart={"under_load": under_load, "free_blocks_for_s": 0, "stall_after_s": 5})
    seen: list[Sample] = []
    moved = count(100)
    odd_before = False
    for kind, gap, odd in steps:
        at = play.now + gap
        watch = play.engine().watch
        if watch is not None and watch.canary.sent_at is not None and kind != "canary":
            canary(play, sane=len(seen) % 2 == 0)
        match kind:
            case "healthy":
                sample = look(at, steps=float(next(moved)), running=len(seen) % 5)
            case "odd" if not odd_before:
                sample = replace(odd, at=at)
            case "missing" | "malformed":
                sample = missing(at, "timeout" if kind == "missing" else "malformed")
            case "copy" if seen:
                sample = seen[len(steps) % len(seen)]
            case "canary":
                canary(play, ok=True)
                continue
            case "clock":
                play.see(Due(What.CLOCK), at=at)
                harmless(play)
                continue
            case _:
                sample = Sample(at=at, health_status=200)
        if kind == "odd" and not odd_before:
            odd_before = True
        elif kind == "healthy":
            odd_before = False
        seen.append(sample)
        see(play, sample)
        harmless(play)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["timeout", "malformed", "bare", "empty"]), gaps), max_size=60))
def test_an_engine_of_which_nothing_is_known_for_ever_is_left_alone(steps: list[tuple[str, float]]) -> None:
    play = serving()
    for kind, gap in steps:
        at = play.now + gap
        sample = {"bare": Sample(at=at, health_status=200), "empty": page(at, rank(steps=None, running=None))}
        see(play, sample.get(kind, missing(at, kind)))
        watch = play.engine().watch
        if watch is not None and watch.canary.sent_at is not None:
            canary(play)
        harmless(play)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["dead", "refused", "stall", "low", "pool"]), st.lists(st.integers(0, 1), max_size=50))
def test_one_look_however_often_it_is_heard_is_one_look(what: str, order: list[int]) -> None:
    at = T0 + 100.0
    evidence = {
        "dead": page(at, health_status=503),
        "refused": missing(at, "refused"),
        "stall": look(at, running=3),
        "low": stated(at, 1),
        "pool": look(at, total_blocks=10),
    }[what]
    play = start_with(serving(restart={"free_blocks_for_s": 0, "stall_after_s": 1}), 1000)
    old = look(T0 + 50.0, running=3)
    for number in order:
        play.see(Sampled("a", 1, (old, evidence)[number]), at=max(play.now, at) + 500)
        harmless(play)


def test_canaries_of_an_older_generation_are_none_of_ours() -> None:
    play = quiet(serving(), T0 + 65)
    play.see(CanaryEnded("a", 0, ok=False, sane=False)).does_nothing()


def test_nothing_is_said_about_an_engine_that_is_well() -> None:
    play = serving(restart={"free_blocks_min": 10})
    for at in range(5, 2000, 5):
        see(play, look(T0 + at, steps=at, running=at % 3, free_blocks=500))
    assert [record for record in play.told if record.kind in {"degraded", "recovered", "verdict"}] == []
    assert isinstance(play.told[-1], Record)
    assert play.engine().watch != Watch(since=0, moved_at=0)
