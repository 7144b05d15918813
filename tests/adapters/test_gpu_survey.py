"""The one look of `doctor` at everything: what is said is checked like input from a stranger, and every end is told."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core.gpu_samples import GpuPlace
from supervisord.gpu import survey
from supervisord.gpu.protocol import Depths, ProtocolError, decode_survey
from supervisord.gpu.survey import SurveyError, look
from tests.sim.nvml import NvmlBox

GPU: dict[str, Any] = {"uuid": "GPU-1", "pci_id": "0000:1b:00.0", "index": 0, "error": None}
SAID: dict[str, Any] = {
    "sweep": 1,
    "slow": True,
    "at": 1.0,
    "took_ms": 2.0,
    "driver": "580",
    "problem": None,
    "xids": [],
    "gpus": [GPU],
    "cuda": 12080,
}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlBox:
    made = NvmlBox.make(tmp_path / "nvml", "h100", "rtx3090")
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


def test_what_is_seen(box: NvmlBox) -> None:
    box.gpu(0).set(nvlinks=18, nvlinks_up=17, fabric_state=3, fabric_status=0, retired_pending=1, mig_mode=1)
    found = look(60)
    assert found.cuda == (13, 0)
    assert found.sweep.driver == "580.159.04"
    assert [gpu.name for gpu in found.sweep.gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090"]
    assert found.sweep.gpus[0].mig is True
    assert found.depths == (Depths(17, 18, 3, 0, retired_pending=True), Depths())


def test_one_call_that_fails_costs_one_value(box: NvmlBox) -> None:
    box.gpu(0).set(nvlinks=18, nvlinks_up=18, fabric_state=3)
    box.gpu(0).fault("nvmlDeviceGetNvLinkState", 999)
    found = look(60)
    assert found.depths[0] == Depths(None, None, 3, 0)
    assert found.sweep.gpus[0].problems == {"nvlinks": 999, "nvlinks_up": 999}


def test_a_dead_gpu_is_not_touched(box: NvmlBox) -> None:
    dead = box.gpu(0)
    dead.fault("every", "hang 600")
    place = GpuPlace(dead.uuid, dead.get("pci_id"), 0)
    assert [gpu.error for gpu in look(60, [place]).sweep.gpus] == [16, None]


def test_a_driver_that_hangs(box: NvmlBox) -> None:
    box.fault("nvmlInitWithFlags", "hang 600")
    began = time.monotonic()
    with pytest.raises(SurveyError, match="does not answer within 1 s") as caught:
        look(1)
    assert caught.value.hangs
    assert time.monotonic() - began < 30


def test_no_driver_is_an_answer(box: NvmlBox) -> None:
    box.fault("nvmlInitWithFlags", 18)
    found = look(60)
    assert (found.sweep.problem, found.cuda, found.depths) == (18, None, ())


@pytest.mark.parametrize(
    "script", ["print('nonsense')", "print('{}')", "raise SystemExit(3)", "print('x' * (1 << 21))", "print()"]
)
def test_a_probe_that_says_something_else(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def other(stdin: int) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-IS", "-c", f"input(); {script}")
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)

    monkeypatch.setattr(survey, "popen", other)
    with pytest.raises(SurveyError, match="cannot be understood") as caught:
        look(60)
    assert not caught.value.hangs


def test_a_probe_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(stdin: int) -> subprocess.Popen[bytes]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(survey, "popen", none)
    with pytest.raises(SurveyError, match=r"cannot start .*: Too many open files"):
        look(60)


@pytest.mark.parametrize(
    "changed",
    [
        {"cuda": "13"},
        {"cuda": -1},
        {"gpus": [GPU | {"nvlinks": "four"}]},
        {"gpus": [GPU | {"retired_pending": 1}]},
        {"sweep": None},
    ],
)
def test_wrong_answers(changed: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_survey(json.dumps(SAID | changed).encode(), 5.0)


def test_an_answer_to_something_else() -> None:
    with pytest.raises(ProtocolError, match="it is no sweep"):
        decode_survey(b'{"persistence": "GPU-1", "on": true, "error": null}', 5.0)


def test_a_driver_that_does_not_say_its_cuda() -> None:
    assert decode_survey(json.dumps(SAID | {"cuda": None}).encode(), 5.0).cuda is None
    assert decode_survey(json.dumps(SAID).encode(), 5.0).cuda == (12, 8)


JSON = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False).filter(math.isfinite) | st.text(max_size=9)
)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(["nvlinks", "nvlinks_up", "fabric_state", "retired_pending", "cuda"]), value=JSON)
def test_any_value_is_taken_or_refused(key: str, value: object) -> None:
    said = SAID | {"cuda": value} if key == "cuda" else SAID | {"gpus": [GPU | {key: value}]}
    try:
        found = decode_survey(json.dumps(said).encode(), 5.0)
    except ProtocolError:
        return
    assert len(found.depths) == len(found.sweep.gpus)
