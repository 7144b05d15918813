"""What the plain launcher remembers of one engine's latest generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock

from supervisord.launcher import procfs
from supervisord.launcher.common import Kept
from supervisord.launcher.family import Clues
from supervisord.launcher.logs import LinesOfFile
from supervisord.launcher.procfs import Census, Stat
from supervisord.launcher.records import Record


class BytesRead:
    """Counts what changing processes read together; `of` gives the count of one."""

    def __init__(self, of: Callable[[int], int] = procfs.read_bytes) -> None:
        self._of = of
        self._read: dict[tuple[int, int], int] = {}
        self._total = 0

    def count(self, members: Iterable[Stat]) -> int:
        """Bytes read by all processes so far; does not fall when one of them ends."""
        now = {(stat.pid, stat.start_ticks): self._of(stat.pid) for stat in members}
        self._total += sum(max(0, count - self._read.get(key, 0)) for key, count in now.items())
        self._read = now
        return self._total


class Entry(Kept):
    """One engine: its identity, and what was seen of its processes.

    `child` says that the main process is ours to reap, `vanished` that it ended in this boot and nobody was told of
    that. `remember` and `note` are called by who takes samples too, so these two lock.
    """

    def __init__(self, record: Record, pidfd: int | None, log: Path) -> None:
        super().__init__(record.engine, record.generation, None if record.ended else record.process, pidfd)
        self.record = record
        self.child = pidfd is not None
        self.vanished = False
        self.reaped_ticks: int | None = None
        self.ended = record.ended
        self.log_offset = record.log_offset
        self.lines = LinesOfFile(log, record.log_offset)
        self.shared_memory = dict(record.shared_memory)
        self._lock = Lock()
        self._known: Mapping[int, int] = {}
        self._known_at = 0.0
        self._looked_at: frozenset[str] = frozenset()
        self.bytes_read = BytesRead().count

    @property
    def known(self) -> Mapping[int, int]:
        """Members at the latest census, pid to start time."""
        return self._known

    def clues(self, state_dir: str) -> Clues:
        """What members are recognised by."""
        return Clues(self.engine, state_dir, self.record.uid, self.process, self.reaped_ticks, self._known)

    def forget_main_unless_alive(self, boot_id: str, census: Census) -> None:
        """After a restart of the daemon: somebody else may have the recorded pid now."""
        process = self.process
        if process is not None:
            stat = census.processes.get(process.pid) if process.boot_id == boot_id else None
            if stat is None or not stat.alive or stat.start_ticks != process.start_ticks:
                self.process = None
                self.vanished = process.boot_id == boot_id

    def remember(self, census: Census, members: Iterable[Stat]) -> None:
        """Keep who was a member; an older census than the latest says nothing new."""
        with self._lock:
            if census.at >= self._known_at:
                self._known, self._known_at = {stat.pid: stat.start_ticks for stat in members}, census.at

    def unlooked(self, names: frozenset[str]) -> bool:
        """Whether there are names in /dev/shm since the last look; they count as looked at now."""
        with self._lock:
            new = not names <= self._looked_at
            self._looked_at = names
        return new

    def note(self, files: Mapping[str, int]) -> dict[str, int]:
        """Add files in /dev/shm; give those that were not known."""
        with self._lock:
            new = {name: inode for name, inode in files.items() if self.shared_memory.get(name) != inode}
            self.shared_memory |= new
        return new

    def end(self) -> None:
        """Nothing of it lives any more."""
        super().end()
        self.process, self._known = None, {}
