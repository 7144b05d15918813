"""Plays of the core that keep what was told, as the history has it; and a shelf of what happens to engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from supervisord.core.incident import Event
from supervisord.core.messages import (
    Booted,
    Due,
    Exited,
    GateClosed,
    GpuOp,
    GpuRequested,
    Observation,
    Op,
    PortForeign,
    Reconfigured,
    Record,
    Sampled,
    SpawnFailed,
    Swept,
    What,
    XidSeen,
)
from supervisord.core.model import ExitClass, State
from supervisord.core.story import Story, tell
from tests.core.looks import page, rank
from tests.core.play import BAD, T0, Play, card, engine_spec, foreign, holds, mine, new_node, node_spec

WALL0 = 1_780_023_600.0
"""Epoch seconds at T0: 2026-05-29 03:00:00 UTC."""

QWEN = "qwen"


def event_of(record: Record, number: int, wall: float, now: float, boot_id: str = "boot") -> Event:
    """A record as the history gives it back."""
    return Event(
        id=number,
        at=wall,
        boot_id=boot_id,
        now=now,
        severity=record.severity,
        kind=record.kind,
        message=record.message,
        engine=record.engine,
        generation=record.generation,
        reason=record.reason,
        numbers=record.numbers,
    )


class Tale(Play):
    """One engine, "qwen", that is being launched; every step is a moment of its own."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(new_node(node_spec(engine_spec(QWEN, **keys))))
        self.events: list[Event] = []

    def see(self, observation: Observation, *, at: float | None = None, after: float = 0.0) -> Tale:
        """One observation; what it made the core tell is kept."""
        super().see(observation, at=at, after=after)
        for action in self.actions:
            if isinstance(action, Record) and action.engine == QWEN:
                self.add(action)
        return self

    def add(self, record: Record, boot_id: str = "boot") -> Tale:
        """Something that was told."""
        self.events.append(event_of(record, len(self.events) + 1, self.wall, self.now, boot_id))
        return self

    def later(self, seconds: float) -> Tale:
        """Time passes."""
        self.now += seconds
        return self

    def come_up(self, start_s: float = 18.4, warm_s: float = 2.9) -> Tale:
        """From an outstanding launch to ready, in about the time that a small model takes."""
        self.spawn(QWEN)
        self.later(start_s).answer(QWEN)
        self.later(warm_s).warm(QWEN).is_(State.READY, QWEN)
        return self

    def end(self, code: int | None = None, signal: int | None = None, *tail: str) -> Tale:
        """The main process ends, and what it left behind is swept."""
        generation = self.engine(QWEN).generation
        self.see(Exited(QWEN, generation, code, signal, tail))
        return self.swept()

    def swept(self, *remaining: str) -> Tale:
        """The sweep is over."""
        return self.see(Swept(QWEN, self.engine(QWEN).generation, remaining), after=0.05)

    def on(self) -> Tale:
        """To the next deadline."""
        self.wake()
        return self

    @property
    def wall(self) -> float:
        """Epoch seconds now."""
        return WALL0 + self.now - T0

    def story(self) -> Story:
        """What `why` has to tell."""
        return tell(QWEN, self.events, self.node.engines.get(QWEN), self.now, self.wall)


def booted(**keys: Any) -> Tale:
    """The daemon has started and launches its engine."""
    return Tale(**keys).see(Booted())


def serving(**keys: Any) -> Tale:
    """It has been ready for more than two hours."""
    return booted(**keys).come_up().later(8040)


def exit_zero() -> Tale:
    """vLLM's API server ends with 0 after its engine died."""
    tale = serving().end(
        0, None, "ERROR EngineDeadError: EngineCore encountered an issue", "Application shutdown complete."
    )
    return tale.on().come_up().later(15_600)


def killed() -> Tale:
    """Somebody, or the kernel, killed the API server; it is still coming up."""
    tale = serving(restart={"backoff_initial_s": 0}).end(None, 9, "INFO 200 OK")
    tale.spawn(QWEN)
    return tale.later(7)


def bad_configuration() -> Tale:
    """A flag that this vLLM does not know."""
    tale = booted()
    tale.spawn(QWEN)
    return tale.later(6).end(2, None, "vllm: error: unrecognized arguments: --frobnicate 3").later(300)


def no_such_program() -> Tale:
    """It cannot even be spawned."""
    text = "cannot run /opt/vllm/bin/vllm: No such file or directory; correct `command`"
    return booted().see(SpawnFailed(QWEN, 1, ExitClass.CONFIG, text)).later(60)


def crash_loop() -> Tale:
    """It never comes up, and nobody knows why."""
    tale = booted(restart={"max_restarts": 3})
    for _ in range(4):
        tale.spawn(QWEN)
        tale.later(11).end(1, None, "RuntimeError: nobody knows why")
        if tale.engine(QWEN).state is State.BACKOFF:
            tale.on()
    return tale.later(3600)


def backing_off() -> Tale:
    """The second crash in a row; it waits for its time."""
    tale = serving().end(1, None, "RuntimeError: nobody knows why").on()
    tale.spawn(QWEN)
    return tale.later(12).end(1, None, "RuntimeError: nobody knows why").later(0.5)


def port_held() -> Tale:
    """Somebody has its port."""
    tale = booted().see(GateClosed(QWEN, 1, "port_held", "port 8016 is held by pid 77 (nginx)"), after=0.1)
    for _ in range(3):
        tale.on().see(GateClosed(QWEN, 1, "port_held", "port 8016 is held by pid 77 (nginx)"))
    return tale.later(2)


