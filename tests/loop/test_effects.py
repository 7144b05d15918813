"""What the effects keep of each engine: for how long, and that none of it is a secret told to anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest

from supervisord import effects as module
from supervisord.core.gpu_samples import GpuPlace
from supervisord.core.messages import (
    Adopt,
    Exited,
    KeepEvidence,
    KillGpuHelper,
    Launch,
    Observation,
    Probe,
    Sampled,
    SetPersistence,
    Spawned,
    StartGpuHelper,
    SweepGpus,
)
from supervisord.core.model import Gpu, LaunchPlan, Node, Process, Reason, Sample
from supervisord.core.spec import EngineSpec, ProbeSpec
from supervisord.effects import NodeEffects, Parts
from supervisord.gpu.client import GpuProbe
from supervisord.lanes import Lanes
from supervisord.launcher.base import Ended, Launcher
from supervisord.loop import Board, Inbox
from supervisord.state import StateFile
from supervisord.systemd.notify import Notifier
from supervisord.voice import Voice
from tests.core.play import engine_spec, new_node, node_spec
from tests.sim.engine import wait_until

TOKEN = "hf_QmFzZTY0IGlzIG5vdCBlbmNyeXB0aW9u"


HOST_BYTES = 1 << 30
DEAD = GpuPlace("GPU-9", "0000:99:00.0", 9)


class FakeLauncher:
    """An engine that quotes what it knows."""

    def __init__(self) -> None:
        self.evidence: list[tuple[str, int, str, tuple[str, ...]]] = []
        self.launched: list[LaunchPlan] = []
        self.oom_killed = False
        self.stopped_by: str | None = None

    def launch(self, plan: LaunchPlan, generation: int) -> Process:
        self.launched.append(plan)
        return Process(100 + generation, 1, "boot")

    def adopt(self, engine: str, generation: int) -> None:
        pass

    def ended(self, engine: str, generation: int, code: int | None, number: int | None) -> Ended:
        return Ended(code, number, oom_killed=self.oom_killed, stopped_by=self.stopped_by)

    def tail(self, engine: str, lines: int) -> tuple[str, ...]:
        return (f"cannot use {TOKEN}", "1 of 10")

    def keep_evidence(self, *told: Any) -> None:
        self.evidence.append(told)

    def host_bytes(self, engine: str) -> int:
        return HOST_BYTES

    def rotate_if_large(self, engine: str) -> bool:
        return False


class FakeGpuProbe:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def start(self, helper: int) -> None:
        self.asked.append(("start", helper))

    def kill(self, helper: int) -> None:
        self.asked.append(("kill", helper))

    def sweep(self, helper: int, number: int, *, slow: bool, avoid: tuple[GpuPlace, ...]) -> None:
        self.asked.append(("sweep", helper, number, slow, avoid))

    def set_persistence(self, helper: int, uuid: str, *, on: bool) -> None:
        self.asked.append(("persistence", helper, uuid, on))


class FakeProbe:
    """Remembers what it was made with."""

    made: list[FakeProbe]

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.closed = False
        self.made.append(self)

    def look(self, at: float, host_bytes: int | None) -> Sample:
        assert not self.closed
        return Sample(at=at, host_bytes=host_bytes)

    def close(self) -> None:
        self.closed = True


class Bench:
    """The effects of a node with one engine, over a launcher and probes that are not real."""

    def __init__(self, folder: Path) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.launcher = FakeLauncher()
        self.gpus = FakeGpuProbe()
        self.state = StateFile(folder, lambda _: None)
        self.bugs: list[BaseException] = []
        self.resyncs: list[None] = []
        self.looks: list[tuple[str, float]] = []
        self.node = new_node(node_spec(engine_spec("a", env={"HF_TOKEN": TOKEN, "SWITCH": "1"})))
        self.effects = NodeEffects(
            Parts(
                inbox=self.inbox,
                lanes=Lanes(lambda _, error: self.bugs.append(error)),
                launcher=cast("Launcher", self.launcher),
                gpus=cast("GpuProbe", self.gpus),
                plan=_plan,
                voice=cast("Voice", None),
                notifier=Notifier(),
                board=Board(self.node),
                state=self.state,
                answer=lambda _: None,
                resync=lambda: self.resyncs.append(None),
                looked=lambda engine, seconds: self.looks.append((engine, seconds)),
            )
        )

    def change(self, change: Callable[[Node], Node]) -> None:
        old, self.node = self.node, change(self.node)
        self.effects.begin(old, self.node)

    def probe(self, generation: int) -> Sampled:
        """One look, and what came of it."""
        while True:  # a lane is busy for a moment after its job
            self.effects.perform(Probe("a", generation), self.node)
            try:
                seen = self.inbox.get(timeout=0.1)
            except Empty:
                continue
            assert isinstance(seen, Sampled)
            return seen

    def next(self) -> Observation:
        return self.inbox.get(timeout=20)


def _plan(spec: EngineSpec) -> LaunchPlan:
    return LaunchPlan(spec.name, ("x",), spec.env, None, spec.host, spec.port, "p1", api_key="sk-1234567890")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    FakeProbe.made = []
    monkeypatch.setattr(module, "EngineProbe", FakeProbe)
    made = Bench(tmp_path)
    yield made
    assert made.bugs == []


def with_timeout(timeout_s: float) -> Callable[[Node], Node]:
    def change(node: Node) -> Node:
        engine = node.engines["a"]
        spec = replace(engine.spec, probe=ProbeSpec(timeout_s=timeout_s))
        return replace(node, engines={"a": replace(engine, spec=spec, generation=engine.generation + 1)})

    return change


def running(plan_id: str) -> Callable[[Node], Node]:
    def change(node: Node) -> Node:
        return replace(node, engines={"a": replace(node.engines["a"], running_plan_id=plan_id)})

    return change


def without_engines(node: Node) -> Node:
    return replace(node, engines={})


def test_a_probe_is_kept_for_a_generation_and_a_timeout(bench: Bench) -> None:
    bench.probe(1)
    bench.probe(1)
    assert [probe.timeout_s for probe in FakeProbe.made] == [15.0]
    bench.change(with_timeout(2.5))
    bench.probe(1)
    bench.probe(2)
    assert [(probe.timeout_s, probe.closed) for probe in FakeProbe.made] == [(15.0, True), (2.5, True), (2.5, False)]
    assert len(bench.looks) >= 4
    assert all(engine == "a" and 0 <= seconds < 60 for engine, seconds in bench.looks)


def test_of_an_engine_that_is_gone_nothing_is_kept(bench: Bench) -> None:
    bench.change(with_timeout(2.5))
    bench.change(running("p1"))
    bench.effects.perform(Adopt("a", 1), bench.node)
    bench.probe(1)
    watch = bench.effects._new_watch("a")
    wait_until(lambda: bench.effects._keys, 20, "the key to be known")
    bench.change(without_engines)
    wait_until(lambda: not (bench.effects._probes or bench.effects._keys or bench.effects._secrets), 20, "nothing")
    assert [probe.closed for probe in FakeProbe.made] == [True]
    assert watch.is_set()
    assert bench.effects._watches == {}


def test_last_words_are_told_without_secrets(bench: Bench) -> None:
    bench.change(running("p1"))
    bench.effects.perform(Adopt("a", 1), bench.node)
    bench.effects.on_exit("a", 1, 1, None)
    assert bench.next() == Exited("a", 1, 1, None, ("cannot use (hidden)", "1 of 10"))
    bench.effects.perform(KeepEvidence("a", 1, "stalled"), bench.node)
    wait_until(lambda: bench.launcher.evidence, 20, "the evidence")
    assert bench.launcher.evidence == [("a", 1, "stalled", ("cannot use (hidden)", "1 of 10"))]


def test_what_the_launcher_knows_of_an_end_is_told(bench: Bench) -> None:
    bench.launcher.oom_killed, bench.launcher.stopped_by = True, "somebody"
    bench.effects.on_exit("a", 1, None, 9)
    assert bench.next() == Exited("a", 1, None, 9, (), oom_killed=True, stopped_by="somebody")


def test_where_the_secrets_are_not_known_nothing_is_quoted(bench: Bench) -> None:
    bench.effects.on_exit("a", 1, 1, None)
    assert bench.next() == Exited("a", 1, 1, None, ())
    # It was started with the secrets of an earlier configuration.
    bench.change(running("p0"))
    bench.effects.perform(Adopt("a", 1), bench.node)
    bench.effects.on_exit("a", 1, 1, None)
    assert bench.next() == Exited("a", 1, 1, None, ())


def test_every_turn_lets_the_schedule_notice_a_clock_that_was_set_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.effects.end(bench.node)
    bench.effects.end(bench.node)
    assert len(bench.resyncs) == 2


def test_host_memory_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeProbe.made = []
    monkeypatch.setattr(module, "EngineProbe", FakeProbe)
    bench = Bench(tmp_path)
    bench.effects.perform(Probe("a", 1, host=True), bench.node)
    seen = bench.inbox.get(timeout=30)
    assert isinstance(seen, Sampled)
    assert seen.sample.host_bytes == HOST_BYTES
    assert seen.sample.host_limit_bytes is not None
    assert seen.sample.host_limit_bytes > HOST_BYTES, "what the machine still has comes on top"


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_the_probe_is_asked_what_was_decided(bench: Bench) -> None:
    for action in (
        StartGpuHelper(2),
        SweepGpus(2, 7, slow=True, avoid=(DEAD,)),
        SetPersistence(2, "GPU-0", on=False),
        KillGpuHelper(2),
    ):
        bench.effects.perform(action, bench.node)
    assert bench.gpus.asked == [
        ("start", 2),
        ("sweep", 2, 7, True, (DEAD,)),
        ("persistence", 2, "GPU-0", False),
        ("kill", 2),
    ]


@pytest.mark.parametrize(
    ("devices", "visible"),
    [((2, 0), "2,0"), ((0,), "0"), ((), ""), (None, None)],
    ids=["two", "one", "none", "unknown"],
)
def test_an_engine_sees_the_devices_that_were_decided(
    bench: Bench, devices: tuple[int, ...] | None, visible: str | None
) -> None:
    bench.effects.perform(Launch("a", 1, devices), bench.node)
    assert bench.next() == Spawned("a", 1, Process(101, 1, "boot"))
    assert bench.launcher.launched[0].env.get("CUDA_VISIBLE_DEVICES") == visible
    assert bench.launcher.launched[0].env["HF_TOKEN"] == TOKEN


def test_a_quarantine_is_saved_and_so_is_its_end(bench: Bench) -> None:
    bad = Gpu("GPU-0", pci_id="0000:1b:00.0", quarantine=Reason("gpu_lost", "it is gone"))
    bench.change(lambda node: replace(node, gpus={"GPU-0": bad}))
    wait_until(lambda: "GPU-0" in bench.state.gpus, 20, "it to be saved")
    assert bench.state.gpus["GPU-0"]["code"] == "gpu_lost"
    bench.change(lambda node: replace(node, gpus={"GPU-0": replace(bad, quarantine=None)}))
    wait_until(lambda: not bench.state.gpus, 20, "it to be forgotten")
