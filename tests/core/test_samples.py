"""What a metrics page says: unknown is not zero."""

from __future__ import annotations

import pytest

from supervisord.core.samples import RankMetrics


@pytest.mark.parametrize(
    ("running", "waiting", "pending"),
    [
        (None, None, None),
        (0, None, False),
        (None, 0, False),
        (0, 0, False),
        (1, None, True),
        (None, 1, True),
        (0, 3, True),
    ],
)
def test_pending(running: int | None, waiting: int | None, pending: bool | None) -> None:
    assert RankMetrics(0, running=running, waiting=waiting).pending is pending


def test_the_odometer() -> None:
    rank = RankMetrics(0, iterations=1.0, prompt_tokens=2.0, generation_tokens=3.0)
    assert rank.odometer == (1.0, 2.0, 3.0)
    assert RankMetrics(0).odometer == (None, None, None)
