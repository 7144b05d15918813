"""The storm's invariants bite: what they are there for is staged by hand, and each sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from supervisord.core.incident import Event
from supervisord.core.messages import Severity
from tests.sim.engine import wait_until
from tests.storm import budget, ledger
from tests.storm import storm as storm_module
from tests.storm import witness as witness_module
from tests.storm.blame import BLIND_S, REST_S, Blame
from tests.storm.faults import KINDS
from tests.storm.ledger import Ends, Start, Told
from tests.storm.quiet import Quiet
from tests.storm.stage import Stage
from tests.storm.storm import Storm, StormError
from tests.storm.witness import Witness

# --- who may be restarted ---------------------------------------------------------------------------------------------


def test_a_restart_without_a_fault_is_seen() -> None:
    blame = Blame("ab")
    assert blame.seen("a", "starting", 1, 1.0) is None, "it begins"
    assert blame.seen("a", "ready", 1, 2.0) is None
    assert "generation 1 to 2" in str(blame.seen("a", "ready", 2, 3.0))
    assert "draining" in str(blame.seen("a", "draining", 2, 4.0))


def test_a_fault_excuses_until_the_engine_was_well_for_a_while() -> None:
    blame = Blame("ab")
    for name in "ab":
        blame.seen(name, "ready", 1, 0.0)
    blame.begin("a")
    assert blame.seen("a", "starting", 2, 1.0) is None
    assert "b was restarted" in str(blame.seen("b", "ready", 2, 1.0)), "nothing was done to b"
    assert blame.seen("a", "ready", 2, 2.0) is None
    blame.end("a")
    assert blame.seen("a", "ready", 2, 100.0) is None
    assert blame.seen("a", "ready", 3, 100.0 + REST_S / 2) is None, "its rules may still have evidence"
    assert blame.seen("a", "ready", 3, 200.0) is None
    assert blame.seen("a", "ready", 4, 200.1) is not None


def test_what_nobody_could_see_comes_out_later() -> None:
    blame = Blame("ab")
    for name in "ab":
        blame.seen(name, "ready", 1, 0.0)
    blame.begin("a")
    blame.end("a")
    blame.seen("a", "ready", 1, 1.0)
    blame.blind("ab", 10.0 + BLIND_S)
    assert not blame.well("a", 10.0 + BLIND_S)
    assert blame.well("a", 10.0 + BLIND_S + REST_S)
    assert blame.well("b", 11.0), "nothing was ever done to b"
    blame.sees(20.0)
    assert blame.well("a", 20.0 + REST_S), "it has come out by now"
    blame.blind("ab", float("inf"))
    blame.sees(21.0)
    assert not blame.well("a", 1000.0), "what was seen then was of before"


def test_what_a_new_daemon_found_may_start_but_not_be_another_generation() -> None:
    blame = Blame("a")
    blame.seen("a", "ready", 1, 0.0)
    assert blame.seen("a", "starting", 1, 1.0, adopting=True) is None
    assert blame.seen("a", "starting", 2, 2.0, adopting=True) is not None


def test_it_is_guarded_again_once_it_rested_and_that_is_counted() -> None:
    blame = Blame("a")
    blame.seen("a", "ready", 1, 0.0)
    blame.begin("a")
    blame.end("a")
    for second in range(1, 30):
        assert blame.seen("a", "ready", 1, float(second)) is None
    assert blame.guarded_s["a"] == 28 - REST_S, "from the first look after its rest on"
    blame.blind("a", 1000.0)
    assert blame.well("a", 30.0), "it is like one that nothing was ever done to"


def test_a_new_start_by_a_new_daemon_needs_no_rest() -> None:
    blame = Blame("a")
    blame.begin("a", rest_s=0.0)
    blame.end("a")
    blame.seen("a", "ready", 2, 1.0)
    assert blame.seen("a", "ready", 3, 1.5) is not None


def test_what_a_fault_left_in_a_process_excuses_as_long_as_that_lives() -> None:
    blame = Blame("a")
    blame.seen("a", "ready", 1, 0.0)
    blame.begin("a")
    blame.end("a", spoils=True)
    for generation, well in ((1, False), (2, False), (3, True)):
        blame.seen("a", "ready", generation, 100.0 * generation)
        blame.seen("a", "ready", generation, 100.0 * generation + 2 * REST_S)
        assert blame.well("a", 100.0 * generation + 2 * REST_S) is well


def test_who_starts_while_gpus_come_and_go_may_be_started_again() -> None:
    blame = Blame("ab")
    blame.seen("a", "ready", 1, 0.0)
    blame.blind("ab", 1.0, shifting=True)
    assert blame.well("a", 1.0), "it ran already"
    blame.seen("b", "ready", 1, 2.0)
    assert not blame.well("b", 2.0 + REST_S / 2)
    assert blame.well("b", 2.0 + REST_S)


def test_everybody_is_left_alone_now_and_then() -> None:
    units = [frozenset(unit) for unit in ("a", "b", "d", "g", "hi", "t")]
    quiet, seen, sights = Quiet(units, "ghit", Random(1)), set[str](), set[bool]()
    for now in range(0, 1000, 5):
        if quiet.turns(float(now)):
            assert quiet.gpus is bool(quiet.engines & set("ghit"))
            assert 1 <= len(quiet.engines) <= 4
            assert ("h" in quiet.engines) is ("i" in quiet.engines)
            seen |= quiet.engines
            sights.add(quiet.gpus)
    assert seen == set("abdghit")
    assert sights == {True, False}


# --- the books --------------------------------------------------------------------------------------------------------


def event(kind: str, now: float, **numbers: float) -> Event:
    return Event(
        id=1,
        at=now,
        boot_id="boot",
        now=now,
        severity=Severity.INFO,
        kind=kind,
        engine="a",
        generation=1,
        reason=None,
        message=f"{kind} a",
        numbers=numbers,
    )


def line(kind: str, engine: str = "a", generation: int = 1) -> dict[str, object]:
    return {"kind": kind, "engine": engine, "generation": generation, "event": f"{kind} {engine}", "timestamp": "T"}


def test_what_misses_in_the_history_is_seen() -> None:
    log = [Told(5.0, line("spawned")), Told(6.0, line("exited")), Told(7.0, line("exited"))]
    history = [event("spawned", 5.0), event("exited", 6.0)]
    (lost,) = ledger.missing(log, history, [])
    assert "exited a" in lost
    assert ledger.missing(log, history, [(6.5, 7.5)]) == [], "a daemon was killed then"


def test_the_same_sentence_again_does_not_stand_for_the_one_that_misses() -> None:
    log = [Told(at, line("exited")) for at in (5.0, 60.0, 120.0)]
    history = [event("exited", 60.0), event("exited", 120.0)]
    assert len(ledger.missing(log, history, [])) == 1
    assert ledger.missing(log, history, [(4.0, 6.0)]) == []
    assert len(ledger.missing(log, history, [(119.0, 121.0)])) == 1


def test_losses_that_were_told_are_counted() -> None:
    """So many may be missing, and not one more."""
    told = {**line("history", "", 0), "event": "2 events and 7 observations are missing in the history: the disk"}
    log = [Told(float(n), line("exited", generation=n)) for n in range(1, 4)]
    assert len(ledger.missing([*log, Told(9.0, told)], [], [])) == 1
    assert ledger.missing([*log[:2], Told(9.0, told)], [], []) == []


def test_what_was_counted_before_the_last_rest_pays_for_nothing_after_it() -> None:
    told = {**line("history", "", 0), "event": "5 events and 7 observations are missing in the history: the disk"}
    log = [Told(1.0, line("exited")), Told(2.0, told), Told(9.0, line("exited", generation=2))]
    assert ledger.missing(log, [], []) == []
    (lost,) = ledger.missing(log, [], [], checked=2)
    assert "exited a" in lost


def test_losses_are_forgiven_only_while_the_disk_is_full(tmp_path: Path) -> None:
    """And until the history has caught up; not since the first of many full disks."""
    with Stage(tmp_path) as stage:
        stage.daemon.log.touch()
        with Witness(stage) as witness:
            storm = Storm(stage, witness, 1, 1.0, 1)
        full, kill = KINDS["disk_full"], KINDS["daemon_sigkill"]
        now = time.monotonic()
        storm._forgive(full, now - 100)
        storm._full_until = now - 90
        storm._forgive(kill, now - 89)
        assert storm._forgiven[-1][0] == now - 100 - ledger.KILL_LOSES_S, "it had not caught up"
        storm._forgive(kill, now - 60)
        assert storm._forgiven[-1][0] == now - 60 - ledger.KILL_LOSES_S, "it had"
        storm._forgive(full, now - 50)
        storm._full_until = now - 40
        storm._forgive(kill, now - 39)
        assert storm._forgiven[-1][0] == now - 50 - ledger.KILL_LOSES_S, "another full disk"


def test_processes_that_nobody_told_of_are_seen() -> None:
    log = [Told(1.0, line("spawned")), Told(2.0, line("exited")), Told(3.0, line("spawned", generation=2))]
    good = [Start("a", 1, 10), Start("a", 2, 20)]
    calm = Ends({}, [])
    assert ledger.unexplained(good, log, {"a": 2}, calm) == []
    assert "ran twice" in " ".join(ledger.unexplained([*good, Start("a", 1, 11)], log, {"a": 2}, calm))
    twice = ledger.unexplained([*good, Start("a", 3, 30)], log, {"a": 2}, calm)
    assert "generation 3 of a (pid 30)" in " ".join(twice)
    assert "the end of generation 2 of a" in " ".join(ledger.unexplained(good, log, {}, calm))


@pytest.mark.parametrize(
    ("killed", "told"),
    [([], False), ([50.0], False), ([59.0], False), ([60.5], True), ([80.0], False), ([20.0, 61.0], True)],
)
def test_an_end_is_told_unless_the_daemon_was_killed_over_it(killed: list[float], told: bool) -> None:
    """One that comes while no daemon runs is told by the next."""
    ends = Ends({("a", 1): 60.0}, killed)
    assert (ledger.unexplained([Start("a", 1, 10)], [Told(1.0, line("spawned"))], {}, ends) == []) is told


@pytest.mark.parametrize(
    ("before", "reason", "wrong"),
    [
        ((("b", "exited"),), "kv_shortfall", True),
        ((("b", "exited"),), "stalled", False),
        ((("b", "exited"), ("b", "ready")), "kv_shortfall", False),
        ((("b", "exited"), ("b", "stopped")), "kv_shortfall", False),
        ((("b", "exited"), (None, "daemon_started")), "kv_shortfall", False),
        ((("other", "exited"),), "kv_shortfall", False),
        ((), "kv_shortfall", False),
    ],
)
def test_a_voluntary_restart_of_the_last_replica_is_seen(
    before: tuple[tuple[str | None, str], ...], reason: str, wrong: bool
) -> None:
    told = [replace(event(kind, 1.0), engine=engine) for engine, kind in before]
    found = ledger.out_of_turn([*told, replace(event("draining", 2.0), reason=reason)], ("a", "b"))
    assert bool(found) is wrong


@pytest.mark.parametrize(
    ("delay_s", "spent", "spawned_at", "asked", "wrong"),
    [
        (2.0, 1, 3.1, False, None),
        (2.0, 1, 2.5, False, "1.50 s after it was told to wait 2.0 s"),
        (2.0, 1, 2.5, True, None),
        (2.0, 9, 3.1, False, None),
        (0.5, 9, 3.1, False, "has spent its budget"),
    ],
)
def test_hasty_restarts_are_seen(delay_s: float, spent: int, spawned_at: float, asked: bool, wrong: str | None) -> None:
    numbers = {"delay_s": delay_s, "restarts_in_window": spent, "max_restarts": 5}
    history = [
        event("restart", 1.0, **numbers),
        *([replace(event("requested", 2.0), reason="start")] if asked else ()),
        event("spawned", spawned_at),
    ]
    found = budget.too_hasty(history, 2.0, [], [])
    assert (found == []) if wrong is None else (wrong in found[0])


RESTART = {"delay_s": 2.0, "restarts_in_window": 1, "max_restarts": 5}


def test_a_back_off_counts_from_the_turn_that_decided_it() -> None:
    """An event is noted when the loop gets to it: late on a machine that is short of breath."""
    history = [event("restart", 1.9, **RESTART), event("spawned", 3.1)]
    assert budget.too_hasty(history, 2.0, [], [])
    assert budget.too_hasty(history, 2.0, [0.5, 1.0, 3.0], []) == []
    assert budget.too_hasty(history, 2.0, [0.5, 1.5, 3.0], []), "that was still too soon"
    late = [event("restart", 100.0, **RESTART), event("spawned", 101.0)]
    assert budget.too_hasty(late, 2.0, [1.0], []), "its turn is not in the history"


@pytest.mark.parametrize(
    ("between", "asked", "forgotten", "wrong"),
    [
        ("daemon_started", [], [], True),
        ("daemon_started", [], [(0.5, 2.0)], False),
        ("daemon_ending", [], [], False),
        ("reload", [], [], True),
        ("reconfigured", [], [], True),
        ("daemon_started", [Told(1.5, {**line("requested"), "reason": "start"})], [], False),
        ("daemon_started", [Told(1.5, {**line("requested"), "reason": "drain"})], [], True),
    ],
)
def test_a_back_off_outlives_the_daemon(
    between: str, asked: list[Told], forgotten: list[tuple[float, float]], wrong: bool
) -> None:
    other = replace(event(between, 1.8), engine="a" if between == "reconfigured" else None)
    history = [event("restart", 1.0, **RESTART), other, event("spawned", 2.5)]
    assert bool(budget.too_hasty(history, 2.0, [], asked, forgotten)) is wrong


def started(*at: float, **between: str) -> tuple[list[Start], list[Told], dict[tuple[str, int], float]]:
    """Generations of engine a from 1 on, seen until 0.1 s before the next; `g3="kind:reason"` is told before that."""
    starts = [Start("a", number, 10 + number, when) for number, when in enumerate(at, 1)]
    log = []
    for start in starts:
        kind, _, reason = between.get(f"g{start.generation}", "exited:by itself").partition(":")
        told = line(kind, generation=start.generation)
        if kind == "exited":
            told["event"] = f"a ended {reason} while ready"
        log.append(Told(start.at, {**told, "reason": reason}))
        log.append(Told(start.at, line("spawned", generation=start.generation)))
    return starts, log, {("a", start.generation): after - 0.1 for start, after in zip(starts, at[1:], strict=False)}


RULE = budget.Rule(max_restarts=2, window_s=30.0, backoff_max_s=2.0)


@pytest.mark.parametrize(
    ("at", "between", "wrong"),
    [
        ((1, 2, 3, 4), {}, 0),
        ((1, 2, 3, 4, 5), {}, 1),
        ((1, 2, 3, 4, 5, 6), {}, 2),
        ((1, 12, 23, 34, 45), {}, 0),
        ((1, 2, 3, 4, 5), {"g3": "requested:start"}, 0),
        ((1, 2, 3, 4, 5), {"g3": "exited:unseen"}, 0),
        ((1, 2, 3, 4, 5, 6), {"g5": "requested:reset"}, 0),
        ((1, 2, 3, 4, 5), {"g3": "daemon_started:"}, 1),
        ((1, 2, 3, 4, 5), {"g3": "killing:gpu_fault"}, 0),
        ((1, 2, 3, 4, 5), {"g3": "killing:engine_dead"}, 1),
        ((1, 2, 3, 4, 5), {"g3": "waiting:max_parallel_starts"}, 1),
    ],
)
def test_starts_beyond_the_budget_are_counted_from_outside(
    at: tuple[float, ...], between: dict[str, str], wrong: int
) -> None:
    starts, log, last_seen = started(*at, **between)
    assert len(budget.overspent(starts, log, last_seen, RULE)) == wrong
    assert budget.overspent(starts, log, last_seen, RULE, [(0.0, 100.0)]) == [], "the daemon may not have known"


def test_a_spent_budget_that_is_waited_for_is_right() -> None:
    starts, log, last_seen = started(1, 2, 3, 4, 5)
    assert budget.overspent(starts, log, last_seen | {("a", 4): 2.9}, RULE) == []


# --- the witness, over the real daemon --------------------------------------------------------------------------------


def violated(witness: Witness, word: str) -> str:
    """Wait until a violation with these words was seen."""
    return wait_until(lambda: [text for text in witness.violations if word in text], 40, f"a violation: {word}")[0]


@contextmanager
def twin_of(stage: Stage, engine: str, generation: int) -> Iterator[int]:
    """A process that bears the marks of an engine."""
    marks = {"SUPERVISED_STATE": str(stage.daemon.state_dir), "SUPERVISED_ENGINE": engine}
    command = ["/bin/sleep", "100"]
    with subprocess.Popen(command, env={**marks, "SUPERVISED_GENERATION": str(generation)}) as twin:
        try:
            yield twin.pid
        finally:
            twin.kill()


def test_the_witness_sees_what_must_not_be(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage, Witness(stage, answer_s=1.0) as witness:
        stage.start()
        stage.settle(60)
        assert witness.violations == []
        pid = stage.process("calm")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert violated(witness, "though nothing was done to it").startswith("calm ")
        with twin_of(stage, "b", 7) as pid:
            assert "beside generation 7" in violated(witness, "two generations")
            assert pid in {seen.pid for seen in stage.processes("b")}
        with frozen(stage.daemon.pid):
            violated(witness, "did not say its status")
        os.kill(stage.stranger, signal.SIGKILL)
        violated(witness, "somebody else's vllm")
        with added(stage.daemon.log, '{"kind": "x", "event": "Traceback (most recent call last):"}', "no document"):
            violated(witness, "speaks of a bug")
            violated(witness, "a line that is none")
        bug = stage.daemon.state_dir / "bug-1.txt"
        bug.write_text("in step", encoding="utf-8")
        assert "in step" in violated(witness, "met a bug")
        bug.unlink()
        stage.daemon.stop()
        violated(witness, "ended by itself with 0")
    assert witness.most.looks > 10


@pytest.mark.parametrize(
    ("limit", "what"),
    [("RSS_MAX_MIB", "MiB of memory"), ("DESCRIPTORS_MAX", "descriptors"), ("THREADS_MAX", "threads")],
)
def test_a_daemon_that_takes_too_much_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, what: str
) -> None:
    monkeypatch.setattr(witness_module, limit, 3)
    with Stage(tmp_path) as stage, Witness(stage) as witness:
        stage.start()
        assert violated(witness, what) == f"the daemon has more than 3 {what}"


def test_what_must_not_be_at_rest_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stage(tmp_path) as stage, Witness(stage) as witness:
        storm = Storm(stage, witness, 1, 1.0, 1)
        stage.start()
        stage.settle(120)
        wait_until(storm._nothing_else_lives, 60, "all to be as status says")
        with twin_of(stage, "nobody", 1):
            wait_until(lambda: not storm._nothing_else_lives(), 10, "a process of nobody to be seen")
        wait_until(storm._nothing_else_lives, 60, "it to be gone")
        document = stage.status()
        document["engines"][0]["pid"] = 1
        with monkeypatch.context() as patch:
            patch.setattr(stage, "status", lambda: document)
            assert not storm._nothing_else_lives(), "status names a main process that is none"
        (gpu,) = stage.gpus_of("g")
        gpu.lose()
        wait_until(lambda: stage.engine("g").get("state") == "waiting", 60, "g to wait for its GPU")
        monkeypatch.setattr(storm_module, "CONVERGED_S", 3.0)
        with pytest.raises(AssertionError, match="all engines to be ready"):
            storm._come_to_rest()
        gpu.come_back()
        with twin_of(stage, "nobody", 1), pytest.raises(StormError, match=r"the daemon ended with 0 and left \[.Seen"):
            storm._stop()


def test_a_daemon_that_ends_with_another_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stage(tmp_path) as stage, Witness(stage) as witness:
        stage.start()
        stop = stage.daemon.stop
        monkeypatch.setattr(stage.daemon, "stop", lambda: stop() or 3)
        with pytest.raises(StormError, match=r"the daemon ended with 3 and left \[\]"):
            Storm(stage, witness, 1, 1.0, 1)._stop()
        monkeypatch.undo()


def test_a_teardown_that_fails_does_not_hide_what_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def see() -> None:
        with Stage(tmp_path) as stage:
            stage._over.callback(lambda: 1 / 0)
            raise StormError("seen before")

    with pytest.raises(StormError, match="seen before"):
        see()
    assert "ZeroDivisionError" in capsys.readouterr().out


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def added(log: Path, *lines: str) -> Iterator[None]:
    """Lines that the daemon never wrote, and that are gone afterwards."""
    with log.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    try:
        yield
    finally:
        kept = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.strip() not in lines]
        log.write_text("".join(kept), encoding="utf-8")
