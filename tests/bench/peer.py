"""What a supervisor has to be to be measured here: started, asked, killed and started again, with nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

from tests.bench.engines import FLOOR, START_S, BenchEngine, answers_argv, free_ports, own_python, timer_argv
from tests.bench.processes import family, kill
from tests.sim.engine import alive, processes_with_marker, sim_command, wait_until

RAN_S = 1.1
"""An engine has run for so long before it is killed: less counts as a failed start with several of them."""
OWN = "VLLM_BENCH_MARK"
_STOP_S = 60


class Seen(NamedTuple):
    """What a status command says of one engine; pid None: it does not say."""

    up: bool
    pid: int | None = None


DOWN = Seen(up=False)


class Peer(ABC):
    """One supervisor in a folder of its own. A context: what it started is gone afterwards."""

    name: ClassVar[str]
    what: ClassVar[str]
    """Its configuration, in a sentence."""
    polls: ClassVar[bool] = False
    """Whether it needs engines that answer HTTP."""
    can_be_killed: ClassVar[bool] = True
    revives_itself: ClassVar[bool] = False
    """Whether something starts it again without us."""
    looks_every_s: ClassVar[float] = 0.0
    """How often it looks after its engines, if it does that by the clock."""

    def __init__(self) -> None:
        self.outside = Path(tempfile.mkdtemp(prefix="vs-bench.", dir="/tmp"))
        self.home = str(self.outside)
        self.engines: list[BenchEngine] = []
        self._mark = uuid.uuid4().hex
        self._env = dict(os.environ) | {OWN: self._mark}

    # --- what each has of its own -----------------------------------------------------------------------------------

    @abstractmethod
    def configure(self) -> None:
        """Write what it needs to run `self.engines`."""

    @abstractmethod
    def launch(self) -> None:
        """Start the supervisor, and with it the engines; return at once or when it answers."""

    @abstractmethod
    def roots(self) -> list[int]:
        """Its own processes, as numbered out here; what descends from them is found."""

    @abstractmethod
    def status_argv(self) -> list[str]:
        """Its status command, for people."""

    @abstractmethod
    def seen(self, name: str) -> Seen:
        """What the status command says of an engine now."""

    @abstractmethod
    def shut_down(self) -> None:
        """End it in good order, engines too."""

    def revive(self) -> None:
        """Start it again after it was killed."""
        self.launch()

    # --- for all of them --------------------------------------------------------------------------------------------

    def sim(self) -> list[str]:
        """The simulated vLLM as its engines see it, without `serve`."""
        return sim_command()[:-1]

    def python(self) -> list[str]:
        """A Python where its engines are."""
        return own_python()

    def start(self, *names: str, sleeps: bool = False, changes: bool = False, **mood: Any) -> None:
        """Start it with engines. `sleeps`: engines that need not answer may be things that only sleep."""
        sleepers = sleeps and not self.polls
        self.engines = [
            BenchEngine(name, port, self.home, self.outside, self.sim(), sleeps=sleepers, changes=changes, **mood)
            for name, port in zip(names, free_ports(len(names)), strict=True)
        ]
        self.configure()
        self.launch()

    def own(self) -> list[int]:
        """All processes of the supervisor itself."""
        return family(self.roots())

    def wait_up(self, timeout_s: float = START_S) -> None:
        """Until all engines run: their processes, which is quicker to see than by a status command."""
        for engine in self.engines:
            wait_until(engine.processes, timeout_s, f"{engine.name} of {self.name} to run", 0.05)

    def wait_settled(self, engine: BenchEngine, starts: int) -> None:
        """Until it may be killed and counts as having run."""
        engine.wait_servers()
        time.sleep(RAN_S)

    def run(self, argv: Sequence[str], timeout_s: float = 120) -> str:
        """The output of a command of its own; what it answers by its exit code is in its output too."""
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=self._env,
        )
        return done.stdout + done.stderr

    def spawn(self, argv: Sequence[str], log: str = "supervisor.log") -> subprocess.Popen[bytes]:
        """Start something of its own that stays."""
        with (self.outside / log).open("ab") as sink:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=self._env, start_new_session=True
            )

    def status_times(self, runs: int) -> tuple[list[float], list[float]]:
        """Milliseconds of the status command, and of a Python that does nothing, by turns where its engines are."""
        floor = [*self.python(), *FLOOR]
        told = self.run(timer_argv(self.python(), runs, self.status_argv(), floor), timeout_s=600)
        own, least = json.loads(told)
        return own, least

    def prober(self, engine: BenchEngine, timeout_s: float) -> subprocess.Popen[bytes]:
        """A process that prints when the engine first answers."""
        return subprocess.Popen(answers_argv(self.python(), engine.port, timeout_s), stdout=subprocess.PIPE)

    def __enter__(self) -> Peer:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with contextlib.suppress(Exception):
                self.shut_down()
        finally:
            self.end()

    def end(self) -> None:
        """Kill whatever is left of it."""

        def left() -> list[int]:
            engines = [pid for engine in self.engines for pid in engine.processes()]
            return sorted({*self.own(), *processes_with_marker(OWN, self._mark), *engines})

        def gone() -> bool:
            found = left()
            kill(found)
            return not found

        wait_until(gone, _STOP_S, f"what {self.name} started to go", 0.05)
        shutil.rmtree(self.outside, ignore_errors=True)


def wait_gone(pids: Sequence[int], timeout_s: float = _STOP_S) -> None:
    """Until none of them is alive."""
    wait_until(lambda: not any(alive(pid) for pid in pids), timeout_s, f"{list(pids)} to go")
