"""Metric families in the making: one of a name, however many engines and GPUs have a sample in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Final

from prometheus_client.metrics_core import Metric

from supervisord.figures import Durations

PREFIX: Final = "vllm_supervisor_"
LABEL_MAX: Final = 128
"""Values of labels may come from an engine: no longer than this, and printable."""


class Families:
    """What is unknown (None) adds no sample, and a family without one is not there."""

    def __init__(self) -> None:
        self._found: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._found.values())

    def gauge(self, name: str, doc: str, value: float | None, /, **labels: str) -> None:
        """Add a value of now."""
        if value is not None:
            self._family(name, doc, "gauge").add_sample(PREFIX + name, _printable(labels), float(value))

    def counter(self, name: str, doc: str, value: float | None, /, **labels: str) -> None:
        """Add a value that only grows. The name ends in _total."""
        if value is not None:
            family = self._family(name.removesuffix("_total"), doc, "counter")
            family.add_sample(PREFIX + name, _printable(labels), float(value))

    def durations(self, name: str, doc: str, seen: Durations, /, **labels: str) -> None:
        """Add a histogram."""
        family, known = self._family(name, doc, "histogram"), _printable(labels)
        for bound_s, count in zip(seen.bounds_s, seen.counts, strict=True):
            family.add_sample(
                f"{PREFIX}{name}_bucket", {**known, "le": "+Inf" if bound_s == inf else str(bound_s)}, float(count)
            )
        family.add_sample(f"{PREFIX}{name}_count", known, float(seen.counts[-1]))
        family.add_sample(f"{PREFIX}{name}_sum", known, seen.sum_s)

    def _family(self, name: str, doc: str, kind: str) -> Metric:
        family = self._found.get(name)
        if family is None:
            family = self._found[name] = Metric(PREFIX + name, doc, kind)
        return family


def _printable(labels: Mapping[str, str]) -> dict[str, str]:
    """Quotes and backslashes are escaped by the library; control characters are nobody's name."""
    return {name: "".join(c if c.isprintable() else "?" for c in value[:LABEL_MAX]) for name, value in labels.items()}
