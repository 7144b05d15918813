"""The page of /metrics: what is known with its unit, what is unknown or stale not at all, and names that hold."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.gpu_samples import GpuReading
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Failed,
    FailedKind,
    Node,
    Reason,
    Sample,
    State,
    Stopped,
    Telemetry,
    Waiting,
)
from supervisord.core.spec import SloSpec
from tests.adapters.metric_nodes import (
    GIB,
    UUID,
    engine,
    everything_known,
    gpu,
    names_of,
    node,
    page_of,
    value,
    values_of,
)

REPO = Path(__file__).resolve().parents[2]
WORK = re.compile(r"vllm_supervisor_engine_(kv|requests|ttft|generation|prefix|draft)")
CAUSE = Reason("operator", "somebody")


def everything() -> set[str]:
    """The name of every sample that there can be."""
    return names_of(values_of(page_of(node(engine(), gpus=(gpu(),)), everything_known)))


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm_supervisor_[a-z0-9_]*[a-z0-9]|process_[a-z_]*[a-z])\b", text))


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["packaging/prometheus/vllm-supervisor.rules.yml", "packaging/grafana/vllm-supervisor.json"]
)
def test_what_rules_and_dashboard_ask_for_is_there(file: str) -> None:
    named = named_in((REPO / file).read_text(encoding="utf-8"))
    assert len(named) > 10
    assert named - everything() == set()


def test_the_documentation_names_all_of_them_and_no_other() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (REPO / "docs/monitoring.md").read_text(encoding="utf-8"), re.MULTILINE)
    documented = {f"vllm_supervisor_{name}" for row in rows for name in re.findall(r"`([a-z0-9_]+)", row)}
    histograms = re.compile(r"_(bucket|count|sum)$")
    there = {histograms.sub("", name) for name in everything() if name.startswith("vllm_supervisor_")}
    assert documented == there


def test_the_dashboard_shows_every_figure_of_engines_and_gpus() -> None:
    """But those that only name something, or that an alert is for."""
    shown = named_in((REPO / "packaging/grafana/vllm-supervisor.json").read_text(encoding="utf-8"))
    shown |= named_in((REPO / "packaging/prometheus/vllm-supervisor.rules.yml").read_text(encoding="utf-8"))
    left = {name.removeprefix("vllm_supervisor_") for name in everything() - shown if "process_" not in name}
    assert {name for name in left if not name.endswith(("_count", "_sum"))} == {
        "engine_degraded",
        "engine_kv_usage_ratio",
        "engine_state_since_timestamp_seconds",
        "engine_warmup_duration_seconds",
        "engine_warmup_rounds",
        "gpu_driver_info",
        "gpu_last_look_timestamp_seconds",
        "gpu_memory_free_bytes",
        "gpu_persistence_mode",
        "gpu_persistence_wanted",
        "gpu_up",
    }


# --- values -----------------------------------------------------------------------------------------------------------


def test_an_engine_and_its_gpu() -> None:
    values = values_of(page_of(node(engine(), gpus=(gpu(),))))
    found = {metric: value(values, f"engine_{metric}", engine="qwen") for metric in ENGINE}
    assert found == ENGINE
    info = {"model": "org/qwen", "port": "8001", "replica_group": "chat", "vllm_version": ""}
    assert value(values, "engine_info", engine="qwen", **info) == 1
    assert value(values, "engine_reason", engine="qwen", reason="slo") == 1
    assert value(values, "engine_restarts_total", engine="qwen", reason="exited") == 1
    assert value(values, "engine_look_duration_seconds_bucket", engine="qwen", le="0.1") == 1
    assert value(values, "engine_look_duration_seconds_bucket", engine="qwen", le="+Inf") == 1
    since = value(values, "engine_state_since_timestamp_seconds", engine="qwen")
    assert since == pytest.approx(time.time() - 60, abs=5)
    states = {state: value(values, "engine_state", engine="qwen", state=state.value) for state in State}
    assert states == {state: float(state is State.READY) for state in State}
    found = {metric: value(values, f"gpu_{metric}", gpu=UUID) for metric in GPU}
    assert found == GPU
    assert value(values, "gpu_engine", gpu=UUID, engine="qwen") == 1
    assert value(values, "gpu_engine_memory_bytes", gpu=UUID, engine="qwen") == 3 * GIB
    assert value(values, "gpu_reason", gpu=UUID, reason="gpu_throttled") == 1
    assert value(values, "gpu_xids_total", gpu=UUID, xid="13") == 2


ENGINE = {
    "ready": 1,
    "wanted": 1,
    "degraded": 1,
    "spawns_total": 3,
    "warmup_first_seconds": 0.8125,
    "warmup_settled_seconds": 0.401,
    "warmup_rounds": 3,
    "warmup_duration_seconds": 4.5,
    "kv_blocks": 4000,
    "kv_blocks_free": 42,
    "kv_usage_ratio": 0.9895,
    "requests_running": 3,
    "requests_waiting": 12,
    "ttft_p95_slo_seconds": 0.5,
    "ttft_p95_seconds": None,
    "generation_tokens_per_second": None,
    "memory_exhaustion_seconds": None,
}
GPU = {
    "up": 1,
    "quarantined": 0,
    "memory_bytes": 24 * GIB,
    "memory_used_bytes": 4 * GIB,
    "memory_free_bytes": 20 * GIB,
    "temperature_celsius": 61,
    "power_watts": 280,
    "utilization_ratio": 0.97,
    "energy_joules_total": 1e6,
    "persistence_mode": 0,
    "persistence_wanted": 1,
}


def test_the_daemon_itself() -> None:
    values = values_of(page_of(node(config_error="line 3")))
    assert value(values, "build_info", version="1.2.3", launcher="plain") == 1
    assert value(values, "config_error") == 1
    assert value(values, "ready") == 0
    assert value(values, "dropped_total", kind="event") == 3
    assert value(values, "gpu_telemetry_up") == 1
    assert value(values, "loop_turn_duration_seconds_count") == 1
    assert value(values, "loop_turn_duration_seconds_sum") == 0.002
    own = {name: number for (name, _), number in values.items() if name.startswith("process_")}
    assert own["process_resident_memory_bytes"] > 1e6
    assert own["process_cpu_seconds_total"] > 0


@pytest.mark.parametrize(
    ("phase", "reason"),
    [
        (Waiting(Reason("port_held", "by nginx"), 9.0), "port_held"),
        (Failed(FailedKind.CRASH_LOOP, "6 failures"), "crash_loop"),
        (Backoff(9.0, Reason("exited", "exit code 1")), "exited"),
    ],
)
def test_why_an_engine_is_where_it_is(phase: Any, reason: str) -> None:
    values = values_of(page_of(node(engine(phase=phase, process=None))))
    assert value(values, "engine_reason", engine="qwen", reason=reason) == 1
    assert value(values, "engine_degraded", engine="qwen") is None


# --- what is not known is not there -----------------------------------------------------------------------------------


def test_what_an_engine_did_not_say_is_absent() -> None:
    values = values_of(page_of(node(engine(sample=Sample(time.monotonic()), warmup=None))))
    names = {name for name in names_of(values) if WORK.match(name) or "warmup" in name}
    assert names == {"vllm_supervisor_engine_ttft_p95_slo_seconds"}


@pytest.mark.parametrize(
    "changed",
    [
        {"sample": Sample(time.monotonic() - 3600, 200, running=3, waiting=1, host_bytes=GIB, total_blocks=9)},
        {"sample": None},
        {"phase": Stopped(), "process": None},
        {"phase": Waiting(Reason("port_held", "x"), 9.0), "process": None},
    ],
)
def test_what_is_old_is_absent(changed: dict[str, Any]) -> None:
    """The last look at a process that is gone, or a look that hangs since."""
    values = values_of(page_of(node(engine(**changed))))
    assert [name for name in names_of(values) if WORK.match(name)] == []
    assert value(values, "engine_memory_bytes", engine="qwen", kind="host") is None


def test_a_draining_engine_is_still_looked_at() -> None:
    values = values_of(page_of(node(engine(phase=Draining(After.HOLD, None, CAUSE, 1.0)))))
    assert value(values, "engine_requests_running", engine="qwen") == 3
    assert value(values, "engine_ready", engine="qwen") == 0


def test_without_a_limit_there_is_none() -> None:
    one = engine()
    one = replace(one, spec=replace(one.spec, slo=SloSpec(ttft_p95_ms=0)))
    assert value(values_of(page_of(node(one))), "engine_ttft_p95_slo_seconds", engine="qwen") is None


def test_while_gpus_are_not_seen_nothing_is_said_of_them() -> None:
    blind = Telemetry(helper=1, running=True, swept_at=time.monotonic() - 90, unresponsive=True)
    values = values_of(page_of(node(engine(gpu_bytes=GIB), gpus=(gpu(),), telemetry=blind)))
    assert value(values, "gpu_telemetry_up") == 0
    assert value(values, "gpu_up", gpu=UUID) == 0
    assert value(values, "engine_memory_bytes", engine="qwen", kind="gpu") is None
    kept = ("gpu_info", "gpu_up", "gpu_quarantined", "gpu_reason", "gpu_xids_total", "gpu_engine", "gpu_telemetry_up")
    assert {name for name in names_of(values) if "_gpu_" in name} == {
        f"vllm_supervisor_{name}" for name in (*kept, "gpu_last_look_timestamp_seconds")
    }


def test_what_a_gpu_does_not_have_is_absent() -> None:
    plain = gpu(reading=GpuReading(UUID, "0000:1b:00.0", 0), reasons=(), xids={})
    values = values_of(page_of(node(gpus=(plain,))))
    for metric in ("energy_joules_total", "power_watts", "persistence_mode", "memory_bytes", "utilization_ratio"):
        assert value(values, f"gpu_{metric}", gpu=UUID) is None
    assert value(values, "gpu_up", gpu=UUID) == 1


def test_a_machine_without_gpus_says_nothing_of_them() -> None:
    values = values_of(page_of(node(engine(gpu_bytes=None), telemetry=Telemetry())))
    assert [name for name in names_of(values) if "_gpu_" in name] == []


# --- what others say is text ------------------------------------------------------------------------------------------


def test_names_that_an_engine_or_a_driver_made_up_stay_labels() -> None:
    evil = 'x"}\n# TYPE y gauge\ny 1\x1b[31m\\\u202e' + "z" * 10_000
    one = engine(sample=Sample(time.monotonic(), 200, version=evil))
    body = page_of(node(one, gpus=(gpu(name="\ud800" + evil),))).give("")[0].decode()
    assert "\ny 1" not in body
    assert "\x1b" not in body
    assert "\u202e" not in body
    assert max(map(len, body.splitlines())) < 500
    assert len(values_of(page_of(node(one)))) > 20, "it can be read"


def test_no_number_is_no_sample() -> None:
    """An engine may say NaN; the document knows no such number."""
    one = engine(sample=Sample(time.monotonic(), 200, kv_usage=float("nan")))
    assert value(values_of(page_of(node(one))), "engine_kv_usage_ratio", engine="qwen") is None


# --- many -------------------------------------------------------------------------------------------------------------


def crowd(count: int) -> Node:
    one = engine()
    return node(*(replace(one, spec=replace(one.spec, name=f"e{number}")) for number in range(count)))


def test_a_hundred_engines_are_quick_and_their_series_few() -> None:
    """Bounded: what there is of one engine depends on its states and reasons alone."""
    page = page_of(crowd(100))
    began = time.process_time()
    body, _ = page.give("")
    assert time.process_time() - began < 1.0
    assert body.count(b"\n") < 100 * 40 + 200
    alone = page_of(crowd(1)).give("")[0].count(b"\n")
    assert body.count(b"\n") < 100 * alone


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads((REPO / "packaging/grafana/vllm-supervisor.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places)
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "instance", "engine"}
    assert all(p["targets"] for p in panels if p["type"] != "row")
