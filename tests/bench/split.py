"""Where the time and the memory go: measured apart, so that a missed target can be explained by figures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from supervisord.engine.probe import EngineProbe
from tests.adapters.fake_daemon import FakeDaemon, engine
from tests.adapters.fake_gpus import MIXED
from tests.bench.engines import FLOOR, BenchEngine, own_python, timer_argv
from tests.bench.own import Ours
from tests.bench.processes import kill
from tests.bench.report import ROOT
from tests.sim.engine import running

_LIBRARIES = ("requests", "urllib3", "apscheduler", "prometheus_client", "psutil", "structlog", "jeepney")


# ---- status ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """Milliseconds of `status`, of the floor beside it, and by turns of its pieces."""

    status: list[float]
    floor: list[float]
    bare: list[float]
    ours_us: int
    others_us: int


def status(count: int, runs: int) -> Status:
    """Of a document with so many engines and six GPUs."""
    engines = [engine(f"e{number}", gpus=("0",)) for number in range(count)]
    with tempfile.TemporaryDirectory() as folder, FakeDaemon(Path(folder), *engines, gpus=MIXED) as daemon:
        command = [sys.executable, "-m", "supervisord", "--socket", daemon.socket, "status"]
        timer = timer_argv(own_python(), runs, command, [sys.executable, *FLOOR], [sys.executable, "-c", "pass"])
        told = subprocess.run(timer, check=True, capture_output=True, text=True).stdout
        imports = [_imports_us(command) for _ in range(min(runs, 5))]
    whole, floor, bare = json.loads(told)
    ours, others = (round(statistics.median(one)) for one in zip(*imports, strict=True))
    return Status(whole, floor, bare, ours, others)


def _imports_us(command: list[str]) -> tuple[int, int]:
    """What a command spends on importing: our own modules, and all others after the interpreter's start."""
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, check=False)
    ours = others = 0
    started = False
    for self_us, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)", done.stderr, re.MULTILINE):
        if name.partition(".")[0] == "supervisord":
            ours += int(self_us)
        elif started:
            others += int(self_us)
        started = started or name == "site"
    return ours, others


# ---- relaunch -------------------------------------------------------------------------------------------------------


# Within the daemon: when it syncs to disk and when it starts processes, by the monotonic clock.
_SPANS = """import os, subprocess, sys, time
if sys.orig_argv[1:4] == ["-m", "supervisord", "run"]:
    out = os.open(os.environ["VLLM_BENCH_SPANS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    def timed(kind, work):
        def told(*args, **keys):
            began = time.monotonic()
            try:
                return work(*args, **keys)
            finally:
                os.write(out, f"{kind} {began} {time.monotonic()}\\n".encode())
        return told
    os.fsync = timed("fsync", os.fsync)
    subprocess.Popen.__init__ = timed("spawn", subprocess.Popen.__init__)
"""


@dataclass(frozen=True)
class Relaunch:
    """Milliseconds of each kill: to the first instruction, and parts of it.

    `gone`: until the kernel had ended all processes that were killed. `told`: until the daemon told of the exit.
    """

    total: list[float]
    gone: list[float]
    told: list[float]
    fsync: list[float]
    fsyncs: list[float]
    spawn: list[float]


def relaunch(kills: int, *, tree: bool) -> Relaunch:
    """From SIGKILL of a ready engine to the first instruction of the next; a tree has more to end than one process."""
    found = Relaunch([], [], [], [], [], [])
    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "sitecustomize.py").write_text(_SPANS, encoding="utf-8")
        spans = Path(site) / "spans"
        with Ours({"PYTHONPATH": f"{site}:{ROOT}", "VLLM_BENCH_SPANS": str(spans)}) as peer:
            assert isinstance(peer, Ours)
            peer.start("e0", children=tree)
            (one,) = peer.engines
            with one.telling() as told:
                for starts in range(1, kills + 1):
                    peer.wait_settled(one, starts)
                    while not told.empty():
                        told.get()
                    servers, offset = one.servers(), time.time() - time.monotonic()
                    with _watched(servers) as gone:
                        before = time.monotonic()
                        kill(servers)
                        found.gone.append((gone() - before) * 1000)
                    first = told.get(timeout=60)
                    found.total.append((first - before) * 1000)
                    exited = _at(peer.daemon.wait_event("exited", "e0", starts)) - offset
                    found.told.append((exited - before) * 1000)
                    syncs = _within(spans, "fsync", before, first)
                    found.fsync.append(sum(syncs))
                    found.fsyncs.append(len(syncs))
                    found.spawn.append(sum(_within(spans, "spawn", before, first)))
    return found


