"""The rules: each a pure function from what was watched to a finding, with its numbers and thresholds.

A finding never says more than what was seen; what is done about it stands in `judging`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from supervisord.core.model import Reason

Numbers = Mapping[str, float | int | str | None]


class Remedy(Enum):
    """What a rule asks for, from the least harm to the most."""

    TELL = "tell"
    """Show it as a reason of `degraded`; nothing is done."""
    CONFIRM = "confirm"
    """The same, and look every second until it is clear."""
    DRAIN = "drain"
    """Out of traffic; ready again if it passes, otherwise restart."""
    REPLACE = "replace"
    """Restart gracefully, when the voluntary budget allows."""
    RESTART = "restart"
    """Restart gracefully, now."""
    KILL = "kill"
    """It cannot answer any more: evidence, SIGKILL, start again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says of one engine."""

    reason: Reason
    remedy: Remedy
    numbers: Numbers = field(default_factory=dict)
    urgent: bool = False
    """A restart that it asks for does not wait for a maintenance window."""
    waives_budget: bool = False
    """Nor for the node's budget of voluntary restarts."""
