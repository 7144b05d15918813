"""A daemon for tests of the control API: real server, real status documents, scripted decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, final

from supervisord.control.routes import EventPage, InJournal, LogChunk, Reloaded
from supervisord.control.server import ControlServer
from supervisord.core import status
from supervisord.core.messages import Answer, GpuOp, Op
from supervisord.core.model import Engine, Gpu, Node, Phase, Process, Ready, Stopped
from supervisord.core.spec import EngineSpec, NodeSpec

Script = Callable[["FakeDaemon"], None]


def stamp(at: float) -> str:
    """RFC 3339, as the daemon writes it."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def engine(name: str, phase: Phase | None = None, **fields: Any) -> Engine:
    """An engine in some phase; one that has a process when it is ready."""
    phase = phase if phase is not None else Ready()
    spec = EngineSpec(name=name, model=fields.pop("model", "Qwen/Qwen3.5-9B"), port=8001, gpus=fields.pop("gpus", ()))
    known: dict[str, Any] = {"wanted": not isinstance(phase, Stopped), "since": time.monotonic() - 75, "generation": 1}
    if isinstance(phase, Ready):
        known["process"] = Process(4711, 1, "boot")
    return Engine(spec=spec, plan_id="p", phase=phase, **{**known, **fields})


@final
class FakeDaemon:
    """Use as a context manager. Attributes may be changed while it runs; `put` publishes."""

    def __init__(self, folder: Path, *engines: Engine, gpus: tuple[Gpu, ...] = (), deadline_s: float = 10.0) -> None:
        self.socket = str(folder / "c.sock")
        self.answer: tuple[Answer, str] | Exception = (Answer.ACCEPTED, "accepted")
        self.outcome: Reloaded | Exception = Reloaded(accepted=True)
        self.logs: dict[str, bytes | InJournal] = {}
        self.told: list[dict[str, Any]] = []
        """Events, as the history writes them for programs; their ids are 1, 2, ..."""
        self.stories: dict[str, dict[str, Any]] = {}
        self.no_history: Exception | None = None
        self.requests: list[tuple[Op, str, bool, str]] = []
        self.gpu_requests: list[tuple[GpuOp, str | None, str]] = []
        self.reloads: list[str] = []
        self.errors: list[tuple[str, Exception]] = []
        self.waits = 0
        self.script: list[Script] = []
        """What happens after a request was accepted, one step each time that somebody looks again."""
        self.node = Node(
            spec=NodeSpec(),
            version="0.1.0",
            pid=99,
            since=time.monotonic() - 3700,
            engines={e.spec.name: e for e in engines},
            gpus={gpu.uuid: gpu for gpu in gpus},
        )
        self._changed = threading.Condition()
        self._serial = 1
        self.server = ControlServer(
            self.socket, self, lambda what, error: self.errors.append((what, error)), client_deadline_s=deadline_s
        )

    def __enter__(self) -> FakeDaemon:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def put(self, *engines: Engine) -> None:
        """Publish changed engines."""
        with self._changed:
            self.node = replace(self.node, engines={**self.node.engines, **{e.spec.name: e for e in engines}})
            self._serial += 1
            self._changed.notify_all()

    def enter(self, name: str, phase: Phase, **fields: Any) -> None:
        """Publish one engine in another phase."""
        self.put(replace(self.node.engines[name], phase=phase, since=time.monotonic(), **fields))

    def forget(self, name: str) -> None:
        """Publish a node without this engine."""
        self.node = replace(self.node, engines={k: v for k, v in self.node.engines.items() if k != name})
        self.put()

    # --- routes.Handlers ----------------------------------------------------------------------------------------

    def status(self) -> tuple[int, dict[str, Any]]:
        with self._changed:
            return self._serial, status.of(self.node, time.monotonic(), time.time(), stamp)

    def wait(self, after: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        self.waits += 1
        if self.script:
            self.script.pop(0)(self)
        with self._changed:
            self._changed.wait_for(lambda: self._serial > after, timeout_s)
        return self.status()

    def request(self, op: Op, engine: str, at_once: bool, actor: str) -> tuple[Answer, str]:
        self.requests.append((op, engine, at_once, actor))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.script:
            self.script.pop(0)(self)
        return self.answer

    def gpu_request(self, op: GpuOp, gpu: str | None, actor: str) -> tuple[Answer, str]:
        self.gpu_requests.append((op, gpu, actor))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def reload(self, actor: str) -> Reloaded:
        self.reloads.append(actor)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.script:
            self.script.pop(0)(self)
        return self.outcome

    def log(self, engine: str, offset: int | None, limit: int) -> LogChunk | InJournal | None:
        if engine not in self.node.engines:
            return None
        log = self.logs.get(engine, b"")
        if isinstance(log, InJournal):
            return log
        start = max(0, len(log) - limit) if offset is None else (offset if offset <= len(log) else 0)
        data = log[start : start + limit]
        return LogChunk(data, start, start + len(data), self.node.engines[engine].generation)

    def tell(self, kind: str = "ready", message: str = "qwen is ready", **fields: Any) -> None:
        """Something to read in the history."""
        known = {"severity": "notice", "engine": "qwen", "generation": 1, "reason": None, "numbers": {}}
        with self._changed:
            number = len(self.told) + 1
            event = {"id": number, "at": stamp(1_780_023_600 + number), "kind": kind, "message": message}
            self.told.append({**event, **known, **fields})
            self._changed.notify_all()

    def events(self, engine: str | None, since: float | None, after: int | None, limit: int) -> EventPage | None:
        if self.no_history is not None:
            raise self.no_history
        if engine is not None and engine not in {*self.node.engines, *(event["engine"] for event in self.told)}:
            return None
        mine = [event for event in self.told if engine in (None, event["engine"]) and event["id"] > (after or 0)]
        if since is not None:
            mine = [event for event in mine if event["at"] >= stamp(since)]
        if after is None and since is None:
            return EventPage(tuple(mine[-limit:]), len(self.told))
        more = len(mine) > limit
        return EventPage(tuple(mine[:limit]), mine[limit - 1]["id"] if more else len(self.told), more)

    def wait_event(self, last_id: int, timeout_s: float) -> None:
        self.waits += 1
        with self._changed:
            self._changed.wait_for(lambda: len(self.told) != last_id, timeout_s)

    def why(self, engine: str) -> dict[str, Any] | None:
        if self.no_history is not None:
            raise self.no_history
        return self.stories.get(engine)
