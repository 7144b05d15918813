"""What must hold after every single step, each as a function of its own.

`Step` is one step with what the core knew; `Outside` is what really exists (the model of the world, see world.py),
where there is one. A function that is broken raises `InvariantError`, which carries its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, NoReturn, Protocol

from supervisord.core import gpu_inventory, lifecycle, telemetry, xids
from supervisord.core import node as reducer
from supervisord.core.gpu_samples import LOST, GpuReading
from supervisord.core.messages import (
    Action,
    AnnounceReady,
    Booted,
    Due,
    EndRequested,
    EngineObservation,
    Exited,
    Finish,
    GateClosed,
    GpuHelperEnded,
    GpusSwept,
    KeepEvidence,
    KillGpuHelper,
    Launch,
    Observation,
    PortForeign,
    Reconfigured,
    Record,
    Reply,
    Requested,
    Sampled,
    SetPersistence,
    Spawned,
    SpawnFailed,
    StartGpuHelper,
    Sweep,
    SweepGpus,
    Swept,
    Terminate,
    WarmedUp,
    What,
    XidSeen,
)
from supervisord.core.model import (
    After,
    Backoff,
    Draining,
    Engine,
    Gpu,
    Node,
    Ready,
    Starting,
    State,
    Stopping,
    Telemetry,
    Waiting,
)
from supervisord.core.watch import HTTP_SERVICE_UNAVAILABLE


class InvariantError(AssertionError):
    """An invariant does not hold; `name` says which."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


@dataclass(frozen=True, slots=True)
class Step:
    """One observation and what became of it."""

    before: Node
    seen: Observation
    now: float
    after: Node
    actions: tuple[Action, ...]
    wakeup: Callable[[Node], float | None] = reducer.wakeup


class Outside(Protocol):
    """What the world tells about itself."""

    def generations(self, engine: str) -> set[int]:
        """Generations of which some process lives."""

    def plan_of(self, engine: str) -> str | None:
        """The launch plan of the process that lives."""

    @property
    def announced(self) -> int:
        """How often this daemon has said READY=1."""

    @property
    def helpers(self) -> int:
        """Probe processes of this daemon that live."""

    @property
    def adoptable(self) -> set[str]:
        """Engines whose main process this daemon found alive."""

    def budgeted(self, engine: str) -> list[float]:
        """When restarts that cost budget were decided, of launch plans that had never been ready."""


def _fail(check: Callable[..., None], text: str) -> NoReturn:
    raise InvariantError(check.__name__, text)


def brief(node: Node) -> str:
    """A node without its configuration."""
    return "; ".join(
        f"{name}: generation {e.generation}, launching {e.launching}, wanted {e.wanted}, removed {e.removed}, {e.phase}"
        for name, e in node.engines.items()
    )


def _engine_of(step: Step, name: str) -> Engine | None:
    return step.after.engines.get(name) or step.before.engines.get(name)


# --- of one step alone ------------------------------------------------------------------------------------------------


def states_follow_the_diagram(step: Step) -> None:
    """Only the transitions of the table, also over two phases within one step (engine by engine, end to end)."""
    allowed = lifecycle.TRANSITIONS
    for name, new in step.after.engines.items():
        old = step.before.engines.get(name)
        if old is None or old.state is new.state:
            continue
        reached = allowed[old.state] | {third for second in allowed[old.state] for third in allowed[second]}
        if new.state not in reached:
            _fail(states_follow_the_diagram, f"{name}: {old.state.value} -> {new.state.value}")


def actions_name_the_living_generation(step: Step) -> None:
    """Nothing is done to a generation that is not the engine's current or launching one."""
    for action in step.actions:
        if isinstance(action, Record | Reply | AnnounceReady | Finish | GpuAction):
            continue
        engine = _engine_of(step, action.engine)
        if engine is None and isinstance(step.seen, Booted):
            continue
        if engine is None or action.generation not in {engine.generation, engine.launching}:
            _fail(actions_name_the_living_generation, f"{action} of {engine}")


GpuAction = StartGpuHelper | KillGpuHelper | SweepGpus | SetPersistence
"""What is asked of the probe."""

RESTING: Final = frozenset({State.STOPPED, State.READY, State.FAILED})


