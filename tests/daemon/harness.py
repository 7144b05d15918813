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

from supervisord.control import client
from tests.daemon.outside import engine_processes, processes_using
from tests.daemon.sims import table
from tests.sim.engine import alive, processes_with_marker, wait_until

MARKER = "VLLM_SUPERVISOR_TEST"
DEADLINE_S = 60
"""For what takes less than a second on a quiet machine: an fsync alone has been seen to take 18 s."""

Document = dict[str, Any]


class Daemon:
    """One state directory and configuration; the daemon over it can be started, killed and started again.

    Everything that it ever starts carries a marker in its environment, so that `leftovers` sees what it lost.
    `supervisor` holds keys of `[supervisor]` that differ from those of every test.
    """

    def __init__(self, toml: str, env: Mapping[str, str] | None = None, **supervisor: Any) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="vs.", dir="/tmp"))
        self.marker = uuid.uuid4().hex
        self.socket = self.home / "s"
        self.config = self.home / "config.toml"
        self.state_dir = self.home / "state"
        self.log = self.home / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._env = dict(os.environ) | dict(env or {}) | {MARKER: self.marker}
        self._supervisor = supervisor
        self.configure(toml)

    def configure(self, toml: str) -> None:
        """Write the configuration; `toml` holds the engines and what differs from the defaults here."""
        settings = {"state_dir": str(self.state_dir), "socket": str(self.socket), "listen": "", "launcher": "plain"}
        head = table("supervisor", {**settings, "poll_interval_s": 0.5, **self._supervisor})
        self.write_config(f"{head}{toml}")

    def write_config(self, text: str) -> None:
        """Replace the whole file, as an editor does: a reload reads the old or the new one."""
        new = self.config.with_name("config.toml.new")
        new.write_text(text, encoding="utf-8")
        new.chmod(0o600)
        new.replace(self.config)

    def __enter__(self) -> Daemon:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.stop()
            left = self.leftovers()
            if error is None:
                assert not left, f"left behind: {_describe(left)}"
                self.assert_no_bug()
        finally:
            self._kill_all()
            if error is not None:
                print(self.story())
            shutil.rmtree(self.home, ignore_errors=True)

    def start(self, *, wait: bool = True) -> Daemon:
        """Start the daemon, and wait until it answers."""
        self.start_as(wait=wait)
        return self

    def start_as(self, *, wait: bool = True, **options: Any) -> None:
        """Start it with other options of Popen."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "supervisord", "run", "--config", str(self.config)],
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": self._env, **options},
            )
        if wait:
            wait_until(lambda: self._answers() or self._ended(), DEADLINE_S, "the daemon to answer")
            assert self.process.poll() is None, self.story()

    def stop(self, timeout_s: float = 120) -> int | None:
        """SIGTERM, and its exit code."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    @property
    def pid(self) -> int:
        """Of the daemon."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL to the daemon alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

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

    def request(self, *args: str) -> str:
        """Run a command that has to succeed; what it printed."""
        done = self.cli(*args)
        assert done.returncode == 0, f"{args}: {done.returncode} {done.stdout} {done.stderr}"
        return done.stdout

    def status(self) -> Document:
        """The status document, as `status --json` prints it (which would cost a process each time)."""
        return client.get(str(self.socket), "/v1/status", timeout_s=DEADLINE_S).document()

    def events(self, kind: str | None = None, engine: str | None = None) -> list[Document]:
        """What the daemons of this home have told so far, one document each."""
        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if kind in {None, event["kind"]} and engine in {None, event.get("engine")}:
                    found.append(event)
        return found

    def wait_event(
        self, kind: str, engine: str | None = None, count: int = 1, timeout_s: float = DEADLINE_S
    ) -> Document:
        """Wait until something was told for the `count`-th time."""
        wait_until(lambda: len(self.events(kind, engine)) >= count, timeout_s, f"event {kind} of {engine}")
        return self.events(kind, engine)[count - 1]

    def assert_no_bug(self) -> None:
        """No daemon of this home has met what it does not know."""
        bugs = [path.read_text(encoding="utf-8") for path in self.state_dir.glob("bug-*.txt")]
        assert not bugs, bugs[0]
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        assert "Traceback" not in text, text
        assert "internal error" not in text, text

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
            return wait_until(look, timeout_s, f"{name}: {what}", every_s=0.02)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.engine(name)}") from None

    def wait_state(
        self, name: str, state: str, timeout_s: float = DEADLINE_S, generation: int | None = None
    ) -> Document:
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
        """Living processes of one engine: those that write its log or bear its marks."""
        marked = {seen.pid for seen in engine_processes(self.state_dir) if seen.engine == name}
        return sorted({*processes_using(str(self.state_dir / "logs" / f"{name}.log")), *marked})

    def _processes(self) -> list[int]:
        marked = [seen.pid for seen in engine_processes(self.state_dir)]
        mine = processes_with_marker(MARKER, self.marker)
        return sorted({*mine, *marked, *processes_using(f"{self.home}/")})

    def story(self) -> str:
        """What the daemon and its engines wrote, for a failing test."""
        logs = [self.log, *sorted((self.state_dir / "logs").glob("*.log"))]
        parts = [f"--- {log.name}\n{_tail(log)}" for log in logs if log.exists()]
        return "\n".join(parts)

    def _answers(self) -> bool:
        with contextlib.suppress(client.ControlError):
            return self.process is not None and bool(self.status()["supervisor"]["pid"] == self.process.pid)
        return False

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


def _tail(path: Path, characters: int = 6000) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if '"GET /' not in line)[-characters:]


def _describe(pids: list[int]) -> str:
    texts = []
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            texts.append(f"{pid} ({command[:100]}, alive: {alive(pid)})")
    return ", ".join(texts)
