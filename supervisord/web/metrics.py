"""The page of /metrics, made from the published node, its status document and what the daemon counts of itself.

The document decides what is known, so that the page and `status` never differ; what is unknown or stale is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from supervisord.core import readiness, telemetry
from supervisord.core.model import Node, State
from supervisord.figures import Figures
from supervisord.web.engine_metrics import add_engines
from supervisord.web.families import Families
from supervisord.web.gpu_metrics import add_gpus

KEEP_S: Final = 1.0
"""A page is given to everybody who asks within this time: many scrapers cost no more than one."""
_FORMS_MAX: Final = 8
"""Forms of the page in that time; who wants yet another one, and any version number makes one, gets the plain one."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the numbers come from. Each is a quick read on any thread.

    `document`: core.status of a node at monotonic seconds. `lost`: records by what they were.
    """

    node: Callable[[], Node]
    document: Callable[[Node, float], Mapping[str, Any]]
    figures: Figures
    lost: Callable[[], Mapping[str, int]]


class Page:
    """Makes the page, at most once in `KEEP_S` for each of the forms that Prometheus asks for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._lock = Lock()
        self._made: dict[str, tuple[float, bytes]] = {}

    def give(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, as the header Accept wants it."""
        encode, content_type = _encoder(accept)
        with self._lock:
            now = time.monotonic()
            self._made = {kind: made for kind, made in self._made.items() if now < made[0] + KEEP_S}
            if content_type not in self._made and len(self._made) >= _FORMS_MAX:
                encode, content_type = choose_encoder("")
            if content_type not in self._made:
                self._made[content_type] = (now, encode(self._registry))
            return self._made[content_type][1], content_type

    def collect(self) -> Iterator[Metric]:
        """All families but those of the process: prometheus_client asks for them."""
        source, now = self._source, time.monotonic()
        node = source.node()
        families = Families()
        document = source.document(node, now)
        _add_daemon(families, source, node)
        add_engines(families, node, document, source.figures, now)
        add_gpus(families, node, document, now)
        yield from families

    def describe(self) -> list[Metric]:
        """Nothing: the registry would collect once to learn the names."""
        return []


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """How the page is written for who wants it so, and its content type. What makes no sense is as good as nothing."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        return choose_encoder("")


def _add_daemon(families: Families, source: Source, node: Node) -> None:
    families.gauge("build_info", "The daemon; 1.", 1, version=node.version, launcher=node.launcher)
    ready = readiness.of_node(node) is State.READY
    families.gauge("ready", "Whether /ready says that every wanted engine is ready.", ready)
    text = "Whether the configuration is refused, and the last one that was applied is in force."
    families.gauge("config_error", text, node.config_error is not None)
    families.durations("loop_turn_duration_seconds", "Turns of the loop.", source.figures.turns())
    for kind, count in source.lost().items():
        families.counter("dropped_total", "Records that the log or the history lost.", count, kind=kind)
    if not telemetry.off(node):
        families.gauge("gpu_telemetry_up", "Whether the GPUs are seen.", telemetry.trouble(node) is None)
