"""Persistence mode: what is wanted for which GPU, what keeps us from setting it, and what is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest

from supervisord.core import persistence
from supervisord.core.gpu_samples import GpuReading
from supervisord.core.messages import (
    Booted,
    Due,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    KillGpuHelper,
    PersistenceSet,
    Reconfigured,
    SetPersistence,
    Severity,
    What,
    XidSeen,
)
from supervisord.core.model import Gpu, Persistence
from supervisord.core.persistence import HELD_FOR_S, RETRY_S, REVERTED_MAX, wanted
from supervisord.core.spec import GpuSpec
from supervisord.core.telemetry import ABANDON_S
from tests.core.play import Play, card, engine_spec, foreign, new_node, node_spec, plan_ids

H200 = Gpu("GPU-0", pci_id="0000:1b:00.0", name="NVIDIA H200", generation="hopper", kind="datacenter")


# --- what is wanted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "kind", "value"),
    [
        ("ampere", "geforce", False),
        ("ada", "geforce", True),
        ("blackwell", "geforce", None),
        ("turing", "geforce", None),
        ("pascal", "datacenter", None),
        ("volta", "datacenter", True),
        ("turing", "datacenter", True),
        ("turing", "professional", None),
        ("ampere", "datacenter", True),
        ("ampere", "professional", True),
        ("hopper", "datacenter", True),
        ("blackwell", "datacenter", True),
        ("blackwell", "integrated", None),
        ("hopper", "superchip", None),
        ("", "", None),
    ],
)
def test_the_defaults_of_the_policy(*, generation: str, kind: str, value: bool | None) -> None:
    found, why = wanted(Gpu("GPU-0", generation=generation, kind=kind), GpuSpec())
    assert found is value
    assert why.startswith(f"default for {generation or 'unknown'} {kind or 'unknown'}")
    assert why.endswith(": left as it is") is (value is None)


@pytest.mark.parametrize(("word", "value"), [("on", True), ("off", False), ("leave", None)])
def test_a_word_for_all(*, word: Literal["on", "off", "leave"], value: bool | None) -> None:
    assert wanted(H200, GpuSpec(persistence=word)) == (value, f'gpu.persistence = "{word}"')


def test_the_most_exact_override_holds() -> None:
    overrides = {"NVIDIA H*": "off", "00000000:1B:00.0": "leave", "GPU-0": "on", "GPU-7": "off"}
    assert wanted(H200, GpuSpec(persistence_override=overrides)) == (True, 'persistence_override."GPU-0"')
    del overrides["GPU-0"]
    assert wanted(H200, GpuSpec(persistence_override=overrides))[0] is None
    del overrides["00000000:1B:00.0"]
    assert wanted(H200, GpuSpec(persistence_override=overrides)) == (False, 'persistence_override."NVIDIA H*"')
    del overrides["NVIDIA H*"]
    assert wanted(H200, GpuSpec(persistence="off", persistence_override=overrides)) == (
        False,
        'gpu.persistence = "off"',
    )
    assert wanted(H200, GpuSpec(persistence="off", persistence_override={"GPU-0": "auto"}))[0] is True


# --- reconciling ------------------------------------------------------------------------------------------------------


OFF, ON = card(persistence=False), card(persistence=True)


def seen(*cards: GpuReading, **keys: Any) -> Play:
    """A first sweep that saw these cards; `keys` of [gpu]."""
    spec = replace(node_spec(engine_spec(gpus=("GPU-0",), autostart=False)), gpu=GpuSpec(**keys))
    play = Play(new_node(spec))
    play.cards = None
    return play.see(Booted()).sweep(*cards)


def sets(play: Play) -> list[SetPersistence]:
    return [action for action in play.actions if isinstance(action, SetPersistence)]


def done(play: Play, *, on: bool = True, error: int | None = None) -> Play:
    return play.see(PersistenceSet("GPU-0", on, error))


def state(play: Play) -> Persistence:
    return play.gpu().persistence


def test_what_is_right_is_left_alone() -> None:
    play = seen(ON)
    assert sets(play) == []
    assert (state(play).wanted, state(play).why, state(play).told) == (True, "default for hopper datacenter", "")


def test_what_is_wrong_is_set_once_and_read_back() -> None:
    play = seen(OFF)
    assert sets(play) == [SetPersistence(1, "GPU-0", on=True)]
    done(play).says("persistence_set")
    assert play.record("persistence_set").message == (
        "GPU 0 (GPU-0): persistence mode set to on (default for hopper datacenter)"
    )
    play.sweep(ON, after=5.0).says()
    assert sets(play) == []


@pytest.mark.parametrize(
    "reading", [replace(OFF, persistence=None), replace(OFF, name="x", brand=None, architecture=None, compute=None)]
)
def test_unknown_and_unwanted_are_left_alone(reading: GpuReading) -> None:
    assert sets(seen(reading)) == []


def test_off_is_set_too() -> None:
    play = seen(ON, persistence="off")
    assert sets(play) == [SetPersistence(1, "GPU-0", on=False)]
    assert "set to off" in done(play, on=False).record("persistence_set").message


@pytest.mark.parametrize(
    ("reading", "keys", "why"),
    [
        (replace(OFF, mig=True), {}, "MIG is on"),
        (replace(ON, processes=(foreign(),)), {"persistence": "off"}, "processes use it"),
        (replace(ON, processes=None), {"persistence": "off"}, "processes use it"),
        (replace(OFF, name="NVIDIA GB10", compute=(12, 1)), {"persistence": "on"}, "shares memory with the CPU"),
        (replace(OFF, name="NVIDIA GH200"), {"persistence": "on"}, "shares memory with the CPU"),
    ],
)
def test_what_keeps_us_from_it_is_told_once(reading: GpuReading, keys: dict[str, Any], why: str) -> None:
    play = seen(reading, **keys)
    assert sets(play) == []
    record = play.record("persistence_drift")
    assert why in record.message
    assert record.severity is Severity.NOTICE
    play.sweep(reading, after=40.0).says()
    assert why in state(play).told
    # Somebody set it himself, and it drifts again: that is news.
    play.sweep(replace(reading, persistence=not reading.persistence), after=40.0).says()
    assert state(play).told == ""
    play.sweep(reading, after=40.0).says("persistence_drift")


def test_processes_do_not_matter_for_on() -> None:
    assert sets(seen(replace(OFF, processes=(foreign(),)))) != []


@pytest.mark.parametrize(
    ("error", "why"), [(4, "it needs root"), (3, "this GPU does not support it"), (999, "NVML code 999")]
)
def test_refused(error: int, why: str) -> None:
    play = done(seen(OFF), error=error)
    assert f"cannot set persistence mode to on: {why}" in play.record("persistence_drift").message
    play.sweep(OFF, after=5.0).says()
    assert sets(play) == []
    assert state(play).told == f"refused ({why})"


@pytest.mark.parametrize("error", [4, 3])
def test_some_refusals_are_final(error: int) -> None:
    play = done(seen(OFF), error=error)
    for _ in range(10):
        play.sweep(OFF, after=RETRY_S).says()
        assert sets(play) == []


def test_other_failures_are_tried_again_three_times_an_hour() -> None:
    play = done(seen(OFF), error=999).says("persistence_drift")
    tries = []
    for _ in range(2 * int(HELD_FOR_S) // 60):
        play.sweep(OFF, after=60.0)
        if sets(play):
            tries.append(play.now)
            done(play, error=999).says()
    assert len(tries) == 2 * REVERTED_MAX
    assert min(later - one for one, later in pairwise(tries)) >= RETRY_S
    done(play.sweep(OFF, after=RETRY_S)).says("persistence_set")
    play.sweep(ON, after=1.0).says()
    assert state(play).told == ""


def test_another_failure_is_told() -> None:
    play = done(seen(OFF), error=999).sweep(OFF, after=RETRY_S)
    done(play, error=4).says("persistence_drift")
    play.sweep(OFF, after=RETRY_S).says()
    assert sets(play) == []


def test_a_gpu_that_waits_for_a_reset_is_left_alone() -> None:
    """A42: persistence mode on blocks a reset; an operator who switches it off for one is not reverted."""
    play = seen(ON).see(XidSeen(1000.0, "GPU-0", 119, "nvml"))
    play.sweep(OFF, after=1.0).says("persistence_drift")
    assert "it is quarantined" in play.record("persistence_drift").message
    assert sets(play) == []
    play.sweep(OFF, after=60.0).says()
    play.see(GpuRequested(5, GpuOp.CLEAR, "GPU-0", "uid 0")).sweep(OFF, after=1.0)
    assert len(sets(play)) == 1


def test_a_changed_policy_tries_again() -> None:
    play = done(seen(OFF), error=4)
    spec = replace(play.node.spec, gpu=GpuSpec(persistence="on"))
    play.see(Reconfigured(spec, plan_ids(spec), "uid 0")).sweep(OFF, after=1.0)
    assert len(sets(play)) == 1
    assert (state(play).why, state(play).told) == ('gpu.persistence = "on"', "")


def test_three_that_are_undone_are_a_conflict() -> None:
    play = seen(OFF)
    for _ in range(REVERTED_MAX):
        assert len(sets(play)) == 1
        done(play).sweep(OFF, after=5.0)
    assert sets(play) == []
    record = play.record("persistence_conflict")
    assert f"changed it back {REVERTED_MAX} times" in record.message
    play.sweep(OFF, after=5.0).says()
    assert "nvidia-persistenced" in state(play).told


def test_one_that_is_never_answered_is_tried_again_later() -> None:
    """Not at once: the driver hangs in it, and the next probe would hang as well."""
    play = hanging()
    play.see(GpuHelperEnded(1, "killed")).see(Due(What.CLOCK), after=5.0)
    play.sweep(OFF)
    assert sets(play) == []
    assert "the driver never answered" in play.record("persistence_drift").message
    failed_at = play.now
    play.sweep(OFF, after=5.0).says()
    play.sweep(OFF, after=failed_at + RETRY_S - play.now - 0.001).says()
    assert sets(play) == []
    play.sweep(OFF, after=0.001).says()
    assert sets(play) == [SetPersistence(2, "GPU-0", on=True)]


def test_it_is_not_while_the_probe_that_tried_it_sits_in_the_kernel() -> None:
    """A second one that hangs there would be the last: all GPUs would be lost from sight."""
    play = hanging().see(Due(What.CLOCK), after=ABANDON_S)
    assert play.node.telemetry.stuck == 1
    for _ in range(3):
        play.sweep(OFF, after=RETRY_S)
        assert sets(play) == []
    play.see(GpuHelperEnded(1, "killed")).sweep(OFF, after=1.0)
    assert len(sets(play)) == 1


def hanging() -> Play:
    """The sweep after a set is not answered in time."""
    play = seen(OFF)
    play.see(Due(What.POLL), after=5.0)
    while KillGpuHelper(1) not in play.actions:
        play.wake()
    return play


def test_one_that_was_never_answered_but_is_right_now() -> None:
    play = seen(OFF)
    play.see(GpuHelperEnded(1, "killed")).see(Due(What.CLOCK), after=5.0)
    play.sweep(ON).says()
    assert (state(play).asked, state(play).told) == (False, "")


def test_what_is_lost_or_unknown_is_left_alone() -> None:
    play = seen(OFF)
    done(play).sweep(replace(OFF, error=15), after=1.0)
    assert sets(play) == []
    play.see(PersistenceSet("GPU-9", on=True, error=None)).says()


def test_one_that_held_for_an_hour_is_no_conflict() -> None:
    play = seen(OFF)
    for _ in range(2 * REVERTED_MAX):
        done(play).sweep(ON, after=HELD_FOR_S).sweep(OFF, after=5.0)
        assert len(sets(play)) == 1
    for _ in range(REVERTED_MAX):
        done(play).sweep(ON, after=HELD_FOR_S - 10.0).sweep(OFF, after=5.0)
    play.says("persistence_conflict")


def test_the_limit() -> None:
    assert persistence.REVERTED_MAX == 3
