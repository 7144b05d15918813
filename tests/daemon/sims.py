"""Simulated engines as sections of a configuration."""

from __future__ import annotations

import getpass
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.sim.engine import SIM_PATH, Mood, free_port

MAX_LIFE_S = "240"
"""Nothing that a broken test leaves lives longer."""

QUICK: dict[str, Any] = {"drain_timeout_s": 1, "stop_timeout_s": 5}
QUICK_RESTART: dict[str, Any] = {"backoff_initial_s": 0}


class Sim:
    """One simulated engine: its name, port and mood, and its section.

    Without anything said it is not warmed up, is started again at once, drains for 1 s and stops within 5 s.
    Keyword arguments are keys of `[engine.X]`, tables as mappings.
    """

    def __init__(
        self, folder: Path, name: str = "a", *, mood: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        self.name = name
        self.port = free_port()
        self.mood = Mood(folder / f"{name}.mood", **(mood or {}))
        self.record = folder / f"{name}.starts"
        self.settings: dict[str, Any] = {
            **QUICK,
            **settings,
            "restart": {**QUICK_RESTART, **settings.get("restart", {})},
            "warmup": {"enabled": False, **settings.get("warmup", {})},
            "env": {
                "VLLM_SIM_MAX_LIFE_S": MAX_LIFE_S,
                "VLLM_SIM_RECORD": str(self.record),
                **self.mood.env,
                **settings.get("env", {}),
            },
        }

    def toml(self) -> str:
        """The section of the configuration."""
        settings = {
            "command": [str(SIM_PATH), "serve"],
            "model": "tiny",
            "port": self.port,
            "user": getpass.getuser(),
            **self.settings,
        }
        return table(f"engine.{self.name}", settings)

    def change(self, **settings: Any) -> None:
        """Other settings, tables merged, for the next `toml`."""
        for key, value in settings.items():
            old = self.settings.get(key)
            self.settings[key] = {**old, **value} if isinstance(old, dict) else value

    def starts(self) -> list[dict[str, Any]]:
        """What each start of it was given: pid, time, arguments, environment."""
        if not self.record.exists():
            return []
        return [json.loads(line) for line in self.record.read_text(encoding="utf-8").splitlines()]


def section(*sims: Sim) -> str:
    """The sections of several engines."""
    return "\n".join(sim.toml() for sim in sims)


def table(path: str, values: Mapping[str, Any]) -> str:
    """A TOML table and those below it. JSON's strings, numbers, booleans and lists are TOML's."""
    lines = [f"[{path}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    below = [table(f"{path}.{key}", value) for key, value in values.items() if isinstance(value, Mapping)]
    return "\n".join([*lines, *below]) + "\n"
