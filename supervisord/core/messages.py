"""What comes into the core (observations, past tense) and what goes out (actions, imperative).

Every message about a process carries its generation; the reducer ignores those of an older one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from supervisord.core.gpu_samples import GpuPlace, GpuSweep
from supervisord.core.model import ExitClass, Found, Process, Progress, Sample, Warmup
from supervisord.core.spec import NodeSpec

# --- observations ---------------------------------------------------------------------------------------------------


class What(Enum):
    """What is due."""

    CLOCK = "clock"
    """A deadline of the state has passed."""
    POLL = "poll"
    """Time to look at every engine."""
    WATCHDOG = "watchdog"
    """A turn is wanted, so that the watchdog can be fed after it."""


class Op(Enum):
    """What an operator can ask of an engine."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    DRAIN = "drain"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Due:
    """The schedule says that it is time."""

    what: What


@dataclass(frozen=True, slots=True)
class Booted:
    """The daemon has started; `found` is what an earlier one left. `nvidia`: this machine has a driver for GPUs."""

    found: tuple[Found, ...] = ()
    nvidia: bool = False


@dataclass(frozen=True, slots=True)
class Requested:
    """An operator asked for something. `actor` is e.g. "uid 1000"; `request` is answered by one `Reply`."""

    request: int
    op: Op
    engine: str
    actor: str
    at_once: bool = False
    """Skip the drain (`--now`)."""


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """A validated configuration arrived. `plan_ids` by engine name."""

    spec: NodeSpec
    plan_ids: Mapping[str, str]
    actor: str
    request: int | None = None


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The daemon was told to end (SIGTERM, SIGINT). `keep`: engines run on, for the next daemon."""

    cause: str
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Spawned:
    """A launch succeeded: the process runs and its identity is durable."""

    engine: str
    generation: int
    process: Process


@dataclass(frozen=True, slots=True)
class GateClosed:
    """A launch did not happen because the world is not ready for it; nothing was spawned."""

    engine: str
    generation: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A launch did not happen and will not by waiting; nothing was spawned."""

    engine: str
    generation: int
    kind: ExitClass
    message: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The main process ended. `tail`: last lines of its output, control characters removed, oldest first."""

    engine: str
    generation: int
    code: int | None
    signal: int | None
    tail: tuple[str, ...] = ()
    oom_killed: bool = False
    stopped_by: str | None = None
    """Who had it stopped, past the daemon ("systemctl stop vllm-engine-a.service"): an operator's stop, no crash."""
    again: bool = False
    """That was a restart ("systemctl restart vllm-engine-a.service")."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Everything of the engine got SIGKILL; `remaining` names what is still there (empty: all gone, files too)."""

    engine: str
    generation: int
    remaining: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PortAnswered:
    """`/health` said 200, and the listener belongs to this engine's processes."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class PortForeign:
    """Somebody else answers on the engine's port. `holder`: pid and name."""

    engine: str
    generation: int
    holder: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a start has come."""

    engine: str
    generation: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class WarmupNoted:
    """A stage of the warm-up began; `note` is one line for status."""

    engine: str
    generation: int
    note: str


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """The warm-up ended, well or not."""

    engine: str
    generation: int
    warmup: Warmup


@dataclass(frozen=True, slots=True)
class Sampled:
    """A look at an engine succeeded or failed; both are in the sample."""

    engine: str
    generation: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class CanaryEnded:
    """A canary came back, or never will. `possible` is False when this engine cannot be asked at all."""

    engine: str
    generation: int
    ok: bool
    sane: bool
    possible: bool = True
    detail: str = ""
    evidence: bool = True
    """False: turned away for the moment; neither alive nor dead."""


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """The maintenance window of an engine begins; it is open for `for_s` seconds."""

    engine: str
    for_s: float


class GpuOp(Enum):
    """What an operator can ask of GPUs."""

    CLEAR = "clear"
    """Trust a quarantined GPU again."""
    RELEASE = "release"
    """Close NVML for a while, so that a GPU can be reset."""


@dataclass(frozen=True, slots=True)
class GpuRequested:
    """An operator asked for something. `gpu`: UUID, PCI id or index; None for a request about all of them."""

    request: int
    op: GpuOp
    gpu: str | None
    actor: str


@dataclass(frozen=True, slots=True)
class GpusSwept:
    """A sweep was answered. `helper` numbers the probe processes, `number` the sweeps."""

    helper: int
    number: int
    sweep: GpuSweep


@dataclass(frozen=True, slots=True)
class GpuHelperEnded:
    """The probe process is gone, or could not be started. `detail`: how, in words."""

    helper: int
    detail: str


@dataclass(frozen=True, slots=True)
class PersistenceSet:
    """Setting persistence mode was tried. `error`: the NVML code, None: done."""

    uuid: str
    on: bool
    error: int | None


@dataclass(frozen=True, slots=True)
class XidSeen:
    """The driver reported a fault. `gpu`: UUID or PCI id (0000:1b:00.0); `source`: nvml or kmsg.

    `xid` is None for a GPU that fell off the bus without a number. `engine`, `generation`: whose process it was.
    """

    at: float
    gpu: str
    xid: int | None
    source: str
    pid: int | None = None
    engine: str | None = None
    generation: int | None = None
    text: str = ""


GpuObservation = GpusSwept | GpuHelperEnded | PersistenceSet | XidSeen

EngineObservation = (
    Spawned
    | GateClosed
    | SpawnFailed
    | Exited
    | Swept
    | PortAnswered
    | PortForeign
    | Progressed
    | WarmupNoted
    | WarmedUp
    | Sampled
    | CanaryEnded
)
Observation = (
    Booted
    | Due
    | Requested
    | GpuRequested
    | Reconfigured
    | EndRequested
    | WindowOpened
    | GpuObservation
    | EngineObservation
)

# --- actions --------------------------------------------------------------------------------------------------------


class Severity(Enum):
    """Journal priorities that we use (syslog numbers)."""

    CRITICAL = 2
    ERROR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6
    DEBUG = 7


@dataclass(frozen=True, slots=True)
class Launch:
    """Check the outside gates, record the identity, spawn. Answered by Spawned, GateClosed or SpawnFailed.

    `devices`: CUDA_VISIBLE_DEVICES, in the order of the engine's `gpus`; None: the names as they are configured.
    """

    engine: str
    generation: int
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over the process that an earlier daemon left, with its exit, log and files."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to the main process."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """SIGKILL to every process of the engine, then its private files. Answered by Swept."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class WatchPort:
    """Look at /health many times a second until it answers. Answered by PortAnswered or PortForeign, or by nothing."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class MeasureProgress:
    """Answered by Progressed."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run the warm-up against the engine's own port. Answered by WarmedUp."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Look at the engine once. Answered by Sampled. `host`: measure its host memory too (a scan of /proc)."""

    engine: str
    generation: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class SendCanary:
    """One tiny completion, read to its end. Answered by CanaryEnded, at the latest when the engine goes.

    `rank`: the data-parallel rank that it is meant for (vLLM's header X-data-parallel-rank); None: any.
    """

    engine: str
    generation: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Before a kill: stacks, states, last lines of output; to a file under `evidence`."""

    engine: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartGpuHelper:
    """Start the probe process with this number. Its end is told by GpuHelperEnded."""

    helper: int


@dataclass(frozen=True, slots=True)
class KillGpuHelper:
    """SIGKILL it. Answered by GpuHelperEnded when it is gone; one that hangs in the kernel never is."""

    helper: int


@dataclass(frozen=True, slots=True)
class SweepGpus:
    """Look at all GPUs. Answered by GpusSwept, or by nothing when the driver hangs.

    `avoid`: GPUs that no call may touch, because each would hang: they are answered for with error 16.
    """

    helper: int
    number: int
    slow: bool
    avoid: tuple[GpuPlace, ...] = ()


@dataclass(frozen=True, slots=True)
class SetPersistence:
    """Switch persistence mode. Answered by PersistenceSet, or by nothing when the driver hangs."""

    helper: int
    uuid: str
    on: bool


@dataclass(frozen=True, slots=True)
class Abandon:
    """Whatever watches or warms this generation may stop: nobody waits for it any more."""

    engine: str
    generation: int


@dataclass(frozen=True, slots=True)
class Record:
    """Tell people, once: journal and history. `numbers` are the evidence behind the message."""

    kind: str
    message: str
    severity: Severity = Severity.INFO
    engine: str | None = None
    generation: int | None = None
    reason: str | None = None
    numbers: Mapping[str, float | int | str | None] = field(default_factory=dict)


class Answer(Enum):
    """How a request was answered."""

    ACCEPTED = "accepted"
    UNKNOWN_ENGINE = "unknown_engine"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a control request; sent only after what it changed is durable."""

    request: int
    answer: Answer
    message: str


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """READY=1 to systemd."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing of ours runs any more: the daemon may exit."""


Action = (
    Launch
    | Adopt
    | Terminate
    | Sweep
    | WatchPort
    | MeasureProgress
    | WarmUp
    | Probe
    | SendCanary
    | KeepEvidence
    | StartGpuHelper
    | KillGpuHelper
    | SweepGpus
    | SetPersistence
    | Abandon
    | Record
    | Reply
    | AnnounceReady
    | Finish
)
