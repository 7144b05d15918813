"""The link between the API server and its engine cores."""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
from functools import partial

from . import page
from .core import EngineCore, run_worker
from .gpus import CannotStartError, Claim, Plan, names_gpus, settle, settle_worker
from .machine import Memory
from .moods import ENGINE_KEYS, STUBBORN_CHILDREN
from .scheduler import Scheduler
from .tree import say, stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .server import App
    from .tree import Tree


class Rank:
    """An engine core as the API server sees it."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.pid = os.getpid()
        self.stats = page.RankStats()
        self.inflight = 0
        self.up = False

    def send(self, message: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def deliver(self, message: tuple[Any, ...]) -> None:
        if message[0] == "step":
            self.app.work.on_step(self, message[1:])
        elif message[0] == "up":
            self.up = True
            self.app.on_pool(message[1])
            self.app.life.on_loaded()
        elif message[0] == "dead":
            self.app.life.on_engine_dead()


class RemoteRank(Rank):
    """A forked engine core behind a socket."""

    def __init__(self, app: App, sock: socket.socket, pid: int) -> None:
        super().__init__(app)
        self.pid = pid
        self._sock = sock
        self._pending: list[bytes] = []
        sock.setblocking(False)
        app.loop.watch(sock.fileno(), self._on_event)

    def send(self, message: tuple[Any, ...]) -> None:
        self._pending.append(marshal.dumps(message))
        self._flush()

    def _flush(self) -> None:
        blocked = False
        while self._pending and not blocked:
            try:
                self._sock.send(self._pending[0])
            except BlockingIOError:  # the engine core does not read: it is stopped
                blocked = True
                break
            except OSError:
                self._pending.clear()
                return
            self._pending.pop(0)
        events = select.EPOLLIN | (select.EPOLLOUT if blocked else 0)
        self.app.loop.change(self._sock.fileno(), events)

    def _on_event(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.app.loop.forget(self._sock.fileno())
                self.app.life.on_engine_dead()
                return
            self.deliver(marshal.loads(data))


class LocalRank(Rank):
    """An engine core inside the API server's process (`children = false`)."""

    def __init__(self, app: App, make: Callable[[Rank], EngineCore]) -> None:
        super().__init__(app)
        self.core = make(self)
        self.up = True
        self._timer = app.loop.later(0, self._pump)

    def send(self, message: tuple[Any, ...]) -> None:
        self.core.handle(message[0], list(message[1:]))
        self._timer.cancel()
        self._timer = self.app.loop.later(0, self._pump)

    def _pump(self) -> None:
        wait_s = self.core.turn()
        if wait_s is not None:
            self._timer.cancel()
            self._timer = self.app.loop.later(wait_s, self._pump)


class LocalCore(EngineCore):
    """An engine core without a process of its own."""

    def __init__(self, home: Rank, scheduler: Scheduler, memory: Memory, rank: int) -> None:
        super().__init__(None, scheduler, memory, rank)
        self._home = home

    def _tell(self, message: tuple[Any, ...]) -> None:
        self._home.deliver(message)


def engine_mood(app: App) -> dict[str, Any]:
    """What an engine core needs to know of the mood."""
    return {key: app.mood[key] for key in ENGINE_KEYS}


