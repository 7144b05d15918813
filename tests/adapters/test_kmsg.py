"""The kernel log: what the driver writes about faults, and a log that cannot be read."""

from __future__ import annotations

import errno
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from supervisord.core.messages import XidSeen
from supervisord.systemd.kmsg import Kmsg, Parser

DEADLINE_S = 20.0
OWNERS = {4711: ("qwen", 3)}


def parsed(*texts: str, head: str = "3,4471,3023054882,-;") -> list[tuple[str, int | None, int | None]]:
    """GPU, Xid and pid of what some records tell."""
    parser = Parser(OWNERS.get)
    return [(seen.gpu, seen.xid, seen.pid) for text in texts for seen in parser.parse(head + text, 5.0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # From issues and logs of users, driver by driver.
        ("Xid (0000:03:00): 14, Channel 00000001", ("0000:03:00.0", 14, None)),
        ("Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", ("0000:01:00.0", 79, None)),
        ("Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus.", ("0000:01:00.0", 79, 1122)),
        (
            "Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            ("0000:05:00.0", 79, None),
        ),
        ("Xid (PCI:0000:00:1E.0): 48, pid='1234', name=python3, Ch 00000002", ("0000:00:1e.0", 48, 1234)),
        ('Xid (PCI:0000:00:1E.1): 48, pid="<unknown>"', ("0000:00:1e.1", 48, None)),
        (
            "Xid (PCI:0000:CB:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH TIMEOUT",
            ("0000:cb:00.0", 109, 1797828),
        ),
        ("Xid (PCI:0000:41:00 GPU-I:05): 43, pid=77, name=python, Ch 00000008", ("0000:41:00.0", 43, 77)),
        ("Xid (PCI:0000:86:00): 31", ("0000:86:00.0", 31, None)),
        ("Xid (PCI:10000:01:00): 154, GPU recovery action changed from 0x0 (None)", ("10000:01:00.0", 154, None)),
        ("GPU 0000:06:00.0: GPU has fallen off the bus.", ("0000:06:00.0", None, None)),
        ("GPU at PCI:0000:06:00: GPU has fallen off the bus.", ("0000:06:00.0", None, None)),
        ("GPU at 0000:06:00.0 has fallen off the bus.", ("0000:06:00.0", None, None)),
        (
            (
                r"The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has"
                r"\x0aNVRM: fallen off the bus and is not responding to commands."
            ),
            ("0000:b3:00.0", None, None),
        ),
    ],
)
def test_faults(text: str, expected: tuple[str, int | None, int | None]) -> None:
    assert parsed(f"NVRM: {text}") == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU at PCI:0000:06:00: GPU-0b6b7808-c002-f593-ac86-cd8e57757b94",
        "NVRM: GPU Board Serial Number: 0",
        "NVRM: GPU 0000:06:00.0: GPU serial number is 0.",
        "NVRM: kgspRcAndNotifyAllChannels_IMPL: RC all channels for critical error 79.",
        "NVRM: Persistence mode is deprecated and will be removed in a future release.",
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: Xid (PCI:garbage): 79",
        "NVRM: Xid (PCI:0000:06:00): many",
        "usb 1-2: has fallen off the bus",
        "systemd[1]: Starting NVRM: Xid (PCI:0000:01:00): 79, a unit with this description...",
        "",
    ],
)
def test_everything_else_is_none(text: str) -> None:
    assert parsed(text) == []


