"""How well an engine serves, in the status document: from captured pages of real engines to the figures people see."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from supervisord.core import status
from supervisord.core.messages import Op
from supervisord.core.model import Sample
from supervisord.engine import metrics
from tests.core.looks import look, missing, page, rank, see, serving
from tests.core.play import T0, Play

DATA = Path(__file__).parents[1] / "data"


def captured(at: float, name: str) -> Sample:
    parsed = metrics.parse((DATA / name).read_bytes())
    return page(at, *parsed.ranks, pool_blocks=parsed.num_gpu_blocks)


def value(name: str, series: str) -> float:
    """Straight from the text of the page."""
    found = re.search(rf"^{series}\{{.*\}} (\S+)$", (DATA / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return float(found[1])


def shown(play: Play) -> dict[str, Any]:
    document: dict[str, Any] = status.of(play.node, play.now, 1e9, str)["engines"][0]
    return document


def test_an_engine_that_was_looked_at_once_has_no_rates() -> None:
    seen = shown(see(serving(), captured(T0 + 5, "metrics/kv-idle-before.txt")))
    for key in ("tokens_per_s", "ttft_p95_ms", "prefix_hit_rate", "draft_acceptance_rate"):
        assert seen[key] is None, key
    assert seen["ranks"] == [
        {
            "rank": 0,
            "running": 0,
            "waiting": 0,
            "total_blocks": 200,
            "free_blocks": 199,
            "usage": 0.0,
            "preemptions": 0.0,
        }
    ]


def test_the_saturation_run_in_figures() -> None:
    """300 requests of 900 tokens each on vLLM 0.32.0, as if they had taken 20 s."""
    play = see(serving(), captured(T0 + 5, "metrics/kv-idle-before.txt"))
    seen = shown(see(play, captured(T0 + 25, "metrics/after-saturated.txt")))
    assert seen["tokens_per_s"] == 270_000 / 20
    assert seen["prefix_hit_rate"] == 0.0
    assert seen["draft_acceptance_rate"] is None
    assert seen["ranks"][0]["preemptions"] == 1331
    name = "metrics/after-saturated.txt"
    bucket = r'vllm:time_to_first_token_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)'
    buckets = [(float(le), float(n)) for le, n in re.findall(bucket, (DATA / name).read_text(encoding="utf-8"))]
    above = next(le for le, n in buckets if n >= 285)
    below = max(le for le, n in buckets if n < 285)
    assert below * 1000 < seen["ttft_p95_ms"] <= above * 1000
    assert {reason["code"] for reason in seen["reasons"]} == {"slo"}


def test_a_real_cuda_engine_under_load() -> None:
    play = see(serving(), captured(T0 + 5, "cuda-0.24/idle.txt"))
    seen = shown(see(play, captured(T0 + 35, "cuda-0.24/busy.txt")))
    grown = value("cuda-0.24/busy.txt", "vllm:generation_tokens_total") - value(
        "cuda-0.24/idle.txt", "vllm:generation_tokens_total"
    )
    assert seen["tokens_per_s"] == pytest.approx(grown / 30, abs=0.1)
    assert seen["requests"] == {"running": 30, "waiting": 0}
    assert (seen["health"], seen["reasons"]) == ("ok", [])
    assert 10 < seen["ttft_p95_ms"] < 500


def test_figures_are_unknown_while_the_metrics_are() -> None:
    play = see(serving(), look(T0 + 5, steps=0))
    see(play, look(T0 + 25, steps=200))
    assert shown(play)["tokens_per_s"] == 10.0
    assert shown(see(play, missing(T0 + 26)))["tokens_per_s"] is None
    assert shown(see(play, look(T0 + 27, steps=220)))["tokens_per_s"] == 10.0
    play.ask(Op.DRAIN)
    assert shown(play)["tokens_per_s"] is None


def test_every_rank_is_shown() -> None:
    seen = shown(see(serving(), page(T0 + 5, rank(0, running=3), rank(1, free_blocks=7))))
    assert [(one["rank"], one["running"], one["free_blocks"]) for one in seen["ranks"]] == [(0, 3, 999), (1, 0, 7)]
    assert seen["kv"]["free_blocks"] == 7
