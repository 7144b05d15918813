"""A Python environment with a `vllm` in it whose body a test writes; it counts its starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from supervisord.core.spec import EngineSpec
from supervisord.engine.flags import FlagBook
from tests.sim.engine import DATA_PATH

HELP = (DATA_PATH / "help-all-0.32.0.txt").read_text(encoding="utf-8")


@contextlib.contextmanager
def open_home() -> Iterator[Path]:
    """A directory with a short path that every user may enter; those of pytest are long and private."""
    path = Path(tempfile.mkdtemp(prefix="vs.", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


class FakeInstallation:
    """An installation below `home`, with a state directory beside it. It prints the captured help of 0.32.0."""

    def __init__(self, home: Path, body: str = "print(HELP)") -> None:
        self.home = home
        self.state_dir = home / "state"
        self.starts = home / "starts"
        self.program = home / "venv" / "bin" / "vllm"
        self.packages = home / "venv" / "lib" / "python3.11" / "site-packages"
        self.packages.mkdir(parents=True)
        self.program.parent.mkdir()
        self.state_dir.mkdir()
        self.starts.touch()
        self.starts.chmod(0o666)
        (home / "help.txt").write_text(HELP)
        python = self.program.parent / "python3"
        python.symlink_to("/usr/bin/python3" if Path("/usr/bin/python3").exists() else os.path.realpath(sys.executable))
        self.release("0.32.0")
        self.says(body)

    def says(self, body: str) -> None:
        head = f"""#!{self.program.parent}/python3
import json, os, sys, time
with open({str(self.starts)!r}, "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "uid": os.getuid()}}) + "\\n")
HELP = open({str(self.home / "help.txt")!r}).read()
"""
        self.program.write_text(head + body + "\n")
        self.program.chmod(0o755)

    def release(self, version: str) -> None:
        for old in self.packages.glob("vllm-*"):
            old.rmdir()
        (self.packages / f"vllm-{version}.dist-info").mkdir()

    def spec(self, **keys: Any) -> EngineSpec:
        return EngineSpec(**{"name": "q", "model": "m/m", "port": 1, "command": (str(self.program), "serve"), **keys})

    def book(self, base_env: dict[str, str] | None = None, *, as_root: bool = False) -> FlagBook:
        return FlagBook(self.state_dir, as_root=as_root, base_env=base_env or {"PATH": "/usr/bin:/bin"})

    def asked(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.starts.read_text().splitlines()]

    def cache(self) -> Path:
        (found,) = (self.state_dir / "flags").iterdir()
        return found
