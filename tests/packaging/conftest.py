"""The package, built once for all tests that look at it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dpkg-deb", "git", "lintian", "man", "mandoc", "perl", "systemd-analyze", "unshare", "zsh")


def try_build(out: Path, *options: str, umask: int = 0o022, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a package with this interpreter; times come from its changelog, not from the environment of the tests."""
    command = [sys.executable, str(ROOT / "scripts/deb_build.py"), "--out", str(out), *options]
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, umask=umask)


def build(out: Path, *options: str, umask: int = 0o022) -> Path:
    """Build a package and return its path."""
    done = try_build(out, *options, umask=umask)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="session", autouse=True)
def _tools() -> None:
    """Fails where something is missing that these tests look with; none of them is passed over."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    assert not missing, f"cannot test the package without {', '.join(missing)}: scripts/test --systemd installs them"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of this checkout."""
    return build(tmp_path_factory.mktemp("deb"))