def test_three_lines_in_three_records() -> None:
    lines = (
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "usb 1-2: new device",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert parsed(*lines) == [("0000:b3:00.0", None, None)]
    assert parsed(*lines, lines[-1]) == [("0000:b3:00.0", None, None)]
    two = (
        "NVRM: The NVIDIA GPU 0000:05:00.0 (PCI ID: 10de:1e07)",
        "NVRM: installed in this system has fallen off the bus",
    )
    assert parsed(*two) == [("0000:05:00.0", None, None)]
    # Another GPU was spoken of in between: nobody knows which one left.
    assert parsed(lines[0], "NVRM: GPU at PCI:0000:06:00: GPU-0b6b7808", lines[-1]) == []


def test_one_record_can_tell_several() -> None:
    text = r"NVRM: Xid (PCI:0000:06:00): 63, pid=5\x0aNVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    assert parsed(text) == [("0000:06:00.0", 63, 5), ("0000:06:00.0", 79, None)]


def test_continuations_are_no_records() -> None:
    line = "NVRM: Xid (PCI:0000:06:00): 79"
    assert parsed(line, head=" SUBSYSTEM=pci;") == []
    assert parsed(line, head="") == []
    assert parsed(line, head="3,1,2,c,caller=T77;") == [("0000:06:00.0", 79, None)]


def test_the_process_is_tied_to_its_engine() -> None:
    record = r"3,1,2,-;NVRM: Xid (PCI:0000:06:00): 31, pid=4711, name=py\x1b[2J, Ch 0000001" + "0" * 999
    (seen,) = Parser(OWNERS.get).parse(record, 5.0)
    text = ("NVRM: Xid (PCI:0000:06:00): 31, pid=4711, name=py [2J, Ch 0000001" + "0" * 999)[:300]
    assert seen == XidSeen(5.0, "0000:06:00.0", 31, "kmsg", 4711, "qwen", 3, text)


@dataclass
class Following:
    """A `Kmsg` on a named pipe, and what it told."""

    path: Path
    xids: queue.SimpleQueue[XidSeen] = field(default_factory=queue.SimpleQueue)
    reasons: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.kmsg = Kmsg(self.xids.put, self.reasons.put, OWNERS.get, self.path)
        self.kmsg.start()

    def ends(self) -> None:
        self.kmsg._thread.join(DEADLINE_S)
        assert not self.kmsg._thread.is_alive()


@dataclass
class Log:
    """A named pipe in the place of the kernel log."""

    path: Path
    writer: int

    def write(self, *texts: str) -> None:
        os.write(self.writer, "".join(f"3,1,2,-;NVRM: {text}\n" for text in texts).encode())


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    yield Log(path, writer)
    os.close(writer)


def test_follows(log: Log) -> None:
    following = Following(log.path)
    log.write("Xid (PCI:0000:06:00): 31, pid=4711, name=python", "something else")
    seen = following.xids.get(timeout=DEADLINE_S)
    assert (seen.gpu, seen.xid, seen.engine, seen.generation) == ("0000:06:00.0", 31, "qwen", 3)
    assert 0 <= time.monotonic() - seen.at < DEADLINE_S
    log.write("GPU 0000:06:00.0: GPU has fallen off the bus.")
    assert following.xids.get(timeout=DEADLINE_S).xid is None
    following.kmsg.close()
    following.ends()
    assert following.reasons.empty()


def test_goes_on_when_records_were_overwritten(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    read, failures = os.read, [BrokenPipeError(), BlockingIOError()]

    def failing(descriptor: int, size: int) -> bytes:
        if failures:
            raise failures.pop()
        return read(descriptor, size)

    monkeypatch.setattr("supervisord.systemd.kmsg.os.read", failing)
    following = Following(log.path)
    log.write("Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.")
    assert following.xids.get(timeout=DEADLINE_S).xid == 79
    assert failures == []
    following.kmsg.close()
    following.ends()


def test_what_was_written_before_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("3,1,2,-;NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.\n")
    following = Following(path)
    assert following.reasons.get(timeout=DEADLINE_S) == f"cannot read {path}: it has ended"
    following.ends()
    assert following.xids.empty()


def test_no_log(tmp_path: Path) -> None:
    following = Following(tmp_path / "kmsg")
    assert following.reasons.get(timeout=DEADLINE_S) == f"cannot read {tmp_path}/kmsg: No such file or directory"
    following.ends()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_no_permission(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("supervisord.systemd.kmsg.os.open", refuse)
    following = Following(tmp_path / "kmsg")
    reason = following.reasons.get(timeout=DEADLINE_S)
    following.ends()
    assert reason == f"cannot read {tmp_path}/kmsg: permission denied; it needs root or the capability CAP_SYSLOG"
