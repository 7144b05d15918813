"""Free KV blocks and the size of the pool, at, below and above every threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisord.core.model import Sample
from supervisord.core.rules import Finding, Remedy
from supervisord.core.rules.blocks import (
    believed_pool,
    free_blocks,
    is_low,
    is_short,
    kv_shortfall,
    limit_text,
    threshold,
)
from supervisord.core.watch import Canary, RankWatch, Watch
from tests.core.looks import look, missing, page, spec, stated

NEW = Watch(since=0.0, moved_at=0.0)
RANK = RankWatch(0, (1, 1, 1), 0.0, 0.0)
LITERAL: dict[str, Any] = {"restart": {"free_blocks_min": 100}}


def remedy(finding: Finding | None) -> Remedy | None:
    return None if finding is None else finding.remedy


# --- the limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "limit"), [(24_000, 100), (2000, 100), (1999, 99), (1000, 50), (118, 5), (19, 0), (None, None)]
)
def test_unset_it_is_100_or_5_percent_of_a_small_pool(total: int | None, limit: int | None) -> None:
    assert threshold(spec(), look(0, total_blocks=total)) == limit


def test_what_is_set_is_taken_literally() -> None:
    assert threshold(spec(**LITERAL), look(0, total_blocks=118)) == 100
    assert threshold(spec(restart={"free_blocks_min": 0}), look(0)) == 0


def test_a_stated_number_alone_has_100() -> None:
    assert threshold(spec(), stated(0, 5)) == 100
    assert threshold(spec(), missing(0)) is None


def test_off_with_kv_transfer_unless_set() -> None:
    args = {"kv-transfer-config": {"kv_connector": "x"}}
    assert threshold(spec(args=args), look(0)) is None
    assert threshold(spec(args=args, **LITERAL), look(0)) == 100


def test_low_is_below_the_limit() -> None:
    keys = spec(**LITERAL)
    assert [is_low(keys, look(0, free_blocks=free)) for free in (0, 99, 100, 101)] == [True, True, False, False]
    assert is_low(keys, look(0, free_blocks=None)) is None
    assert is_low(spec(), missing(0)) is None
    assert is_low(spec(restart={"free_blocks_min": 0}), look(0, free_blocks=0)) is False


def test_what_the_rule_goes_by_in_words() -> None:
    assert limit_text(spec(**LITERAL), look(0)) is None
    assert limit_text(spec(), missing(0)) is None
    assert limit_text(spec(), stated(0, 5)) is None
    text = limit_text(spec(), look(0))
    assert text == "fewer than 50 of 1000 free KV blocks are too few (free_blocks_min is not set)"
    transfer = limit_text(spec(args={"kv-transfer-config": {}}), look(0))
    assert transfer is not None
    assert transfer.startswith("KV transfer is configured")
    for keys in (spec(), spec(**LITERAL)):
        unknown = limit_text(keys, look(0, free_blocks=None))
        assert unknown == "its metrics do not say how many KV blocks are free: the rule for free blocks cannot act"


# --- free_blocks ------------------------------------------------------------------------------------------------------


def low(sample: Sample, *, for_s: float = 30.0, samples: int = 3, canaries: int = 0, **keys: Any) -> Finding | None:
    canary = keys.pop("canary", Canary())
    ranks = keys.pop("ranks", (RANK,))
    since = sample.at - for_s
    seen = replace(NEW, ranks=ranks, low_since=since, low_samples=samples, low_canaries=canaries, canary=canary)
    return free_blocks(seen, sample, spec(**{**LITERAL, **keys}))


def test_nothing_is_said_without_a_low_look() -> None:
    assert free_blocks(NEW, look(9, free_blocks=1), spec(**LITERAL)) is None
    assert low(look(90, free_blocks=None)) is None
    assert low(missing(90), restart={}) is None


def test_idle_it_takes_three_canaries_over_two_deadlines() -> None:
    idle = look(900, free_blocks=99)
    cases = {
        (60.0, 3, 3): Remedy.RESTART,
        (59.9, 3, 3): Remedy.CONFIRM,
        (60.0, 2, 3): Remedy.CONFIRM,
        (60.0, 3, 2): Remedy.CONFIRM,
        (0.0, 1, 0): Remedy.CONFIRM,
    }
    assert {c: remedy(low(idle, for_s=c[0], samples=c[1], canaries=c[2])) for c in cases} == cases
    found = low(idle, for_s=60.0, canaries=3)
    assert found is not None
    assert found.reason.code == "free_blocks"
    assert found.reason.message == (
        "99 of 1000 KV blocks free for 60 s (free_blocks_min 100), nothing runs, "
        "and 3 of 3 canaries did not change that"
    )
    assert found.numbers == {"free": 99, "total": 1000, "min": 100, "low_s": 60.0}


def test_idle_the_confirmation_time_counts_too() -> None:
    keys: dict[str, Any] = {"restart": {"free_blocks_min": 100, "free_blocks_for_s": 300}}
    assert remedy(low(look(900, free_blocks=1), for_s=299.9, canaries=9, **keys)) is Remedy.CONFIRM
    assert remedy(low(look(900, free_blocks=1), for_s=300.0, canaries=9, **keys)) is Remedy.RESTART


def test_our_own_canary_is_no_load() -> None:
    sample = look(900, free_blocks=9, running=1)
    restart = {"free_blocks_min": 100, "under_load": "restart"}
    found = low(sample, for_s=60.0, canaries=2, canary=Canary(sent_at=899.0), restart=restart)
    assert (remedy(found), found and found.reason.code) == (Remedy.CONFIRM, "free_blocks")


def test_an_idle_engine_that_cannot_be_asked_is_only_told() -> None:
    found = low(look(900, free_blocks=1), for_s=900.0, canary=Canary(possible=False))
    assert remedy(found) is Remedy.TELL


@pytest.mark.parametrize(
    ("policy", "short", "confirmed", "code"),
    [
        ("wait", None, Remedy.TELL, "kv_pressure"),
        ("drain", Remedy.CONFIRM, Remedy.DRAIN, "kv_pressure"),
        ("restart", Remedy.CONFIRM, Remedy.RESTART, "free_blocks"),
    ],
)
def test_under_load_the_operator_decides(policy: str, short: Remedy | None, confirmed: Remedy, code: str) -> None:
    keys: dict[str, Any] = {"restart": {"free_blocks_min": 100, "under_load": policy}}
    busy = look(900, free_blocks=3, running=9)
    assert remedy(low(busy, for_s=29.9, **keys)) is short
    assert remedy(low(busy, samples=2, **keys)) is short
    found = low(busy, **keys)
    assert (remedy(found), found and found.reason.code) == (confirmed, code)
    assert remedy(low(look(900, free_blocks=3, waiting=1), **keys)) is confirmed


def test_pending_and_still_is_the_stall_rule_s() -> None:
    for policy in ("drain", "restart"):
        keys: dict[str, Any] = {"restart": {"free_blocks_min": 100, "under_load": policy}}
        still = (RankWatch(0, (1, 1, 1), 0.0, 900.0, 800.0, pending=True),)
        found = low(look(900, free_blocks=3, running=9), ranks=still, **keys)
        assert (remedy(found), found and found.reason.code) == (Remedy.TELL, "kv_pressure")


def test_where_load_was_never_known_the_rule_is_literal() -> None:
    assert remedy(low(stated(900, 99), ranks=(), for_s=29.9)) is Remedy.CONFIRM
    assert remedy(low(stated(900, 99), ranks=(), samples=2)) is Remedy.CONFIRM
    found = low(stated(900, 99), ranks=())
    assert remedy(found) is Remedy.RESTART
    assert found is not None
    assert found.reason.message == "99 KV blocks free for 30 s (free_blocks_min 100)"


def test_a_look_that_missed_the_metrics_is_no_licence_for_the_literal_rule() -> None:
    assert low(stated(900, 99), for_s=900.0, samples=99) is None
    timed_out = replace(stated(900, 99), metrics_status=None)
    assert low(timed_out, ranks=(), for_s=900.0, samples=99) is None, "nobody knows whether there are metrics"


def test_a_limit_beyond_the_pool_is_told_and_restarts_nothing() -> None:
    small = look(900, free_blocks=63, total_blocks=64)
    found = low(small, for_s=900.0, samples=99, restart={"free_blocks_min": 100})
    assert remedy(found) is Remedy.TELL
    assert found is not None
    assert found.reason.message == "free_blocks_min 100 cannot be reached with a pool of 64 KV blocks: lower it"


def test_low_blocks_are_over_a_fifth_above_the_limit() -> None:
    """At the limit itself it would begin and end every few seconds."""
    keys = spec(restart={"free_blocks_min": 100})
    assert [is_low(keys, look(1, free_blocks=n)) for n in (99, 100)] == [True, False]
    assert [is_low(keys, look(1, free_blocks=n), 0.5) for n in (100, 119, 120)] == [True, True, False]


# --- kv_shortfall -----------------------------------------------------------------------------------------------------


def test_a_pool_is_believed_after_three_looks() -> None:
    assert believed_pool(replace(NEW, pool=7, pool_looks=2)) is None
    assert believed_pool(replace(NEW, pool=7, pool_looks=3)) == 7
    assert believed_pool(NEW) is None


def test_short_is_below_80_percent_of_the_last_good_start() -> None:
    assert [is_short(pool, 1000) for pool in (799, 800, 1000)] == [True, False, False]
    assert not is_short(1, None)


def shortfall(pool: int, good: int | None, sample: Sample, **keys: Any) -> Finding | None:
    return kv_shortfall(replace(NEW, pool=pool, pool_looks=3), sample, spec(**keys), good)


def test_a_shortfall_is_replaced_when_idle() -> None:
    assert shortfall(800, 1000, look(1)) is None
    assert shortfall(1, None, look(1)) is None
    assert kv_shortfall(NEW, look(1), spec(), 1000) is None
    found = shortfall(799, 1000, look(1))
    assert remedy(found) is Remedy.REPLACE
    assert found is not None
    assert found.reason.code == "kv_shortfall"
    assert found.reason.message.startswith("799 KV blocks, 1000 at the last good start of this plan")
    assert found.numbers == {"blocks": 799, "good": 1000, "fraction": 0.8}


@pytest.mark.parametrize("sample", [look(1, running=1), look(1, waiting=1), missing(1), page(1)])
def test_a_shortfall_waits_for_quiet(sample: Sample) -> None:
    assert remedy(shortfall(10, 1000, sample)) is Remedy.TELL


def test_a_shortfall_may_only_alert() -> None:
    assert remedy(shortfall(10, 1000, look(1), restart={"on_kv_shortfall": "alert"})) is Remedy.TELL