def transient_states_are_timed(step: Step) -> None:
    """Every state but stopped, ready, failed and an operator's drain has a deadline."""
    for name, engine in step.after.engines.items():
        held = isinstance(engine.phase, Draining) and engine.phase.after is After.HOLD
        if engine.state in RESTING or held:
            continue
        alone = replace(step.after, engines={name: engine}, announce_ready_at=None, telemetry=Telemetry())
        at = step.wakeup(alone)
        if at is None or not isfinite(at):
            _fail(transient_states_are_timed, f"{name} is {engine.state.value} for ever: {engine.phase}")


def the_clock_moves_on(step: Step) -> None:
    """After the clock was due, it is due later: no busy loop."""
    if not (isinstance(step.seen, Due) and step.seen.what is What.CLOCK):
        return
    at = step.wakeup(step.after)
    if at is not None and at <= step.now:
        _fail(the_clock_moves_on, f"due again at {at}, now is {step.now}: {brief(step.after)}")


def no_launch_while_ending_or_unwanted(step: Step) -> None:
    """A daemon that ends starts nothing, and nobody starts what nobody wants."""
    for action in step.actions:
        if not isinstance(action, Launch):
            continue
        engine = step.after.engines.get(action.engine)
        if step.after.ending or engine is None or not engine.wanted or engine.removed:
            _fail(no_launch_while_ending_or_unwanted, f"{action} of {engine}, ending is {step.after.ending}")


def one_launch_at_a_time(step: Step) -> None:
    """A launch is asked for only while none is outstanding and the core believes that nothing lives."""
    for action in step.actions:
        if not isinstance(action, Launch):
            continue
        before = step.before.engines.get(action.engine)
        answered = isinstance(step.seen, Spawned | GateClosed | SpawnFailed) and step.seen.engine == action.engine
        if before is not None and before.launching is not None and not answered:
            _fail(one_launch_at_a_time, f"{action} while launching {before.launching}")


def is_stale(node: Node, seen: Observation) -> bool:
    """A message about a generation that is neither the engine's present nor its launching one, or of no engine."""
    if not isinstance(seen, EngineObservation):
        return False
    engine = node.engines.get(seen.engine)
    if engine is None:
        return True
    if isinstance(seen, Spawned | GateClosed | SpawnFailed):
        return seen.generation != engine.launching
    return seen.generation != (engine.generation if engine.launching is None else engine.launching)


def stale_messages_change_nothing(step: Step) -> None:
    """The node stays as it is, and nothing is done or said."""
    if not is_stale(step.before, step.seen):
        return
    done = [action for action in step.actions if not isinstance(action, Finish)]
    if step.after != step.before or done:
        _fail(stale_messages_change_nothing, f"{step.seen}: {brief(step.before)} -> {brief(step.after)}, {done}")


def ends_only_on_evidence(step: Step) -> None:
    """SIGTERM and SIGKILL follow an exit, a passed deadline, a fault or a request; never missing data, never a tick."""
    for action in step.actions:
        if isinstance(action, Terminate | Sweep) and not _is_evidence(step, action):
            _fail(ends_only_on_evidence, f"{action} because of {step.seen}")


def _is_evidence(step: Step, action: Terminate | Sweep) -> bool:
    match step.seen:
        case Booted() | Requested() | Reconfigured() | EndRequested():
            return True
        case Exited() | Spawned() | PortForeign() | Swept():
            return step.seen.engine == action.engine
        case WarmedUp():
            return step.seen.warmup.problem is not None
        case Sampled():
            sample = step.seen.sample
            return (sample.running == 0 and sample.waiting == 0) or _is_rule_evidence(step, step.seen)
        case Due(what=What.CLOCK):
            engine = step.before.engines[action.engine]
            return any(at <= step.now for at in lifecycle.deadlines(engine))
        case GpusSwept() | XidSeen():
            return _is_gpu_evidence(step, action.engine)
        case _:
            return False


