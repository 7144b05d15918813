"""What a probe says is checked like input from a stranger."""

from __future__ import annotations

import json
import math
import select
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core.gpu_samples import GpuPlace, GpuProcess, GpuReading, GpuSweep
from supervisord.core.messages import GpusSwept, PersistenceSet, XidSeen
from supervisord.core.telemetry import AVOIDED_MAX
from supervisord.gpu.protocol import ProtocolError, decode, pci_id, persistence_request, sweep_request

NOW = 1000.0
UUID = "GPU-5135c0de-0000-4000-8000-000000000000"

GPU: dict[str, Any] = {
    "uuid": UUID,
    "pci_id": "00000000:1B:00.0",
    "index": 0,
    "name": "NVIDIA H200",
    "architecture": 9,
    "compute": [9, 0],
    "brand": 14,
    "error": None,
    "problems": {"power_w": 999},
    "unsupported": ["mig"],
    "total_bytes": 150754820096,
    "used_bytes": 2147483648,
    "free_bytes": 147962462208,
    "memory_version": 2,
    "processes": [[4711, 2147483648, "VLLM::EngineCor"], [4712, None, ""]],
    "persistence": True,
    "utilization_percent": 40,
    "temperature_c": 61,
    "clock_reasons": 1,
    "energy_j": 1000.5,
    "ecc_uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "recovery_action": 0,
}
SWEEP: dict[str, Any] = {
    "sweep": 7,
    "slow": True,
    "at": 999.5,
    "took_ms": 1.25,
    "driver": "580.159.04",
    "problem": None,
    "xids": [UUID],
    "gpus": [GPU],
}
READING = GpuReading(
    uuid=UUID,
    pci_id="0000:1b:00.0",
    index=0,
    name="NVIDIA H200",
    architecture=9,
    compute=(9, 0),
    brand=14,
    problems={"power_w": 999},
    unsupported=frozenset({"mig"}),
    total_bytes=150754820096,
    used_bytes=2147483648,
    free_bytes=147962462208,
    memory_version=2,
    processes=(GpuProcess(4711, 2147483648, "VLLM::EngineCor", "qwen", 3), GpuProcess(4712, None)),
    persistence=True,
    utilization_percent=40.0,
    temperature_c=61.0,
    clock_reasons=1,
    energy_j=1000.5,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    recovery_action=0,
)


def heard(said: object) -> GpusSwept | PersistenceSet | XidSeen:
    return decode(json.dumps(said).encode(), 1, NOW, {4711: ("qwen", 3)}.get)


def reading(**changes: Any) -> GpuReading:
    observation = heard(SWEEP | {"gpus": [GPU | changes]})
    assert isinstance(observation, GpusSwept)
    return observation.sweep.gpus[0]


def test_a_sweep() -> None:
    assert heard(SWEEP) == GpusSwept(
        1, 7, GpuSweep(999.5, (READING,), None, True, "580.159.04", 1.25, frozenset({UUID}))
    )


def test_what_is_not_known_is_none() -> None:
    lost = {"uuid": UUID, "pci_id": "0000:1b:00.0", "index": 3, "error": 15}
    assert heard(SWEEP | {"gpus": [lost]}) == GpusSwept(
        1,
        7,
        GpuSweep(
            999.5,
            (GpuReading(UUID, "0000:1b:00.0", 3, error=15),),
            None,
            True,
            "580.159.04",
            1.25,
            frozenset({UUID}),
        ),
    )


def test_other_answers() -> None:
    assert heard({"persistence": UUID, "on": True, "error": None}) == PersistenceSet(UUID, True, None)
    assert heard({"persistence": UUID, "on": False, "error": 4}) == PersistenceSet(UUID, False, 4)
    assert heard({"xid": 79, "gpu": UUID, "at": 990.0}) == XidSeen(990.0, UUID, 79, "nvml")


def test_nothing_is_later_than_now() -> None:
    observation = heard({"xid": 79, "gpu": UUID, "at": 1e9})
    assert isinstance(observation, XidSeen)
    assert observation.at == NOW


def test_each_owner_is_asked_for_once_in_a_sweep() -> None:
    asked: list[int] = []
    other = GPU | {"uuid": "GPU-other", "pci_id": "0000:2b:00.0", "index": 1}
    decode(json.dumps(SWEEP | {"gpus": [GPU, other]}).encode(), 1, NOW, asked.append)
    assert asked == [4711, 4712]


