"""The composition root: builds the parts, wires them, runs the loop, and ends all of it within bounds."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Final

from supervisord import __version__, applied, heap
from supervisord.applied import Chosen
from supervisord.bugs import Bugs
from supervisord.config import ConfigError, load
from supervisord.config_checks import host_and_port
from supervisord.control.listen import ListenError
from supervisord.control.routes import EventPage, InJournal, LogChunk, Reloaded
from supervisord.control.server import ControlServer
from supervisord.core import durable, requests, status
from supervisord.core.messages import (
    Answer,
    Booted,
    EndRequested,
    GpuOp,
    GpuRequested,
    Op,
    Reconfigured,
    Reply,
    Requested,
    Severity,
)
from supervisord.core.model import Node
from supervisord.core.spec import NodeSpec, SupervisorSpec
from supervisord.effects import NodeEffects, Parts
from supervisord.engine import profiles
from supervisord.gpu.client import GpuProbe
from supervisord.history import History
from supervisord.history_answers import HistoryAnswers, stamp
from supervisord.lanes import Lanes
from supervisord.launcher import launchers, ports
from supervisord.launcher.base import ManagerError, StateDirBusy, StateDirError, log_identifier
from supervisord.launcher.choice import no_systemd
from supervisord.launcher.statedir import lock_state_dir
from supervisord.log import Journal
from supervisord.loop import UNBOOTED, Board, Inbox, Loop
from supervisord.planning import Planner
from supervisord.schedule import Schedule
from supervisord.state import StateFile
from supervisord.systemd import journal as journald
from supervisord.systemd.kmsg import Kmsg
from supervisord.systemd.notify import Notifier
from supervisord.voice import Voice, tell_of_history
from supervisord.web.metrics import Page, Source
from supervisord.web.server import Hooks, WebServer
from supervisord.web.site import Site
from supervisord.webhook.notifier import Webhooks

EXIT_OK: Final = 0
EXIT_CANNOT: Final = 1
EXIT_CONFIG: Final = 2
EXIT_INTERNAL: Final = 70
EXIT_BUSY: Final = 75

NVIDIA: Final = Path("/dev/nvidiactl")
"""There when the driver was loaded once."""

ANSWER_S: Final = 8.0
"""How long a control request waits for the loop and the disk."""

FLUSH_S: Final = 2.0


def run(config_path: Path) -> int:
    """The daemon, in the foreground, until it is told to end. Returns the exit code (docs/guide.md)."""
    # Whoever started us may have blocked signals, or ignored SIGCHLD (exit codes are lost then); threads and engines
    # would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heap.share_one_arena()
    try:
        chosen = applied.choose(config_path, trust=os.geteuid() == 0)
    except ConfigError as error:
        for problem in error.problems:
            _say(str(problem))
        return EXIT_CONFIG
    why_not = no_systemd() if chosen.spec.supervisor.launcher == "systemd" else None
    if why_not is not None:
        _say(f'cannot use supervisor.launcher = "systemd": {why_not}; write "auto" or "plain"')
        return EXIT_CONFIG
    state_dir = Path(chosen.spec.supervisor.state_dir)
    try:
        lock = lock_state_dir(state_dir)
    except StateDirBusy as error:
        _say(str(error))
        return EXIT_BUSY
    except StateDirError as error:
        _say(str(error))
        return EXIT_CANNOT
    with lock:
        journal = Journal(sink=journald.connect(sys.stderr, os.environ))
        webhooks = Webhooks()
        history = History(state_dir, partial(tell_of_history, journal, webhooks))
        voice = Voice(journal, history, webhooks)
        voice.notify(chosen.spec.notify)
        for warning in chosen.warnings:
            voice.tell("config_warning", warning, Severity.WARNING)
        if chosen.error is not None:
            voice.tell("config_error", chosen.error, Severity.ERROR)
        try:
            return Daemon(config_path, chosen, voice, history).run()
        except ListenError as error:
            voice.tell("cannot_listen", str(error), Severity.ERROR)
            return EXIT_BUSY if error.busy else EXIT_CANNOT
        except (StateDirError, ManagerError) as error:
            kind = "cannot_use_state_dir" if isinstance(error, StateDirError) else "cannot_use_systemd"
            voice.tell(kind, str(error), Severity.ERROR)
            return EXIT_CANNOT
        finally:
            voice.close()


class Replies:
    """Answers of the loop to control requests, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[Reply]] = {}

    def ask(self, send: Callable[[int], None], timeout_s: float) -> Reply:
        """Send a request under a new number and wait for its answer. Raises TimeoutError."""
        number = next(self._numbers)
        box = self._waiting[number] = SimpleQueue()
        try:
            send(number)
            return box.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        finally:
            del self._waiting[number]

    def answer(self, reply: Reply) -> None:
        """Hand an answer over; nobody waits any more: dropped."""
        box = self._waiting.get(reply.request)
        if box is not None:
            box.put(reply)


