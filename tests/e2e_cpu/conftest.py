"""The real vLLM on CPU: installed by scripts/install-vllm, with the tiny model of scripts/make-tiny-model."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RealVllm:
    """Where the command and the model are. `env`: what its engines need, as lines of `[engine.X.env]`."""

    command: Path
    model: Path
    env: str


@pytest.fixture(scope="session")
def vllm() -> RealVllm:
    """What scripts/test prepared; VLLM_SUPERVISOR_TEST_{VLLM,MODEL,ENV} name another installation (--matrix)."""
    named = os.environ.get("VLLM_SUPERVISOR_TEST_VLLM")
    command = Path(named or _output("scripts/install-vllm", "--cpu", "--print-path"))
    model = Path(os.environ.get("VLLM_SUPERVISOR_TEST_MODEL") or _output("scripts/make-tiny-model"))
    assert command.exists(), f"no vLLM at {command}: run scripts/install-vllm, or scripts/test, which does"
    return RealVllm(command, model, os.environ.get("VLLM_SUPERVISOR_TEST_ENV", ""))


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