def port_foreign() -> Tale:
    """Somebody else answers on its port."""
    tale = booted()
    tale.spawn(QWEN)
    tale.see(PortForeign(QWEN, 1, "pid 77 (nginx)"), after=3).see(Exited(QWEN, 1, 0, None), after=4).swept()
    return tale.later(1)


def restarted() -> Tale:
    """An operator asked for it."""
    tale = serving()
    tale.ask(Op.RESTART, QWEN)
    tale.later(4.2).sample(QWEN, running=0, waiting=0)
    return tale.see(Exited(QWEN, 1, 0, None), after=1.1).swept().come_up().later(60)


def stopped() -> Tale:
    """An operator asked for it, and it had to be killed."""
    tale = serving(drain_timeout_s=0)
    tale.ask(Op.STOP, QWEN)
    return tale.on().swept().later(86_400 * 3)


def start_timeout() -> Tale:
    """It stands still, is replaced, and comes up."""
    tale = booted()
    tale.spawn(QWEN)
    tale.on().see(Exited(QWEN, 1, None, 15), after=0.3).swept().on()
    return tale.come_up().later(700)


def unkillable() -> Tale:
    """Something of it hangs in the kernel."""
    tale = serving(drain_timeout_s=0, stop_timeout_s=10)
    tale.ask(Op.RESTART, QWEN)
    while tale.engine(QWEN).state is State.STOPPING:
        tale.on()
        if tale.actions:
            tale.swept("pid 4711 (VLLM::EngineCor, D)")
    return tale.later(120)


def degraded() -> Tale:
    """It was restarted, and its warm-up fails since."""
    tale = serving(restart={"backoff_initial_s": 0}).end(1, None, "RuntimeError: CUDA error: an illegal memory access")
    tale.spawn(QWEN)
    tale.later(20).answer(QWEN)
    tale.later(3).warm(QWEN, BAD)
    return tale.later(60)


def reloaded() -> Tale:
    """A reload changed its launch plan."""
    tale = serving(drain_timeout_s=0)
    tale.see(Reconfigured(tale.node.spec, {QWEN: "p2"}, "uid 0 pid 12"))
    return tale.see(Exited(QWEN, 1, 0, None), after=1.1).swept().come_up().later(60)


def gpu_lost() -> Tale:
    """Its GPU fell off the bus."""
    tale = serving(gpus=("GPU-0",))
    tale.see(XidSeen(tale.now, "GPU-0", 79, "kmsg"))
    return tale.swept().later(600)


def gpu_mended() -> Tale:
    """The same, and somebody has mended it since."""
    tale = gpu_lost()
    tale.see(GpuRequested(1, GpuOp.CLEAR, "GPU-0", "uid 0"))
    return tale.come_up().later(60)


def gpu_released() -> Tale:
    """It was to be started again while NVML was closed."""
    tale = serving(gpus=("GPU-0",))
    tale.see(GpuRequested(1, GpuOp.RELEASE, None, "uid 0"))
    tale.end(1, None, "RuntimeError: nobody knows why").on().on()
    return tale.later(2)


def memory_held() -> Tale:
    """Somebody else has the memory of its GPU."""
    tale = Tale(gpus=("GPU-0",))
    tale.cards = (holds(card(), foreign(60)),)
    return tale.see(Booted()).later(30)


def memory_stays() -> Tale:
    """It crashed, and its memory never came back."""
    tale = serving(gpus=("GPU-0",))
    tale.cards = (holds(card(), mine(70, QWEN)),)
    tale.end(1, None, "RuntimeError: nobody knows why")
    while tale.engine(QWEN).state is not State.WAITING:
        tale.on()
    return tale.later(60)


def wrong_gpu() -> Tale:
    """CUDA counts differently here."""
    tale = booted(gpus=("GPU-0",))
    tale.spawn(QWEN)
    tale.cards = (card(), holds(card("GPU-1"), mine(1, QWEN)))
    return tale.see(Due(What.POLL), after=2).see(Due(What.POLL), after=1).swept().later(0.5)


def stalled() -> Tale:
    """Work is pending and nothing moves: killed by a rule, with evidence."""
    tale = serving(restart={"stall_after_s": 60, "backoff_initial_s": 0})
    for second in range(14):
        sample = page(tale.now + 10.0 * second, rank(running=2))
        if tale.engine(QWEN).state is State.READY:
            tale.see(Sampled(QWEN, 1, sample), at=sample.at)
    return tale.swept().come_up().later(60)


def uneventful() -> Tale:
    """Nothing happened."""
    return serving()


GPU_TALES: Mapping[str, Callable[[], Tale]] = {
    "gpu-lost": gpu_lost,
    "gpu-mended": gpu_mended,
    "gpu-released": gpu_released,
    "memory-held": memory_held,
    "memory-stays": memory_stays,
    "wrong-gpu": wrong_gpu,
    "stalled": stalled,
}

TALES: Mapping[str, Callable[[], Tale]] = {
    "exit-zero": exit_zero,
    "killed": killed,
    "bad-configuration": bad_configuration,
    "no-such-program": no_such_program,
    "crash-loop": crash_loop,
    "backing-off": backing_off,
    "port-held": port_held,
    "port-foreign": port_foreign,
    "restarted": restarted,
    "stopped": stopped,
    "start-timeout": start_timeout,
    "unkillable": unkillable,
    "degraded": degraded,
    "reloaded": reloaded,
    "uneventful": uneventful,
}
