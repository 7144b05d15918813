"""What must not happen: told in one line, with the details for the maintainers in a file."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from threading import Lock
from typing import Final

from supervisord.config_problems import HIDDEN, secrets_of, without
from supervisord.core.messages import Severity
from supervisord.core.model import Node
from supervisord.core.spec import EngineSpec
from supervisord.state import write_atomically
from supervisord.voice import Voice

KEPT_FILES: Final = 20
AGAIN_S: Final = 3600.0
"""A bug that comes at every look would fill the disk and the log: the same one is written so often at most."""

_REMEMBERED: Final = 100


class Bugs:
    """`<state_dir>/bug-TIME.txt`; for any thread."""

    def __init__(self, state_dir: Path, voice: Voice, clock: Callable[[], float] = time.monotonic) -> None:
        self._state_dir = state_dir
        self._voice = voice
        self._clock = clock
        self._lock = Lock()
        self._seen: dict[tuple[str, ...], tuple[float, int]] = {}
        """By kind, place and text: when it was written, and how often it came, that time included."""

    def report(self, where: Hashable, error: BaseException, node: Node) -> None:
        """Write and tell it; the same again within an hour is told once more and then no longer."""
        secrets = [secret for engine in node.spec.engines.values() for secret in secrets_of(engine.env)]
        told = without(secrets, f"internal error in {where}: {type(error).__name__}: {error}")
        times = self._count(_kind(error))
        if times == 1:
            details = without(secrets, "".join(traceback.format_exception(error)))
            path = self._write(f"{where}\n\n{details}\n{_without_env(node)!r}\n")
            told = f"{told}; please report it with {path}" if path else f"{told}; please report it\n{details}"
        elif times == 2:  # noqa: PLR2004 (the first repetition)
            told = f"{told}; again, and more of it is not told within the hour"
        else:
            return
        self._voice.tell("bug", told, Severity.CRITICAL)

    def _count(self, kind: tuple[str, ...]) -> int:
        """How often this one came within the hour, this time included."""
        now = self._clock()
        with self._lock:
            since, times = self._seen.pop(kind, (now, 0))
            if now - since >= AGAIN_S:
                since, times = now, 0
            self._seen[kind] = (since, times + 1)
            if len(self._seen) > _REMEMBERED:
                del self._seen[next(iter(self._seen))]
        return times + 1

    def _write(self, text: str) -> Path | None:
        path = self._state_dir / f"bug-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%f}.txt"
        try:
            write_atomically(path, text.encode("utf-8", "replace"))
            for old in sorted(self._state_dir.glob("bug-*.txt"))[:-KEPT_FILES]:
                old.unlink(missing_ok=True)
        except OSError:
            return None
        return path


def _kind(error: BaseException) -> tuple[str, ...]:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return (type(error).__qualname__, str(error), *(f"{frame.filename}:{frame.lineno}" for frame in last))


def _without_env(node: Node) -> Node:
    """The node as its recordings have it (core.codec): of environments the names only."""

    def hidden(spec: EngineSpec) -> EngineSpec:
        return replace(spec, env=dict.fromkeys(spec.env, HIDDEN))

    specs = {name: hidden(spec) for name, spec in node.spec.engines.items()}
    engines = {name: replace(engine, spec=hidden(engine.spec)) for name, engine in node.engines.items()}
    return replace(node, spec=replace(node.spec, engines=specs), engines=engines)
