"""How much of its GPUs an engine will claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord.core import gpu_claims
from supervisord.core.messages import Due, Exited, Swept, What
from supervisord.core.model import Engine, State, Waiting
from tests.core.play import card, engine_spec, foreign, holds, launching

REFUSED = (Path(__file__).parents[1] / "data/cuda-0.24/start-memory-held.log").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ({"gpu-memory-utilization": 0.45}, 0.45),
        ({"gpu-memory-utilization": 1}, 1.0),
        ({"gpu-memory-utilization": "0.45"}, 0.45),
        ({"gpu-memory-utilization": "much"}, None),
        ({"gpu-memory-utilization": True}, None),
        ({"gpu-memory-utilization": 1.5}, None),
        ({"gpu-memory-utilization": 0}, None),
        ({}, None),
        ({"gpu-memory-utilization": 0.45, "kv-cache-memory-bytes": 1}, None),
        ({"gpu-memory-utilization": 0.45, "config": "vllm.yaml"}, None),
    ],
)
def test_what_the_configuration_says(args: dict[str, Any], part: float | None) -> None:
    assert gpu_claims.stated(engine_spec(args=args)) == part
    assert gpu_claims.assumed(engine_spec(args=args)) == (part if args else gpu_claims.CLAIM_DEFAULT)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (("/opt/vllm/bin/vllm", "serve"), 0.9),
        (("vllm", "serve"), 0.9),
        (("/opt/serve-it.sh",), None),
        (("vllm", "serve", "--gpu-memory-utilization", "0.4"), None),
    ],
)
def test_what_may_be_assumed(command: tuple[str, ...], part: float | None) -> None:
    assert gpu_claims.assumed(engine_spec(command=command)) == part


def test_what_vllm_refused_for_is_learned() -> None:
    assert gpu_claims.refused_in(REFUSED) == 0.9
    assert gpu_claims.refused_in(["RuntimeError: something else"]) is None


@pytest.mark.parametrize(
    ("refused", "part"), [(None, 0.9), (("now", 0.92), 0.92), (("now", 0.5), 0.9), (("old", 0.92), 0.9)]
)
def test_the_gate_goes_by_what_was_refused_of_this_plan(refused: tuple[str, float] | None, part: float) -> None:
    engine = Engine(spec=engine_spec(command=("vllm", "serve")), plan_id="now", refused_claim=refused)
    assert gpu_claims.of(engine) == part
    wrapped = replace(engine, spec=engine_spec(command=("/opt/serve-it.sh",)))
    assert gpu_claims.of(wrapped) == (refused[1] if refused is not None and refused[0] == "now" else None)


def test_an_engine_that_was_refused_waits_for_that_much() -> None:
    """A profile or vLLM's own default wants more than is assumed: without that it would be refused again and again."""
    almost = holds(card("GPU-0"), foreign(0.1 * 80))
    play = launching(engine_spec(gpus=("GPU-0",), command=("vllm", "serve"))).spawn()
    play.cards = None
    play.sweep(almost, after=1.0)
    line = "Free memory on device cuda:0 (72.0/80.0 GiB) on startup is less than desired GPU memory utilization"
    play.see(Exited("a", 1, 1, None, tail=(f"{line} (0.92, 73.6 GiB).",)), after=1.0).see(Swept("a", 1)).sweep(
        almost, after=0.1
    )
    play.see(Due(What.CLOCK), after=60.0)
    assert play.phase(Waiting).reason.code == "gpu_memory_held"
    assert "gpu-memory-utilization 0.92" in play.phase(Waiting).reason.message
    play.sweep(card("GPU-0"), after=1.0).is_(State.STARTING)
