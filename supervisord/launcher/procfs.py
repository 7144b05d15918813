"""What /proc says about processes.

A process may end at any moment: then the answer is None or empty, never an exception. Reading the environment, maps,
descriptors and I/O counters of another user's process needs CAP_SYS_PTRACE.
"""
# A census reads a file of every process of the machine; with a Path for each it takes twice as long.
# ruff: noqa: PTH115, PTH116, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_DEAD: Final = frozenset("ZXx")
_SHM_IN_MAPS: Final = re.compile(rb" /dev/shm/([^/\n]+)$", re.MULTILINE)
_SHM_PREFIX: Final = "/dev/shm/"  # noqa: S108 (the directory of POSIX shared memory, not a place for files of ours)
_ENVIRON_MAX: Final = 2 * 1024 * 1024
"""What execve takes, arguments and environment together, with the usual limit of the stack (execve(2))."""
_MARK: Final = re.compile(rb"(?<![^\0])SUPERVISED_[^\0]{1,8192}(?![^\0])")
_MARKS_MAX: Final = 16
_DELETED: Final = " (deleted)"
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


class Stat(NamedTuple):
    """One process, from /proc/PID/stat (proc(5)). A zombie is dead, unless threads of it still run."""

    pid: int
    ppid: int
    session: int
    start_ticks: int
    alive: bool
    state: str
    name: str


@dataclass(frozen=True, slots=True)
class Census:
    """All processes that can be an engine's. `at`: monotonic seconds when counting began.

    `whole`: nobody was gone between being listed and being looked at.
    """

    at: float
    processes: dict[int, Stat]
    whole: bool
    _marks: dict[int, frozenset[bytes] | None] = field(default_factory=dict, repr=False, compare=False)

    def marks(self, pid: int) -> frozenset[bytes] | None:
        """`marks`, read once: a hundred engines that are looked for everywhere would each read everybody's."""
        if pid not in self._marks:
            self._marks[pid] = marks(pid)
        return self._marks[pid]


class Listener(NamedTuple):
    """A listening TCP socket: packed address (IPv4 in IPv6 unwrapped), inode, uid of its owner."""

    address: bytes
    inode: int
    uid: int


def now_ticks() -> int:
    """The present in the unit of `Stat.start_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)


def read_stat(pid: int) -> Stat | None:
    """One process, or None when there is none."""
    data = _read_small(f"/proc/{pid}/stat")
    return _parse_stat(pid, data) if data else None


def pids() -> list[int]:
    """Every process of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def census() -> Census:
    """Count everybody with a session, about 10 microseconds each.

    Kernel threads, of which a large machine has thousands, have none (getsid says 0) and cost a thirtieth of that. An
    engine is given a session, and what descends from it inherits one or makes one: it can never be without.
    """
    at = time.monotonic()
    candidates = [pid for pid in pids() if not _has_no_session(pid)]
    processes = {pid: stat for pid in candidates if (stat := read_stat(pid)) is not None}
    return Census(at, processes, whole=len(processes) == len(candidates))


def _has_no_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == 0
    except OSError:
        return False


def _parse_stat(pid: int, data: bytes) -> Stat:
    # The name stands in parentheses and may hold anything, also ") ".
    head, _, tail = data.rpartition(b") ")
    fields = tail.split(None, 20)
    state = fields[0].decode("ascii")
    return Stat(
        pid=pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        alive=state not in _DEAD or int(fields[17]) > 1,
        state=state,
        name=head.partition(b" (")[2].decode("utf-8", "replace"),
    )


def describe(stat: Stat) -> str:
    """A process in words: "pid 123 (VLLM::Worker, state D)"; the state is that of a thread that does not end."""
    state = stat.state
    if state in _DEAD:
        state = next((s for s in _thread_states(stat.pid) if s not in _DEAD), state)
    return f"pid {stat.pid} ({printable(stat.name)}, state {state})"


