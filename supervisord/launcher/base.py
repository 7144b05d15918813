"""What every launcher offers: how a process is started, recognised, watched, ended and swept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from supervisord.core.model import ExitClass, Found, LaunchPlan, Process, Progress

MARK_ENGINE: Final = "SUPERVISED_ENGINE"
MARK_GENERATION: Final = "SUPERVISED_GENERATION"
MARK_STATE: Final = "SUPERVISED_STATE"
"""Environment of every process of an engine: whose it is, also when its parents are gone and its session is its own."""

_GENERATION: Final = re.compile(r"[0-9]{1,18}")


def generation_of(mark: str) -> int:
    """The number in MARK_GENERATION; 0 when it is none of ours: every process may have anything in its environment."""
    return int(mark) if _GENERATION.fullmatch(mark) else 0


def log_identifier(engine: str) -> str:
    """What the output of an engine is found by in the journal (journalctl -t)."""
    return f"vllm-{engine}"


class GateError(Exception):
    """Nothing was spawned, because the world is not ready for it. `code` is a gate ("port_held", ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LaunchError(Exception):
    """Nothing was spawned, and waiting alone does not help."""

    def __init__(self, kind: ExitClass, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ManagerError(Exception):
    """What is to run the engines cannot be talked to, so nobody knows which of them live."""


class StateDirError(Exception):
    """The state directory cannot be used."""


class StateDirBusy(StateDirError):  # noqa: N818 (it says what is the case, not what went wrong)
    """Another daemon uses the state directory. `pid` is None when it did not say who it is."""

    def __init__(self, pid: int | None, message: str) -> None:
        super().__init__(message)
        self.pid = pid


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who gets the connections to an address. `holder` describes somebody else who does; both unset: nobody listens."""

    ours: bool
    holder: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a main process ended; `code` and `signal` are None when nobody knows.

    `stopped_by`: who had it stopped, when that was not the daemon ("systemctl stop vllm-engine-a.service");
    `again`: that was a restart.
    """

    code: int | None
    signal: int | None
    oom_killed: bool = False
    stopped_by: str | None = None
    again: bool = False


class Launcher(Protocol):
    """How engines are run. Calls for one engine that change something come one after the other (its lane)."""

    name: str
    """As in `supervisor.launcher`."""

    def keeps_engines(self) -> bool:
        """Whether engines are to outlive the daemon, which was just told to end. Bounded."""

    def launch(self, plan: LaunchPlan, generation: int) -> Process:
        """Spawn and begin to watch. Raises GateError or LaunchError: then nothing of it lives."""

    def recover(self) -> tuple[Found, ...]:
        """At the start of the daemon: what lives of an earlier one. Files of what does not are removed."""

    def generations(self) -> dict[str, int]:
        """The last generation of each engine that `recover` knows of, alive or not."""

    def adopt(self, engine: str, generation: int) -> None:
        """Take over what `recover` found; the exit of its main process is told like any other."""

    def terminate(self, engine: str, generation: int) -> None:
        """SIGTERM to the main process."""

    def keep_evidence(self, engine: str, generation: int, reason: str, tail: tuple[str, ...]) -> None:
        """Write down what its processes do, before they are killed, and its last words; takes seconds at most."""

    def sweep(self, engine: str, generation: int) -> tuple[str, ...]:
        """SIGKILL to everything, then its files. Returns what remains after a few seconds, described."""

    def ended(self, engine: str, generation: int, code: int | None, number: int | None, /) -> Ended:
        """All that is known of an end; `code` and `number` are what `on_exit` told. Before it is swept."""

    def members(self, engine: str) -> tuple[int, ...]:
        """Pids of the living processes of the engine."""

    def whose(self, pid: int) -> tuple[str, int] | None:
        """Engine and generation of a process; of a dead one too, if it was asked for while it lived. On any thread."""

    def host_bytes(self, engine: str) -> int | None:
        """Anonymous host memory of the engine."""

    def progress(self, engine: str) -> Progress:
        """How far its start has come."""

    def owns_listener(self, engine: str, host: str, port: int) -> Ownership:
        """Who answers on the engine's address."""

    def tail(self, engine: str, lines: int) -> tuple[str, ...]:
        """Last lines of output of this generation, oldest first, without control characters."""

    def log_path(self, engine: str) -> Path | None:
        """The file that the output goes to; None when journald has it, under `log_identifier`."""

    def rotate_if_large(self, engine: str) -> bool:
        """Shorten the log of a running engine when it has grown too large; say whether it was."""

    def close(self) -> None:
        """Stop watching. Engines are left as they are."""


@contextlib.contextmanager
def telling(on_trouble: Callable[[str], None], what: str) -> Iterator[None]:
    """Say what went wrong with the world, and go on."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        on_trouble(f"{what}: {where}{error.strerror or error}")