class Builder:
    """Makes the ranks of one engine, in processes of their own or in this one."""

    def __init__(self, app: App, tree: Tree) -> None:
        self.app = app
        self.tree = tree
        self.plan: Plan | None = None

    def make(self) -> None:
        app, options = self.app, self.app.options
        count = app.mood["engines"] or options.integer("data-parallel-size", 1)
        width = options.integer("tensor-parallel-size", 1)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = [name.strip() for name in visible.split(",") if name.strip()]
        if names_gpus(app):
            self.plan = Plan(app, width)
        for number in range(count):
            ours = gpus[number * width : (number + 1) * width]
            if app.mood["children"]:
                app.ranks.append(self._fork_rank(number, count, width, ours))
            else:
                app.ranks.append(LocalRank(app, partial(self._local, number=number, gpus=gpus)))

    def _scheduler(self, blocks: int | None = None) -> Scheduler:
        app, options = self.app, self.app.options
        return Scheduler(
            blocks or app.total_blocks(),
            app.block_size,
            options.integer("max-num-seqs", 256),
            options.integer("max-num-batched-tokens", 8192),
        )

    def _local(self, home: Rank, number: int, gpus: list[str]) -> LocalCore:
        core = LocalCore(home, self._scheduler(), Memory(gpus if number == 0 else []), number)
        core.obey(engine_mood(self.app))
        if number == 0:
            core.memory.tell_gpu()
            core.memory.keep_gpu(self.app.mood["gpu_release_delay_s"])
            core.memory.allocate(self.app.mood["allocate_mib"])
        return core

    def _fork_rank(self, number: int, count: int, width: int, gpus: list[str]) -> Rank:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        title = "VLLM::EngineCore" + (f"_DP{number}" if count > 1 else "")

        def main() -> None:
            workers = [self._fork_worker(place, width, gpus) for place in range(width)]
            memory, blocks = self._memory(width, gpus, workers)
            core = EngineCore(theirs, self._scheduler(blocks), memory, number)
            core.workers = workers
            core.grows_workers = self.plan is not None and width > 1
            core.api_pid = self.tree.api_pid
            core.obey(engine_mood(self.app))
            memory.tell_gpu()
            memory.keep_gpu(self.app.mood["gpu_release_delay_s"])
            memory.allocate(self.app.mood["allocate_mib"])
            core.say_up(blocks)
            core.run()

        pid = self.tree.fork(title, main, [theirs.fileno()])
        theirs.close()
        return RemoteRank(self.app, ours, pid)

    def _memory(
        self, width: int, gpus: list[str], workers: list[tuple[int, socket.socket]]
    ) -> tuple[Memory, int | None]:
        """An engine core's memory, and the KV blocks that there is GPU memory for; None: without simulated GPUs."""
        if self.plan is None:
            return Memory(gpus if width == 1 else []), None
        who = f"(EngineCore pid={os.getpid()})"

        def give_up(*_: object) -> None:
            for pid, _sock in workers:
                os.kill(pid, signal.SIGKILL)
            os._exit(1)

        signal.signal(signal.SIGTERM, give_up)
        try:
            memory = self._claim(self.plan, gpus, 0) if width == 1 else Memory([])
            return memory, settle(self.plan, memory.claim, workers, who)
        except CannotStartError as error:
            say(f"{who} ERROR {stamp()} [core.py:1231] EngineCore failed to start.")
            say(f"{who} {error}")
            give_up()
            raise

    def _claim(self, plan: Plan, gpus: list[str], place: int) -> Memory:
        memory = Memory([], Claim(plan, gpus, place))
        memory.mood = engine_mood(self.app)
        return memory

    def _settle_worker(self, plan: Plan, gpus: list[str], place: int, core: socket.socket) -> Memory:
        who = f"(Worker_TP{place} pid={os.getpid()})"
        try:
            memory = self._claim(plan, gpus, place)
            assert memory.claim is not None
            settle_worker(memory.claim, core, who)
        except CannotStartError as error:
            say(f"{who} ERROR {stamp()} [multiproc_executor.py:870] WorkerProc failed to start.")
            say(f"{who} {error}")
            os._exit(1)
        return memory

    def _fork_worker(self, place: int, width: int, gpus: list[str]) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mood = engine_mood(self.app)

        def main() -> None:
            memory = Memory(gpus[place : place + 1]) if width > 1 else None
            if memory and self.plan:
                memory = self._settle_worker(self.plan, gpus, place, theirs)
            elif memory:
                memory.mood = mood
                memory.tell_gpu()
                memory.keep_gpu(self.app.mood["gpu_release_delay_s"])
            run_worker(theirs, memory, ignore_sigterm=mood["ignore_sigterm"] in STUBBORN_CHILDREN)

        title = "VLLM::Worker" + (f"_TP{place}" if width > 1 else "")
        pid = self.tree.fork(title, main, [theirs.fileno()])
        theirs.close()
        ours.settimeout(float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or 300))
        return pid, ours