@contextlib.contextmanager
def _watched(pids: Iterable[int]) -> Iterator[Callable[[], float]]:
    """A call that waits until all of these processes are gone, and says when that was seen (monotonic seconds)."""
    with contextlib.ExitStack() as stack:
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)

        def gone() -> float:
            for pidfd in pidfds:
                select.select([pidfd], [], [], 60)
            return time.monotonic()

        yield gone


def _within(spans: Path, kind: str, begin: float, end: float) -> list[float]:
    """Milliseconds of the spans of a kind, cut to a time."""
    lines = [line.split() for line in spans.read_text(encoding="ascii").splitlines()]
    times = [(float(began), float(ended)) for what, began, ended in lines if what == kind]
    return [(min(ended, end) - began) * 1000 for began, ended in times if begin <= began < end]


def _at(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


def bare_start_ms(runs: int) -> list[float]:
    """From the spawn of the same script to its first instruction, by nobody but Popen."""
    times = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        one = BenchEngine("e", 1, folder, Path(folder), [], sleeps=True)
        with one.telling() as told:
            for _ in range(runs):
                before = time.monotonic()
                with subprocess.Popen([one.script, "serve"]) as process:
                    times.append((told.get(timeout=60) - before) * 1000)
                    process.kill()
    return times


# ---- readiness ------------------------------------------------------------------------------------------------------


def noticed_ms(starts: int) -> list[float]:
    """From the first answer of an engine (seen within 2 ms) to the moment when the daemon tells that it answers."""
    took: list[float] = []
    with Ours() as peer:
        assert isinstance(peer, Ours)
        peer.start("e0", ready_delay_s=1, children=False)
        (one,) = peer.engines
        for number in range(1, starts * 2 + 1):
            offset = time.time() - time.monotonic()
            told, tries = peer.prober(one, 60).communicate(timeout=90)[0].split()
            at = _at(peer.daemon.wait_event("answering", "e0", number))
            if int(tries) > 1:  # it was there before the engine was
                took.append((at - offset - float(told)) * 1000)
            if len(took) == starts:
                break
            peer.wait_settled(one, number)
            kill(one.servers())
            peer.daemon.wait_event("spawned", "e0", number + 1)
    return took


# ---- a poll, and memory ---------------------------------------------------------------------------------------------


def look_us(looks: int) -> list[float]:
    """CPU of one look (GET /health and /metrics over a new connection, parsed), in the thread that does it."""
    used = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as sim:
        probe = EngineProbe("127.0.0.1", sim.wait_ready().port, 10)
        probe.look(0.0, None)  # which asks for the version too
        for _ in range(looks):
            probe.close()  # five seconds later the engine has closed it as well
            before = time.thread_time()
            sample = probe.look(0.0, None)
            used.append((time.thread_time() - before) * 1e6)
            assert sample.metrics_ok
        probe.close()
    return used


_GROWTH = """import sys
def rss():
    return int(open("/proc/self/smaps_rollup").read().partition("Rss:")[2].split()[0]) / 1024
print("python", rss())
for name in sys.argv[1:]:
    __import__(name)
    print(name, rss())
"""


def memory_of_imports_mib() -> list[tuple[str, float]]:
    """How resident memory grows when a bare Python imports what the daemon imports, in this order."""
    steps = ["sqlite3", "ssl", *_LIBRARIES, "supervisord.app"]
    argv = [sys.executable, "-c", _GROWTH, *steps]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    sizes = list(zip(lines[::2], map(float, lines[1::2]), strict=True))
    grown = [(name, size - before) for (_, before), (name, size) in pairwise(sizes)]
    return [sizes[0], *grown]
