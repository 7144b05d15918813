"""The kinds of faults: what each does to the stage, for how long, and how it is undone.

A fault may say `NotNowError`: it needs an engine that runs, or a daemon. It is then tried on another engine, or later.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from tests.daemon.outside import marks_of
from tests.sim.engine import title_of
from tests.storm.stage import Stage


class NotNowError(Exception):
    """It cannot be staged at the moment."""


class On(Enum):
    """Whom a fault befalls, and so who may be restarted for it."""

    ENGINE = "one engine"
    GPU = "a GPU, and all engines on it"
    GPUS = "several GPUs, and all engines on GPUs"
    SIGHT = "how the daemon sees the GPUs, and no engine"
    NODE = "the daemon or its surroundings, and no engine"
    ALL = "the daemon and, rightly, all engines"


Undo = Callable[[], None]
Begin = Callable[[Stage, str, Random], Undo | None]
"""With the name of an engine, "" when it befalls the node."""


@dataclass(frozen=True)
class Fault:
    """One kind."""

    name: str
    on: On
    begin: Begin
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """At least and at most, before it is undone."""
    shifts: bool = False
    """CUDA's numbers of GPUs shift: who is started meanwhile may get another one than its own."""
    spoils: bool = False
    """What it did to a process stays until that is another one."""


KINDS: dict[str, Fault] = {}


def fault(on: On, lasts_s: tuple[float, float] = (0.0, 0.0), *, shifts: bool = False) -> Callable[[Begin], Begin]:
    """Make a function a kind of fault of its name."""

    def register(begin: Begin) -> Begin:
        add(Fault(begin.__name__, on, begin, lasts_s, shifts=shifts))
        return begin

    return register


def add(kind: Fault) -> None:
    """Make it known."""
    assert kind.name not in KINDS
    KINDS[kind.name] = kind


def running(stage: Stage, engine: str, title: str = "") -> int:
    """A living process of an engine."""
    pid = stage.process(engine, title)
    if pid is None:
        raise NotNowError(f"no process {title or 'vllm serve'} of {engine}")
    return pid


def ready(stage: Stage, engine: str) -> int:
    """The pid of an engine that is ready."""
    document = stage.engine(engine)
    if document.get("state") != "ready":
        raise NotNowError(f"{engine} is not ready")
    pid: int = document["pid"]
    return pid


def send(pid: int, number: signal.Signals) -> None:
    """A signal to what may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def frozen(stage: Stage, pid: int) -> Undo:
    """SIGSTOP; undone if it is still the same process."""
    before = (marks_of(pid, stage.daemon.state_dir), title_of(pid))
    send(pid, signal.SIGSTOP)

    def go_on() -> None:
        if (marks_of(pid, stage.daemon.state_dir), title_of(pid)) == before:
            send(pid, signal.SIGCONT)

    return go_on