def _is_rule_evidence(step: Step, seen: Sampled) -> bool:
    """A rule's verdict needs something that this look saw, and that an earlier one had seen already."""
    engine = step.before.engines[seen.engine]
    watch, sample = engine.watch, seen.sample
    if watch is None:
        return False
    return (
        (sample.health_status == HTTP_SERVICE_UNAVAILABLE and watch.unavailable > 0)
        or (sample.health_error == "refused" and watch.refused_since is not None)
        or (sample.free_blocks is not None and watch.low_since is not None)
        or (bool(sample.ranks) and any(rank.still_since is not None for rank in watch.ranks))
        or watch.canary.failures >= engine.spec.probe.canary_failures
    )


def _is_gpu_evidence(step: Step, name: str) -> bool:
    """A GPU of this very engine was found faulty, or its own processes twice on a GPU that it was not given."""
    engine = step.before.engines[name]
    mine = {gpu.uuid for gpu in gpu_inventory.of_engine(step.after.gpus, engine)}
    fell = {
        uuid
        for uuid, gpu in step.after.gpus.items()
        if gpu.quarantine is not None and (uuid not in step.before.gpus or step.before.gpus[uuid].quarantine is None)
    }
    if isinstance(step.seen, XidSeen):
        return bool(mine & fell) and xids.class_of(step.seen.xid) in xids.REMEDIES
    assert isinstance(step.seen, GpusSwept)
    old = {uuid: gpu.reading for uuid, gpu in step.before.gpus.items()}
    astray = any(
        _runs_on(reading, engine) and _runs_on(old.get(reading.uuid), engine)
        for reading in step.seen.sweep.gpus
        if reading.uuid not in engine.devices
    )
    return step.seen.sweep.problem is None and (bool(mine & fell) or (bool(engine.devices) and astray))


def _runs_on(reading: GpuReading | None, engine: Engine) -> bool:
    processes = reading.processes or () if reading is not None else ()
    return any((p.engine, p.generation) == (engine.spec.name, engine.generation) for p in processes)


# --- of GPUs ----------------------------------------------------------------------------------------------------------


def no_launch_on_a_gpu_that_must_not_be_used(step: Step) -> None:
    """None that is quarantined, lost or not there; none at all while the driver takes no new process."""
    node = step.after
    for engine in _launched(step):
        names = engine.spec.gpus
        if not names or telemetry.off(node) or names[0].startswith(gpu_inventory.MIG):
            continue
        seen = node.telemetry
        blind = seen.problem is not None or seen.swept_at is None
        if seen.released_until is not None or (blind and not seen.unresponsive) or seen.problem in telemetry.LASTING:
            _fail(no_launch_on_a_gpu_that_must_not_be_used, f"{engine.spec.name}: {seen}")
        for name in names:
            gpu = gpu_inventory.find(node.gpus, name)
            if gpu is None and not seen.unresponsive:
                _fail(no_launch_on_a_gpu_that_must_not_be_used, f"{engine.spec.name}: there is no {name}")
            if gpu is not None and _must_not_be_used(gpu, seen):
                _fail(no_launch_on_a_gpu_that_must_not_be_used, f"{engine.spec.name}: {gpu}")


def _must_not_be_used(gpu: Gpu, seen: Telemetry) -> bool:
    error = gpu.reading.error if gpu.reading is not None else None
    failing = error is not None and (not seen.unresponsive or error in telemetry.LASTING)
    return gpu.quarantine is not None or gpu.absent_since is not None or failing


def _launched(step: Step) -> list[Engine]:
    return [step.after.engines[action.engine] for action in step.actions if isinstance(action, Launch)]


def it_goes_where_it_is_configured(step: Step) -> None:
    """The devices of a launch are what the configuration of now says, in its order, as CUDA counts them."""
    for action in step.actions:
        if isinstance(action, Launch) and action.devices is not None:
            gpus, names = step.after.gpus, step.after.engines[action.engine].spec.gpus
            found = [gpu_inventory.find(gpus, name) for name in names]
            order = sorted((gpu.pci_id, gpu.uuid) for gpu in gpus.values() if gpu.absent_since is None)
            places = tuple(order.index((gpu.pci_id, gpu.uuid)) for gpu in found if gpu is not None)
            if step.after.telemetry.cuda_counts_lost:  # then CUDA's numbers are NVML's
                places = tuple(gpu.index for gpu in found if gpu is not None and gpu.index is not None)
            if action.devices != places or None in found:
                _fail(it_goes_where_it_is_configured, f"{action}, configured {names}")


