"""The project's own environment, as scripts/lib.sh makes it. Its long steps are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.engine import wait_until

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = r"""
set -euo pipefail
PROGRAM=$1
source "$2/scripts/lib.sh"
# Instead of `python -m venv`: it takes as long as HOLD is there, and leaves what a whole environment has.
run_step() {
  echo made >>"$RECORD"
  for ((tries = 0; tries < 3000; tries++)); do
    [[ -e $HOLD ]] || break
    sleep 0.02
  done
  mkdir -p "$VENV/bin"
  ln -sf "$PYTHON" "$VENV/bin/python"
  ln -sf /bin/true "$VENV/bin/vllm-supervisor"
}
run_own_pip() { :; }
own_venv runtime
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    own = {"VENV": str(tmp_path / "venv"), "RECORD": str(tmp_path / "record"), "HOLD": str(tmp_path / "hold")}
    return {**os.environ, **own, "PYTHON": sys.executable}


def command(name: str) -> list[str]:
    return ["bash", "-c", _SCRIPT, "bash", name, str(ROOT)]


def test_two_scripts_at_once_make_it_once(env: dict[str, str], tmp_path: Path) -> None:
    hold, record, told = Path(env["HOLD"]), Path(env["RECORD"]), tmp_path / "told"
    hold.touch()
    with told.open("w") as stderr, subprocess.Popen(command("one"), env=env, stderr=subprocess.DEVNULL) as one:
        wait_until(record.exists, 60, "the first script to be at it")
        with subprocess.Popen(command("two"), env=env, stderr=stderr) as two:
            waits = "two: another script makes the project's environment; waiting for it\n"
            try:
                wait_until(lambda: told.read_text() == waits, 60, "the second script to wait")
            finally:
                hold.unlink()
        assert (one.wait(), two.wait()) == (0, 0)
    assert told.read_text() == f"{waits}two: the project's environment {env['VENV']} is up to date\n"
    assert record.read_text() == "made\n"


def test_one_whose_removal_was_interrupted_is_made_anew(env: dict[str, str]) -> None:
    left = Path(env["VENV"]) / "lib"
    left.mkdir(parents=True)
    (left.parent / "pyvenv.cfg").touch()
    subprocess.run(command("one"), env=env, stderr=subprocess.DEVNULL, check=True)
    assert not left.exists()
    assert (left.parent / ".made-from").exists()


def test_what_is_no_environment_is_left_alone(env: dict[str, str]) -> None:
    other = Path(env["VENV"]) / "thesis.txt"
    other.parent.mkdir()
    other.touch()
    done = subprocess.run(command("one"), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "something else is there" in done.stderr
    assert other.exists()