def test_requests() -> None:
    assert json.loads(sweep_request(7, slow=False)) == {"sweep": 7, "slow": False, "avoid": []}
    dead = [GpuPlace(UUID, "00000000:1b:00.0", number or None) for number in range(AVOIDED_MAX)]
    request = sweep_request(1 << 40, slow=True, avoid=dead)
    assert json.loads(request)["avoid"][:2] == [[UUID, "00000000:1b:00.0", None], [UUID, "00000000:1b:00.0", 1]]
    assert len(request) < select.PIPE_BUF, "it goes into a pipe at once"
    assert json.loads(persistence_request(UUID, on=True)) == {"persistence": UUID, "on": True}
    assert sweep_request(7, slow=False).endswith(b"\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("0000:C1:00", "0000:c1:00.0"),
        ("00010000:01:1F.7", "10000:01:1f.7"),
    ],
)
def test_pci_id(text: str, expected: str) -> None:
    assert pci_id(text) == expected


def test_text_is_bounded_and_printable() -> None:
    assert reading(name=" NVIDIA\x1b[2J \ud800" + "X" * 1000).name == "NVIDIA [2J  " + "X" * 83
    assert reading(problems={"a\nb": 3}).problems == {"a b": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"uuid": None},
        {"uuid": 5},
        {"uuid": ""},
        {"pci_id": "1b"},
        {"pci_id": "\x1b[2J"},
        {"index": -1},
        {"index": True},
        {"index": 0.5},
        {"compute": [9]},
        {"compute": [9, "0"]},
        {"compute": [True, 0]},
        {"error": 1 << 40},
        {"problems": []},
        {"problems": {"power_w": None}},
        {"unsupported": "mig"},
        {"unsupported": [3]},
        {"total_bytes": 1 << 64},
        {"total_bytes": 1e3},
        {"used_bytes": -1},
        {"memory_version": 3},
        {"memory_version": []},
        {"memory_version": True},
        {"memory_version": 1.0},
        {"processes": None},
        {"processes": [[4711, 1]]},
        {"processes": [[0, 1, ""]]},
        {"processes": [[4711, True, ""]]},
        {"processes": [[4711, 1, None]]},
        {"persistence": 1},
        {"temperature_c": True},
        {"temperature_c": 1e300},
        {"temperature_c": "61"},
        {"energy_j": 10**400},
    ],
    ids=repr,
)
def test_wrong_values_of_a_gpu(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        reading(**changes)


@pytest.mark.parametrize("key", ["slow", "at", "took_ms", "driver", "problem", "xids", "gpus"])
def test_missing_keys(key: str) -> None:
    with pytest.raises(ProtocolError, match=key):
        heard({name: value for name, value in SWEEP.items() if name != key})


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"{",
        b"\xff\xfe\x00",
        b'{"sweep": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"xid": NaN, "gpu": "", "at": 0}',
        b'{"xid": 1, "gpu": "", "at": Infinity}',
        b'{"xid": 1, "gpu": "", "at": 1e999}',
        b'{"xid": null, "gpu": "", "at": 1}',
    ],
    ids=lambda line: repr(line[:40]),
)
def test_wrong_lines(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line, 1, NOW, lambda _pid: None)


def test_contradictions() -> None:
    with pytest.raises(ProtocolError, match="one UUID"):
        heard(SWEEP | {"gpus": [GPU, GPU]})
    with pytest.raises(ProtocolError, match="problem and GPUs"):
        heard(SWEEP | {"problem": 9})


def test_keys_of_a_later_version_are_passed_over() -> None:
    assert reading(fan_percent=30) == READING


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _put(said: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    if key in GPU and key not in SWEEP:
        return said | {"gpus": [GPU | {key: value}]}
    return said | {key: value}


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(sorted(SWEEP.keys() | GPU.keys())), value=JSON)
def test_any_value_anywhere_is_taken_or_refused(key: str, value: object) -> None:
    try:
        observation = heard(_put(SWEEP, key, value))
    except ProtocolError:
        return
    assert isinstance(observation, GpusSwept)
    assert 0 <= observation.number < 1 << 64
    assert observation.sweep.at <= NOW
    for gpu in observation.sweep.gpus:
        for number in (gpu.temperature_c, gpu.power_w, gpu.energy_j, gpu.utilization_percent):
            assert number is None or (type(number) is float and math.isfinite(number))
        for text in (gpu.uuid, gpu.name, gpu.pci_id, *gpu.unsupported, *gpu.problems):
            assert text.isprintable()
            assert len(text) <= 96


@settings(max_examples=200, deadline=None)
@given(line=st.binary(max_size=200) | JSON.map(lambda said: json.dumps(said).encode()))
def test_any_line_is_taken_or_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line, 1, NOW, lambda _pid: None)