def one_start_a_gpu(step: Step) -> None:
    """No engine is launched while another one of its GPUs is between its launch and /health 200, or is stopping."""
    for engine in _launched(step):
        for other in step.after.engines.values():
            stopping = isinstance(other.phase, Stopping) and not _stops_later(step, engine, other)
            busy = stopping or isinstance(other.phase, Starting) or other.launching is not None
            same = other.spec.name == engine.spec.name
            if busy and not same and _on_one_gpu(step.after, engine, other):
                _fail(one_start_a_gpu, f"{engine.spec.name} is launched while {brief(step.after)}")


def _stops_later(step: Step, launched: Engine, other: Engine) -> bool:
    """Whether the stop of `other` began in this very step, after the launch."""
    before = step.before.engines.get(other.spec.name)
    told = [action.engine for action in step.actions if isinstance(action, Launch | Terminate | Sweep)]
    later = told[told.index(launched.spec.name) :]
    return before is not None and not isinstance(before.phase, Stopping) and other.spec.name in later


def _on_one_gpu(node: Node, one: Engine, other: Engine) -> bool:
    mine, theirs = ({gpu.uuid for gpu in gpu_inventory.of_engine(node.gpus, engine)} for engine in (one, other))
    return bool(mine & theirs) or bool(set(one.spec.gpus) & set(other.spec.gpus))


def memory_comes_back_first(step: Step) -> None:
    """An engine that had GPUs is done with stopping when a sweep saw its memory back, or MEMORY_BACK_S later."""
    if step.after.ending or telemetry.off(step.after) or telemetry.blind(step.after):
        return
    for name, old in step.before.engines.items():
        phase, new = old.phase, step.after.engines.get(name)
        if not isinstance(phase, Stopping) or old.launching is not None or not old.devices:
            continue
        if new is not None and new.state in {State.STOPPING, State.FAILED}:
            continue
        gone_at = phase.gone_at
        late = gone_at is not None and step.now >= gone_at + lifecycle.MEMORY_BACK_S
        seen = isinstance(step.seen, GpusSwept) and gone_at is not None and step.seen.sweep.at >= gone_at
        if not (late or (seen and not _holds(step.seen, old))):
            _fail(memory_comes_back_first, f"{name} after {step.seen}: {brief(step.before)} -> {brief(step.after)}")


def _holds(seen: Observation, engine: Engine) -> bool:
    readings = seen.sweep.gpus if isinstance(seen, GpusSwept) else ()
    return any(
        process.engine == engine.spec.name
        for reading in readings
        if reading.uuid in engine.devices
        for process in reading.processes or ()
    )


def probes_are_few(step: Step) -> None:
    """At most two that are stuck and one that runs; only one that runs and is not killed is asked, once at a time."""
    old, new = step.before.telemetry, step.after.telemetry
    for action in step.actions:
        another = old.running and new.stuck == old.stuck
        if isinstance(action, StartGpuHelper) and (new.stuck >= telemetry.STUCK_MAX or another):
            _fail(probes_are_few, f"{action}: {old} -> {new}")
        if isinstance(action, SweepGpus) and (not new.running or new.killed_at is not None or new.asked_at != step.now):
            _fail(probes_are_few, f"{action}: {old} -> {new}")
        if isinstance(action, StartGpuHelper | SweepGpus) and new.released_until is not None:
            _fail(probes_are_few, f"{action} while NVML is closed")
    if not 0 <= new.stuck <= telemetry.STUCK_MAX:
        _fail(probes_are_few, f"{new}")


def what_nobody_sees_hurts_nobody(step: Step) -> None:
    """A probe that ends or sees nothing, and a sweep that is not answered, end no engine and degrade none."""
    seen = step.seen
    for uuid, gpu in step.after.gpus.items():
        old = step.before.gpus.get(uuid)
        fell = gpu.quarantine is not None and old is not None and old.quarantine is None
        if isinstance(seen, GpusSwept) and fell and not _is_blamed(step, seen, uuid):
            _fail(what_nobody_sees_hurts_nobody, f"{gpu} after {seen}")
    if isinstance(seen, GpuHelperEnded) or (isinstance(seen, GpusSwept) and seen.sweep.problem is not None):
        done = [action for action in step.actions if isinstance(action, Terminate | Sweep | KeepEvidence)]
        worse = [
            name
            for name, old in step.before.engines.items()
            if old.state is not State.STOPPING and step.after.engines[name].state in {State.STOPPING, State.DRAINING}
            if old.state is not step.after.engines[name].state
        ]
        if done or worse or step.before.gpus != step.after.gpus:
            _fail(what_nobody_sees_hurts_nobody, f"{seen}: {done} {worse}")


