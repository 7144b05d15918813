"""Runs the real daemon as a process of its own and looks at it from outside."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.sim.engine import alive, processes_with_marker, wait_until

MARKER = "VLLM_SUPERVISOR_TEST"
Document = dict[str, Any]


class Daemon:
    """One state directory and configuration; the daemon over it can be started, killed and started again.

    Everything that it ever starts carries a marker in its environment, so that `leftovers` sees what it lost.
    """

    def __init__(self, toml: str, env: Mapping[str, str] | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="vs.", dir="/tmp"))
        self.marker = uuid.uuid4().hex
        self.socket = self.home / "s"
        self.config = self.home / "config.toml"
        self.log = self.home / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._env = dict(os.environ) | dict(env or {}) | {MARKER: self.marker}
        self.configure(toml)

    def configure(self, toml: str) -> None:
        """Write the configuration; `toml` holds the engines and what differs from the defaults here."""
        head = f'[supervisor]\nstate_dir = "{self.home}/state"\nsocket = "{self.socket}"\nlisten = ""\n'
        head += 'launcher = "plain"\n'
        self.config.write_text(f"{head}{toml}", encoding="utf-8")
        self.config.chmod(0o600)

    def __enter__(self) -> Daemon:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.stop()
            left = self.leftovers()
            if error is None:
                assert not left, f"left behind: {_describe(left)}"
        finally:
            self._kill_all()
            if error is not None:
                error.args = (*error.args, self.story()) if hasattr(error, "args") else error.args
            shutil.rmtree(self.home, ignore_errors=True)

    def start(self, *, wait: bool = True) -> Daemon:
        """Start the daemon, and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "supervisord", "run", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._env,
            )
        if wait:
            wait_until(lambda: self._answers() or self._ended(), 30, "the daemon to answer")
            assert self.process.poll() is None, self.story()
        return self

    def stop(self, timeout_s: float = 120) -> int | None:
        """SIGTERM, and its exit code."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the daemon alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def cli(self, *args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command as an operator would."""
        return subprocess.run(
            [sys.executable, "-m", "supervisord", "--socket", str(self.socket), *args],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={k: v for k, v in self._env.items() if k != MARKER},
        )

    def status(self) -> Document:
        """The status document."""
        done = self.cli("status", "--json")
        document: Document = json.loads(done.stdout)
        return document

    def engine(self, name: str) -> Document:
        """One engine of the status document."""
        found: Document = next(e for e in self.status()["engines"] if e["name"] == name)
        return found

    def wait_engine(self, name: str, test: Callable[[Document], bool], timeout_s: float, what: str) -> Document:
        """Wait until an engine is as wanted."""

        def look() -> Document:
            engine = self.engine(name)
            return engine if test(engine) else {}

        try:
            return wait_until(look, timeout_s, f"{name}: {what}", every_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.engine(name)}") from None

    def wait_state(self, name: str, state: str, timeout_s: float = 30, generation: int | None = None) -> Document:
        """Wait for a state, of a generation if one is given."""

        def test(engine: Document) -> bool:
            return engine["state"] == state and generation in (None, engine["generation"])

        return self.wait_engine(name, test, timeout_s, f"to be {state} (generation {generation})")

    def leftovers(self, timeout_s: float = 5.0) -> list[int]:
        """Processes that this daemon or its engines started and that still live, after a moment to go.

        Two signs, because vLLM's children write their title over their environment: the marker, and an open file here.
        """
        until = time.monotonic() + timeout_s
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def engine_processes(self, name: str) -> list[int]:
        """Living processes of one engine: those that write its log."""
        return sorted(processes_using(str(self.home / "state" / "logs" / f"{name}.log")))

    def _processes(self) -> list[int]:
        return sorted({*processes_with_marker(MARKER, self.marker), *processes_using(f"{self.home}/")})

    def story(self) -> str:
        """What the daemon and its engines wrote, for a failing test."""
        logs = [self.log, *sorted((self.home / "state" / "logs").glob("*.log"))]
        parts = [f"--- {log.name}\n{_tail(log)}" for log in logs if log.exists()]
        return "\n".join(parts)

    def _answers(self) -> bool:
        return self.socket.exists() and self.cli("status").returncode in {0, 1}

    def _ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def _kill_all(self) -> None:
        for pid in self.leftovers(0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


def engine_toml(name: str, command: list[str], port: int, model: str, extra: str = "") -> str:
    """An engine section that runs as the user of the tests."""
    return (
        f"[engine.{name}]\ncommand = {json.dumps(command)}\nmodel = {json.dumps(model)}\nport = {port}\n"
        f"user = {json.dumps(getpass.getuser())}\n{extra}\n"
    )


def processes_using(prefix: str) -> list[int]:
    """Living processes with an open file whose path begins with `prefix`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            links = [str(link.readlink()) for link in (entry / "fd").iterdir()]
            if any(link.startswith(prefix) for link in links) and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-characters:]


def _describe(pids: list[int]) -> str:
    texts = []
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            texts.append(f"{pid} ({command[:100]}, alive: {alive(pid)})")
    return ", ".join(texts)
