"""Pages of /metrics over nodes that tests make, read back as Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as open_parser

from supervisord.core import status
from supervisord.core.gpu_samples import GpuProcess, GpuReading
from supervisord.core.messages import Record
from supervisord.core.model import Engine, Gpu, Node, Persistence, Process, Ready, Reason, Sample, Telemetry, Warmup
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.figures import Figures
from supervisord.web.metrics import Page, Source
from tests.adapters.fake_daemon import stamp

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""By name and labels."""

GIB = 1024**3
UUID = "GPU-5135c0de-0000-4000-8000-000000000000"


def engine(**fields: Any) -> Engine:
    """A ready engine that was just looked at."""
    spec = EngineSpec(name="qwen", model="org/qwen", port=8001, gpus=(UUID,), replica_group="chat")
    now = time.monotonic()
    known: dict[str, Any] = {
        "phase": Ready(found=(Reason("slo", "slow"),)),
        "since": now - 60,
        "wanted": True,
        "generation": 3,
        "process": Process(4711, 1, "boot"),
        "warmup": Warmup(812.5, 401.0, 3, took_s=4.5),
        "sample": Sample(now - 1, 200, running=3, waiting=12, total_blocks=4000, free_blocks=42, kv_usage=0.9895),
    }
    return Engine(spec=spec, plan_id="p", **{**known, **fields})


def gpu(**fields: Any) -> Gpu:
    """A GPU that answers, with a process of the engine and a stranger's."""
    processes = (GpuProcess(1, 3 * GIB, "python", "qwen", 3), GpuProcess(2, GIB, "Xorg"))
    reading = GpuReading(
        UUID,
        "0000:1b:00.0",
        0,
        total_bytes=24 * GIB,
        used_bytes=4 * GIB,
        free_bytes=20 * GIB,
        processes=processes,
        persistence=False,
        utilization_percent=97.0,
        temperature_c=61.0,
        power_w=280.0,
        energy_j=1e6,
    )
    known: dict[str, Any] = {
        "pci_id": "0000:1b:00.0",
        "index": 0,
        "name": "NVIDIA GeForce RTX 3090",
        "generation": "ampere",
        "reading": reading,
        "reasons": (Reason("gpu_throttled", "hot"),),
        "xids": {"13": 2},
        "persistence": Persistence(wanted=True),
    }
    return Gpu(UUID, **{**known, **fields})


def node(*engines: Engine, gpus: tuple[Gpu, ...] = (), **fields: Any) -> Node:
    """A node that sees its GPUs."""
    seen = Telemetry(helper=1, running=True, swept_at=time.monotonic(), driver="580.1")
    known: dict[str, Any] = {"version": "1.2.3", "telemetry": seen}
    return Node(
        spec=NodeSpec(),
        engines={engine.spec.name: engine for engine in engines},
        gpus={gpu.uuid: gpu for gpu in gpus},
        **{**known, **fields},
    )


def figures() -> Figures:
    """Something of everything that the daemon counts."""
    made = Figures()
    made.turned(0.002)
    made.looked("qwen", 0.02)
    for kind in ("exited", "spawned"):
        made.heard(Record(kind, "", engine="qwen", reason="exited"))
    return made


def document_of(node: Node, now: float) -> dict[str, Any]:
    """As the daemon makes it."""
    return status.of(node, now, time.time(), stamp)


def everything_known(node: Node, now: float) -> dict[str, Any]:
    """The same, with a number wherever one is unknown."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [filled(one) for one in value]
        return 0.5 if value is None else value

    document = document_of(node, now)
    for one in document["engines"]:
        for key, value in one.items():
            one[key] = filled(value) if key != "vllm_version" else value
    return document


def page_of(shown: Node, document: Callable[[Node, float], Mapping[str, Any]] = document_of) -> Page:
    """The page of a node."""
    return Page(Source(lambda: shown, document, figures(), lambda: {"event": 3}))


def values_of(page: Page) -> Values:
    """What Prometheus takes from it; both of its forms say the same."""
    body, _ = page.give("")
    text = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in _families(parser, body)
        for sample in family.samples
    }
    body, _ = page.give("application/openmetrics-text; version=1.0.0")
    names = {sample.name for family in _families(open_parser, body) for sample in family.samples}
    assert names == {name for name, _ in text}
    return text


def _families(form: Any, body: bytes) -> list[Metric]:
    return list(form.text_string_to_metric_families(body.decode()))


def value(values: Values, metric: str, **labels: str) -> float | None:
    """One sample; None: it is not there."""
    return values.get((f"vllm_supervisor_{metric}", frozenset(labels.items())))


def names_of(values: Values) -> set[str]:
    """All names."""
    return {name for name, _ in values}
