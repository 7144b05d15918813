"""Free KV blocks: the plain rule "restart when fewer than 100", and how it does not shoot a busy engine.

Measured on a real vLLM: 485 of 495 looks at a saturated engine saw fewer than 100 free blocks, 406 fewer than 10, and
all of its 300 requests succeeded. So low free blocks with tokens flowing is load; low without work is a leak.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from supervisord.core.model import Reason, Sample
from supervisord.core.rules import Finding, Numbers, Remedy
from supervisord.core.spec import EngineSpec
from supervisord.core.watch import Watch, pending, still

DEFAULT_MIN: Final = 100
DEFAULT_FRACTION: Final = 0.05
"""100 blocks are below 1 % of a large pool and 85 % of one of 118 (vllm-metal#479)."""

SAMPLES_MIN: Final = 3
CANARIES_MIN: Final = 3
IDLE_DEADLINES: Final = 2
"""Gauges of an idle engine are stale until it steps: that many canaries, a `canary_deadline_s` apart, make it step."""

CLEAR_FACTOR: Final = 1.2
"""Low blocks are over at this much above the limit."""

SHORTFALL: Final = 0.8


def threshold(spec: EngineSpec, sample: Sample) -> int | None:
    """The limit that applies; None: the rule is off (KV transfer configured and nothing set, or nothing known)."""
    stated = spec.restart.free_blocks_min
    if stated is not None:
        return stated
    if "kv-transfer-config" in spec.args:
        return None
    if sample.total_blocks is None:
        return DEFAULT_MIN if sample.free_stated else None
    return min(DEFAULT_MIN, int(DEFAULT_FRACTION * sample.total_blocks))


def limit_text(spec: EngineSpec, sample: Sample) -> str | None:
    """What an operator should know about the limit, in words; None: nothing, or this look does not tell."""
    limit, unset = threshold(spec, sample), spec.restart.free_blocks_min is None
    if unset and "kv-transfer-config" in spec.args:
        return (
            "KV transfer is configured, so low free blocks are normal: that rule is off unless free_blocks_min is set"
        )
    if sample.ranks and sample.free_blocks is None:
        return "its metrics do not say how many KV blocks are free: the rule for free blocks cannot act"
    if unset and limit is not None and sample.total_blocks is not None:
        return f"fewer than {limit} of {sample.total_blocks} free KV blocks are too few (free_blocks_min is not set)"
    return None


def is_low(spec: EngineSpec, sample: Sample, low_since: float | None = None) -> bool | None:
    """Whether this look saw too few free blocks; None when it saw nothing about them."""
    limit = threshold(spec, sample)
    if limit is None or sample.free_blocks is None:
        return None
    if low_since is not None:
        # Not over at the first block more: at the limit it would be told every few seconds.
        limit = ceil(CLEAR_FACTOR * limit)
    return sample.free_blocks < limit


def free_blocks(watch: Watch, sample: Sample, spec: EngineSpec) -> Finding | None:
    """Judge a run of low looks."""
    since, limit = watch.low_since, threshold(spec, sample)
    if since is None or limit is None or sample.free_blocks is None:
        return None
    low_s = sample.at - since
    total = f" of {sample.total_blocks}" if sample.total_blocks is not None else ""
    what = f"{sample.free_blocks}{total} KV blocks free for {low_s:.0f} s (free_blocks_min {limit})"
    numbers = {"free": sample.free_blocks, "total": sample.total_blocks, "min": limit, "low_s": round(low_s, 1)}
    confirmed = low_s >= spec.restart.free_blocks_for_s and watch.low_samples >= SAMPLES_MIN
    busy = pending(watch, sample)
    if sample.total_blocks is not None and limit > sample.total_blocks - 1:
        text = f"free_blocks_min {limit} cannot be reached with a pool of {sample.total_blocks} KV blocks: lower it"
        return Finding(Reason("free_blocks", text), Remedy.TELL, numbers)
    if busy is None:
        if watch.ranks or sample.metrics_status is None:
            return None
        # Only ever a stated number and no gauges: nobody can tell load from leak, so the rule is taken literally.
        return Finding(Reason("free_blocks", what), Remedy.RESTART if confirmed else Remedy.CONFIRM, numbers)
    if busy:
        flowing = not still(watch, sample.at)
        return _under_load(spec, what, numbers, confirmed=confirmed, flowing=flowing)
    if not watch.canary.possible:
        text = f"{what} and nothing runs; it cannot be asked to step, so this may be old news"
        return Finding(Reason("free_blocks", text), Remedy.TELL, numbers)
    text = f"{what}, nothing runs, and {watch.low_canaries} of {CANARIES_MIN} canaries did not change that"
    long = low_s >= IDLE_DEADLINES * spec.probe.canary_deadline_s
    leaked = confirmed and long and watch.low_canaries >= CANARIES_MIN
    return Finding(Reason("free_blocks", text), Remedy.RESTART if leaked else Remedy.CONFIRM, numbers)


def _under_load(spec: EngineSpec, what: str, numbers: Numbers, *, confirmed: bool, flowing: bool) -> Finding | None:
    policy = spec.restart.under_load
    if not confirmed and policy == "wait":
        return None
    if policy == "wait":
        return Finding(Reason("kv_pressure", f"{what} while requests run: load, not a fault"), Remedy.TELL, numbers)
    if not flowing:
        text = f"{what} while requests are pending and nothing moves: that is judged as a stall"
        return Finding(Reason("kv_pressure", text), Remedy.TELL, numbers)
    text = f"{what} while requests run (under_load = {policy})"
    if not confirmed:
        return Finding(Reason("kv_pressure", text), Remedy.CONFIRM, numbers)
    if policy == "drain":
        return Finding(Reason("kv_pressure", text), Remedy.DRAIN, numbers)
    return Finding(Reason("free_blocks", text), Remedy.RESTART, numbers)


def believed_pool(watch: Watch) -> int | None:
    """The size of the KV pool once several looks have agreed; it never changes while a process lives."""
    return watch.pool if watch.pool_looks >= SAMPLES_MIN else None


def is_short(pool: int, good: int | None) -> bool:
    """Whether a pool is a fraction of what it was."""
    return good is not None and pool < SHORTFALL * good


def kv_shortfall(watch: Watch, sample: Sample, spec: EngineSpec, good: int | None) -> Finding | None:
    """Compare the pool with that of the last good start of the same plan.

    Two engines that profile free memory at once end with 2 GiB of KV cache instead of 59, without any error.
    """
    pool = believed_pool(watch)
    if pool is None or good is None or not is_short(pool, good):
        return None
    text = f"{pool} KV blocks, {good} at the last good start of this plan: memory was taken by something else meanwhile"
    idle = pending(watch, sample) is False
    remedy = Remedy.REPLACE if idle and spec.restart.on_kv_shortfall == "restart" else Remedy.TELL
    return Finding(Reason("kv_shortfall", text), remedy, {"blocks": pool, "good": good, "fraction": SHORTFALL})