def _thread_states(pid: int) -> Iterator[str]:
    for thread in _list(f"/proc/{pid}/task"):
        data = _read_small(f"/proc/{pid}/task/{thread}/stat")
        if data:
            yield _parse_stat(int(thread), data).state


def printable(text: str) -> str:
    """A process's name is its own choice: nothing of it may reach a terminal unseen."""
    return "".join(c if c.isprintable() else "?" for c in text)


def uid_of(pid: int) -> int | None:
    """Effective uid of a process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def marks(pid: int) -> frozenset[bytes] | None:
    """Our variables among those that a process was started with, as b"NAME=value"; None when there are none at all.

    setproctitle, which vLLM uses, overwrites them unless SPT_NOENV was set. Any process can call any memory of its own
    its environment (PR_SET_MM), so only as much is read and kept as one of ours can have.
    """
    data = _read(f"/proc/{pid}/environ", _ENVIRON_MAX)
    found = frozenset(match[0] for match in islice(_MARK.finditer(data), _MARKS_MAX))
    return found if found or (data.strip(b"\0") and len(data) < _ENVIRON_MAX) else None


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory: resident less file and shared pages, the RssAnon of status at half the price."""
    fields = _read_small(f"/proc/{pid}/statm").split(None, 3)
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES if fields else 0


def read_bytes(pid: int) -> int:
    """Bytes that came through read calls, and bytes fetched from storage (that is how mapped weights load)."""
    return _counted(pid, b"rchar", b"read_bytes")


def moved_bytes(pid: int) -> int:
    """Also bytes written to disks: the kernel does not count what is received, so a download shows here alone."""
    return _counted(pid, b"rchar", b"read_bytes", b"write_bytes")


def _counted(pid: int, *names: bytes) -> int:
    lines = dict(line.split(b": ") for line in _read_small(f"/proc/{pid}/io").splitlines())
    return sum(int(lines.get(name, 0)) for name in names)


def shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped or open."""
    names = {match.decode("utf-8", "surrogateescape") for match in _SHM_IN_MAPS.findall(_read(f"/proc/{pid}/maps"))}
    with contextlib.suppress(PermissionError):
        names |= {target[len(_SHM_PREFIX) :] for target in _open_files(pid) if target.startswith(_SHM_PREFIX)}
    return {name for name in names if "/" not in name and not name.endswith(_DELETED)}


def sockets(pid: int) -> set[int] | None:
    """Inodes of the sockets that a process has open; None when we may not look."""
    try:
        return {int(match[1]) for target in _open_files(pid) if (match := _SOCKET.fullmatch(target))}
    except PermissionError:
        return None


def listeners(port: int) -> list[Listener]:
    """Every TCP socket of this network namespace that listens on a port."""
    row = re.compile(rb"^ *\d+: ([0-9A-F]+):%04X \S+ 0A(?: \S+){3} +(\d+) +\d+ (\d+) " % port, re.MULTILINE)
    pages = _read("/proc/net/tcp") + _read("/proc/net/tcp6")
    return [Listener(_packed(address), int(inode), int(uid)) for address, uid, inode in row.findall(pages)]


def _packed(text: bytes) -> bytes:
    words = (text[i : i + 8] for i in range(0, len(text), 8))
    return unwrapped(b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words))


def unwrapped(address: bytes) -> bytes:
    """An IPv4 address that comes as ::ffff:a.b.c.d, as itself."""
    prefix = socket.inet_pton(socket.AF_INET6, "::ffff:0.0.0.0")[:12]
    return address[12:] if len(address) > len(prefix) and address.startswith(prefix) else address


def _open_files(pid: int) -> Iterator[str]:
    """What the descriptors of a process stand for. Raises PermissionError."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    for descriptor in descriptors:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str, at_most: int = -1) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(at_most)
    except OSError:
        return b""


def _read_small(path: str) -> bytes:
    """Read a file of at most a page with three system calls: this is what a census spends its time on."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
