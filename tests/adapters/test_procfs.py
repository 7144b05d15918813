"""What /proc says: parsed right for odd processes, and silent about those that are gone."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from supervisord.launcher import procfs
from tests.sim.engine import wait_until

GONE = 2**22 + 1
"""Above the largest pid of Linux."""


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that has run `code` when we see it; it then waits for the end of its stdin."""
    text = f"import os, sys\n{code}\nprint('ok', flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-IS", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ok\n"
        try:
            yield child
        finally:
            child.kill()


def stat_of(pid: int) -> procfs.Stat:
    stat = procfs.read_stat(pid)
    assert stat is not None
    return stat


def test_a_census_holds_our_children() -> None:
    before = time.monotonic()
    with python("os.setsid()") as child:
        census = procfs.census()
    me, it = stat_of(os.getpid()), census.processes[child.pid]
    assert before <= census.at <= time.monotonic()
    assert (me.ppid, me.session) == (os.getppid(), os.getsid(0))
    assert (it.ppid, it.session) == (os.getpid(), child.pid)
    assert me.alive
    assert it.alive
    assert me.start_ticks <= it.start_ticks <= procfs.now_ticks()


def test_a_census_is_of_those_with_a_session() -> None:
    census = procfs.census()
    assert all(stat.session != 0 for stat in census.processes.values())
    others = [stat for pid in procfs.pids() if pid not in census.processes and (stat := procfs.read_stat(pid))]
    old = [stat for stat in others if stat.start_ticks < procfs.now_ticks() - 1000]
    assert all(stat.session == 0 for stat in old)


@pytest.mark.parametrize("name", ["a) S 1 (b", "two words", "new\nline", ")", "((("])
def test_a_process_may_be_called_anything(name: str) -> None:
    with python(f"open('/proc/self/comm', 'w').write({name!r})") as child:
        stat = stat_of(child.pid)
    assert stat.name == name
    assert (stat.ppid, stat.session) == (os.getpid(), os.getsid(0))


def test_a_name_cannot_steer_a_terminal() -> None:
    with python(r"open('/proc/self/comm', 'w').write('\x1b[2Jx\n')") as child:
        assert procfs.describe(stat_of(child.pid)).startswith(f"pid {child.pid} (?[2Jx?, state ")


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["/bin/true"])
    wait_until(lambda: stat_of(child.pid).state == "Z", 10, "the zombie")
    assert not stat_of(child.pid).alive
    child.wait()
    assert procfs.read_stat(child.pid) is None


