"""Engine cores and workers: the loop that steps."""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import socket
import time

from .moods import STUBBORN_CHILDREN
from .scheduler import Job, Scheduler
from .tree import say, stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .machine import Memory

_MAX_MESSAGE = 1 << 18


class EngineCore:
    """One rank: the loop that steps, in lock-step with its workers."""

    def __init__(self, api: socket.socket | None, scheduler: Scheduler, memory: Memory, rank: int) -> None:
        self._api = api
        self.scheduler = scheduler
        self.memory = memory
        self.rank = rank
        self.workers: list[tuple[int, socket.socket]] = []
        self.mood: dict[str, Any] = {}
        self.orphan = False
        self.wedged = False
        self.grows_workers = False
        self._grown_mib = 0.0
        self.api_pid = 0

    @property
    def api(self) -> socket.socket:
        assert self._api is not None
        return self._api

    def obey(self, mood: dict[str, Any]) -> None:
        if self.mood:
            self.memory.tick()  # up to now under the old mood
        self.mood = self.scheduler.mood = self.memory.mood = mood

    def say_up(self, blocks: int | None = None) -> None:
        """The API server waits for this before it is ready. `blocks`: what there was GPU memory for."""
        for _, sock in self.workers:
            sock.recv(16)
        self._tell(("up", blocks))

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_sigterm)
        self.memory.tell_gpu()
        poll = select.poll()
        poll.register(self.api, select.POLLIN)
        for _, sock in self.workers:
            poll.register(sock, select.POLLIN)
        while True:
            wait_s = self._wait_s()
            for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000):
                if fd != self.api.fileno():
                    self._worker_died()
                elif not self._receive():
                    poll.unregister(self.api)
            self.turn()

    def turn(self) -> float | None:
        """Do what is due; seconds until the next turn, None: not before the next message."""
        self.memory.tick()
        self._advance()
        self._grow_workers()
        return self._wait_s()

    def _grow_workers(self) -> None:
        """With several GPUs the workers hold the memory, and grow as their engine core says."""
        grown_mib = self.memory.grown_gpu_mib
        if self.grows_workers and grown_mib != self._grown_mib:
            self._grown_mib = grown_mib
            for _, sock in self.workers:
                with contextlib.suppress(OSError):  # a stopped worker
                    sock.send(b"%.3f" % grown_mib, socket.MSG_DONTWAIT)

    def frozen(self) -> bool:
        freeze = self.mood["freeze"]
        ours = freeze if isinstance(freeze, bool) else self.rank in freeze
        return bool(ours or self.wedged or self.mood["asleep"])

    def _wait_s(self) -> float | None:
        wait_s = None if self.frozen() or self.orphan else self.scheduler.wait_s(time.monotonic())
        if self.memory.grows():
            wait_s = min(wait_s if wait_s is not None else 0.1, 0.1)
        return wait_s

    def _advance(self) -> None:
        if self.orphan or self.frozen() or self.scheduler.wait_s(time.monotonic()) != 0:
            return
        for _, sock in self.workers:
            sock.send(b"step")
        for _, sock in self.workers:
            try:
                alive = sock.recv(16)
            except TimeoutError:  # VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
                alive = b""
            if not alive:
                self._worker_died()
        step = self.scheduler.advance(time.monotonic())
        if step:
            self.memory.on_batch(step[3] / self.scheduler.max_batched)
            self._tell(("step", *step))

    def _tell(self, message: tuple[Any, ...]) -> None:
        try:
            self.api.send(marshal.dumps(message))
        except OSError:
            self._lost_api()

    def _receive(self) -> bool:
        try:
            data = self.api.recv(_MAX_MESSAGE)
        except ConnectionResetError:
            data = b""
        if not data:
            self._lost_api()
            return False
        kind, *rest = marshal.loads(data)
        self.handle(kind, rest)
        return True

    def handle(self, kind: str, rest: list[Any]) -> None:
        if kind == "add":
            self.scheduler.add(Job(*rest))
        elif kind == "abort":
            self.scheduler.abort(*rest)
            self.wedged = self.wedged or bool(self.mood["wedge_on_abort"])
        elif kind == "mood":
            self.obey(*rest)
            self.wedged = self.wedged and bool(self.mood["wedge_on_abort"])

    def _lost_api(self) -> None:
        """vLLM's engine core does not notice that its API server has gone."""
        self.orphan = True
        if not self.mood["orphans"]:
            self._end(0)

    def _worker_died(self) -> None:
        time.sleep(self.mood["worker_death_s"])
        say(
            f"(EngineCore pid={os.getpid()}) ERROR {stamp()} [multiproc_executor.py:315] Worker "
            "proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
        )
        self._tell(("dead",))
        time.sleep(self.mood["dead_503_s"])
        self._end(1)

    def _on_sigterm(self, number: int, frame: object) -> None:
        if self.mood["ignore_sigterm"] in STUBBORN_CHILDREN:
            return
        if self.orphan or os.getppid() != self.api_pid:
            time.sleep(self.mood["orphan_stop_s"])
        self._end(0)

    def _end(self, code: int) -> None:
        for pid, _ in self.workers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.memory.release_gpu()
        os._exit(code)


def run_worker(sock: socket.socket, memory: Memory | None, ignore_sigterm: bool) -> None:
    """Answer every step of the engine core; end with it."""
    if ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if memory:
        memory.tell_gpu()
    with contextlib.suppress(OSError):
        sock.send(b"up")
        while message := sock.recv(16):
            if message == b"step":
                sock.send(b"done")
            elif memory:
                memory.grow_gpu(float(message))
    if memory:
        memory.release_gpu()