def _is_blamed(step: Step, seen: GpusSwept, uuid: str) -> bool:
    """Whether a sweep, or the driver before it, says of this very GPU that it must not be used."""
    readings = seen.sweep.gpus
    mine = next((reading for reading in readings if reading.uuid == uuid), None)
    pci_id = step.after.gpus[uuid].pci_id
    if {uuid, pci_id} & {name for name, gpu in step.before.unseen_gpus.items() if gpu.quarantine is not None}:
        return True
    if mine is None:
        return any(reading.error is None for reading in readings)
    return mine.error in LOST or bool(mine.error is None and (mine.recovery_action or mine.remap_failed))


def a_fault_stays_on_its_gpu(step: Step) -> None:
    """Engines that have nothing to do with a faulty GPU are neither stopped nor drained for it."""
    if not isinstance(step.seen, GpusSwept | XidSeen):
        return
    for name, old in step.before.engines.items():
        new = step.after.engines.get(name)
        if new is None or new.state is old.state or new.state not in {State.STOPPING, State.DRAINING}:
            continue
        if not _is_gpu_evidence(step, name):
            _fail(a_fault_stays_on_its_gpu, f"{name} because of {step.seen}")


# --- of requests ------------------------------------------------------------------------------------------------------


def every_request_is_answered_once(step: Step) -> None:
    """One reply, to the request that was made."""
    replies = Counter(action.request for action in step.actions if isinstance(action, Reply))
    asked = getattr(step.seen, "request", None)
    if replies != (Counter() if asked is None else Counter([asked])):
        _fail(every_request_is_answered_once, f"{step.seen}: {step.actions}")


def finish_means_nothing_lives(step: Step) -> None:
    """Finish comes exactly when the daemon is ending and keeps its engines, or only stopped or failed ones are left."""
    settled = all(engine.state in {State.STOPPED, State.FAILED} for engine in step.after.engines.values())
    over = step.after.ending and (step.after.keeping or settled)
    if over != any(isinstance(action, Finish) for action in step.actions):
        _fail(finish_means_nothing_lives, f"{step.actions} with {brief(step.after)}")


def generations_only_grow(step: Step) -> None:
    """A generation number is never taken back, and one spawn adds one."""
    for name, new in step.after.engines.items():
        old = step.before.engines.get(name)
        if (
            old is not None
            and not isinstance(step.seen, Booted)
            and new.generation
            not in {
                old.generation,
                old.generation + 1,
            }
        ):
            _fail(generations_only_grow, f"{name}: {old.generation} -> {new.generation}")


def since_moves_with_the_state(step: Step) -> None:
    """`since` is when the state that people see was entered, by whichever daemon, and nothing else moves it."""
    for name, new in step.after.engines.items():
        old = step.before.engines.get(name)
        if old is not None and old.state is new.state and new.since != old.since:
            _fail(since_moves_with_the_state, f"{name}: {old.since} -> {new.since} at {step.now}")
        left = old.left if old is not None else None
        entered = {step.now} | ({left.since} if left is not None and left.state is new.state else set())
        if old is not None and old.state is not new.state and new.since not in entered:
            _fail(since_moves_with_the_state, f"{name} is {new.state.value} since {new.since}, now is {step.now}")


STEP_INVARIANTS: Final = (
    states_follow_the_diagram,
    actions_name_the_living_generation,
    transient_states_are_timed,
    the_clock_moves_on,
    no_launch_while_ending_or_unwanted,
    one_launch_at_a_time,
    stale_messages_change_nothing,
    ends_only_on_evidence,
    every_request_is_answered_once,
    finish_means_nothing_lives,
    generations_only_grow,
    since_moves_with_the_state,
    no_launch_on_a_gpu_that_must_not_be_used,
    it_goes_where_it_is_configured,
    one_start_a_gpu,
    memory_comes_back_first,
    probes_are_few,
    what_nobody_sees_hurts_nobody,
    a_fault_stays_on_its_gpu,
)


