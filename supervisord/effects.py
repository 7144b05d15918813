"""Doing what the core decided. Decides nothing: each action becomes a job on a lane, each result an observation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import psutil

from supervisord.config_problems import secrets_of, without
from supervisord.core import durable, telemetry
from supervisord.core.messages import (
    Abandon,
    Action,
    Adopt,
    AnnounceReady,
    CanaryEnded,
    Exited,
    GateClosed,
    KeepEvidence,
    KillGpuHelper,
    Launch,
    MeasureProgress,
    PortAnswered,
    PortForeign,
    Probe,
    Progressed,
    Record,
    Reply,
    Sampled,
    SendCanary,
    SetPersistence,
    Spawned,
    SpawnFailed,
    StartGpuHelper,
    Sweep,
    SweepGpus,
    Swept,
    Terminate,
    WarmedUp,
    WarmUp,
    WarmupNoted,
    WatchPort,
)
from supervisord.core.model import ExitClass, LaunchPlan, Node, Sample
from supervisord.core.spec import EngineSpec
from supervisord.engine import canary, portwatch, warmup
from supervisord.engine.http import Target
from supervisord.engine.probe import EngineProbe
from supervisord.gpu.client import GpuProbe
from supervisord.lanes import Lanes, Turnstile
from supervisord.launcher.base import GateError, Launcher, LaunchError
from supervisord.loop import Board, Inbox
from supervisord.state import StateFile
from supervisord.systemd.notify import Notifier
from supervisord.voice import Voice

EXTENDED_S: Final = 30.0
"""Before READY=1 and while the daemon ends, every turn asks systemd for so much more: each step has its own bound,
their sum has none."""

SWEEP_WITHIN_S: Final = 5.0
"""While an engine warms up its GPUs are looked at every second."""

TAIL_LINES: Final = 200
"""Last lines of output that an exit is classified by, and that are kept as evidence."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the effects work with."""

    inbox: Inbox
    lanes: Lanes
    launcher: Launcher
    gpus: GpuProbe
    plan: Callable[[EngineSpec], LaunchPlan]
    voice: Voice
    notifier: Notifier
    board: Board
    state: StateFile
    answer: Callable[[Reply], None]
    resync: Callable[[], None]
    """Start the schedule over if the wall clock was set back; cheap, called after every turn."""
    looked: Callable[[str, float], None]
    """Hears of each look at an engine how many seconds it took."""


