"""From the first process to the last: loading, ready, stopping, dead."""

# Importing pathlib would cost a third of the start-up time.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import partial

from .captures import captured_log
from .gpus import names_gpus
from .moods import STUBBORN_CHILDREN, STUBBORN_PARENT, watch
from .ranks import Builder, LocalRank, engine_mood
from .tree import Tree, say, stamp
from .work import DEAD_TEXT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .machine import Leftovers
    from .server import App
    from .wire import Timer

_TICK_S = 0.25
_STATISTICS_S = 10.0
_DEAD_LINES = (
    "AsyncLLM output_handler failed.",
    "Traceback (most recent call last):",
    '  File "/opt/vllm/lib/python3.11/site-packages/vllm/v1/engine/core_client.py", line 1235, in get_output_async',
    "    raise self._format_exception(outputs) from None",
    "vllm.v1.engine.exceptions.EngineDeadError: " + DEAD_TEXT,
)


class Life:
    """State of the whole engine; reacts to signals, deaths and moods."""

    def __init__(self, app: App, listener: socket.socket, leftovers: Leftovers, deadline: float) -> None:
        self.app = app
        self.loop = app.loop
        self.state = "loading"
        self.tree = Tree(deadline, leftovers)
        self._listener = listener
        self._leftovers = leftovers
        self._bind_late: tuple[str, int] | None = None
        self._delay_over = False
        self._drained_at = 0.0
        self._swallowed_at: float | None = None
        self._exit_mood: Any = None
        self._timers: list[Timer] = []
        self._wake_read, wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        wake_write.setblocking(False)
        self._wake_write = wake_write

    # start

    def begin(self, bind_late: tuple[str, int] | None) -> None:
        """Fork the tree and load the simulated model."""
        mood = self.app.mood
        if mood["children"]:
            self.tree.track()
        Builder(self.app, self.tree).make()
        if mood["escape"]:
            self.tree.escape()
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        self.loop.watch(self._wake_read.fileno(), self._on_wake)
        self._bind_late = bind_late
        self._load()
        self.obey()
        self._watch_mood(self.app.mood_file.path)
        self.loop.later(_STATISTICS_S, self._statistics)

    def _load(self) -> None:
        app = self.app
        lines = self._start_lines()
        left_s = max(0.0, app.mood["ready_delay_s"] - app.mood["imports_s"])
        for number, line in enumerate(lines):
            at_s = left_s * number / len(lines)
            self.loop.later(at_s, partial(say, line))
        self.loop.later(left_s, self._on_delay_over)

    def _on_delay_over(self) -> None:
        self._delay_over = True
        self.on_loaded()

    def on_loaded(self) -> None:
        """Ready when the delay is over and every engine core has said that it is up."""
        if self.state == "loading" and self._delay_over and all(r.up for r in self.app.ranks):
            self._ready()

    def _start_lines(self) -> list[str]:
        said = self.app.mood["start_lines"]
        if isinstance(said, list):
            return said
        if said:
            return captured_log(self.app.data, said)
        size = self.app.total_blocks() * self.app.block_size
        version = os.environ.get("VLLM_SIM_VERSION", "0.32.0")
        at, core = stamp(), f"(EngineCore pid={self.app.ranks[0].pid}) INFO"
        lines = [
            f"{core} {at} [core.py:133] Initializing a V1 LLM engine (v{version}) with config: model='{self.app.root}'",
            f"{core} {at} [kv_cache_utils.py:2327] GPU KV cache size: {size:,} tokens",
            f"{core} {at} [core.py:402] init engine (profile, create kv cache, warmup model) took 0.01 s",
        ]
        return [line for line in lines if "KV cache size" not in line] if names_gpus(self.app) else lines

    def _ready(self) -> None:
        app = self.app
        if self._bind_late:
            try:
                self._listener.bind(self._bind_late)
            except OSError as error:
                say(f"OSError: {error}", "stderr")
                self.quit(1)
        address = f"{app.options.text('host', '0.0.0.0')}:{app.options.integer('port', 8000)}"
        app.log("entry.py:140", f"Starting vLLM server on http://{address}")
        say(f"INFO:     Started server process [{os.getpid()}]", "stderr")
        say("INFO:     Waiting for application startup.", "stderr")
        say("INFO:     Application startup complete.", "stderr")
        self.state = "ready"
        app.listen(self._listener)

    # moods

    def _watch_mood(self, path: str | None) -> None:
        if not path or os.environ.get("VLLM_SIM_MOOD_WATCH") == "no":
            return
        fd = watch(path)
        if fd is None:
            self.loop.later(_TICK_S, self._tick)
            return

        def on_event(events: int) -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 65536)
            self.app.poll_mood()

        self.loop.watch(fd, on_event)

    def _tick(self) -> None:
        self.loop.later(_TICK_S, self._tick)
        self.app.poll_mood()

    def obey(self) -> None:
        mood, app = self.app.mood, self.app
        app.keep_alive_s = float(mood["keep_alive_s"])
        levels = ("awake", "weights_offloaded", "discard_all")
        for rank in app.ranks:
            rank.send(("mood", engine_mood(app)))
            for level, name in enumerate(levels):
                value = float(level == mood["asleep"])
                rank.stats.simple[f"vllm:engine_sleep_state|{name}"] = value
        if mood["exit"] != self._exit_mood:
            self._exit_mood = said = mood["exit"]
            if said:
                self.loop.later(said.get("after_s", 0), lambda: self._obey_exit(said))
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if mood["spam"] and mood["spam"].get("lines_per_s"):
            self._spam(mood["spam"], time.monotonic(), 0)

    def _obey_exit(self, said: dict[str, Any]) -> None:
        if said is not self._exit_mood:
            return  # the mood has changed
        process = said.get("process", "api")
        number = _signal_number(said.get("signal"))
        if process == "api":
            if number is None:
                self.quit(said.get("code", 1))
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            pid = self.app.ranks[0].pid
            if process == "worker":
                pid = child_of(pid) or pid
            os.kill(pid, number or signal.SIGKILL)

    def _spam(self, spam: dict[str, Any], since: float, written: int) -> None:
        rate = spam["lines_per_s"]
        owed = int((time.monotonic() - since) * rate) - written
        line, stream = spam.get("line", "spam"), spam.get("stream", "stdout")
        for start in range(0, owed, 1000):
            count = min(1000, owed - start)
            say("\n".join([line] * count), stream)
        pause_s = max(0.02, 1 / rate)
        again = self.loop.later(pause_s, lambda: self._spam(spam, since, written + max(0, owed)))
        self._timers[:] = [again]

    def _statistics(self) -> None:
        self.loop.later(_STATISTICS_S, self._statistics)
        prompt, generated = self.app.work.traffic
        self.app.work.traffic = [0, 0]
        if not prompt and not generated:
            return
        simple = self.app.ranks[0].stats.simple
        self.app.log(
            "loggers.py:335",
            f"Engine 000: Avg prompt throughput: {prompt / _STATISTICS_S:.1f} tokens/s, "
            f"Avg generation throughput: {generated / _STATISTICS_S:.1f} tokens/s, "
            f"Running: {simple['vllm:num_requests_running']:.0f} reqs, "
            f"Waiting: {simple['vllm:num_requests_waiting']:.0f} reqs, "
            f"GPU KV cache usage: {100 * simple['vllm:kv_cache_usage_perc']:.1f}%, "
            "Prefix cache hit rate: 0.0%",
        )

    # signals and stop

    def _on_wake(self, events: int) -> None:
        try:
            numbers = self._wake_read.recv(64)
        except BlockingIOError:
            return
        for _ in (number for number in numbers if number in (signal.SIGTERM, signal.SIGINT)):
            self._on_sigterm()

    def _on_sigterm(self) -> None:
        mood, now = self.app.mood, time.monotonic()
        if mood["ignore_sigterm"] in STUBBORN_PARENT:
            return
        if self.state == "loading":
            if not mood["swallow_sigterm_while_starting"] or (
                self._swallowed_at is not None and now - self._swallowed_at >= 2
            ):
                self.quit(1)
            self._swallowed_at = self._swallowed_at or now
        elif self.state == "ready":
            self._stop()

    def _stop(self) -> None:
        app = self.app
        timeout_s = app.options.integer("shutdown-timeout", 0)
        app.log("launcher.py:279", "[shutdown] API server: signalling HTTP server shutdown")
        if timeout_s:
            self.state = "draining"
            if app.mood["drain_refuses"]:
                app.refuse()
            self._drained_at = time.monotonic() + app.mood["drain_idle_s"]
            self.loop.later(timeout_s, self._stop_now)
            self.loop.later(app.mood["drain_idle_s"], self.on_request_gone)
            return
        self._stop_now()

    def _stop_now(self) -> None:
        """The default: the engine dies at once, the server waits for its clients without bound."""
        if self.state == "stopping":
            return
        self.state = "stopping"
        say("INFO:     Shutting down", "stderr")
        self.app.refuse()
        if self.app.mood["ignore_sigterm"] not in STUBBORN_CHILDREN:
            self._end_children(signal.SIGTERM)
        if self.app.mood["stop_busy"] == "abort":
            for completion in list(self.app.work.active):
                completion.abort()
        self.on_request_gone()

    def on_request_gone(self) -> None:
        busy = any(link.request is not None for link in self.app.connections.values())
        if busy or self.app.work.active:
            return
        if self.state == "draining" and time.monotonic() >= self._drained_at:
            self._stop_now()
        elif self.state == "stopping":
            self.state = "leaving"
            self.loop.later(self.app.mood["stop_delay_s"], lambda: self.quit(0))

    # ends

    def on_engine_dead(self) -> None:
        if self.state == "loading":
            if self._swallowed_at is None:
                text = "Engine core initialization failed. See root cause above."
                say(f"RuntimeError: {text} Failed core proc(s): {{}}", "stderr")
                self.quit(1)
            return  # vLLM no longer watches its engine after a swallowed SIGTERM
        if self.state not in ("ready", "draining"):
            return
        self.state = "dead"
        for line in _DEAD_LINES:
            self.app.log("async_llm.py:849", line, "ERROR")
        for completion in list(self.app.work.active):
            completion.fail()
        if os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1":
            return
        self.loop.later(self.app.mood["dead_503_s"], self._leave_dead)

    def _leave_dead(self) -> None:
        self.app.refuse()
        self.loop.later(self.app.mood["dead_exit_s"], lambda: self.quit(0))

    def _end_children(self, number: signal.Signals) -> None:
        for rank in self.app.ranks:
            if rank.pid != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, number)

    def quit(self, code: int) -> NoReturn:
        """Leave, and take the engine cores along unless the mood makes them stubborn."""
        signal.set_wakeup_fd(-1)
        stubborn = code == 0 and self.app.mood["ignore_sigterm"] in STUBBORN_CHILDREN
        pids = [rank.pid for rank in self.app.ranks if rank.pid != os.getpid()]
        if not stubborn:
            self._end_children(signal.SIGTERM)
            until = time.monotonic() + 1
            while pids and time.monotonic() < until:
                pids = [pid for pid in pids if not _reaped(pid)]
                time.sleep(0.002)
            for pid in pids:
                for victim in (pid, child_of(pid)):
                    with contextlib.suppress(OSError):
                        os.kill(victim or pid, signal.SIGKILL)
            self._leftovers.clean()
        for rank in self.app.ranks:
            if isinstance(rank, LocalRank):
                rank.core.memory.release_gpu()
        if code == 0:
            say("INFO:     Application shutdown complete.", "stderr")
        os._exit(code)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def child_of(pid: int) -> int | None:
    """The first child of a process: the worker of an engine core."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            words = file.read().split()
    except OSError:
        return None
    return int(words[0]) if words else None


def _signal_number(said: Any) -> int | None:
    if said is None or isinstance(said, int):
        return said
    name = said if said.startswith("SIG") else "SIG" + said
    return int(signal.Signals[name])
