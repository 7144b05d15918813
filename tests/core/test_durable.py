"""What survives the daemon: a round trip, garbage of every shape, another boot."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core.durable import restore, save
from supervisord.core.memory import MemoryWatch
from supervisord.core.messages import Booted, Exited, Op, Swept
from supervisord.core.model import (
    STATE_OF,
    After,
    Backoff,
    Draining,
    Engine,
    ExitClass,
    Failed,
    FailedKind,
    LastExit,
    Left,
    Node,
    Phase,
    Ready,
    Reason,
    Starting,
    State,
    Stopped,
    Warmup,
)
from supervisord.core.spec import NodeSpec
from supervisord.core.watch import Watch
from tests.core.play import T0, Play, engine_spec, new_node, node_spec, plan_ids, ready

NOW: Final = 5000.0
SPEC: Final = node_spec(engine_spec())


def restored(
    saved: object, *, same_boot: bool = True, spec: NodeSpec = SPEC, plan: str = "p1", spawned: int = 0
) -> Engine:
    """Engine "a" of a daemon that starts at NOW, from what was saved for it."""
    known = {"a": json.loads(json.dumps(saved))}
    return restore(spec, plan_ids(spec, a=plan), known, NOW, same_boot=same_boot, spawned={"a": spawned})["a"]


def saved(**fields: Any) -> dict[str, Any]:
    """What is saved of engine "a" with these fields."""
    engine = replace(Engine(spec=SPEC.engines["a"], plan_id="p1"), **fields)
    return save(Node(spec=SPEC, engines={"a": engine}))["a"]


MOMENTS: Final = st.floats(0.0, NOW)
COUNTS: Final = st.integers(0, 2**40)
EXITS: Final = st.none() | st.builds(
    LastExit,
    kind=st.sampled_from(ExitClass),
    code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    at=MOMENTS,
    generation=COUNTS,
    advice=st.text(),
)
PHASES: Final = st.sampled_from(
    [
        Stopped(),
        Ready(),
        Backoff(1.0, Reason("x", "y")),
        Failed(FailedKind.CONFIG, "c"),
        Failed(FailedKind.UNKILLABLE, "u"),
    ]
) | st.builds(Failed, st.just(FailedKind.CRASH_LOOP), st.text())


@settings(deadline=None)
@given(
    generation=COUNTS,
    warm=COUNTS,
    wanted=st.booleans(),
    failures=COUNTS,
    times=st.lists(MOMENTS, max_size=8).map(tuple),
    good=st.none() | st.text(),
    last=EXITS,
    phase=PHASES,
)
def test_round_trip(
    *,
    generation: int,
    warm: int,
    wanted: bool,
    failures: int,
    times: tuple[float, ...],
    good: str | None,
    last: LastExit | None,
    phase: Phase,
) -> None:
    warm = min(warm, generation)
    engine = restored(
        saved(
            generation=generation,
            warm_generation=warm,
            wanted=wanted,
            failures=failures,
            restart_times=times,
            good_plan_id=good,
            last_exit=last,
            phase=phase,
        )
    )
    kept = isinstance(phase, Failed) and phase.kind is FailedKind.CRASH_LOOP
    assert engine == Engine(
        spec=SPEC.engines["a"],
        plan_id="p1",
        phase=phase if kept else Stopped(),
        since=0.0 if kept or phase == Stopped() else NOW,
        left=Left(State.BACKOFF, 0.0, cause=phase.reason, until=phase.until)
        if isinstance(phase, Backoff)
        else Left(STATE_OF[type(phase)], 0.0),
        wanted=wanted,
        generation=generation,
        restart_times=times,
        failures=failures,
        good_plan_id=good,
        warm_generation=warm,
        last_exit=last,
    )


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
FIELDS: Final = sorted(saved())


@settings(deadline=None)
@given(JSON | st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_garbage_is_as_good_as_nothing(garbage: object) -> None:
    engine = restored(garbage)
    play = Play(Node(spec=SPEC, engines={"a": engine}), NOW).see(Booted())
    assert play.engine().state in {State.STARTING, State.STOPPED, State.FAILED}
    json.dumps(save(play.node), allow_nan=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation", -1),
        ("generation", True),
        ("generation", "7"),
        ("generation", 1.5),
        ("wanted", 0),
        ("wanted", "no"),
        ("failures", -3),
        ("good_plan_id", 7),
        ("failed", {"kind": "config", "message": "x"}),
        ("failed", "crash_loop"),
        ("failed", {"kind": ["crash_loop"]}),
        ("warm_generation", 9),
        ("last_exit", {"class": "crash"}),
        ("last_exit", {"class": "nonsense", "at": 1.0}),
        ("last_exit", {"class": ["crash"], "at": 1.0}),
        ("last_exit", {"class": "crash", "at": True}),
        ("last_exit", {"class": "crash", "at": float("nan")}),
        ("last_exit", {"class": "crash", "at": float("inf")}),
        ("last_exit", {"class": "crash", "at": -1.0}),
        ("last_exit", {"class": "crash", "at": 10**400}),
        ("last_exit", {"class": "crash", "at": NOW + 1}),
        ("good_blocks", 10**400),
        ("replacing", 1),
        ("refused_claim", ["p1"]),
        ("refused_claim", [1, 0.5]),
        ("refused_claim", ["p1", float("nan")]),
        ("app_xids", "31"),
        ("app_xids", [31, None]),
        ("ready_since", NOW + 1),
        ("ready_since", "1"),
        ("state", "ready"),
        ("since", 1.0),
        ("warmup", [1]),
        ("memory", "5"),
        ("restart_times", "1234"),
        ("restart_times", [None, "1", True, float("nan"), float("inf"), -1, 10**400, NOW + 1, [], {}]),
    ],
)
def test_a_wrong_value_is_as_good_as_an_absent_one(field: str, value: object) -> None:
    assert restored({field: value}) == restored({})


def test_one_wrong_value_does_not_spoil_the_others() -> None:
    engine = restored({**saved(generation=4, wanted=False, failures=2), "restart_times": [1, "x", 2.5]})
    assert (engine.generation, engine.wanted, engine.failures, engine.restart_times) == (4, False, 2, (1.0, 2.5))


def test_an_exit_with_odd_numbers_keeps_what_is_right() -> None:
    engine = restored({"last_exit": {"class": "crash", "at": 7, "code": "1", "signal": True, "generation": -1}})
    assert engine.last_exit == LastExit(ExitClass.CRASH, None, None, 7.0, 0, "")


def test_a_warm_up_with_odd_numbers_keeps_what_is_right() -> None:
    odd = {"first_ms": 7, "settled_ms": 10**400, "rounds": -1, "problem": {"code": "x"}, "gpu_bytes": 10**400}
    assert restored({"warmup": odd}).warmup == Warmup(first_ms=7.0, settled_ms=None, rounds=0)


def test_odd_levels_are_none() -> None:
    engine = restored({"memory": {"asleep": 1, "host": 10**400, "gpu": -5}})
    assert engine.watch == Watch(NOW, NOW)


def test_a_drain_without_a_cause_is_none() -> None:
    engine = restored({"state": "draining", "since": 1, "after": "hold", "cause": {"code": "operator"}})
    assert engine.left == Left(State.DRAINING, 1.0)


def test_nothing_saved_means_the_configuration() -> None:
    assert restored(None).wanted
    assert not restored(None, spec=node_spec(engine_spec(autostart=False))).wanted


# --- what lives ---

SETTLED: Final = MemoryWatch(seen_at=9.0, settling=0, high_bytes=5_000, lows=((9.0, 6_000),))
OF_GENERATION: Final[dict[str, Any]] = {
    "generation": 3,
    "warm_generation": 3,
    "phase": Draining(After.HOLD, None, Reason("operator", "drain requested by uid 0"), 1.0),
    "since": 900.0,
    "ready_since": 700.0,
    "warmup": Warmup(28.5, 10.0, 3, Reason("warmup_failed", "x"), 4_000, 3_000, 12.5),
    "watch": Watch(5.0, 6.0, asleep=True, host=SETTLED, gpu=replace(SETTLED, settling=1)),
    "app_xids": ("Xid 31: x",),
    "replacing": True,
    "refused_claim": ("p1", 0.92),
    "devices": ("GPU-1",),
}


def test_what_belongs_to_the_generation_that_lives_goes_on() -> None:
    engine = restored(saved(**OF_GENERATION), spawned=3)
    for name in ("ready_since", "warmup", "app_xids", "replacing", "refused_claim", "devices"):
        assert getattr(engine, name) == OF_GENERATION[name]
    assert engine.left == Left(State.DRAINING, 900.0, After.HOLD, Reason("operator", "drain requested by uid 0"))
    assert engine.since == NOW
    assert engine.watch == Watch(NOW, NOW, asleep=True, host=MemoryWatch(settling=0, high_bytes=5_000))


def test_nothing_of_another_generation_does() -> None:
    engine = restored(saved(**OF_GENERATION), spawned=4)
    assert (engine.left, engine.ready_since, engine.warmup, engine.watch, engine.app_xids) == (None,) * 4 + ((),)


def test_nothing_of_another_boot_does() -> None:
    engine = restored(saved(**OF_GENERATION), same_boot=False, spawned=3)
    fresh = Engine(spec=SPEC.engines["a"], plan_id="p1", since=NOW, wanted=True, generation=3, warm_generation=3)
    assert engine == fresh


def test_one_that_was_adopted_and_does_not_answer_yet_is_as_it_was_left() -> None:
    before = Left(State.READY, 400.0)
    assert restored(saved(phase=Starting(1.0, 2.0), since=900.0, left=before)).left == before
    assert restored(saved(phase=Ready(), since=900.0, left=before)).left == Left(State.READY, 900.0)


def test_a_drain_that_may_be_taken_back_is_judged_anew() -> None:
    drained = Draining(After.CRASH, 9.0, Reason("free_blocks", "x"), 1.0, recoverable=True)
    assert restored(saved(phase=drained, since=900.0)).left == Left(State.READY, 900.0)


def test_a_look_alone_changes_nothing_that_is_saved() -> None:
    play = ready()
    before = save(play.node)
    play.sample(running=1, waiting=0)
    assert play.engine().sample is not None
    assert save(play.node) == before


# --- boots ---


def test_after_a_reboot_autostart_counts_and_generations_go_on() -> None:
    before = saved(
        generation=9,
        warm_generation=9,
        wanted=False,
        failures=4,
        restart_times=(1.0,),
        good_plan_id="p1",
        phase=Failed(FailedKind.CRASH_LOOP, "x"),
        last_exit=LastExit(ExitClass.CRASH, 1, None, 1.0, 9, "x"),
    )
    engine = restored(before, same_boot=False)
    assert engine == Engine(
        spec=SPEC.engines["a"],
        plan_id="p1",
        since=NOW,
        wanted=True,
        generation=9,
        warm_generation=9,
        good_plan_id="p1",
    )


def test_a_crash_loop_is_kept_for_the_same_plan_only() -> None:
    before = saved(phase=Failed(FailedKind.CRASH_LOOP, "x"))
    assert restored(before).phase == Failed(FailedKind.CRASH_LOOP, "x")
    assert restored(before, plan="p2").phase == Stopped()


def test_the_records_of_the_launcher_may_know_more() -> None:
    """A daemon that was killed between the spawn and the end of its turn has not saved it."""
    assert restored(saved(generation=3), spawned=4).generation == 4
    assert restored(saved(generation=3), spawned=2).generation == 3


@pytest.mark.parametrize(("launching", "spawned", "known"), [(None, 3, True), (4, 4, True), (None, 4, False)])
def test_gpus_belong_to_the_generation_that_was_given_them(*, launching: int | None, spawned: int, known: bool) -> None:
    """A daemon that was killed before it saved a launch: what lives is not where the last one was."""
    before = saved(generation=3, launching=launching, devices=("GPU-1",))
    engine = restored(before, spawned=spawned)
    assert (engine.generation, engine.devices) == (spawned, ("GPU-1",) if known else ())
    assert restored(before, spawned=spawned, same_boot=False).devices == ()


# --- through the core ---


def test_an_operators_stop_survives_and_so_does_the_budget() -> None:
    play = ready().see(Exited("a", 1, 0, None)).see(Swept("a", 1))
    engine = restored(save(play.node)["a"])
    assert (engine.restart_times, engine.failures, engine.generation, engine.warm_generation) == ((T0,), 1, 1, 1)
    play.ask(Op.STOP)
    assert not restored(save(play.node)["a"]).wanted


BACKING_OFF: Final = Backoff(NOW + 20.0, Reason("exited", "boom"))


def test_a_back_off_goes_on() -> None:
    left = restored(saved(phase=BACKING_OFF)).left
    assert left == Left(State.BACKOFF, 0.0, cause=BACKING_OFF.reason, until=NOW + 20.0)


@pytest.mark.parametrize(
    "changed", [{"until": None}, {"until": "soon"}, {"cause": None}, {"plan_id": "p0"}, {"state": "stopped"}]
)
def test_a_back_off_that_is_not_known_well_is_over(changed: dict[str, Any]) -> None:
    left = restored(saved(phase=BACKING_OFF) | changed).left
    assert left is not None
    assert left.until is None


def test_a_back_off_is_never_longer_than_the_longest() -> None:
    longest_s = SPEC.engines["a"].restart.backoff_max_s
    left = restored(saved(phase=BACKING_OFF) | {"until": NOW * 10}).left
    assert left is not None
    assert left.until == NOW + longest_s


def test_an_engine_that_is_no_longer_configured_is_not_saved() -> None:
    node = new_node(node_spec(engine_spec("a"), engine_spec("b")))
    play = Play(node).change("b", removed=True)
    assert set(save(play.node)) == {"a"}


def test_what_does_not_die_is_found_again_not_remembered() -> None:
    assert restored(saved(phase=Failed(FailedKind.UNKILLABLE, "x"))).phase == Stopped()
