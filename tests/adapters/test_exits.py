"""The end of processes is told once, at once, with the right status, and nobody else's status is taken."""

from __future__ import annotations

import os
import queue
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.launcher.exits import Exit, ExitWatcher
from supervisord.launcher.procfs import now_ticks
from tests.sim.engine import wait_until


class Watching:
    """A watcher, what it told, and children that only it may reap."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[float, Exit]] = queue.SimpleQueue()
        self.watcher = ExitWatcher(lambda seen: self.told.put((time.perf_counter(), seen)))

    def start(self, *argv: str, generation: int = 1) -> int:
        """Start a child like the launcher does, and watch it."""
        child = subprocess.Popen(argv)
        child.returncode = 0
        self.watch(child.pid, generation, child=True)
        return child.pid

    def watch(self, pid: int, generation: int, *, child: bool) -> None:
        pidfd = os.pidfd_open(pid)
        self.watcher.watch("qwen", generation, pidfd, child=child)
        os.close(pidfd)

    def next(self) -> Exit:
        return self.told.get(timeout=10)[1]


@pytest.fixture
def watching() -> Iterator[Watching]:
    made = Watching()
    yield made
    made.watcher.close()
    assert made.told.empty()


@pytest.mark.parametrize("code", [0, 1, 2, 125, 255])
def test_an_exit_code(watching: Watching, code: int) -> None:
    before = now_ticks()
    watching.start("/bin/sh", "-c", f"exit {code}", generation=7)
    seen = watching.next()
    assert seen[:4] == ("qwen", 7, code, None)
    assert seen.reaped_ticks is not None
    assert before <= seen.reaped_ticks <= now_ticks()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_a_signal(watching: Watching, number: signal.Signals) -> None:
    pid = watching.start("/bin/sleep", "60")
    os.kill(pid, number)
    assert watching.next()[:4] == ("qwen", 1, None, number)


def test_a_child_is_reaped(watching: Watching) -> None:
    pid = watching.start("/bin/true")
    watching.next()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_an_end_before_the_watch_began(watching: Watching) -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "exit 3"])
    child.returncode = 0
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    watching.watch(child.pid, 1, child=True)
    assert watching.next().code == 3


def test_a_process_that_is_not_our_child(watching: Watching) -> None:
    # Its parent is a shell that goes on: a status that is not ours is not taken.
    script = "/bin/sleep 60 & echo $!; wait $!; echo $?; read -r _"
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        watching.watch(pid, 4, child=False)
        os.kill(pid, signal.SIGKILL)
        assert watching.next() == Exit("qwen", 4, None, None, None)
        assert shell.stdout.readline() == b"137\n"
        shell.kill()


def test_many_at_once(watching: Watching) -> None:
    pids = {watching.start("/bin/sleep", "60", generation=number): number for number in range(50)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert {watching.next().generation for _ in pids} == set(pids.values())


def test_children_of_others_are_left_alone(watching: Watching) -> None:
    other = subprocess.Popen(["/bin/sh", "-c", "exit 9"])
    watching.start("/bin/true")
    watching.next()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    watching.start("/bin/true")
    watching.next()
    assert other.wait() == 9


def test_a_traced_child_is_told_when_its_tracer_lets_go(watching: Watching) -> None:
    pid = watching.start("/bin/sleep", "60")
    code = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, {pid}, None, None) == 0  # PTRACE_SEIZE
print('ok', flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(["python3", "-IS", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"ok\n"
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: b") Z" in Path(f"/proc/{pid}/stat").read_bytes(), 10, "the zombie")
        tracer.kill()
    assert watching.next().signal == signal.SIGKILL


def test_close_is_bounded_and_silent() -> None:
    made = Watching()
    pid = made.start("/bin/sleep", "60")
    before = set(threading.enumerate())
    made.watcher.close()
    assert "exits" in {thread.name for thread in before - set(threading.enumerate())}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert made.told.empty()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_do_not_leak(watching: Watching) -> None:
    watching.start("/bin/true")
    watching.next()
    before = descriptors()
    for _ in range(20):
        watching.start("/bin/true")
        watching.next()
    assert descriptors() <= before


def test_it_is_told_at_once(watching: Watching) -> None:
    took_ms = []
    for _ in range(30):
        pid = watching.start("/bin/sleep", "60")
        time.sleep(0.002)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        at, _ = watching.told.get(timeout=10)
        took_ms.append((at - began) * 1000)
    print(f"death to callback: best {min(took_ms):.2f} ms, median {statistics.median(took_ms):.2f} ms")
    assert min(took_ms) < 5
