"""What a gateway is told of the whole node."""

from __future__ import annotations

from typing import Any

import pytest

from supervisord.core import readiness
from supervisord.core.model import After, Draining, Engine, Node, Ready, Reason, State, Stopped, Warming
from supervisord.core.spec import EngineSpec, NodeSpec

DEGRADED = Ready(found=(Reason("slo", "slow"),))
DRAINING = Draining(After.HOLD, None, Reason("operator", "somebody"), 1.0)


def node(*phases: Any) -> Node:
    """Engines that are wanted unless they are stopped."""
    engines = [
        Engine(EngineSpec(name=f"e{number}", model="m", port=1), "p", phase, wanted=not isinstance(phase, Stopped))
        for number, phase in enumerate(phases)
    ]
    return Node(spec=NodeSpec(), engines={engine.spec.name: engine for engine in engines})


@pytest.mark.parametrize(
    ("phases", "state"),
    [
        ([], State.STOPPED),
        ([Stopped()], State.STOPPED),
        ([Ready()], State.READY),
        ([DEGRADED], State.READY),
        ([DRAINING], State.DRAINING),
        ([Ready(), Stopped(), DEGRADED], State.READY),
        ([Ready(), Warming(9.0), DRAINING], State.WARMING),
        ([DRAINING, Warming(9.0)], State.DRAINING),
    ],
)
def test_ready_when_every_wanted_engine_is_and_there_is_one(phases: list[Any], state: State) -> None:
    assert readiness.of_node(node(*phases)) is state
