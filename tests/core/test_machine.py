"""The core against a hostile world: processes that crash, fork, swallow signals and refuse to die, answers that come
late and out of step, a daemon that is killed between any two actions. See invariants.py for what has to hold always.

MACHINE_EXAMPLES=2000 looks longer, with new examples each time; without it the examples are always the same.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from supervisord.core import telemetry
from supervisord.core.lifecycle import MEMORY_BACK_S
from supervisord.core.messages import (
    Due,
    EndRequested,
    EngineObservation,
    GateClosed,
    GpuOp,
    Op,
    Requested,
    Spawned,
    SpawnFailed,
    What,
)
from supervisord.core.model import State
from supervisord.core.spec import EngineSpec, NodeSpec
from tests.core.invariants import RESTING, InvariantError, brief, is_stale
from tests.core.play import engine_spec, node_spec
from tests.core.world import CRASH_TAILS, Board, Core, Lane, Luck, World

EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "0"))

SETTINGS = settings(
    max_examples=EXAMPLES or 400,
    stateful_step_count=60,
    derandomize=EXAMPLES == 0,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

NAMES = ("a", "b", "c")
PICK = st.integers(0, 11)
LUCK = st.builds(
    Luck,
    outcome=st.sampled_from(["spawn"] * 6 + ["gate", "crash", "config"]),
    swallows=st.sampled_from([0, 0, 1, 3]),
    deaf=st.sampled_from([False, False, True]),
    children=st.integers(0, 1),
)

DRAIN_S, STOP_S, START_S, START_MAX_S, BACKOFF_MAX_S = 5.0, 8.0, 20.0, 60.0, 16.0
UNKILLABLE_S, EXTERNAL_S, TICK_S = 30.0, 60.0, 1.0

GONE_WITHIN_S = DRAIN_S + STOP_S + UNKILLABLE_S + MEMORY_BACK_S + TICK_S
"""From any point: drain, SIGTERM, SIGKILL, a sweep that has to be repeated, and memory that nobody sees come back."""

PROBE_S = 300.0
"""The longest pause of a GPU probe that failed again and again; a first look that is not answered takes less."""

STRANGER_S = 60.0
"""Longer, when an engine was found that is not configured any more: it is stopped by the defaults."""

READY_WITHIN_S = GONE_WITHIN_S + STRANGER_S + 2 * PROBE_S + 5 * (max(BACKOFF_MAX_S, EXTERNAL_S) + TICK_S)


def make_spec(*, warm: bool, restart_bad: bool, backoff_s: float, drain_s: float, autostart: bool) -> NodeSpec:
    """Two engines on one GPU and one on none; two may start at a time; everything short."""

    def one(name: str, *gpus: str) -> EngineSpec:
        return engine_spec(
            name,
            gpus=gpus,
            args={"gpu-memory-utilization": 0.3},
            autostart=autostart,
            start_timeout_s=START_S,
            start_timeout_max_s=START_MAX_S,
            drain_timeout_s=drain_s,
            stop_timeout_s=STOP_S,
            warmup={"enabled": warm, "timeout_s": 10.0, "on_failure": "restart" if restart_bad else "ready"},
            restart={
                "max_restarts": 1,
                "max_restarts_window_s": 300.0,
                "backoff_initial_s": backoff_s,
                "backoff_max_s": BACKOFF_MAX_S,
                "backoff_reset_after_s": 50.0,
            },
        )

    return node_spec(one("a", "GPU-0"), one("b", "0"), one("c"), max_parallel_starts=2, ready_timeout_s=30.0)


def rotated(items: list[Lane], by: int) -> list[Lane]:
    """The same items, beginning somewhere else."""
    start = by % len(items) if items else 0
    return items[start:] + items[:start]


class NodeMachine(RuleBasedStateMachine):
    """What can happen. Picks are numbers, taken modulo what there is to pick from."""

    core: ClassVar[Core] = Core()
    world: World

    @initialize(
        warm=st.booleans(),
        restart_bad=st.booleans(),
        backoff_s=st.sampled_from([0.0, 1.0]),
        drain_s=st.sampled_from([0.0, DRAIN_S]),
        autostart=st.sampled_from([True, True, False]),
        settled=st.booleans(),
    )
    def begin(self, *, settled: bool, **keys: bool | float) -> None:
        spec = make_spec(**keys)  # type: ignore[arg-type]  # hypothesis gives each key its kind
        self.full = spec
        self.world = World(spec, dict.fromkeys(spec.engines, "p1"), self.core)
        if settled:
            self.world.be_fair(lambda w: all(e.state in RESTING for e in w.node.engines.values()), READY_WITHIN_S)

    # --- the daemon's own doing ---

    @precondition(lambda self: self.world.busy_lanes())
    @rule(pick=PICK, luck=LUCK)
    def perform(self, pick: int, luck: Luck) -> None:
        lanes = self.world.busy_lanes()
        self.world.perform(lanes[pick % len(lanes)], luck)

    @precondition(lambda self: self.world.busy_sources() and not self.world.over)
    @rule(pick=PICK)
    def deliver(self, pick: int) -> None:
        sources = self.world.busy_sources()
        self.world.deliver(sources[pick % len(sources)])

    @precondition(lambda self: not self.world.over)
    @rule(pick=PICK, luck=LUCK)
    def one_of_each(self, pick: int, luck: Luck) -> None:
        """One thing of every lane is done, then one of every source is heard, beginning anywhere."""
        for lane in rotated(self.world.busy_lanes(), pick):
            self.world.perform(lane, luck)
        for source in rotated(self.world.busy_sources(), pick):
            if not self.world.over:
                self.world.deliver(source)

    @precondition(lambda self: not self.world.over)
    @rule(turns=st.integers(1, 12), luck=LUCK)
    def go_on(self, turns: int, luck: Luck) -> None:
        """A stretch of ordinary life, without waiting for time to pass."""
        for _ in range(turns):
            if not self.world.over:
                self.world.one_turn(luck)

    @precondition(lambda self: not self.world.over)
    @rule(late_s=st.sampled_from([0.0, 0.0, 0.4, 7.0]))
    def clock(self, late_s: float) -> None:
        self.world.next_clock(late_s)

    @precondition(lambda self: not self.world.over)
    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 12.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: not self.world.over)
    @rule(what=st.sampled_from([What.POLL, What.POLL, What.WATCHDOG, What.CLOCK]))
    def due(self, what: What) -> None:
        self.world.see(Due(what))

    # --- the world's doing ---

    @rule(name=st.sampled_from(NAMES), code=st.sampled_from([0, 1]), kind=st.sampled_from(sorted(CRASH_TAILS)))
    def crash(self, name: str, code: int, kind: str) -> None:
        proc = self.world.proc(name)
        if proc is not None and proc.main:
            self.world.end_main(name, proc, code=code, kind=kind)

    @rule(
        name=st.sampled_from(NAMES),
        what=st.sampled_from(["answer", "answer", "foreign", "warm", "not warm", "stuck", "free", "orphans end"]),
    )
    def happen(self, name: str, what: str) -> None:
        proc = self.world.proc(name)
        if what in ("answer", "foreign"):
            self.world.answer(name, foreign=what == "foreign")
        elif what in ("warm", "not warm"):
            self.world.end_warmup(name, well=what == "warm")
        elif proc is not None and what == "orphans end":
            proc.children = 0
            self.world.bury(name)
        elif proc is not None:
            proc.stuck = what == "stuck"

    @rule(
        what=st.sampled_from(
            (
                *("hangs", "stuck", "lets go", "ends", "no driver", "lost", "other lost", "broken", "astray", "silent"),
                *("failing", "all failing"),
                *("persistence", "well", "well"),
            )
        ),
        lingers_s=st.sampled_from([0.1, 0.1, 40.0]),
    )
    def gpus_change(self, what: str, lingers_s: float) -> None:
        world = self.world
        newest = max(world.probes, default=0)
        if what in ("hangs", "stuck") and newest:
            world.probes[newest].hangs = True
            world.probes[newest].stuck = what == "stuck"
        elif what == "lets go":
            for probe in world.probes.values():
                probe.stuck = False
            world.end_killed_probes()
        elif what == "ends" and newest:
            world.end_probe(newest)
        changes = {
            "no driver": {"problem": 18},
            "lost": {"lost": frozenset({"GPU-0"})},
            "other lost": {"lost": frozenset({"GPU-1"})},
            "broken": {"broken": frozenset({"GPU-0"})},
            "failing": {"failing": frozenset({"GPU-0"})},
            "all failing": {"failing": frozenset({"GPU-0", "GPU-1"})},
            "astray": {"astray": True},
            "silent": {"silent": True},
            "persistence": {"persistence": False},
        }
        before = Board() if what == "well" else world.board
        world.board = replace(before, lingers_s=lingers_s, **changes.get(what, {}))  # type: ignore[arg-type]  # a table

    @rule(uuid=st.sampled_from(["GPU-0", "GPU-1"]), number=st.sampled_from([31, 63, 79, 119, None]))
    def xid(self, uuid: str, number: int | None) -> None:
        self.world.xid(uuid, number)

    @precondition(lambda self: not self.world.over)
    @rule(op=st.sampled_from(GpuOp), gpu=st.sampled_from(["GPU-0", "GPU-1", "1", "x"]))
    def request_of_gpus(self, op: GpuOp, gpu: str) -> None:
        self.world.gpu_request(op, gpu)

    @precondition(lambda self: self.world.heard and not self.world.over)
    @rule(pick=st.integers(0, 30))
    def hear_again(self, pick: int) -> None:
        """Something old is heard once more; only of launches the adapters promise a single answer."""
        seen = self.world.heard[-1 - pick % len(self.world.heard)]
        answer = isinstance(seen, Spawned | GateClosed | SpawnFailed)
        if isinstance(seen, EngineObservation) and (not answer or is_stale(self.world.node, seen)):
            self.world.see(seen)

    # --- people ---

    @precondition(lambda self: not self.world.over)
    @rule(op=st.sampled_from(Op), name=st.sampled_from(NAMES), at_once=st.sampled_from([False, False, True]))
    def request(self, op: Op, name: str, at_once: bool) -> None:
        self.world.request(Requested(0, op, name, "uid 1000", at_once=at_once))

    @precondition(lambda self: not self.world.over)
    @rule(name=st.sampled_from(NAMES), settings_too=st.booleans())
    def change_plan(self, name: str, settings_too: bool) -> None:
        """A new launch plan for an engine, which is configured again if it was not."""
        spec = self.full.engines[name]
        if settings_too:
            spec = replace(spec, stop_timeout_s=STOP_S - 1)
        plan = "p1" if self.world.plans.get(name) == "p2" else "p2"
        engines = {**self.world.spec.engines, name: spec}
        self.world.reconfigure(replace(self.full, engines=engines), {**self.world.plans, name: plan})

    @precondition(lambda self: not self.world.over)
    @rule(name=st.sampled_from(NAMES), back=st.booleans())
    def configure(self, name: str, back: bool) -> None:
        """An engine is taken out of the configuration, or is put into it as it was."""
        engines = {key: spec for key, spec in self.world.spec.engines.items() if key != name}
        plans = {key: plan for key, plan in self.world.plans.items() if key != name}
        if back:
            engines, plans = {**engines, name: self.full.engines[name]}, {"a": "p1", **plans, name: "p1"}
        self.world.reconfigure(replace(self.full, engines=engines), plans)

    @rule(what=st.sampled_from(["end", "end and keep", "kill", "kill", "kill before saving", "reboot"]))
    def end_daemon(self, what: str) -> None:
        if what == "end" and not self.world.over:
            self.world.see(EndRequested("SIGTERM"))
        elif what == "end and keep" and not self.world.over:
            self.world.see(EndRequested("SIGTERM", keep=True))
        elif what == "reboot":
            self.world.reboot()
        else:
            self.world.kill_daemon(persisted=what != "kill before saving")

    # --- what must come true from here, whatever happened before ---

    @precondition(lambda self: not self.world.over)
    @rule(what=st.sampled_from(["stop", "stop now", "end", "end twice", "start"]))
    def converge(self, what: str) -> None:
        world = self.world.copy()
        if what.startswith("end") or world.node.ending:
            ends(world, twice=what == "end twice")
        elif what == "start":
            starts(world)
        else:
            stops(world, at_once=what == "stop now")


def gone_within_s(world: World) -> float:
    return GONE_WITHIN_S + (STRANGER_S if world.strangers else 0.0)


def stops(world: World, *, at_once: bool) -> None:
    """After an operator's stop every engine is stopped within bounds, if everything dies that is killed."""
    world.heal()
    for name in world.spec.engines:
        world.request(Requested(0, Op.STOP, name, "uid 1000", at_once=at_once))
    names = [name for name in world.spec.engines if world.node.engines[name].state is not State.FAILED]
    gone = world.be_fair(lambda w: all(w.node.engines[n].state is State.STOPPED for n in names), gone_within_s(world))
    if gone is None:
        raise InvariantError("stop_converges", brief(world.node))