class NodeEffects:
    """The seam between the loop and the world."""

    def __init__(self, parts: Parts) -> None:
        self._inbox = parts.inbox
        self._lanes = parts.lanes
        self._launcher = parts.launcher
        self._gpus = parts.gpus
        self._plan = parts.plan
        self._voice = parts.voice
        self._notifier = parts.notifier
        self._board = parts.board
        self._state = parts.state
        self._answer = parts.answer
        self._resync = parts.resync
        self._looked = parts.looked
        self._saved: dict[str, durable.Saved] = {}
        self._pending: dict[str, durable.Saved] = {}
        self._pending_gone: set[str] = set()
        self._saved_gpus: dict[str, durable.Saved] = dict(parts.state.gpus)
        self._pending_gpus: dict[str, durable.Saved] | None = None
        self._pending_lock = threading.Lock()
        self._watches: dict[str, threading.Event] = {}
        self._canaries: dict[str, threading.Event] = {}
        self._probes: dict[str, tuple[tuple[int, float], EngineProbe]] = {}
        """By engine: its generation and the timeout that it was made for, and the probe."""
        self._looking = Turnstile()
        self._keys: dict[str, str | None] = {}
        self._secrets: dict[str, tuple[str, ...]] = {}
        self._perform: Mapping[type[Action], Callable[[Any, Node], None]] = {
            Launch: self._launch,
            Adopt: self._adopt,
            Terminate: self._terminate,
            Sweep: self._sweep,
            WatchPort: self._watch_port,
            MeasureProgress: self._measure_progress,
            WarmUp: self._warm_up,
            Probe: self._probe,
            SendCanary: self._send_canary,
            KeepEvidence: self._keep_evidence,
            StartGpuHelper: lambda action, _: self._gpus.start(action.helper),
            KillGpuHelper: lambda action, _: self._gpus.kill(action.helper),
            SweepGpus: lambda action, _: self._gpus.sweep(
                action.helper, action.number, slow=action.slow, avoid=action.avoid
            ),
            SetPersistence: lambda action, _: self._gpus.set_persistence(action.helper, action.uuid, on=action.on),
            Abandon: self._abandon,
            Record: self._record,
            Reply: self._reply,
            AnnounceReady: self._announce_ready,
        }

    # --- the turn -----------------------------------------------------------------------------------------------

    def begin(self, old: Node, new: Node) -> None:
        """Persist what changed and publish the node, before anything is done or answered."""
        if new is old:
            return
        changed = {
            name: saved
            for name, engine in new.engines.items()
            if engine is not old.engines.get(name) and (saved := durable.save_engine(engine)) != self._saved.get(name)
        }
        gone = self._saved.keys() - new.engines.keys()
        gpus = durable.save_gpus(new) if new.gpus is not old.gpus else self._saved_gpus
        if changed or gone or gpus != self._saved_gpus:
            self._saved.update(changed)
            for name in gone:
                del self._saved[name]
                self._forget(name)
            with self._pending_lock:
                self._pending.update(changed)
                self._pending_gone |= gone
                self._pending_gpus = self._saved_gpus = gpus
            self._lanes.submit("state", self._write_state)
        self._board.publish(new)

    def _forget(self, name: str) -> None:
        """Drop what is known of an engine that is gone, each on the lane that uses it: it may be back at once."""
        self._cancel(name)
        self._lanes.submit(("probe", name), lambda: self._drop_probe(name))

        def job() -> None:
            self._keys.pop(name, None)
            self._secrets.pop(name, None)

        self._on_engine_lane(name, job)

    def perform(self, action: Action, node: Node) -> None:
        """Set one action in motion."""
        self._perform[type(action)](action, node)

    def end(self, node: Node) -> None:
        """Feed the watchdog; say in one line how the node is."""
        self._resync()
        self._notifier.watchdog()
        if self._notifier.active:
            self._notifier.status(summary(node))
            if node.ending:
                self._notifier.stopping()
            if node.ending or node.announce_ready_at is not None:
                self._notifier.extend(EXTENDED_S)

    def on_exit(self, engine: str, generation: int, code: int | None, signal: int | None) -> None:
        """A main process ended; called on the exit watcher's thread."""

        def tell() -> None:
            end, words = self._launcher.ended(engine, generation, code, signal), self._last_words(engine)
            self._inbox.put(
                Exited(
                    engine,
                    generation,
                    end.code,
                    end.signal,
                    words,
                    end.oom_killed,
                    stopped_by=end.stopped_by,
                    again=end.again,
                )
            )

        # On the engine's own lane, so that the observation of a spawn always comes before that of its exit.
        self._lanes.submit(("engine", engine), tell)

    # --- processes ----------------------------------------------------------------------------------------------

    def _launch(self, action: Launch, node: Node) -> None:
        spec = node.engines[action.engine].spec
        name, generation = action.engine, action.generation

        def job() -> None:
            plan = self._plan(spec)
            if plan.errors:
                self._inbox.put(SpawnFailed(name, generation, ExitClass.CONFIG, "; ".join(plan.errors)))
                return
            self._know(plan)
            if action.devices is not None:
                plan = replace(plan, env={**plan.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, action.devices))})
            try:
                process = self._launcher.launch(plan, generation)
            except GateError as error:
                self._inbox.put(GateClosed(name, generation, error.code, str(error)))
            except LaunchError as error:
                self._inbox.put(SpawnFailed(name, generation, error.kind, str(error)))
            else:
                self._inbox.put(Spawned(name, generation, process))

        self._on_engine_lane(name, job)

    def _adopt(self, action: Adopt, node: Node) -> None:
        engine = node.engines[action.engine]

        def job() -> None:
            self._launcher.adopt(action.engine, action.generation)
            plan = self._plan(engine.spec)
            if (
                plan.plan_id == engine.running_plan_id
            ):  # otherwise it was given a key and secrets that nobody knows here
                self._know(plan)

        self._on_engine_lane(action.engine, job)

    def _know(self, plan: LaunchPlan) -> None:
        """Keep the key to talk with, and all that an engine may quote in its last words and nobody else may."""
        self._keys[plan.engine] = plan.api_key
        self._secrets[plan.engine] = secrets_of(plan.env)

    def _last_words(self, engine: str) -> tuple[str, ...]:
        """The last lines of output without secrets; none where these are not known."""
        secrets = self._secrets.get(engine)
        if secrets is None:
            return ()
        return tuple(without(secrets, line) for line in self._launcher.tail(engine, TAIL_LINES))

    def _terminate(self, action: Terminate, _: Node) -> None:
        self._on_engine_lane(action.engine, lambda: self._launcher.terminate(action.engine, action.generation))

    def _sweep(self, action: Sweep, _: Node) -> None:
        def job() -> None:
            remaining = self._launcher.sweep(action.engine, action.generation)
            self._inbox.put(Swept(action.engine, action.generation, remaining))

        self._on_engine_lane(action.engine, job)

    def _measure_progress(self, action: MeasureProgress, _: Node) -> None:
        def job() -> None:
            self._inbox.put(Progressed(action.engine, action.generation, self._launcher.progress(action.engine)))

        self._lanes.submit(("probe", action.engine), job, only_if_idle=True)

    def _on_engine_lane(self, name: str, job: Callable[[], None]) -> None:
        self._lanes.submit(("engine", name), job)

    # --- asking the engine --------------------------------------------------------------------------------------

    def _watch_port(self, action: WatchPort, node: Node) -> None:
        spec = node.engines[action.engine].spec
        name, generation = action.engine, action.generation
        cancelled = self._new_watch(name)

        def job() -> None:
            portwatch.watch(
                spec.host,
                spec.port,
                owner=lambda: self._launcher.owns_listener(name, spec.host, spec.port),
                cancelled=cancelled,
                deadline_s=spec.start_timeout_max_s,
                on_answer=lambda: self._inbox.put(PortAnswered(name, generation)),
                on_foreign=lambda holder: self._inbox.put(PortForeign(name, generation, holder)),
            )

        self._lanes.once(("watch", name, generation), job)

    def _warm_up(self, action: WarmUp, node: Node) -> None:
        spec = node.engines[action.engine].spec
        name, generation = action.engine, action.generation
        cancelled = self._new_watch(name)
        budget = spec.args.get("max-num-batched-tokens")

        def memory() -> int | None:
            return self._gpu_bytes(name, cancelled) if spec.gpus else self._launcher.host_bytes(name)

        def job() -> None:
            outcome = warmup.run(
                Target(spec.host, spec.port, self._keys.get(name)),
                spec.warmup,
                model=spec.served_name,
                batch_tokens=budget if isinstance(budget, int) else None,
                memory=memory,
                note=lambda note: self._inbox.put(WarmupNoted(name, generation, note)),
                cancelled=cancelled,
                clock=time.monotonic,
            )
            if spec.gpus:
                outcome = replace(outcome, gpu_bytes=outcome.memory_bytes, memory_bytes=self._launcher.host_bytes(name))
            self._inbox.put(WarmedUp(name, generation, outcome))

        self._lanes.once(("warm", name, generation), job)

    def _gpu_bytes(self, name: str, cancelled: threading.Event) -> int | None:
        """GPU memory of an engine in a sweep that began from now on; None when none comes."""
        began, serial = time.monotonic(), 0
        while time.monotonic() < began + SWEEP_WITHIN_S and not cancelled.is_set():
            serial, node = self._board.wait(serial, 1.0)
            engine, swept_at = node.engines.get(name), node.telemetry.swept_at
            if engine is None or swept_at is None or telemetry.blind(node):
                return None
            if swept_at >= began:
                return engine.gpu_bytes
        return None

    def _probe(self, action: Probe, node: Node) -> None:
        spec = node.engines[action.engine].spec
        name, generation = action.engine, action.generation

        def job() -> None:
            made_for, known = (generation, spec.probe.timeout_s), self._probes.get(name)
            if known is None or known[0] != made_for:
                self._drop_probe(name)
                known = self._probes[name] = (made_for, EngineProbe(spec.host, spec.port, spec.probe.timeout_s))
            with self._looking.passing():
                sample = self._look(name, known[1], host=action.host)
            self._looked(name, time.monotonic() - sample.at)
            self._inbox.put(Sampled(name, generation, sample))

        self._lanes.submit(("probe", name), job, only_if_idle=True)

    def _look(self, name: str, probe: EngineProbe, *, host: bool) -> Sample:
        at = time.monotonic()
        host_bytes = None
        if host:
            host_bytes = self._launcher.host_bytes(name)
            self._launcher.rotate_if_large(name)
        sample = probe.look(at, host_bytes)
        if host_bytes is not None:
            sample = replace(sample, host_limit_bytes=host_bytes + psutil.virtual_memory().available)
        return sample

    def _drop_probe(self, name: str) -> None:
        _, probe = self._probes.pop(name, (None, None))
        if probe is not None:
            probe.close()

    def _send_canary(self, action: SendCanary, node: Node) -> None:
        spec = node.engines[action.engine].spec
        name, generation = action.engine, action.generation
        cancelled = self._canaries[name] = threading.Event()

        def job() -> None:
            target = Target(spec.host, spec.port, self._keys.get(name))
            outcome = canary.send(target, cancelled, spec.served_name, action.rank)
            if outcome is not None:
                told = (outcome.ok, outcome.sane, outcome.possible, outcome.detail, outcome.evidence)
                self._inbox.put(CanaryEnded(name, generation, *told))

        self._lanes.submit(("canary", name, generation), job)

    def _keep_evidence(self, action: KeepEvidence, _: Node) -> None:
        def job() -> None:
            tail = self._last_words(action.engine)
            self._launcher.keep_evidence(action.engine, action.generation, action.reason, tail)

        # On the engine's own lane: before the kill that follows.
        self._on_engine_lane(action.engine, job)

    def _abandon(self, action: Abandon, _: Node) -> None:
        self._cancel(action.engine)

    def _cancel(self, name: str) -> None:
        for events in (self._watches, self._canaries):
            event = events.pop(name, None)
            if event is not None:
                event.set()

    def _new_watch(self, name: str) -> threading.Event:
        old = self._watches.get(name)
        if old is not None:
            old.set()
        watch = self._watches[name] = threading.Event()
        return watch

    # --- people -------------------------------------------------------------------------------------------------

    def _record(self, action: Record, _: Node) -> None:
        self._voice.write(action)

    def _reply(self, action: Reply, _: Node) -> None:
        # After the state: an operator's stop that was answered is durable.
        self._lanes.submit("state", lambda: self._answer(action))

    def _announce_ready(self, _: AnnounceReady, __: Node) -> None:
        self._notifier.ready()

    def _write_state(self) -> None:
        with self._pending_lock:
            changed, gone, gpus = self._pending, frozenset(self._pending_gone), self._pending_gpus
            self._pending, self._pending_gone, self._pending_gpus = {}, set(), None
        if changed or gone or gpus is not None:
            self._state.save(changed, gone, gpus)


def summary(node: Node) -> str:
    """The node in one line, for systemd's STATUS=."""
    engines = node.engines.values()
    ready = sum(engine.ready_since is not None and engine.state.value == "ready" for engine in engines)
    wanted = sum(engine.wanted for engine in engines)
    others = [
        f"{engine.spec.name} {engine.state.value}"
        for engine in engines
        if engine.state.value not in {"ready", "stopped"}
    ]
    text = f"{ready} of {wanted} wanted engines ready"
    return f"{text}: {', '.join(others)}" if others else text
