"""scripts/install-vllm, with an installation that is only pretended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install-vllm"
REFUSAL = """
        raise RuntimeError(
            f"libtcmalloc is not found in LD_PRELOAD."
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Of a release whose CPU worker wants libraries to be loaded before everything else."""
    prefix = tmp_path / "vllm"
    worker = prefix / "lib/python3.11/site-packages/vllm/v1/worker/cpu_worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text(REFUSAL)
    for name in ("vllm", "python"):
        executable(prefix / "bin" / name, "exit 0")
    (prefix / ".vllm-supervisor-install").write_text("version=0.18.1\nflavour=cpu\nreported=0.18.1+cpu\n")
    return prefix


def run(prefix: Path, path: str, *options: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [SCRIPT, "--cpu", "--version", "0.18.1", "--prefix", prefix, *options]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60)


def test_what_has_to_be_loaded_first_is_named(prefix: Path, tmp_path: Path) -> None:
    library = "/lib/x/libtcmalloc_minimal.so.4"
    executable(tmp_path / "bin/ldconfig", f"echo 'libtcmalloc_minimal.so.4 (libc6,x86-64) => {library}'")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    line = f'LD_PRELOAD = "{library}:{prefix}/lib/libiomp5.so"\n'
    ran = run(prefix, path, "--print-env")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, line, "")
    ran = run(prefix, path)
    assert (ran.returncode, ran.stdout.endswith(f"[engine.NAME.env]\n{line}")) == (0, True)


def test_a_library_that_is_missing_is_told(prefix: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin/ldconfig", "echo 'libc.so.6 (libc6,x86-64) => /lib/x/libc.so.6'")
    ran = run(prefix, f"{tmp_path}/bin:/usr/bin:/bin", "--print-env")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("install-vllm: cannot say what engines of vLLM 0.18.1 need: ")
    assert "libtcmalloc-minimal4" in ran.stderr


def test_users_without_the_folder_of_ldconfig_in_their_path(prefix: Path) -> None:
    ran = run(prefix, "/usr/bin:/bin", "--print-env")
    known = subprocess.run(["/usr/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    assert "command not found" not in ran.stderr
    assert ran.returncode == (0 if "libtcmalloc_minimal.so.4 " in known else 1)
