"""One daemon with so many simulated engines: what it costs, how long turns take, how soon it has them again."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.engines import free_ports
from tests.bench.peer import RAN_S
from tests.bench.processes import Memory, cpu_percent, cpu_s, kill, memory
from tests.bench.report import ROOT
from tests.bench.scraping import scraped
from tests.daemon.harness import Daemon, engine_toml
from tests.sim.engine import sim_command, wait_until

FAST = """[engine.NAME.warmup]
max_rounds = 1
[engine.NAME.restart]
backoff_initial_s = 0
backoff_reset_after_s = 0
max_restarts = 10000
"""
SETTLE_S = 10.0
"""What the start leaves to be done (records, first looks) is not what polling costs."""
_START_S = 600
POLL_S = 5
_LIFE_S = "900"

# The kernel learns the names of threads from Python 3.14 on; the length of each turn is in no metric.
_SITE = """import contextlib, pathlib, sys, threading
if sys.orig_argv[1:4] == ["-m", "supervisord", "run"]:
    import array, os
    from supervisord import figures
    bootstrap, turned = threading.Thread._bootstrap_inner, figures.Figures.turned
    def named(self):
        with contextlib.suppress(OSError):
            name = self.name.replace("lane-", "").strip("('").replace("', '", " ")
            pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:15])
        bootstrap(self)
    def told(self, seconds):
        os.write(out, array.array("d", (seconds,)).tobytes())
        turned(self, seconds)
    out = os.open(os.environ["VLLM_BENCH_TURNS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    threading.Thread._bootstrap_inner, figures.Figures.turned = named, told
"""

_FLOOR = """import socket, sys, time
seconds, ports = float(sys.argv[1]), [int(port) for port in sys.argv[2:]]
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + seconds:
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            for path in (b"health", b"metrics"):
                close = b"Connection: close\\r\\n" if path == b"metrics" else b""
                sock.sendall(b"GET /%b HTTP/1.1\\r\\nHost: x\\r\\n%b\\r\\n" % (path, close))
                while path == b"health" and b"\\r\\n\\r\\n" not in sock.recv(65536):
                    pass
            while sock.recv(65536):
                pass
    time.sleep(5)
print((time.process_time() - used) / (time.monotonic() - began) * 100)
"""


@dataclass(frozen=True)
class Cost:
    """What a daemon with `engines` ready engines costs, polled every 5 s."""

    engines: int
    cpu_percent: float
    by_thread: dict[str, float]
    floor_percent: float
    """Of a bare Python that asks the same of the same engines and looks at no answer."""
    memory: Memory
    threads: int
    fds: int
    turns_ms: list[float]
    turns_in_kills_ms: list[float] = field(default_factory=list)
    """While one engine after the other was killed, one each second, until all were ready again."""
    adoptions: list[Adoption] = field(default_factory=list)


@dataclass(frozen=True)
class Adoption:
    """Seconds from the start of a daemon whose predecessor was killed."""

    answers_s: float
    ready_s: float
    """Until its status shows all engines as ready, in the processes that they had."""
    cpu_s: float
    """CPU of the daemon until then: what a quiet machine would take at least."""


def _thread(pid: int, task: int, comm: str) -> str:
    return "the loop" if pid == task else re.sub(r"\be\d+\b.*", "", comm).strip() or comm


def cost(count: int, seconds: float, adoptions: int, kills: int) -> Cost:
    """All parts on: /metrics is scraped, notifications go out by TLS. The engines are trees like vLLM's."""
    *numbers, listens, refuses = free_ports(count + 2)
    ports = {f"e{number}": port for number, port in enumerate(numbers)}
    listen = f"127.0.0.1:{listens}"
    sections = "".join(
        engine_toml(name, sim_command(), port, "/", FAST.replace("NAME", name)) for name, port in ports.items()
    )
    sections += f'[notify.nobody]\nurl = "https://127.0.0.1:{refuses}/"\nevents = ["all"]\n'
    with tempfile.TemporaryDirectory() as site:
        turns = Path(site) / "turns"
        (Path(site) / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        env = {"PYTHONPATH": f"{site}:{ROOT}", "VLLM_BENCH_TURNS": str(turns), "VLLM_SIM_MAX_LIFE_S": _LIFE_S}
        with Daemon(sections, env, max_parallel_starts=8, poll_interval_s=POLL_S, listen=listen) as daemon:
            daemon.start()
            _wait_ready(daemon, count)
            with urllib.request.urlopen(f"http://{listen}/metrics", timeout=30) as page:
                page.read()
            with scraped(listens) as scrapes:
                time.sleep(SETTLE_S)
                before = turns.stat().st_size
                percent, kinds = cpu_percent(lambda: [daemon.pid], seconds, _thread)
                durations_ms = _since(turns, before)
            assert set(scrapes) <= {"ok"}, f"scrapes of /metrics: {dict(scrapes)}"
            pid = Path(f"/proc/{daemon.pid}")
            return Cost(
                engines=count,
                cpu_percent=percent,
                by_thread=kinds,
                floor_percent=_floor_percent(list(ports.values()), min(seconds, 30)),
                memory=memory([daemon.pid]),
                threads=len(list((pid / "task").iterdir())),
                fds=len(list((pid / "fd").iterdir())),
                turns_ms=durations_ms,
                turns_in_kills_ms=_turns_in_kills_ms(daemon, turns, count, kills),
                adoptions=[_adopt(daemon, count) for _ in range(adoptions)],
            )


def _since(turns: Path, size: int) -> list[float]:
    """Milliseconds of the turns since the file had this size."""
    return [one * 1000 for one in array("d", turns.read_bytes()[size:])]


def _turns_in_kills_ms(daemon: Daemon, turns: Path, count: int, kills: int) -> list[float]:
    before = turns.stat().st_size
    for number in range(kills):
        kill([_wait_pid(daemon, f"e{number % count}")])
        time.sleep(1)
    _wait_ready(daemon, count)
    return _since(turns, before) if kills else []


def _ready(daemon: Daemon) -> dict[str, int]:
    """The pid of each engine that is ready."""
    return {one["name"]: one["pid"] for one in daemon.status()["engines"] if one["state"] == "ready"}


def _wait_ready(daemon: Daemon, count: int) -> dict[str, int]:
    def all_ready() -> dict[str, int]:
        ready = _ready(daemon)
        return ready if len(ready) == count else {}

    return wait_until(all_ready, _START_S, f"{count} engines to be ready", 0.05)


def _wait_pid(daemon: Daemon, name: str) -> int:
    return wait_until(lambda: _ready(daemon).get(name, 0), _START_S, f"{name} to be ready")


def _adopt(daemon: Daemon, count: int) -> Adoption:
    old = _wait_ready(daemon, count)
    time.sleep(RAN_S)
    daemon.kill()
    began = time.monotonic()
    daemon.start()
    answers_s = time.monotonic() - began
    new = _wait_ready(daemon, count)
    assert new == old, f"other processes than before: {sorted(set(new.items()) ^ set(old.items()))}"
    ready_s = time.monotonic() - began
    return Adoption(answers_s, ready_s, sum(cpu_s([daemon.pid], lambda *_: "all").values()))


def _floor_percent(ports: list[int], seconds: float) -> float:
    argv = [sys.executable, "-c", _FLOOR, str(seconds), *map(str, ports)]
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
