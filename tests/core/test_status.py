"""The status document: every field always there, unknown is null, and it keeps to its schema."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from supervisord.core import status
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    ExitClass,
    Failed,
    FailedKind,
    Gpu,
    LastExit,
    Node,
    Persistence,
    Phase,
    Process,
    Progress,
    Ready,
    Reason,
    Sample,
    Starting,
    Stopped,
    Stopping,
    Telemetry,
    Waiting,
    Warming,
    Warmup,
)
from supervisord.core.spec import EngineSpec, NodeSpec, SloSpec
from tests.core.play import card, foreign, mine

NOW = 1000.0
WALL = 1_800_000_000.0
CAUSE = Reason("operator", "stop requested by uid 0 pid 1")
GIB = 1024**3

PHASES: list[tuple[Phase, list[tuple[str, str]]]] = [
    (Stopped(), []),
    (Waiting(Reason("port_held", "port 8001 is held by 77 nginx"), NOW + 5), [("port_held", "port 8001 is held")]),
    (Starting(NOW - 4, NOW + 90), [("starting", "does not answer yet; last progress 4 s ago")]),
    (
        Starting(NOW + 1, NOW + 90, Progress(3 * GIB, GIB // 2, 214)),
        [("starting", "3.0 GiB read, 0.5 GiB in host memory, 214 different log lines; last progress 0 s ago")],
    ),
    (Warming(NOW + 9, "prefill, round 2"), [("warming", "prefill, round 2")]),
    (Warming(NOW + 9), [("warming", "warm-up under way")]),
    (Ready(), []),
    (
        Ready((Reason("slo", "TTFT p95 is 900 ms"), Reason("kv_pressure", "42 free"))),
        [("slo", "900"), ("kv_pressure", "42")],
    ),
    (Draining(After.HOLD, None, CAUSE, NOW + 1), [("operator", "uid 0")]),
    (Stopping(After.STOP, CAUSE, NOW + 60, NOW + 90), [("operator", "uid 0")]),
    (Backoff(NOW + 38, Reason("exited", "exit code 1")), [("exited", "exit code 1")]),
    (Failed(FailedKind.CRASH_LOOP, "6 failures"), [("crash_loop", "6 failures")]),
]


def stamp(at: float) -> str:
    """A formatter that lets tests read seconds."""
    return f"{at - WALL:+.1f}Z"


def engine(phase: Phase, **fields: Any) -> Engine:
    spec = EngineSpec(name="qwen", model="Qwen/Qwen3", port=8001, gpus=("GPU-a", "1"))
    return Engine(spec=spec, plan_id="p", phase=phase, since=NOW - 60, **fields)


def node(*engines: Engine, **fields: Any) -> Node:
    return Node(spec=NodeSpec(), pid=7, since=NOW - 3600, engines={e.spec.name: e for e in engines}, **fields)


def of(*engines: Engine, **fields: Any) -> dict[str, Any]:
    return status.of(node(*engines, **fields), NOW, WALL, stamp)


def one(phase: Phase, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = of(engine(phase, **fields))["engines"][0]
    return found


def closed(schema: Any) -> Any:
    """The schema, but nothing beyond what it names is allowed: finds fields that nobody documented."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(part) for key, part in schema.items()}
    return {**inner, "additionalProperties": False} if "properties" in schema else inner


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads(files("supervisord").joinpath("status.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(closed(schema))


FULL = engine(
    Ready((Reason("kv_pressure", "42 of 4000 blocks are free"),)),
    wanted=True,
    generation=3,
    process=Process(4711, 1, "b"),
    ready_since=NOW - 50,
    warmup=Warmup(812.34, 401.26, 3),
    sample=Sample(NOW - 2, 200, None, 3, 12, 4000, 42, 0.98951, host_bytes=3 * GIB, version="0.24.0"),
    last_exit=LastExit(ExitClass.CUDA_APP, None, 6, NOW - 70, 2, "look at the engine's log"),
)


CARD = Gpu(
    "GPU-b",
    pci_id="0000:1b:00.0",
    index=1,
    name="NVIDIA H200",
    generation="hopper",
    kind="datacenter",
    reading=replace(
        card("GPU-b", 1),
        used_bytes=5 * GIB // 2,
        energy_j=5.55,
        power_w=99.96,
        processes=(mine(2, "qwen", 3), foreign(1)),
    ),
    quarantine=Reason("gpu_fault", "Xid 79 (fallen off the bus)"),
    reasons=(Reason("gpu_throttled", "it runs slower"),),
    xids={"79": 1},
    persistence=Persistence(wanted=True, why="default for hopper datacenter"),
)


@pytest.mark.parametrize(("phase", "_told"), PHASES)
def test_every_state_keeps_to_the_schema(validator: Draft202012Validator, phase: Phase, _told: object) -> None:
    validator.validate(of(engine(phase)))
    validator.validate(of(replace(FULL, phase=phase), config_error="cannot read it"))


def test_a_node_of_many_keeps_to_the_schema(validator: Draft202012Validator) -> None:
    gpus = {
        "GPU-a": Gpu("GPU-a"),
        "GPU-b": CARD,
    }
    named = [replace(e, spec=replace(e.spec, name=f"e{i}")) for i, e in enumerate(engine(phase) for phase, _ in PHASES)]
    validator.validate(of(*named, FULL, gpus=gpus))
    validator.validate(of())


@pytest.mark.parametrize(("phase", "told"), PHASES)
def test_reasons_say_why_it_is_there(phase: Phase, told: list[tuple[str, str]]) -> None:
    document = one(phase)
    assert [reason["code"] for reason in document["reasons"]] == [code for code, _ in told]
    for reason, (_, text) in zip(document["reasons"], told, strict=True):
        assert text in reason["message"]


def test_a_launch_without_its_process_is_said() -> None:
    assert one(Starting(NOW, NOW + 9), launching=4)["reasons"][0]["message"] == "being launched"


def test_a_drain_that_lasts_says_how_it_ends() -> None:
    (held,) = one(Draining(After.HOLD, None, CAUSE, NOW))["reasons"]
    assert held["message"] == f"{CAUSE.message}; back into traffic: vllm-supervisor start qwen"
    (ending,) = one(Draining(After.STOP, NOW, CAUSE, NOW))["reasons"]
    assert ending["message"] == CAUSE.message


def test_a_limit_of_zero_is_none() -> None:
    spec = replace(FULL.spec, slo=SloSpec(ttft_p95_ms=0, gpu_util_min_percent=85))
    limits = of(replace(FULL, spec=spec))["engines"][0]["slo"]
    assert limits == {"ttft_p95_ms": None, "gpu_util_min_percent": 85}


def test_health_is_told_only_when_ready() -> None:
    assert one(Ready())["health"] == "ok"
    assert one(Ready((CAUSE,)))["health"] == "degraded"
    assert one(Draining(After.STOP, NOW, CAUSE, NOW))["health"] is None


def test_next_start_comes_from_backoff_and_from_a_gate_that_nobody_tries_now() -> None:
    gate = Waiting(CAUSE, NOW + 5)
    assert one(Backoff(NOW + 38, CAUSE))["next_start_at"] == "+38.0Z"
    assert one(gate)["next_start_at"] == "+5.0Z"
    assert one(gate, launching=2)["next_start_at"] is None
    assert one(Ready())["next_start_at"] is None


def test_all_that_is_known() -> None:
    document = of(FULL)["engines"][0]
    assert document == {
        "name": "qwen",
        "model": "Qwen/Qwen3",
        "port": 8001,
        "gpus": ["GPU-a", "1"],
        "wanted": "running",
        "state": "ready",
        "health": "degraded",
        "reasons": [{"code": "kv_pressure", "message": "42 of 4000 blocks are free"}],
        "since": "-60.0Z",
        "generation": 3,
        "pid": 4711,
        "vllm_version": "0.24.0",
        "restarts": 2,
        "next_start_at": None,
        "ready_since": "-50.0Z",
        "kv": {"total_blocks": 4000, "free_blocks": 42, "usage": 0.9895, "age_s": 2.0},
        "requests": {"running": 3, "waiting": 12},
        "ranks": [],
        "tokens_per_s": None,
        "ttft_p95_ms": None,
        "prefix_hit_rate": None,
        "draft_acceptance_rate": None,
        "memory": {
            "gpu_mib": None,
            "host_mib": 3072.0,
            "gpu_creep_mib_per_h": None,
            "host_creep_mib_per_h": None,
            "exhausted_in_s": None,
        },
        "slo": {"ttft_p95_ms": 500.0, "gpu_util_min_percent": None},
        "warmup": {"first_ms": 812.3, "settled_ms": 401.3, "rounds": 3},
        "last_exit": {
            "class": "cuda_app",
            "code": None,
            "signal": 6,
            "at": "-70.0Z",
            "generation": 2,
            "advice": "look at the engine's log",
        },
    }


def test_unknown_is_null_and_never_zero() -> None:
    document = one(Stopped())
    assert document["wanted"] == "stopped"
    assert document["kv"] == {"total_blocks": None, "free_blocks": None, "usage": None, "age_s": None}
    assert document["requests"] == {"running": None, "waiting": None}
    assert document["memory"]["host_mib"] is None
    assert document["warmup"] == {"first_ms": None, "settled_ms": None, "rounds": None}
    assert (document["last_exit"], document["pid"], document["vllm_version"]) == (None, None, None)


def test_a_sample_without_blocks_has_no_age() -> None:
    assert one(Ready(), process=Process(1, 1, "b"), sample=Sample(NOW - 3))["kv"]["age_s"] is None


def test_what_a_process_that_is_gone_said_is_not_the_present() -> None:
    document = of(replace(FULL, process=None))["engines"][0]
    assert document["kv"]["free_blocks"] is None
    assert document["requests"]["running"] is None
    assert document["vllm_version"] == "0.24.0"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_unknown(odd: float) -> None:
    document = one(Ready(), process=Process(1, 1, "b"), sample=Sample(NOW, kv_usage=odd, free_blocks=5))
    assert document["kv"] == {"total_blocks": None, "free_blocks": 5, "usage": None, "age_s": 0.0}


SEEN = Telemetry(helper=1, running=True, answered=True, swept_at=NOW - 1, driver="580.159.04")


def test_the_daemon_and_its_gpus() -> None:
    gpus = {"GPU-a": Gpu("GPU-a"), "GPU-b": CARD}
    document = of(FULL, gpus=gpus, version="0.1.0", launcher="plain", config_error="cannot read x", telemetry=SEEN)
    assert document["version"] == 1
    assert document["supervisor"] == {
        "pid": 7,
        "version": "0.1.0",
        "since": "-3600.0Z",
        "launcher": "plain",
        "config_error": "cannot read x",
        "driver": "580.159.04",
        "gpu_trouble": None,
    }
    never_seen, seen = document["gpus"]
    assert seen == {
        "uuid": "GPU-b",
        "index": 1,
        "name": "NVIDIA H200",
        "generation": "hopper",
        "class": "datacenter",
        "pci_id": "0000:1b:00.0",
        "memory_total_mib": 81920.0,
        "memory_used_mib": 2560.0,
        "memory_free_mib": 81920.0,
        "energy_j": 5.5,
        "temperature_c": 55.0,
        "power_w": 100.0,
        "utilization_percent": 40.0,
        "persistence": {"wanted": "on", "actual": "on", "why": "default for hopper datacenter"},
        "health": "degraded",
        "quarantined": True,
        "reasons": [
            {"code": "gpu_fault", "message": "Xid 79 (fallen off the bus)"},
            {"code": "gpu_throttled", "message": "it runs slower"},
        ],
        "xids": {"79": 1},
        "processes": [
            {"pid": 4711, "name": "VLLM::EngineCore", "memory_mib": 2048.0, "engine": "qwen"},
            {"pid": 77, "name": "python", "memory_mib": 1024.0, "engine": None},
        ],
        "engines": ["qwen"],
    }
    assert {key: value for key, value in never_seen.items() if value is None or value in ([], {})} == {
        **dict.fromkeys(("index", "name", "generation", "class", "pci_id", "energy_j", "temperature_c", "power_w")),
        **dict.fromkeys(("memory_total_mib", "memory_used_mib", "memory_free_mib", "utilization_percent", "processes")),
        "reasons": [],
        "xids": {},
    }
    assert never_seen["persistence"] == {"wanted": None, "actual": None, "why": None}
    assert (never_seen["health"], never_seen["quarantined"]) == ("ok", False)


def test_what_is_not_known_of_a_gpu_now_is_null() -> None:
    """Not the last that was known: a figure without an age is read as the present."""
    busy = replace(FULL, gpu_bytes=3 * GIB)
    for change in ({"hangs": 1}, {"problem": 18}, {"released_until": NOW + 9}, {"unresponsive": True}):
        told = of(busy, gpus={"GPU-b": CARD}, telemetry=replace(SEEN, **change))
        assert told["gpus"][0]["memory_used_mib"] is None, change
        assert told["gpus"][0]["processes"] is None
        assert told["engines"][0]["memory"]["gpu_mib"] is None
        assert told["supervisor"]["gpu_trouble"]["code"]
    told = of(busy, gpus={"GPU-b": CARD}, telemetry=SEEN)
    assert told["engines"][0]["memory"]["gpu_mib"] == 3072.0
    lost = replace(CARD, quarantine=None, absent_since=NOW - 1)
    told = of(busy, gpus={"GPU-b": lost}, telemetry=SEEN)["gpus"][0]
    assert told["memory_used_mib"] is None
    assert told["reasons"][0] == {"code": "gpu_missing", "message": "it does not answer"}


def test_processes_that_cannot_be_ended_are_told_of_their_gpu() -> None:
    stuck = engine(Failed(FailedKind.UNKILLABLE, "D state"), devices=("GPU-b",))
    told = of(stuck, gpus={"GPU-b": replace(CARD, quarantine=None, reasons=())}, telemetry=SEEN)["gpus"][0]
    assert told["reasons"] == [{"code": "unkillable", "message": "processes of engine qwen on it cannot be ended"}]
    assert told["health"] == "degraded"


@pytest.mark.parametrize(("wanted", "word"), [(None, "leave"), (True, "on"), (False, "off")])
def test_persistence_in_words(*, wanted: bool | None, word: str) -> None:
    gpu = replace(CARD, persistence=Persistence(wanted=wanted, why="persistence", told="refused (it needs root)"))
    told = of(gpus={"GPU-b": gpu}, telemetry=SEEN)["gpus"][0]["persistence"]
    assert told == {"wanted": word, "actual": "on", "why": "refused (it needs root)"}
    dark = replace(gpu, reading=replace(card("GPU-b"), persistence=False))
    assert of(gpus={"GPU-b": dark}, telemetry=SEEN)["gpus"][0]["persistence"]["actual"] == "off"
    unknown = replace(gpu, reading=replace(card("GPU-b"), persistence=None))
    assert of(gpus={"GPU-b": unknown}, telemetry=SEEN)["gpus"][0]["persistence"]["actual"] is None
