"""Rules for engines that do not work any more, at, below and above every threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisord.core.model import Sample
from supervisord.core.rules import Finding, Remedy
from supervisord.core.rules.hanging import engine_dead, stalled, unreachable, unresponsive
from supervisord.core.watch import Canary, RankWatch, Watch
from tests.core.looks import look, missing, page, rank, spec

NEW = Watch(since=0.0, moved_at=0.0)
SPEC = spec()


def remedy(finding: Finding | None) -> Remedy | None:
    return None if finding is None else finding.remedy


# --- engine_dead ------------------------------------------------------------------------------------------------------


def test_503_twice_decides() -> None:
    found = [engine_dead(replace(NEW, unavailable=count)) for count in range(4)]
    assert [remedy(one) for one in found] == [None, Remedy.CONFIRM, Remedy.KILL, Remedy.KILL]
    assert found[1] is not None
    assert found[1].reason.message == "/health answered 503 once (2 decide)"
    assert found[2] is not None
    assert found[2].reason.message == "/health answered 503 2 times in a row (2 decide)"
    assert (found[2].reason.code, found[2].numbers) == ("engine_dead", {"looks": 2, "looks_max": 2})


# --- unreachable ------------------------------------------------------------------------------------------------------


def refused(since: float, at: float, looks: int = 3) -> Finding | None:
    seen = replace(NEW, refused_since=since, failing_since=since, refused_looks=looks)
    return unreachable(seen, missing(at, "refused"), SPEC)


def test_refused_for_30_s_decides_without_canaries() -> None:
    assert [remedy(refused(10, at)) for at in (10, 39.9, 40, 99)] == [
        Remedy.CONFIRM,
        Remedy.CONFIRM,
        Remedy.KILL,
        Remedy.KILL,
    ]
    found = refused(10, 40)
    assert found is not None
    assert found.reason.message == "nobody has listened on its port for 30 s (30 s decide); its process lives"
    assert (found.reason.code, found.numbers) == ("unreachable", {"refused_s": 30.0, "limit_s": 30.0})
    assert remedy(refused(10, 999, looks=2)) is Remedy.CONFIRM, "a machine that was paused saw nothing in between"


def failing(for_s: float, failures: int, **restart: float) -> Finding | None:
    seen = replace(NEW, failing_since=100.0, canary=Canary(failures=failures))
    return unreachable(seen, missing(100.0 + for_s), spec(restart=restart))


def test_timeouts_need_300_s_and_three_canaries() -> None:
    assert unreachable(NEW, look(500), SPEC) is None
    cases = {
        (0.0, 9): None,
        (59.9, 9): None,
        (60.0, 0): Remedy.CONFIRM,
        (299.9, 3): Remedy.CONFIRM,
        (300.0, 2): Remedy.CONFIRM,
        (300.0, 3): Remedy.KILL,
        (900.0, 0): Remedy.CONFIRM,
    }
    assert {case: remedy(failing(*case)) for case in cases} == cases
    found = failing(300.0, 3)
    assert found is not None
    assert found.reason.message == (
        "/health and /metrics have failed for 300 s (unreachable_after_s 300) "
        "and 3 of 3 canaries in a row (canary_failures)"
    )
    assert found.numbers == {"failing_s": 300.0, "limit_s": 300.0, "canaries": 3, "canaries_max": 3}


def test_an_engine_that_cannot_be_asked_is_unreachable_by_time_and_looks() -> None:
    def found(for_s: float, looks: int) -> Finding | None:
        seen = replace(NEW, failing_since=100.0, failing_looks=looks, canary=Canary(possible=False))
        return unreachable(seen, missing(100.0 + for_s), SPEC)

    assert [remedy(found(*case)) for case in ((299.9, 9), (300.0, 2), (300.0, 3))] == [
        Remedy.CONFIRM,
        Remedy.CONFIRM,
        Remedy.KILL,
    ]
    told = found(300.0, 3)
    assert told is not None
    assert told.reason.message == "/health and /metrics have failed for 300 s (unreachable_after_s 300)"


def test_a_short_limit_is_told_at_a_third_of_it() -> None:
    assert failing(9.9, 3, unreachable_after_s=30) is None
    assert remedy(failing(10.0, 2, unreachable_after_s=30)) is Remedy.CONFIRM
    assert remedy(failing(29.9, 3, unreachable_after_s=30)) is Remedy.CONFIRM
    assert remedy(failing(30.0, 3, unreachable_after_s=30)) is Remedy.KILL


# --- stalled ----------------------------------------------------------------------------------------------------------


def stall(for_s: float, canary: Canary, looks: int = 3, **keys: Any) -> Finding | None:
    """One rank, still since 100."""
    at = 100.0 + for_s
    still = RankWatch(0, (1, 1, 1), 100.0, at, still_since=100.0, still_looks=looks, pending=True)
    seen = replace(NEW, ranks=(still,), canary=canary)
    return stalled(seen, look(at, running=2, waiting=1), spec(**keys))


FAILED = Canary(failures=1)


def test_a_stall_is_told_after_60_s_and_decided_after_180() -> None:
    cases = {0.0: None, 59.9: None, 60.0: Remedy.CONFIRM, 179.9: Remedy.CONFIRM, 180.0: Remedy.KILL, 999.0: Remedy.KILL}
    assert {for_s: remedy(stall(for_s, FAILED)) for for_s in cases} == cases
    found = stall(180.0, FAILED)
    assert found is not None
    assert found.reason.message == (
        "2 running and 1 waiting requests, and no step or token for 180 s (stall_after_s 180)"
    )
    assert found.numbers == {"still_s": 180.0, "limit_s": 180.0, "rank": 0, "running": 2, "waiting": 1}


def test_a_short_stall_is_told_at_a_third_of_its_limit() -> None:
    cases = {4.9: None, 5.0: Remedy.CONFIRM, 14.9: Remedy.CONFIRM, 15.0: Remedy.KILL}
    assert {for_s: remedy(stall(for_s, FAILED, restart={"stall_after_s": 15})) for for_s in cases} == cases


@pytest.mark.parametrize(
    ("canary", "wanted"),
    [
        (Canary(), Remedy.CONFIRM),
        (Canary(sent_at=250.1), Remedy.CONFIRM),
        (Canary(sent_at=250.0), Remedy.KILL),
        (Canary(failures=1), Remedy.KILL),
        (Canary(possible=False), Remedy.TELL),
    ],
)
def test_a_canary_has_its_chance_before_the_verdict(canary: Canary, wanted: Remedy) -> None:
    """Gauges are stale after a mass cancel until the engine steps: canary_deadline_s is 30, a third of 180 is 60."""
    assert remedy(stall(180.0, canary)) is wanted


def test_three_looks_have_to_see_it() -> None:
    """A machine that was paused saw the old and the new with nothing between them."""
    assert [remedy(stall(999.0, FAILED, looks)) for looks in (1, 2, 3)] == [Remedy.CONFIRM, Remedy.CONFIRM, Remedy.KILL]


def test_the_chance_is_a_third_of_a_short_limit() -> None:
    keys: dict[str, Any] = {"restart": {"stall_after_s": 15}}
    assert remedy(stall(15.0, Canary(sent_at=110.1), **keys)) is Remedy.CONFIRM
    assert remedy(stall(15.0, Canary(sent_at=110.0), **keys)) is Remedy.KILL


def test_a_canary_that_completed_is_proof_of_life() -> None:
    assert stall(180.0, Canary(ok_at=230.0)) is None
    assert remedy(stall(190.0, Canary(ok_at=230.0))) is Remedy.CONFIRM
    assert remedy(stall(310.0, Canary(ok_at=230.0, failures=1))) is Remedy.KILL
    assert remedy(stall(180.0, Canary(ok_at=50.0, failures=1))) is Remedy.KILL, "before it began"


def test_only_what_this_look_saw_decides() -> None:
    seen = replace(NEW, ranks=(RankWatch(0, (1, 1, 1), 100.0, 300.0, 100.0, 3, pending=True),), canary=FAILED)
    assert stalled(seen, look(301.0, running=1), SPEC) is None
    assert remedy(stalled(seen, look(300.0, running=1), SPEC)) is Remedy.KILL


def test_ranks_are_judged_by_their_own_counters() -> None:
    ranks = (
        RankWatch(0, (1, 1, 1), 500.0, 500.0, None, 0, pending=True),
        RankWatch(1, (1, 1, 1), 100.0, 500.0, 320.0, 9, pending=True),
        RankWatch(2, (1, 1, 1), 100.0, 500.0, 400.0, 9, pending=True),
    )
    sample = page(500.0, rank(0, running=3), rank(1, waiting=1), rank(2, running=1))
    seen = replace(NEW, ranks=ranks, canary=Canary(ok_at=490.0))
    found = stalled(seen, sample, SPEC)
    assert remedy(found) is Remedy.KILL, "rank 0 serves meanwhile"
    assert found is not None
    assert (found.numbers["rank"], found.numbers["still_s"]) == (1, 180.0)
    assert "no step or token on rank 1 for 180 s" in found.reason.message
    assert stalled(replace(seen, ranks=ranks[:1]), sample, SPEC) is None
    assert stalled(NEW, missing(500.0), SPEC) is None
    idle = replace(seen, ranks=(replace(ranks[0], pending=False), *ranks[1:]))
    assert remedy(stalled(idle, sample, SPEC)) is Remedy.CONFIRM, "after a mass cancel the gauges are old"
    assert remedy(stalled(replace(idle, canary=FAILED), sample, SPEC)) is Remedy.KILL


def test_gauges_that_are_unknown_by_now_read_as_none_of_them() -> None:
    seen = replace(NEW, ranks=(RankWatch(0, (1, 1, 1), 0.0, 60.0, 0.0, pending=True),))
    found = stalled(seen, look(60.0, running=1, waiting=None), SPEC)
    assert found is not None
    assert found.reason.message.startswith("1 running and 0 waiting requests")
    assert found.numbers["waiting"] is None


# --- unresponsive -----------------------------------------------------------------------------------------------------


def silent(failures: int, sample: Sample, *, seen_at: float = 200.0, **keys: Any) -> Finding | None:
    ranks = (RankWatch(0, (1, 1, 1), 0.0, seen_at),)
    return unresponsive(replace(NEW, ranks=ranks, canary=Canary(failures=failures)), sample, spec(**keys))


def test_three_failed_canaries_decide_where_nothing_moves() -> None:
    cases = {0: None, 1: Remedy.CONFIRM, 2: Remedy.CONFIRM, 3: Remedy.KILL, 4: Remedy.KILL}
    assert {failures: remedy(silent(failures, look(200.0))) for failures in cases} == cases
    found = silent(3, look(200.0))
    assert found is not None
    assert found.reason.message == (
        "3 canaries in a row failed (no whole answer within 30 s; 3 decide), and nothing else moved"
    )
    assert found.numbers == {"canaries": 3, "canaries_max": 3, "deadline_s": 30.0}
    first = silent(1, look(200.0), probe={"canary_failures": 1})
    assert remedy(first) is Remedy.KILL
    assert first is not None
    assert first.reason.message.startswith("1 canary failed")


def test_how_the_last_one_failed_is_said() -> None:
    seen = replace(NEW, ranks=(RankWatch(0, (1, 1, 1), 0.0, 200.0),), canary=Canary(failures=2, detail="HTTP 500"))
    found = unresponsive(seen, look(200.0), SPEC)
    assert found is not None
    assert found.reason.message == "2 canaries in a row failed (HTTP 500; 3 decide), and nothing else moved"


def test_where_movement_cannot_be_seen_it_may_only_be_busy() -> None:
    assert [remedy(silent(n, missing(205.0))) for n in (3, 9, 99)] == [Remedy.TELL] * 3
    found = silent(3, missing(205.0))
    assert found is not None
    assert found.reason.message.endswith("its metrics do not say whether anything moves, so it may only be busy")
    never = unresponsive(replace(NEW, canary=Canary(failures=3)), Sample(at=205.0, health_status=200), SPEC)
    assert remedy(never) is Remedy.TELL


def test_an_engine_that_may_sleep_unseen_is_told() -> None:
    """Sleep mode is older than the metric that says so (0.12)."""
    unsaid = page(200.0, replace(rank(0), awake=None))
    assert remedy(silent(9, unsaid)) is Remedy.KILL
    found = silent(9, unsaid, args={"enable-sleep-mode": True})
    assert remedy(found) is Remedy.TELL
    assert found is not None
    assert found.reason.message.endswith("so it may only be asleep")
    said = page(200.0, replace(rank(0), awake=True))
    assert remedy(silent(9, said, args={"enable-sleep-mode": True})) is Remedy.KILL


def test_a_sleeping_engine_owes_no_answer() -> None:
    assert unresponsive(replace(NEW, asleep=True, canary=Canary(failures=9)), look(1.0), SPEC) is None


@pytest.mark.parametrize(
    ("still_since", "sent_at", "wanted"),
    [(20.0, 100.0, None), (20.0, None, None), (100.0, 100.0, Remedy.KILL), (120.0, 100.0, Remedy.KILL)],
)
def test_with_work_pending_the_stall_rule_decides_when(
    still_since: float, sent_at: float | None, wanted: Remedy | None
) -> None:
    """What is pending since our canary was sent may be our canary."""
    ranks = (RankWatch(0, (1, 1, 1), 0.0, 200.0, still_since, pending=True),)
    seen = replace(NEW, ranks=ranks, canary=Canary(failures=3, sent_at=sent_at))
    assert remedy(unresponsive(seen, look(200.0, running=1), SPEC)) is wanted