def test_a_dead_leader_with_a_living_thread_is_alive() -> None:
    # What a worker looks like whose main thread is gone while another sits in the driver.
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print('ok', flush=True)
ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)
"""
    with python(code) as child:
        wait_until(lambda: stat_of(child.pid).state == "Z", 10, "the end of the main thread")
        assert stat_of(child.pid).alive
        assert re.search(r", state [RS]\)$", procfs.describe(stat_of(child.pid)))


def test_memory_is_what_status_calls_rss_anon() -> None:
    with python("data = bytearray(os.urandom(32 << 20))") as child:
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        kib = int(status.partition("RssAnon:")[2].split()[0])
        assert abs(procfs.anonymous_bytes(child.pid) - kib * 1024) < 1 << 20
        assert procfs.anonymous_bytes(child.pid) > 32 << 20


def test_reading_counts() -> None:
    with python("read = open('/dev/zero', 'rb').read(5 << 20)") as child:
        assert procfs.read_bytes(child.pid) > 5 << 20


def test_a_download_shows_in_what_is_written_to_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    # What was received and written is in neither count of reads; wchar has pipes, and so a log that spins.
    counts = b"rchar: 100\nwchar: 90000\nsyscr: 5\nsyscw: 6\nread_bytes: 20\nwrite_bytes: 7000\n"
    monkeypatch.setattr(procfs, "_read_small", {"/proc/1/io": counts, "/proc/2/io": b""}.__getitem__)
    assert [procfs.read_bytes(1), procfs.moved_bytes(1), procfs.moved_bytes(2)] == [120, 7120, 0]


@pytest.mark.parametrize(
    ("env", "marks"),
    [
        ({"A": "1", "SUPERVISED_ENGINE": "x=y", "SUPERVISED_B": ""}, {b"SUPERVISED_ENGINE=x=y", b"SUPERVISED_B="}),
        ({"A": "SUPERVISED_ENGINE=a", "NOT_SUPERVISED_ENGINE": "a", "SUPERVISED_C": "x" * 9000}, set()),
        ({f"SUPERVISED_{number}": "" for number in range(16)}, {b"SUPERVISED_%d=" % number for number in range(16)}),
    ],
)
def test_marks_and_uid(env: dict[str, str], marks: set[bytes]) -> None:
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as child:
        # A process has its new name a moment before its environment.
        wait_until(lambda: stat_of(child.pid).name == "sleep" and procfs.marks(child.pid) is not None, 10, "exec")
        assert (procfs.marks(child.pid) or set()) == marks
        assert procfs.uid_of(child.pid) == os.geteuid()
        child.kill()


_CLAIMS = """
import ctypes, struct
libc, size = ctypes.CDLL(None, use_errno=True), 300 << 20
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
sparse = libc.mmap(None, size, 1, 0x4022, -1, 0)
fields = [int(n) for n in open("/proc/self/stat").read().rpartition(") ")[2].split()[1:]]
of = lambda number: fields[number - 4]
code, data, args = (of(26), of(27)), (of(45), of(46), of(47), libc.sbrk(0), of(28)), (of(48), of(49))
told = struct.pack("=11QQIi", *code, *data, *args, sparse, sparse + size, 0, 0, -1)
assert libc.prctl(35, 14, told, ctypes.c_ulong(len(told)), 0) == 0, ctypes.get_errno()
"""


def test_a_process_may_claim_any_memory_as_its_environment() -> None:
    """PR_SET_MM_MAP needs no privilege, and 300 MiB of it are no memory of the process."""
    with python(_CLAIMS) as child:
        tracemalloc.start()
        try:
            assert procfs.marks(child.pid) is None
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_shared_memory_mapped_or_open() -> None:
    names = [f"sv-test-{os.getpid()}-{kind}" for kind in ("mapped", "open", "gone", "other")]
    mapped, opened, gone, other = (Path("/dev/shm") / name for name in names)
    with ExitStack() as stack:
        for path in (mapped, opened, gone, other):
            path.write_bytes(bytes(4096))
            stack.callback(path.unlink, missing_ok=True)
        for path in (mapped, gone):
            with path.open("r+b") as file:
                stack.enter_context(mmap.mmap(file.fileno(), 4096))
        stack.enter_context(opened.open("rb"))
        gone.unlink()
        assert procfs.shared_memory(os.getpid()) & set(names) == {mapped.name, opened.name}


def test_gone_processes_say_nothing() -> None:
    assert procfs.read_stat(GONE) is None
    assert procfs.uid_of(GONE) is None
    assert procfs.marks(GONE) is None
    assert procfs.anonymous_bytes(GONE) == 0
    assert procfs.read_bytes(GONE) == 0
    assert procfs.shared_memory(GONE) == set()
    assert procfs.sockets(GONE) == set()


@pytest.mark.parametrize(
    ("family", "host", "address"),
    [
        (socket.AF_INET, "127.0.0.2", bytes([127, 0, 0, 2])),
        (socket.AF_INET, "0.0.0.0", bytes(4)),
        (socket.AF_INET6, "::1", bytes(15) + b"\1"),
        (socket.AF_INET6, "::", bytes(16)),
        (socket.AF_INET6, "::ffff:127.0.0.3", bytes([127, 0, 0, 3])),
    ],
)
def test_listeners(family: socket.AddressFamily, host: str, address: bytes) -> None:
    with socket.socket(family) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
        assert procfs.listeners(port) == []
        server.listen()
        (listener,) = procfs.listeners(port)
        assert listener.address == address
        assert listener.uid == os.geteuid()
        assert listener.inode in (procfs.sockets(os.getpid()) or ())
        with socket.create_connection((host, port)):
            assert len(procfs.listeners(port)) == 1
    assert procfs.listeners(port) == []


def best_us(call: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return min(once() for _ in range(30)) * 1e6


def test_a_census_is_cheap() -> None:
    # Of everybody, since the census itself may be empty: where the session began outside the PID namespace, as in some
    # containers, everybody has it as session 0 until something makes its own.
    count = len(procfs.pids())
    census_us = best_us(procfs.census)
    print(f"census of {count}: {census_us:.0f} us; memory: {best_us(lambda: procfs.anonymous_bytes(1)):.0f} us")
    assert census_us < 100 * count