def check(step: Step) -> None:
    """All of the above."""
    for invariant in STEP_INVARIANTS:
        invariant(step)


# --- with the world ---------------------------------------------------------------------------------------------------


def never_two_live_generations(_: Node, __: float, world: Outside, engine: Engine) -> None:
    """The one promise that must never break: one engine, one generation."""
    alive = world.generations(engine.spec.name)
    if len(alive) > 1:
        _fail(never_two_live_generations, f"{engine.spec.name}: {sorted(alive)}")


def rest_means_gone(_: Node, __: float, world: Outside, engine: Engine) -> None:
    """Where the core says that nothing of an engine lives, nothing of it lives."""
    alive = world.generations(engine.spec.name)
    if alive and not engine.live:
        _fail(rest_means_gone, f"{engine.spec.name} is {engine.state.value}, but {sorted(alive)} live")


def ready_runs_the_present_plan(_: Node, __: float, world: Outside, engine: Engine) -> None:
    """A configuration that was accepted is the one that serves, and the core knows which one runs."""
    if isinstance(engine.phase, Ready):
        runs = world.plan_of(engine.spec.name)
        if runs is not None and (runs, runs) != (engine.plan_id, engine.running_plan_id):
            text = f"{engine.spec.name} runs {runs}, wanted {engine.plan_id}, believed {engine.running_plan_id}"
            _fail(ready_runs_the_present_plan, text)


def restarts_stay_in_budget(_: Node, now: float, world: Outside, engine: Engine) -> None:
    """At most `max_restarts` in the window, counted from outside."""
    spec, name = engine.spec.restart, engine.spec.name
    counted = [at for at in world.budgeted(name) if at > now - spec.max_restarts_window_s]
    if len(counted) > spec.max_restarts:
        _fail(restarts_stay_in_budget, f"{name}: {counted}, max_restarts = {spec.max_restarts}")


def an_unwanted_engine_goes(_: Node, __: float, ___: Outside, engine: Engine) -> None:
    """Nobody wants it: it is on its way out (or out), never waiting for its start."""
    if not engine.wanted and isinstance(engine.phase, Backoff | Waiting) and engine.launching is None:
        _fail(an_unwanted_engine_goes, f"{engine.spec.name} is {engine.state.value}")


WORLD_INVARIANTS: Final = (
    never_two_live_generations,
    rest_means_gone,
    ready_runs_the_present_plan,
    restarts_stay_in_budget,
    an_unwanted_engine_goes,
)


def what_was_saved_survives(world: Outside, before: Node, after: Node) -> None:
    """A daemon that comes after another in the same boot wants what that one wanted, and counts on.

    An engine that an operator drained, and that ended, is not wanted any more; perhaps no daemon had heard of its end.
    """
    for name, old in before.engines.items():
        new = after.engines.get(name)
        drained = isinstance(old.phase, Draining) and old.phase.after is After.HOLD
        wanted = old.wanted and not (drained and name not in world.adoptable)
        if new is not None and not old.removed and (new.wanted, new.generation >= old.generation) != (wanted, True):
            _fail(what_was_saved_survives, f"{name}: {brief(before)} -> {brief(after)}")


def ready_is_said_once(world: Outside, node: Node) -> None:
    """READY=1 once in the life of a daemon."""
    if world.announced > 1 or (node.announce_ready_at is None) != (world.announced == 1):
        _fail(ready_is_said_once, f"said {world.announced} times, due {node.announce_ready_at}")


def few_probes_live(world: Outside, _: Node) -> None:
    """Whatever the driver does to them: two that hang in the kernel and one that works."""
    if world.helpers > telemetry.STUCK_MAX + 1:
        _fail(few_probes_live, f"{world.helpers} live")


def forgotten_means_gone(world: Outside, node: Node, names: Mapping[str, Any]) -> None:
    """An engine that the node does not know any more has no process."""
    for name in names:
        if name not in node.engines and world.generations(name):
            _fail(forgotten_means_gone, f"{name}: {sorted(world.generations(name))}")
