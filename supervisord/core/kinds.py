"""The kinds of events that people are told of, by group: what `events` of `[notify.X]` may name.

A new kind goes into exactly one group; the tests compare these with the ids of systemd/message_ids.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

ALL: Final = "all"
IMPORTANT: Final = "important"

_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "failures": (
        *("exited", "verdict", "killing", "restart", "failed", "unkillable_gone", "leftover"),
        *("drain_timeout", "gpu_memory_stays"),
    ),
    "health": ("degraded", "recovered", "canary_impossible", "free_blocks_rule"),
    "life": (
        *("waiting", "spawned", "answering", "ready", "adopted", "draining", "stopping", "stopped", "removed"),
        *("requested", "refused"),
    ),
    "gpus": (
        *("gpu_quarantined", "gpu_cleared", "gpu_degraded", "gpu_recovered", "gpu_replaced", "gpu_released", "xid"),
        *("gpu_driver_trouble", "gpu_driver_ready", "gpu_telemetry_unresponsive", "gpu_telemetry_answers"),
        *("gpu_probe_hangs", "gpu_probe_ended", "kmsg"),
        *("persistence_set", "persistence_drift", "persistence_conflict"),
    ),
    "configuration": ("config_error", "config_warning", "reload", "reconfigured"),
    "daemon": (
        *("daemon_started", "daemon_ending", "daemon_ended", "bug", "trouble", "history"),
        *("cannot_listen", "cannot_use_state_dir", "cannot_use_systemd"),
        *("notify_failing", "notify_lost", "notify_recovered", "web_failed", "web_listening"),
    ),
}

KINDS: Final = frozenset(kind for kinds in _GROUPS.values() for kind in kinds)

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    IMPORTANT: (
        *("exited", "verdict", "failed", "ready", "degraded", "recovered"),
        *("gpu_quarantined", "gpu_cleared", "gpu_memory_stays"),
        *("gpu_driver_trouble", "gpu_driver_ready", "gpu_telemetry_unresponsive", "gpu_telemetry_answers"),
        *("config_error", "bug", "trouble", "history"),
        *("cannot_listen", "cannot_use_state_dir", "cannot_use_systemd"),
        *("notify_failing", "notify_lost", "notify_recovered", "web_failed"),
    ),
    **_GROUPS,
    ALL: tuple(sorted(KINDS)),
}
"""What a person must know and when it is over, then every kind in one group, then all of them."""

FINAL: Final = frozenset({"failed", "gpu_quarantined"})
"""Kinds that only a person ends: one soon after another is no repetition, somebody said meanwhile that all is well."""

UNSENT: Final = frozenset({"log_lost", "history_lost"})
"""Kinds that exist only where the loss is: in the log, in the history. The latter is also told as `history`."""


def named(names: Iterable[str]) -> frozenset[str]:
    """The kinds that these names of kinds and groups stand for."""
    return frozenset(kind for name in names for kind in GROUPS.get(name, (name,)))
