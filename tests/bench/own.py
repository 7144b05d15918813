"""vllm-supervisor as one of those that are measured, with the plain launcher."""

from __future__ import annotations

import getpass
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.bench.engines import BenchEngine
from tests.bench.peer import DOWN, Peer, Seen
from tests.daemon.harness import Daemon
from tests.daemon.sims import table

FAST: dict[str, Any] = {"backoff_initial_s": 0, "backoff_reset_after_s": 0, "max_restarts": 10000}
"""No back-off and no end of tries, as the others are."""


@dataclass(frozen=True)
class Settings:
    """What differs from the defaults, by table."""

    supervisor: Mapping[str, Any] = field(default_factory=lambda: {"poll_interval_s": 5, "max_parallel_starts": 8})
    probe: Mapping[str, Any] = field(default_factory=dict)
    restart: Mapping[str, Any] = field(default_factory=dict)


def seen_in(text: str, name: str) -> Seen:
    """An engine in what `status --json` printed."""
    try:
        engines = json.loads(text)["engines"]
    except (ValueError, KeyError):
        return DOWN
    return next((Seen(one["state"] == "ready", one["pid"]) for one in engines if one["name"] == name), DOWN)


class Ours(Peer):
    name = "vllm-supervisor, plain"
    what = "engines as children of the daemon, no back-off, no warm-up, polled every 5 s"
    polls = True
    settings = Settings()

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.daemon = Daemon("", env, **self.settings.supervisor)
        shutil.rmtree(self.outside)
        self.outside, self.home = self.daemon.home, str(self.daemon.home)

    def configure(self) -> None:
        self.daemon.configure("".join(self.section(engine) for engine in self.engines))

    def section(self, engine: BenchEngine) -> str:
        """The engine's tables."""
        keys = {
            "command": [engine.script, "serve"],
            "model": "tiny",
            "port": engine.port,
            "user": getpass.getuser(),
            "drain_timeout_s": 1,
            "stop_timeout_s": 5,
            "probe": self.settings.probe,
            "warmup": {"enabled": False},
            "restart": {**FAST, **self.settings.restart},
        }
        return table(f"engine.{engine.name}", keys)

    def launch(self) -> None:
        self.daemon.start()

    def roots(self) -> list[int]:
        return [] if self.daemon.process is None else [self.daemon.pid]

    def status_argv(self) -> list[str]:
        return [sys.executable, "-m", "supervisord", "--socket", str(self.daemon.socket), "status"]

    def seen(self, name: str) -> Seen:
        return seen_in(self.run([*self.status_argv(), "--json"]), name)

    def wait_settled(self, engine: BenchEngine, starts: int) -> None:
        self.daemon.wait_state(engine.name, "ready", generation=starts)

    def wait_up(self, timeout_s: float = 600) -> None:
        for engine in self.engines:
            self.daemon.wait_state(engine.name, "ready", timeout_s)

    def shut_down(self) -> None:
        self.daemon.stop()


class OursByDefault(Ours):
    name = "vllm-supervisor, plain, defaults"
    what = "engines as children of the daemon, nothing set but what an engine needs"
    settings = Settings(supervisor={"poll_interval_s": 5})  # the default; the tests have another one

    def section(self, engine: BenchEngine) -> str:
        keys = {
            "command": [engine.script, "serve"],
            "model": "tiny",
            "port": engine.port,
            "user": getpass.getuser(),
        }
        return table(f"engine.{engine.name}", keys)