def ends(world: World, *, twice: bool) -> None:
    """A daemon that was told to end is over within bounds, even if something does not die; told twice, at once."""
    if twice:
        world.heal()
    for _ in range(1 + int(twice)):
        if not world.over:
            world.see(EndRequested("SIGTERM"))
    if world.be_fair(lambda w: w.over, TICK_S if twice else gone_within_s(world)) is None:
        raise InvariantError("end_converges", brief(world.node))


def starts(world: World) -> None:
    """After reset and start every engine is ready within bounds, if nothing goes wrong any more."""
    world.heal()
    for source in world.busy_sources():
        while world.sources[source]:
            world.deliver(source)
    for name in world.spec.engines:
        world.request(Requested(0, Op.RESET, name, "uid 1000"))
        world.request(Requested(0, Op.START, name, "uid 1000"))
    for _ in range(2):
        for uuid in world.cards:
            world.gpu_request(GpuOp.CLEAR, uuid)
        # What the driver said of a GPU before it was seen is held against it then, so that it is cleared once more.
        world.be_fair(lambda w: not w.node.unseen_gpus or telemetry.off(w.node), 2 * telemetry.RETRY_MAX_S)
    for uuid in world.cards:
        world.gpu_request(GpuOp.CLEAR, uuid)
    for name in world.spec.engines:
        world.request(Requested(0, Op.RESET, name, "uid 1000"))
        world.request(Requested(0, Op.START, name, "uid 1000"))
    up = world.be_fair(lambda w: all(w.node.engines[n].state is State.READY for n in w.spec.engines), READY_WITHIN_S)
    if up is None:
        raise InvariantError("start_converges", brief(world.node))


def test_the_core_keeps_its_promises() -> None:
    run_state_machine_as_test(NodeMachine, settings=SETTINGS)
