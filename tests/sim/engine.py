"""Helpers for tests that start the simulated vLLM (see README.md)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

SIM_PATH = Path(__file__).with_name("vllm")
DATA_PATH = Path(__file__).parent.parent / "data"
MARKER = "VLLM_SIM_MARK"

_T = TypeVar("_T")
_SYSTEM_PYTHON = Path("/usr/bin/python3")


def sim_command(python: str | None = None) -> list[str]:
    """Value for an engine's `command`; `python` runs it with another interpreter."""
    if python is None and not _SYSTEM_PYTHON.exists():
        python = sys.executable
    return [*([python, "-IS"] if python else []), str(SIM_PATH), "serve"]


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on; somebody may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def wait_until(predicate: Callable[[], _T], timeout_s: float, what: str, every_s: float = 0.01) -> _T:
    """Poll until the predicate gives something true, and return that; fail with `what`."""
    until = time.monotonic() + timeout_s
    while True:
        result = predicate()
        if result:
            return result
        if time.monotonic() > until:
            raise AssertionError(f"waited {timeout_s:g} s for: {what} (last: {result!r})")
        time.sleep(every_s)


def processes_with_marker(name: str, value: str) -> list[int]:
    """Live processes whose environment holds name=value; zombies are not alive."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile, or not ours to read
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def title_of(pid: int) -> str:
    """The command line as ps would show it; empty when the process has gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()


class Mood:
    """A mood file; every change is atomic, so the engine never sees half of it."""

    def __init__(self, path: Path, **values: Any) -> None:
        self.path = path
        self.values: dict[str, Any] = values
        self._write()

    @property
    def env(self) -> dict[str, str]:
        return {"VLLM_SIM_MOOD": str(self.path)}

    def set(self, **values: Any) -> None:
        """This and nothing else."""
        self.values = values
        self._write()

    def patch(self, **values: Any) -> None:
        """This as well."""
        self.values = {**self.values, **values}
        self._write()

    def clear(self, *keys: str) -> None:
        """Back to the default for these keys; for all keys if none is named."""
        self.values = {key: value for key, value in self.values.items() if keys and key not in keys}
        self._write()

    def _write(self) -> None:
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        new.write_text(json.dumps(self.values), encoding="utf-8")
        new.replace(self.path)


class Answer:
    """Status, headers (lower case) and body of an HTTP answer."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def http(
    method: str,
    url: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5,
) -> Answer:
    """One request without proxies; error statuses are answers, no answer is an OSError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, dict(headers or {}), method=method)
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return Answer(answer.status, dict(answer.headers.items()), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers.items()), error.read())


class SimEngine:
    """A simulated engine that a test started itself, as a session leader with a marker."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, mood: Mood, marker: str, log: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.port = port
        self.mood = mood
        self.marker = marker
        self.log = log

    def get(self, path: str, **options: Any) -> Answer:
        return http("GET", f"http://127.0.0.1:{self.port}{path}", **options)

    def post(self, path: str, body: Any, **options: Any) -> Answer:
        return http("POST", f"http://127.0.0.1:{self.port}{path}", body, **options)

    def health(self) -> int | None:
        """The status of /health; None when nothing answers."""
        try:
            return self.get("/health").status
        except OSError:
            return None

    def metric(self, series: str) -> float:
        """The value of the first line that starts with `series`."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((series + "{", series + " ")) or ("{" in series and line.startswith(series)):
                return float(line.rpartition(" ")[2])
        raise KeyError(series)

    def output(self) -> str:
        """Everything on stdout and stderr so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[int]:
        return processes_with_marker(MARKER, self.marker)

    def pid_of(self, title: str) -> int:
        """The process with exactly this title, such as VLLM::EngineCore."""
        found = [pid for pid in self.processes() if title_of(pid) == title]
        assert len(found) == 1, f"{len(found)} processes are called {title!r}"
        return found[0]

    def wait_ready(self, timeout_s: float = 10) -> SimEngine:
        def ready() -> bool:
            code = self.process.poll()
            assert code is None, f"the engine exited with {code}:\n{self.output()}"
            return self.health() is not None

        wait_until(ready, timeout_s, f"/health on port {self.port}", every_s=0.005)
        return self

    def wait_exit(self, timeout_s: float = 10) -> int:
        """The exit code, negative for a signal."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the engine still runs after {timeout_s:g} s") from None

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def destroy(self) -> None:
        """SIGKILL every process that carries our marker."""
        for _ in range(10):
            left = self.processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.005)
        self.process.wait(10)


@contextlib.contextmanager
def running(
    folder: Path,
    *args: str,
    mood: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    python: str | None = None,
    model: str = "tiny",
) -> Iterator[SimEngine]:
    """Start a simulated engine in `folder`; nothing of it is left afterwards."""
    port, marker = free_port(), uuid.uuid4().hex
    shm = folder / "shm"
    shm.mkdir(exist_ok=True)
    moods = Mood(folder / "mood.json", **(mood or {}))
    environment = {
        "PATH": "/usr/bin:/bin",
        MARKER: marker,
        "VLLM_SIM_MAX_LIFE_S": "120",
        "VLLM_SIM_SHM_DIR": str(shm),
        **moods.env,
        **(env or {}),
    }
    log = folder / "engine.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [*sim_command(python), model, "--host", "127.0.0.1", "--port", str(port), *args],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    engine = SimEngine(process, port, moods, marker, log)
    try:
        yield engine
    finally:
        engine.destroy()
