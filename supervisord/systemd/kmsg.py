"""The kernel log as the second source of GPU faults: it names the process, and speaks of GPUs that NVML lost.

Forms of the lines, as drivers from 390 to 595 write them: kernel-open/nvidia/nv.c and nv_rm.c of NVIDIA's
open-gpu-kernel-modules; NVIDIA/NVSentinel issue 155; leptonai/gpud pull request 1209; NVIDIA's "Xid Errors".
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisord.core.messages import XidSeen
from supervisord.log import printable

PATH: Final = Path("/dev/kmsg")

Whose = Callable[[int], "tuple[str, int] | None"]
"""Engine and generation of a process, by pid."""

_RECORD_BYTES: Final = 1 << 16
"""Above the kernel's longest record; into a shorter buffer it would not be read (EINVAL)."""
_TEXT_CHARS: Final = 300
_PCI: Final = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?"
_XID: Final = re.compile(
    rf"NVRM: Xid \((?:PCI:)?{_PCI}[^)]*\): (?P<xid>\d{{1,9}})(?:, pid=['\"]?(?P<pid>\d{{1,9}})\b)?"
)
_NAMED: Final = re.compile(rf"NVRM: (The NVIDIA )?GPU (?:at )?(?:PCI:)?{_PCI}")
_FALLEN: Final = "fallen off the bus"
_FALLEN_ALONE: Final = re.compile(r"NVRM: (?:[^\n]{0,80}\binstalled in this )?(?:system has )?fallen off the bus")
_ESCAPED: Final = re.compile(r"\\x([0-9a-f]{2})")


class Parser:
    """Records of /dev/kmsg to faults."""

    def __init__(self, whose: Whose) -> None:
        self._whose = whose
        self._named: str | None = None

    def parse(self, record: str, at: float) -> list[XidSeen]:
        """The faults that one record tells, most often none."""
        # Without a head it is a continuation: KEY=value of the device that the record before was about.
        head, _, rest = record.partition(";")
        text = rest.lstrip()
        if not head[:1].isdigit() or not text.startswith("NVRM: "):
            return []
        text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text)
        lines = text.splitlines()
        seen = [self._xid(match, line, at) for line in lines if (match := _XID.match(line))]
        fallen = self._fallen(text)
        if fallen is not None and not seen:
            seen = [XidSeen(at, fallen, None, "kmsg", text=_shown(text))]
        return seen

    def _xid(self, match: re.Match[str], line: str, at: float) -> XidSeen:
        pid = int(match["pid"]) if match["pid"] else None
        engine, generation = (pid is not None and self._whose(pid)) or (None, None)
        return XidSeen(
            at, _pci_id(*match.groups()[:4]), int(match["xid"]), "kmsg", pid, engine, generation, _shown(line)
        )

    def _fallen(self, text: str) -> str | None:
        """The GPU that left. The long form names it in the first of its three lines, in one record or in three."""
        named = _NAMED.search(text)
        if named is not None:
            gpu = _pci_id(*named.groups()[1:])
            if _FALLEN in text:
                return gpu
            self._named = gpu if named[1] else None
        elif _FALLEN_ALONE.search(text):
            left, self._named = self._named, None
            return left
        return None


class Kmsg:
    """Follows the kernel log from now on, in a thread."""

    def __init__(
        self,
        on_xid: Callable[[XidSeen], None],
        on_unavailable: Callable[[str], None],
        whose: Whose,
        path: Path = PATH,
    ) -> None:
        """All three are called in that thread; `on_unavailable`, with the reason in words, once and as the last."""
        self._on_xid = on_xid
        self._on_unavailable = on_unavailable
        self._parser = Parser(whose)
        self._path = path
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kmsg", daemon=True)

    def start(self) -> None:
        """What the kernel wrote before is of an earlier daemon or boot, and is not told."""
        self._thread.start()

    def close(self) -> None:
        """The thread ends by itself."""
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            log = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._follow(log)
            finally:
                os.close(log)
        except OSError as error:
            self._on_unavailable(_why(self._path, error))

    def _follow(self, log: int) -> None:
        """Raises OSError when there is nothing to read any more."""
        with contextlib.suppress(OSError):  # a pipe has no end to go to
            os.lseek(log, 0, os.SEEK_END)
        poll = select.poll()
        poll.register(log, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._wake not in {fd for fd, _ in poll.poll()}:
            try:
                data = os.read(log, _RECORD_BYTES)
            except BlockingIOError:
                continue
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read goes on after them
            if not data:
                raise OSError(errno.EIO, "it has ended")
            at = time.monotonic()
            for record in data.decode(errors="replace").split("\n"):
                for seen in self._parser.parse(record, at):
                    self._on_xid(seen)


def _pci_id(domain: str, bus: str, device: str, function: str | None) -> str:
    """As NVML's are written here: 0000:1b:00.0."""
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or 0}".lower()


def _shown(text: str) -> str:
    return " ".join(printable(text[:_TEXT_CHARS]).split())


def _why(path: Path, error: OSError) -> str:
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"cannot read {path}: permission denied; it needs root or the capability CAP_SYSLOG"
    return f"cannot read {path}: {error.strerror}"