class Daemon:
    """One running node: its parts, and what the control API asks of them."""

    def __init__(self, config_path: Path, chosen: Chosen, voice: Voice, history: History) -> None:
        spec = chosen.spec
        self._config_path = config_path
        self._as_root = os.geteuid() == 0
        self._voice = voice
        self._notifier = Notifier()
        self._replies = Replies()
        self._inbox: Inbox = SimpleQueue()
        self._hangups: SimpleQueue[None] = SimpleQueue()
        self._ends: SimpleQueue[int] = SimpleQueue()
        self._reloading = Lock()
        self._lanes = Lanes(self._on_bug)
        self._state_dir = state_dir = Path(spec.supervisor.state_dir)
        self._bugs = Bugs(state_dir, voice)
        self._state = StateFile(state_dir, self._on_trouble)
        self._planner = Planner(
            state_dir,
            chosen.profiles,
            as_root=self._as_root,
            base_env=dict(os.environ),
            node=lambda: self._board.read()[1],
        )
        self._launcher = launchers.make(spec.supervisor.launcher, state_dir, self._on_exit, self._on_trouble)
        try:
            self._found = self._launcher.recover()
        except OSError as error:
            raise StateDirError(f"cannot read {error.filename or state_dir}: {error.strerror}; mend that") from None
        self._gpus = GpuProbe(self._inbox.put, self._launcher.whose)
        self._kmsg = Kmsg(self._inbox.put, self._on_no_kmsg, self._launcher.whose)
        node = self._first_node(spec, chosen.error)
        if chosen.tables is not None:
            self._remember(chosen.tables)
        self._board = Board(node)
        self._past = HistoryAnswers(history, self._board)
        self._schedule = Schedule(self._inbox, spec.supervisor.poll_interval_s)
        self._effects = NodeEffects(
            Parts(
                inbox=self._inbox,
                lanes=self._lanes,
                launcher=self._launcher,
                gpus=self._gpus,
                plan=self._planner.plan,
                voice=voice,
                notifier=self._notifier,
                board=self._board,
                state=self._state,
                answer=self._replies.answer,
                resync=self._schedule.resync,
                looked=voice.figures.looked,
            )
        )
        self._loop = Loop(node, self._inbox, self._effects, observe=history.observe, timed=voice.figures.turned)
        self._control = ControlServer(spec.supervisor.socket, self, self._on_server_error)
        self._web = self._web_server(spec.supervisor.listen)

    def run(self) -> int:
        """Serve until the loop has ended everything."""
        spec = self._loop.node.spec.supervisor
        # Before anybody can be heard: a start that is asked for in a node of which the core does not know yet what
        # lives would start a twin, and a SIGTERM would leave it behind.
        self._inbox.put(Booted(self._found, nvidia=NVIDIA.exists()))
        self._control.start()
        self._web.start()
        # A handler interrupts the loop at any point, also where it holds a lock: it may only put into a queue.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda seen, _: self._ends.put(seen))
        Thread(target=self._end_on_signal, name="end", daemon=True).start()
        signal.signal(signal.SIGHUP, lambda *_: self._hangups.put(None))
        Thread(target=self._reload_on_hangup, name="hangup", daemon=True).start()
        text = f"vllm-supervisor {__version__} runs, pid {os.getpid()}; socket {spec.socket}, state in {spec.state_dir}"
        self._voice.tell("daemon_started", text, Severity.NOTICE)
        self._kmsg.start()
        self._schedule.start()
        self._schedule.set_windows(_windows(self._loop.node.spec))
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - a bug in the core: say all that is known, and let systemd start us anew
            self._on_bug("the loop", error)
            return EXIT_INTERNAL
        finally:
            self._close()
        left = "engines run on" if self._loop.node.keeping else "nothing of any engine is left"
        self._voice.tell("daemon_ended", f"ended: {left}", Severity.NOTICE)
        return EXIT_OK

    def _close(self) -> None:
        self._control.close()
        self._web.close()
        self._schedule.stop()
        flushed = Event()
        self._lanes.submit("state", flushed.set)
        flushed.wait(FLUSH_S)
        self._launcher.close()
        self._kmsg.close()
        self._gpus.close()

    # --- building -----------------------------------------------------------------------------------------------

    def _remember(self, tables: Mapping[str, Any]) -> None:
        try:
            applied.save(self._state_dir, tables, self._config_path)
        except OSError as error:
            self._on_trouble(f"cannot keep the configuration for a daemon that finds a bad one: {error.strerror}")

    def _web_server(self, address: str) -> WebServer:
        """What gateways and Prometheus ask; it reads the board, never the loop."""
        source = Source(
            node=lambda: self._board.read()[1],
            document=lambda node, now: status.of(node, now, time.time(), stamp),
            figures=self._voice.figures,
            lost=self._voice.lost,
        )
        site = Site(source.node, self._board.booted, Page(source), as_root=self._as_root)
        return WebServer(host_and_port(address), site, Hooks(self._voice.tell, self._on_server_error, ports.holder))

    def _first_node(self, spec: NodeSpec, config_error: str | None) -> Node:
        saved, same_boot = self._state.load()
        plan_ids, spawned = self._planner.plan_ids(spec), self._launcher.generations()
        now = time.monotonic()
        return Node(
            spec=spec,
            version=__version__,
            launcher=self._launcher.name,
            pid=os.getpid(),
            since=now,
            config_error=config_error,
            gpus=durable.restore_gpus(self._state.gpus),
            engines=durable.restore(spec, plan_ids, saved, now, same_boot=same_boot, spawned=spawned),
        )

    # --- what arrives from outside the loop -----------------------------------------------------------------------

    def _end_on_signal(self) -> None:
        """Whether engines are kept is asked of systemd, which takes a moment: not on the loop, and once."""
        keep = None
        while True:
            number = self._ends.get()
            if keep is None:  # a person at a terminal means all of it
                keep = number != signal.SIGINT and self._launcher.keeps_engines()
            self._inbox.put(EndRequested(signal.Signals(number).name, keep))

    def _on_exit(self, engine: str, generation: int, code: int | None, number: int | None) -> None:
        self._effects.on_exit(engine, generation, code, number)

    def _on_trouble(self, message: str) -> None:
        self._voice.tell("trouble", message, Severity.WARNING)

    def _on_no_kmsg(self, reason: str) -> None:
        self._voice.tell("kmsg", f"{reason}: faults of GPUs are heard of from NVML alone", Severity.INFO)

    def _on_server_error(self, where: str, error: Exception) -> None:
        self._on_bug(where, error)

    def _on_bug(self, where: Hashable, error: BaseException) -> None:
        self._bugs.report(where, error, self._loop.node)

    # --- control.routes.Handlers --------------------------------------------------------------------------------

    def status(self) -> tuple[int, dict[str, Any]]:
        """Give the serial and the status document, of a node that has booted."""
        return _document(*self._board.wait(UNBOOTED, ANSWER_S))

    def wait(self, after: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Do the same as soon as there is a newer one."""
        return _document(*self._board.wait(after, timeout_s))

    def request(self, op: Op, engine: str, at_once: bool, actor: str) -> tuple[Answer, str]:
        """Hand a request to the loop and wait for its answer."""
        reply = self._replies.ask(
            lambda number: self._inbox.put(Requested(number, op, engine, actor, at_once)), ANSWER_S
        )
        return self._answered(reply, op.value, actor, engine if reply.answer is Answer.REFUSED else None)

    def gpu_request(self, op: GpuOp, gpu: str | None, actor: str) -> tuple[Answer, str]:
        """Do the same for a request about GPUs."""
        reply = self._replies.ask(lambda number: self._inbox.put(GpuRequested(number, op, gpu, actor)), ANSWER_S)
        return self._answered(reply, op.value, actor)

    def _answered(self, reply: Reply, op: str, actor: str, engine: str | None = None) -> tuple[Answer, str]:
        if reply.answer is not Answer.ACCEPTED:  # of the others the core tells
            text = f"refused to {actor}: {reply.message}"
            self._voice.tell("refused", text, Severity.NOTICE, engine=engine, reason=op)
        return reply.answer, reply.message

    def reload(self, actor: str) -> Reloaded:
        """Read and validate the configuration; apply it only if all of it is right."""
        with self._reloading:  # what was read last is applied last
            outcome = self._reload(actor)
        told = "; ".join(outcome.messages) or "no change"
        text, severity = f"reloaded by {actor}: {told}", Severity.NOTICE
        if not outcome.accepted:
            text, severity = f"cannot reload for {actor}, nothing was changed: {told}", Severity.ERROR
        self._voice.tell("reload", text, severity)
        return outcome

    def _reload(self, actor: str) -> Reloaded:
        try:
            loaded = load(self._config_path, trust=self._as_root)
            own_profiles = profiles.load(self._config_path.absolute().parent, trust=self._as_root)
        except ConfigError as error:
            return Reloaded(accepted=False, messages=tuple(str(problem) for problem in error.problems))
        plans = self._planner.plans_of(loaded, own_profiles)
        problems = [f"engine {name}: {error}" for name, plan in plans.items() for error in plan.errors]
        problems += map(str, self._planner.gpu_problems(loaded))
        if problems:
            return Reloaded(accepted=False, messages=tuple(problems))
        plan_ids = {name: plan.plan_id for name, plan in plans.items()}
        self._planner.use(own_profiles)
        _, node = self._board.read()
        changes = requests.changes(node, loaded.spec, plan_ids)
        messages = [f"{name}: {text}" for name, text in changes.items()]
        messages += fixed_settings(node.spec.supervisor, loaded.spec.supervisor)

        def send(number: int) -> None:
            self._inbox.put(Reconfigured(loaded.spec, plan_ids, actor, number))
            # At once, since the loop applies it even if nobody waits for that any more; and after it, since a window
            # that is open now is told through the inbox too, perhaps of an engine that is new.
            self._schedule.set_interval(loaded.spec.supervisor.poll_interval_s)
            self._schedule.set_windows(_windows(loaded.spec))

        reply = self._replies.ask(send, ANSWER_S)
        accepted = reply.answer is Answer.ACCEPTED
        if accepted:
            self._remember(loaded.tables)
            messages += self._voice.notify(loaded.spec.notify)
        settling = tuple(name for name in changes if not requests.held(node, loaded.spec, name))
        return Reloaded(accepted, tuple(messages) if accepted else (reply.message,), settling)

    def log(self, engine: str, offset: int | None, limit: int) -> LogChunk | InJournal | None:
        """Read a part of an engine's log file, or say that the journal has it."""
        _, node = self._board.read()
        if engine not in node.engines:
            return None
        path = self._launcher.log_path(engine)
        if path is None:
            return InJournal(log_identifier(engine))
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - limit) if offset is None else (offset if offset <= size else 0)
                file.seek(start)
                data = file.read(limit)
        except FileNotFoundError:
            start, data = 0, b""
        return LogChunk(data, start, start + len(data), node.engines[engine].generation)

    def events(self, engine: str | None, since: float | None, after: int | None, limit: int) -> EventPage | None:
        """Read some events."""
        return self._past.events(engine, since, after, limit)

    def wait_event(self, last_id: int, timeout_s: float) -> None:
        """Wait for the next event."""
        self._past.wait_event(last_id, timeout_s)

    def why(self, engine: str) -> Mapping[str, Any] | None:
        """Tell what happened to an engine last."""
        return self._past.why(engine)

    def _reload_on_hangup(self) -> None:
        while True:
            self._hangups.get()
            while not self._hangups.empty():  # what came meanwhile is the same wish
                self._hangups.get()
            try:
                self._reload_by_signal()
            except Exception as error:  # noqa: BLE001 - a bug: told, and the next SIGHUP is heard all the same
                self._on_bug("a reload", error)

    def _reload_by_signal(self) -> None:
        try:
            self.reload("SIGHUP")
        except TimeoutError:
            self._voice.tell("reload", "cannot reload for SIGHUP: the loop did not answer in time", Severity.ERROR)


def _say(text: str) -> None:
    """Say why there will be no daemon, and so no log; to journald as an error (sd-daemon(3))."""
    mark = "<3>" if journald.is_stream(sys.stderr, os.environ) else ""
    sys.stderr.writelines(f"{mark}{line}\n" for line in text.split("\n"))


def _windows(spec: NodeSpec) -> dict[str, str]:
    return {name: engine.restart.maintenance_window for name, engine in spec.engines.items()}


def fixed_settings(old: SupervisorSpec, new: SupervisorSpec) -> list[str]:
    """What a reload cannot change while the daemon runs, said in words."""
    names = ("state_dir", "socket", "listen", "launcher")
    return [
        f"supervisor.{name} is used from the next start of the daemon on: {getattr(new, name)!r}"
        for name in names
        if getattr(old, name) != getattr(new, name)
    ]


def _document(serial: int, node: Node) -> tuple[int, dict[str, Any]]:
    return serial, status.of(node, time.monotonic(), time.time(), stamp)
