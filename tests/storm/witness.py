"""Looks at the node all the time, from outside, and keeps every sight of what must not be."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from supervisord.control import client
from tests.daemon.harness import Document
from tests.daemon.outside import Looker, rss_mib, twins
from tests.sim.engine import alive
from tests.storm.blame import Blame
from tests.storm.idle import Idle
from tests.storm.stage import Stage

ANSWER_S = 8.0
"""The daemon says its status within this, whatever is asked of it, also while clients that never finish hold all
connections of the control socket (10 s each if nobody else comes). Normal are milliseconds."""
SHORT_OF_BREATH = 10
"""And so many times what an idle process takes meanwhile to say a byte: that much more is the machine's."""
BREATH_S = 0.3
"""Where an idle process takes longer, a victim may be restarted: its probes have a second."""
BREATH_FOR_S = 15.0
"""So long a rule of the victims gathers evidence."""
ADOPTED_S = 15.0
"""A new daemon knows by then whether what it found answers, and later where the machine is short of breath."""
RSS_MAX_MIB = 100.0
"""A quiet daemon has half of it; floods of large answers, each bounded, may be under way at the same time."""
DESCRIPTORS_MAX = 400
THREADS_MAX = 200
_PROCESSES_EVERY_S = 0.03
_STATUS_EVERY_S = 0.2


@dataclass
class Extremes:
    """The most of everything that was seen."""

    answers_s: list[float] = field(default_factory=list)
    rss_mib: float = 0.0
    descriptors: int = 0
    threads: int = 0
    looks: int = 0


@dataclass(frozen=True)
class Line:
    """A line of the daemon's log, and when it was there."""

    at: float
    life: int
    document: Document


class Witness:
    """Threads for processes, the daemon's answers, its log. `violations` may be read at any time."""

    def __init__(self, stage: Stage, answer_s: float = ANSWER_S) -> None:
        self._stage = stage
        self._answer_s = answer_s
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._blame = Blame(stage.sims)
        self._idle = Idle(stage.folder)
        self._offset = 0
        self._highest: dict[str, int] = {}
        self._looker = Looker(stage.daemon.state_dir)
        self.last_seen: dict[tuple[str, int], float] = {}
        """When something of a generation of an engine lived last."""
        self.violations: list[str] = []
        self.most = Extremes()
        self.log: list[Line] = []
        self._threads = [
            threading.Thread(target=self._every, args=(every_s, look), daemon=True)
            for every_s, look in (
                (_PROCESSES_EVERY_S, self._processes),
                (_STATUS_EVERY_S, self._status),
                (0.1, self.read_log),
                (_STATUS_EVERY_S, self._idle.ask),
            )
        ]
        self._answered = (0, time.monotonic())
        """In which life of the daemon it answered last, and when."""

    def __enter__(self) -> Witness:  # noqa: PYI034 (typing.Self came with Python 3.11)
        self._idle.begin()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)
        self._idle.end()

    @contextlib.contextmanager
    def blaming(self) -> Iterator[Blame]:
        """What the storm knows about its faults."""
        with self._lock:
            yield self._blame

    def _every(self, every_s: float, look: Callable[[], None]) -> None:
        """A witness that is blind must not pass for one who saw nothing."""
        try:
            while not self._over.wait(every_s):
                look()
        except Exception as error:
            self._saw(f"the witness failed: {error!r}")
            raise

    def _saw(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)

    # --- processes ---

    def _processes(self) -> None:
        self.most.looks += 1
        now, found = time.monotonic(), self._looker.look()
        self.last_seen.update({(seen.engine, seen.generation): now for seen in found})
        for text in twins(found, self._highest):
            self._saw(f"two generations of one engine live: {text}")
        if self._stage.stranger and not alive(self._stage.stranger):
            self._saw("somebody else's vllm was ended")

    # --- answers ---

    def _status(self) -> None:
        stage, began = self._stage, time.monotonic()
        life = stage.lives
        if not stage.up:
            return
        if stage.daemon.process is not None and stage.daemon.process.poll() is not None and life == stage.lives:
            self._saw(f"the daemon ended by itself with {stage.daemon.process.returncode}")
            return
        document: Document = {}
        with contextlib.suppress(client.ControlError):
            document = client.get(str(stage.daemon.socket), "/v1/status", self._answer_s).document()
        now = time.monotonic()
        if life != stage.lives:
            return
        if document:
            self._answered = (life, now)
            self.most.answers_s.append(now - began)
            self._engines(document)
            self._figures()
            return
        if self._answered[0] != life:
            self._answered = (life, began)
            return
        silent_s, slowest_s = now - self._answered[1], self._idle.slowest_s(self._answered[1])
        if silent_s > self._answer_s + SHORT_OF_BREATH * slowest_s:
            text = f"the daemon did not say its status for {silent_s:.1f} s"
            self._saw(f"{text}; an idle process took {slowest_s:.3f} s at most")

    def _engines(self, document: Document) -> None:
        now = time.monotonic()
        short_of_breath = self._idle.slowest_s(now - BREATH_FOR_S) > BREATH_S
        began = self._stage.began
        slowest_s = self._idle.slowest_s(began)
        with self._lock:
            if self._stage.seen_in(document):
                self._blame.sees(now)
            if short_of_breath:
                self._blame.begin(self._stage.victims)
                self._blame.end(self._stage.victims)
            for engine in document["engines"]:
                name, state, generation = engine["name"], engine["state"], engine["generation"]
                adopting = now - began < ADOPTED_S + SHORT_OF_BREATH * slowest_s
                text = self._blame.seen(name, state, generation, now, adopting=adopting)
                if text is not None:
                    self._saw(text)

    def _figures(self) -> None:
        pid, most = self._stage.daemon.pid, self.most
        with contextlib.suppress(OSError, StopIteration):
            most.rss_mib = max(most.rss_mib, rss_mib(pid))
            most.descriptors = max(most.descriptors, len(list(Path(f"/proc/{pid}/fd").iterdir())))
            most.threads = max(most.threads, len(list(Path(f"/proc/{pid}/task").iterdir())))
        for what, is_, limit in (
            ("MiB of memory", most.rss_mib, RSS_MAX_MIB),
            ("descriptors", most.descriptors, DESCRIPTORS_MAX),
            ("threads", most.threads, THREADS_MAX),
        ):
            if is_ > limit:
                self._saw(f"the daemon has more than {limit:g} {what}")

    # --- the log ---

    def read_log(self) -> None:
        """Take up what the daemon has written since."""
        life, now = self._stage.lives, time.monotonic()
        with self._lock, self._stage.daemon.log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for raw in whole.decode("utf-8", "replace").splitlines():
                self._line(raw, now, life)
        for path in self._stage.daemon.state_dir.glob("bug-*.txt"):
            self._saw(f"the daemon met a bug: {path.read_text(encoding='utf-8')[:3000]}")

    def _line(self, raw: str, now: float, life: int) -> None:
        try:
            document = json.loads(raw)
        except ValueError:
            self._saw(f"the daemon's log has a line that is none: {raw[:500]}")
            return
        self.log.append(Line(now, life, document))
        if document["kind"] == "bug" or "Traceback" in raw or "internal error" in raw:
            self._saw(f"the daemon's log speaks of a bug: {raw[:3000]}")
