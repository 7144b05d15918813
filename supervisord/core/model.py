"""What the node is: engines, their phases, GPUs. Frozen data; times are monotonic seconds (CLOCK_MONOTONIC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from supervisord.core.gpu_samples import GpuReading
from supervisord.core.samples import Sample as Sample  # noqa: PLC0414 (it belongs to the model that others import)
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.core.watch import Watch


class State(Enum):
    """The states of an engine that people see (design contract)."""

    STOPPED = "stopped"
    WAITING = "waiting"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


class ExitClass(Enum):
    """Why a process ended, as far as the evidence says."""

    CONFIG = "config"
    EXTERNAL = "external"
    RESOURCE = "resource"
    OOM_HOST = "oom_host"
    CUDA_APP = "cuda_app"
    HARDWARE = "hardware"
    CRASH = "crash"
    STOPPED = "stopped"


class FailedKind(Enum):
    """Why an engine needs a human."""

    CONFIG = "config"
    CRASH_LOOP = "crash_loop"
    UNKILLABLE = "unkillable"


class After(Enum):
    """What follows once every process of the engine is gone."""

    STOP = "stop"
    START = "start"
    """Start again because somebody asked: no back-off, no budget."""
    CRASH = "crash"
    """Start again after a failure: `last_exit` says which class, the budget decides when."""
    HOLD = "hold"
    """Only while draining: keep the process, out of traffic, until somebody decides."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A stable code and one sentence with its numbers."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything needed to start one engine. Built by `engine.launch`, used by a launcher.

    `plan_id` changes exactly when a restart is needed to apply the configuration. `env` is the whole environment of
    the process, secrets included: it is never logged. `errors` are the reasons why it must not be launched.
    """

    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: str | None
    host: str
    port: int
    plan_id: str
    errors: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Process:
    """Identity of a main process: a pid alone may be reused, with its start time and the boot it is unique.

    `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot).
    """

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class Found:
    """What an earlier daemon left of one engine.

    `process` may have ended meanwhile: that is told once it is adopted. It is None when nobody knows which it was.
    `leftovers` describes every process that lives, the main one included.
    """

    engine: str
    generation: int
    process: Process | None
    leftovers: tuple[str, ...]
    plan_id: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start has come. Only growth matters; CPU time is left out on purpose (a spin loop has plenty).

    `read_bytes`: bytes read, or downloaded, by the engine's processes; `memory_bytes`: their anonymous host memory;
    `log_lines`: number of distinct log lines, digits masked.
    """

    read_bytes: int
    memory_bytes: int
    log_lines: int


@dataclass(frozen=True, slots=True)
class Warmup:
    """Outcome of a warm-up. `problem` is None when all stages passed; latencies in milliseconds."""

    first_ms: float | None
    settled_ms: float | None
    rounds: int
    problem: Reason | None = None
    memory_bytes: int | None = None
    """Host memory at its end."""
    gpu_bytes: int | None = None
    """GPU memory at its end."""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LastExit:
    """How the last process of an engine ended. `code` and `signal` are None when nobody could read them."""

    kind: ExitClass
    code: int | None
    signal: int | None
    at: float
    generation: int
    advice: str


# --- phases: one class a state, with the data that only this state has --------------------------------------------


@dataclass(frozen=True, slots=True)
class Stopped:
    """Not wanted."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Wanted, but a gate is closed."""

    reason: Reason
    recheck_at: float


@dataclass(frozen=True, slots=True)
class Starting:
    """A launch was asked for, or its process runs but does not answer yet.

    `progress_at` is the time of the last sign of progress, `give_up_at` the hard cap. `gpu_bytes`: how much GPU memory
    it held then.
    """

    progress_at: float
    give_up_at: float
    progress: Progress | None = None
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Warming:
    """The engine answers; warm-up is under way."""

    give_up_at: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Serving. No reasons: healthy.

    `lasting` are reasons of the warm-up, `found` those of the rules now. `next_look_at`: a rule is being confirmed.
    """

    lasting: tuple[Reason, ...] = ()
    found: tuple[Reason, ...] = ()
    next_look_at: float | None = None

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Everything that makes it degraded."""
        return self.lasting + self.found


@dataclass(frozen=True, slots=True)
class Draining:
    """Out of traffic; requests in flight finish. `until` is None for an operator's drain (`after` is HOLD)."""

    after: After
    until: float | None
    cause: Reason
    next_look_at: float
    recoverable: bool = False
    """Ready again if the blocks are free by the time nothing is in flight (`under_load = "drain"`)."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """SIGTERM was sent (or the main process is gone): now everything of the engine has to go.

    `repeat_at`: when SIGTERM is sent again, because vLLM swallows one while its engine initialises.
    `kill_at`: SIGKILL to everything. `give_up_at`: what lives then is unkillable.
    `sweeping`: a sweep is under way, its result will come; `sweep_at`: when the next one is due.
    `gone_at`: when nothing of it was left but, perhaps, its GPU memory: that is waited for.
    """

    after: After
    cause: Reason
    kill_at: float
    give_up_at: float
    repeat_at: float | None = None
    exited: bool = False
    sweeping: bool = False
    sweep_at: float | None = None
    gone_at: float | None = None


@dataclass(frozen=True, slots=True)
class Backoff:
    """Will be started again at `until`."""

    until: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Failed:
    """Needs a human, or a changed configuration. `gone`: of what could not be killed nothing is left any more."""

    kind: FailedKind
    message: str
    gone: bool = False


Phase = Stopped | Waiting | Starting | Warming | Ready | Draining | Stopping | Backoff | Failed

STATE_OF: Final[Mapping[type, State]] = {
    Stopped: State.STOPPED,
    Waiting: State.WAITING,
    Starting: State.STARTING,
    Warming: State.WARMING,
    Ready: State.READY,
    Draining: State.DRAINING,
    Stopping: State.STOPPING,
    Backoff: State.BACKOFF,
    Failed: State.FAILED,
}


@dataclass(frozen=True, slots=True)
class Left:
    """How the daemon before this one left an engine whose processes may live; of use when these are adopted.

    `since`: when it came into `state`. `after` and `cause`: of one that was draining or stopping. `until` and `cause`:
    of one whose back-off was not over.
    """

    state: State
    since: float
    after: After | None = None
    cause: Reason | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of this node, configured or still ending."""

    spec: EngineSpec
    plan_id: str
    phase: Phase = Stopped()
    since: float = 0.0
    wanted: bool = False
    removed: bool = False
    """Gone from the configuration: forgotten as soon as nothing of it lives."""
    generation: int = 0
    """The last generation that was spawned."""
    launching: int | None = None
    """The generation of a launch whose answer is outstanding."""
    process: Process | None = None
    ready_since: float | None = None
    restart_times: tuple[float, ...] = ()
    """When budgeted (involuntary) restarts were decided, within the window."""
    failures: int = 0
    """Failures in a row: the exponent of the back-off."""
    good_plan_id: str | None = None
    """The last launch plan that became ready: a crash loop of a plan that once worked is retried slowly."""
    running_plan_id: str | None = None
    warmup: Warmup | None = None
    sample: Sample | None = None
    last_exit: LastExit | None = None
    watch: Watch | None = None
    """What the rules remember, while it is ready."""
    good_blocks: int | None = None
    """KV blocks at the last good start of `good_plan_id`."""
    shortfall_retried: bool = False
    """A smaller pool has cost one restart already: a second one would find the same."""
    replacing: bool = False
    """A voluntary restart is under way, until it is ready again or needs a human."""
    window_until: float | None = None
    """The maintenance window is open until then."""
    warm_generation: int = 0
    """The last generation that was ready: an adopted one is not warmed again."""
    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs that it was launched on last."""
    places: tuple[int, ...] = ()
    """CUDA's numbers of them, as they were given to it by this daemon."""
    refused_claim: tuple[str, float] | None = None
    """A launch plan, and the part of its GPUs' memory that vLLM then wanted and did not find free."""
    strange_bytes: Mapping[str, int] = field(default_factory=dict)
    """By UUID, what no process accounted for on each of them at the last look that listed its own."""
    gpu_bytes: int | None = None
    """Memory of its processes on all of them, as of the last sweep."""
    placed: bool = False
    """The processes of this generation were seen on the GPUs that they belong on."""
    left: Left | None = None
    """Until what lives of `generation` is ready, or was started anew."""
    app_xids: tuple[str, ...] = ()
    """What the driver reported of this generation's own mistakes: evidence for how it ends."""

    @property
    def state(self) -> State:
        """The state that people see."""
        return STATE_OF[type(self.phase)]

    @property
    def live(self) -> bool:
        """Whether a process of this engine may exist."""
        phase = self.phase
        if isinstance(phase, Failed):
            return phase.kind is FailedKind.UNKILLABLE and not phase.gone
        return self.launching is not None or isinstance(phase, Starting | Warming | Ready | Draining | Stopping)

    @property
    def lasting(self) -> tuple[Reason, ...]:
        """Why it is degraded for as long as this process lives: its warm-up failed."""
        problem = self.warmup.problem if self.warmup is not None else None
        return () if problem is None else (problem,)

    @property
    def restarts(self) -> int:
        """Spawns after the first."""
        return max(0, self.generation - 1)


@dataclass(frozen=True, slots=True)
class Persistence:
    """Persistence mode of one GPU: what the policy wants (None: leave it as it is), and how that went.

    `sets`: how often it was set and found changed again. `asked`: a set is under way. `told`: what was said last.
    `set_at`: when it was set last.
    """

    wanted: bool | None = None
    why: str = ""
    sets: int = 0
    asked: bool = False
    set_at: float | None = None
    told: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the node knows it, by UUID. `reading` is None until it was seen by this daemon.

    `absent_since`: it answers no more, or is no longer there, while NVML itself works. `quarantine`: no engine is
    started on it, until an operator clears that.
    """

    uuid: str
    pci_id: str = ""
    index: int | None = None
    name: str = ""
    generation: str = ""
    kind: str = ""
    reading: GpuReading | None = None
    absent_since: float | None = None
    quarantine: Reason | None = None
    throttled_since: float | None = None
    reasons: tuple[Reason, ...] = ()
    """What is wrong with it, short of a quarantine."""
    xids: Mapping[str, int] = field(default_factory=dict)
    """How often each Xid was reported since the daemon started, by number."""
    xid_at: Mapping[str, float] = field(default_factory=dict)
    """When each was reported last: two sources tell of one."""
    xid_told: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """When people were told of each last, and how many there had been by then."""
    persistence: Persistence = Persistence()


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The GPU probe: a process that may hang in the driver, so it is watched like one.

    `helper`: its number, 0 before the first; `running`: it was started and not given up. `asked_at`: a sweep is
    outstanding since then. `late_until`: its deadline has passed, and an answer that lies in the inbox is still heard
    until then. `killed_at`: SIGKILL was sent and its end not heard of. `stuck`: processes that SIGKILL did
    not end. `hangs`: in a row. `next_at`: when the next sweep, or the next start of a helper, is due.
    """

    helper: int = 0
    running: bool = False
    number: int = 0
    asked_at: float | None = None
    late_until: float | None = None
    answered: bool = False
    killed_at: float | None = None
    stuck: int = 0
    hangs: int = 0
    next_at: float | None = None
    slow_at: float = 0.0
    swept_at: float | None = None
    """The last sweep that saw GPUs."""
    problem: int | None = None
    """NVML's code when it does not work at all."""
    driver: str = ""
    released_until: float | None = None
    """An operator closed NVML, for a reset, until then."""
    unresponsive: bool = False
    """It hangs: nothing is known of GPUs, and supervision goes on without."""
    cuda_counts_lost: bool = False
    """CUDA's numbers go on over a GPU that is lost: learned from an engine on a wrong GPU, or on none."""


@dataclass(frozen=True, slots=True)
class Node:
    """Everything that the loop decides on."""

    spec: NodeSpec
    version: str = ""
    launcher: str = "plain"
    pid: int = 0
    since: float = 0.0
    engines: Mapping[str, Engine] = field(default_factory=dict)
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    unseen_gpus: Mapping[str, Gpu] = field(default_factory=dict)
    """What the driver reported of GPUs that no sweep has seen yet, by the PCI id or UUID that it said."""
    telemetry: Telemetry = Telemetry()
    ending: bool = False
    """The daemon is going down: nothing is started any more."""
    keeping: bool = False
    """And what runs is left as it is, for the next one."""
    config_error: str | None = None
    announce_ready_at: float | None = None
    """READY=1 is sent then at the latest; None once it was sent."""
