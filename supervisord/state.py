"""The state directory's own file: what the core wants to survive the daemon (see `core.durable`).

Written whole, to a new file that is synced and renamed, so that a reader finds the old or the new one and never a half.
A full or broken disk never stops supervision: the failure is told once, counted, and tried again at the next change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

VERSION: Final = 1
_MAX_BYTES: Final = 16 * 1024 * 1024
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Identifies this boot of the machine; monotonic times mean something only within one."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file as a whole, durably. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class StateFile:
    """`<state_dir>/node.json`."""

    def __init__(self, state_dir: Path, on_trouble: Callable[[str], None]) -> None:
        self._path = state_dir / "node.json"
        self._on_trouble = on_trouble
        self._engines: dict[str, Any] = {}
        self.gpus: dict[str, Any] = {}
        """What is remembered of GPUs, by UUID."""
        self._failing = False

    def load(self) -> tuple[dict[str, Any], bool]:
        """The saved engines and whether they were saved in this boot. Nothing usable: empty, and it is told."""
        try:
            with self._path.open("rb") as file:
                document = json.loads(file.read(_MAX_BYTES))
            engines, same_boot = document["engines"], document["boot_id"] == boot_id()
            if document["version"] != VERSION or not isinstance(engines, dict):
                raise ValueError(f"version {document['version']!r:.80}")  # noqa: TRY301 (one place tells all of it)
        except FileNotFoundError:
            return {}, False
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self._on_trouble(f"cannot use {self._path} ({error}): restart counters start anew; it is replaced")
            return {}, False
        self._engines = dict(engines)
        gpus = document.get("gpus")
        self.gpus = dict(gpus) if isinstance(gpus, dict) else {}
        return engines, same_boot

    def save(
        self,
        changed: Mapping[str, Any],
        gone: frozenset[str] = frozenset(),
        gpus: Mapping[str, Any] | None = None,
    ) -> None:
        """Merge changed engines in and write, `gpus` as a whole; never raises for a broken disk."""
        if gpus is not None:
            self.gpus = dict(gpus)
        self._engines.update(changed)
        for name in gone:
            self._engines.pop(name, None)
        document = {"version": VERSION, "boot_id": boot_id(), "engines": self._engines, "gpus": self.gpus}
        try:
            write_atomically(self._path, json.dumps(document).encode())
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._on_trouble(f"cannot write {self._path}: {error.strerror}; supervision goes on, free some space")
            return
        if self._failing:
            self._failing = False
            self._on_trouble(f"{self._path} can be written again")
