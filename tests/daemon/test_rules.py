"""The rules over the real daemon: sick engines are restarted, busy, slow, sleeping and odd ones are not.

One daemon with an engine for each story; all stories happen at the same time, and the tests look at what came of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.harness import Daemon, Document
from tests.daemon.outside import titled
from tests.daemon.sims import Sim, section
from tests.daemon.staging import Clients
from tests.sim.engine import wait_until

POLL_S = 0.5
STALL_AFTER_S = 3.0
SLACK_S = 2.0
"""What a loaded machine may add to a bound."""

PROBE: dict[str, Any] = {"timeout_s": 2, "canary_after_s": 1, "canary_deadline_s": 1}
BLOCKS: dict[str, Any] = {"free_blocks_min": 100, "free_blocks_for_s": 2}


def stated(free: int) -> dict[str, Any]:
    """A build that states its blocks in /health, without metrics."""
    return {"health": {"status": 200, "json": {"block_table_stats": {"free_blocks": free}}}, "metrics": 404}


class Scene:
    """The daemon and its engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sims: dict[str, Sim] = {}
        self.clients: dict[str, Clients] = {}
        self.begun: dict[str, float] = {}
        self.over = threading.Event()
        self.daemon: Daemon

    def add(self, name: str, *, probe: dict[str, Any] | None = None, **restart: Any) -> None:
        settings = {"probe": {**PROBE, **(probe or {})}, "restart": restart}
        self.sims[name] = Sim(self.folder, name, mood={"tokens_per_s": 100}, **settings)

    def load(self, name: str) -> None:
        """Requests from now on."""
        self.clients[name] = Clients(self.sims[name].port)
        self.daemon.wait_engine(name, lambda engine: bool(engine["requests"]["running"]), 20, "to be seen busy")

    def mood(self, name: str, **values: Any) -> None:
        self.begun[name] = time.time()
        self.sims[name].mood.patch(**values)

    def freeze(self, name: str) -> int:
        """SIGSTOP of EngineCore."""
        pid = titled(self.daemon.engine_processes(name), "VLLM::EngineCore")
        self.begun[name] = time.time()
        os.kill(pid, signal.SIGSTOP)
        return pid

    def heal(self) -> None:
        """What a restart cures is cured: as soon as there is a verdict."""
        while not self.over.wait(0.1):
            for event in self.daemon.events("verdict"):
                self.sims[event["engine"]].mood.set(tokens_per_s=100)

    def verdict(self, name: str, reason: str, timeout_s: float = 40) -> tuple[Document, float]:
        """The one verdict, and how long after the beginning it came."""
        event = self.daemon.wait_event("verdict", name, timeout_s=timeout_s)
        assert event["reason"] == reason
        after = self.daemon.wait_state(name, "ready", 40, 2)
        assert after["restarts"] == 1
        assert (after["last_exit"]["class"], after["last_exit"]["generation"]) == ("crash", 1)
        assert len(self.daemon.events("verdict", name)) == 1
        return event, datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp() - self.begun[name]

    def unharmed(self, name: str) -> Document:
        """Still the first generation, and no rule has decided anything."""
        engine = self.daemon.engine(name)
        assert (engine["state"], engine["generation"]) == ("ready", 1), engine
        assert self.daemon.events("verdict", name) == []
        return engine

    def reasons(self, name: str, kind: str) -> list[str]:
        return [event["reason"] for event in self.daemon.events(kind, name)]

    def evidence(self, name: str, reason: str) -> str:
        path = self.daemon.state_dir / "evidence" / f"{name}.1.{reason}.txt"
        return wait_until(lambda: path.exists() and path.read_text(encoding="utf-8"), 10, str(path)) or ""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("rules"))
    scene.add("low", **BLOCKS)
    scene.add("enough", **BLOCKS)
    scene.add("dip", **BLOCKS)
    scene.add("leak", **BLOCKS)
    scene.add("pressed", **BLOCKS)
    scene.add("literal", **BLOCKS, under_load="restart")
    scene.add("drained", **BLOCKS, under_load="drain")
    scene.add("frozen", stall_after_s=STALL_AFTER_S)
    scene.add("idle")
    scene.add("short", stall_after_s=30)
    scene.add("dead")
    scene.add("refused")
    scene.add("asleep", **BLOCKS)
    scene.add("slow", probe={"timeout_s": 1}, stall_after_s=STALL_AFTER_S)
    scene.add("garbage")
    for name in ("low", "enough"):
        scene.sims[name].mood.patch(**stated(500))
    scene.sims["drained"].change(drain_timeout_s=30)
    supervisor: dict[str, Any] = {"poll_interval_s": POLL_S, "max_parallel_starts": 4}
    with Daemon(section(*scene.sims.values()), **supervisor) as daemon:
        scene.daemon = daemon
        daemon.start()
        for name in scene.sims:
            daemon.wait_state(name, "ready", 40)
        healer = threading.Thread(target=scene.heal, daemon=True)
        healer.start()
        try:
            begin(scene)
            yield scene
        finally:
            scene.over.set()
            healer.join(10)
            for client in scene.clients.values():
                client.stop()


def begin(scene: Scene) -> None:
    """All stories at once; the long ones first."""
    scene.begun["refused"] = time.time()
    scene.sims["refused"].mood.patch(dead_503_s=0, dead_exit_s=100)
    os.kill(titled(scene.daemon.engine_processes("refused"), "VLLM::EngineCore"), signal.SIGKILL)
    scene.mood("low", **stated(99))
    scene.mood("enough", **stated(100))
    scene.mood("asleep", asleep=1, free_blocks=3)
    for name in ("pressed", "literal", "drained", "frozen", "short", "slow"):
        scene.load(name)
    scene.mood("slow", health_delay_s=10)
    scene.freeze("frozen")
    stopped = scene.freeze("short")
    scene.freeze("idle")
    scene.mood("leak", free_blocks=3)
    scene.mood("dead", health=503)
    scene.mood("garbage", completion="garbage")
    for name in ("pressed", "literal", "drained"):
        scene.mood(name, free_blocks=99)
    scene.mood("dip", free_blocks=5)
    scene.daemon.wait_event("degraded", "dip")
    scene.mood("dip", free_blocks=None)
    scene.daemon.wait_event("degraded", "short", timeout_s=40)
    os.kill(stopped, signal.SIGCONT)


def test_99_blocks_stated_by_health_for_the_confirmation_time_restart_it(scene: Scene) -> None:
    event, took_s = scene.verdict("low", "free_blocks")
    assert event["free"] == 99
    assert 2 <= event["low_s"] <= took_s < 2 + 2 * POLL_S + 1 + SLACK_S
    assert "free_blocks" in scene.evidence("low", "free_blocks").splitlines()[0]


def test_one_dip_does_not(scene: Scene) -> None:
    scene.daemon.wait_event("recovered", "dip")
    assert scene.reasons("dip", "degraded") == ["free_blocks"]
    scene.unharmed("dip")


def test_low_blocks_under_load_are_shown_and_cleared(scene: Scene) -> None:
    event = scene.daemon.wait_event("degraded", "pressed")
    assert (event["reason"], event["free"]) == ("kv_pressure", 99)
    wait_until(lambda: time.time() > scene.begun["pressed"] + 6, 20, "three times the confirmation time")
    engine = scene.unharmed("pressed")
    assert [reason["code"] for reason in engine["reasons"]] == ["kv_pressure"]
    assert (engine["health"], engine["kv"]["free_blocks"]) == ("degraded", 99)
    assert scene.daemon.cli("status", "pressed").returncode == 0, "degraded is ready"
    scene.mood("pressed", free_blocks=None)
    assert scene.daemon.wait_event("recovered", "pressed")["reason"] == "kv_pressure"
    scene.daemon.wait_engine("pressed", lambda e: e["health"] == "ok", 20, "to be well")


def test_under_load_restart_is_the_literal_rule(scene: Scene) -> None:
    scene.verdict("literal", "free_blocks")
    assert scene.reasons("literal", "degraded")[0] == "kv_pressure"


def test_under_load_drain_takes_it_out_and_brings_it_back(scene: Scene) -> None:
    scene.daemon.wait_event("draining", "drained")
    scene.clients["drained"].stop()
    scene.mood("drained", free_blocks=None)
    assert scene.daemon.wait_event("ready", "drained", 2)["reason"] == "kv_pressure"
    engine = scene.daemon.wait_state("drained", "ready", 20)
    assert (engine["generation"], engine["last_exit"]) == (1, None)


def test_blocks_that_leaked_while_idle_restart_it_after_three_canaries(scene: Scene) -> None:
    event, took_s = scene.verdict("leak", "free_blocks")
    assert "nothing runs, and 3 of 3 canaries did not change that" in event["event"]
    assert took_s >= 2


def test_a_frozen_engine_with_work_is_found_in_time(scene: Scene) -> None:
    event, took_s = scene.verdict("frozen", "stalled")
    assert event["still_s"] >= STALL_AFTER_S
    assert took_s < STALL_AFTER_S + POLL_S + 1 + SLACK_S
    text = scene.evidence("frozen", "stalled")
    assert "VLLM::EngineCor" in text
    assert "State:\tT (stopped)" in text


def test_a_frozen_engine_that_looks_idle_is_found_by_canaries(scene: Scene) -> None:
    event, took_s = scene.verdict("idle", "unresponsive")
    assert event["canaries"] == 3
    assert took_s < 1 + 3 + POLL_S + 1 + SLACK_S


def test_a_shorter_stop_is_only_told(scene: Scene) -> None:
    scene.daemon.wait_event("recovered", "short")
    assert "stalled" in scene.reasons("short", "degraded")
    assert "stalled" in scene.reasons("short", "recovered")
    scene.unharmed("short")


def test_503_that_stays_is_killed(scene: Scene) -> None:
    event, took_s = scene.verdict("dead", "engine_dead")
    assert event["looks"] == 2
    assert took_s < POLL_S + 1 + SLACK_S
    assert scene.daemon.events("stopping", "dead") == [], "killed, not asked"


def test_garbage_only_degrades(scene: Scene) -> None:
    event = scene.daemon.wait_event("degraded", "garbage")
    assert (event["reason"], event["canaries"]) == ("garbage", 3)
    engine = scene.unharmed("garbage")
    assert [reason["code"] for reason in engine["reasons"]] == ["garbage"]
    scene.mood("garbage", completion="ok")
    assert scene.daemon.wait_event("recovered", "garbage")["reason"] == "garbage"


def test_a_port_that_nobody_listens_on_any_more(scene: Scene) -> None:
    event, took_s = scene.verdict("refused", "unreachable", 60)
    assert 30 <= event["refused_s"] <= took_s


def test_100_blocks_do_not_restart_it(scene: Scene) -> None:
    assert scene.daemon.events("degraded", "enough") == []
    assert scene.unharmed("enough")["kv"]["free_blocks"] == 100


def test_a_sleeping_engine_is_left_alone(scene: Scene) -> None:
    engine = scene.unharmed("asleep")
    assert (engine["health"], scene.daemon.events("degraded", "asleep")) == ("ok", [])
    log = scene.daemon.state_dir / "logs" / "asleep.log"

    def asked() -> int:
        return log.read_text(encoding="utf-8").count('"POST /v1/completions')

    canaries = asked()
    wait_until(lambda: time.time() > scene.begun["asleep"] + 10, 20, "ten times canary_after_s")
    assert asked() == canaries
    scene.mood("asleep", asleep=0, free_blocks=None)
    wait_until(lambda: asked() > canaries, 20, "a canary after it woke")
    scene.unharmed("asleep")


def test_a_slow_health_with_tokens_flowing_does_no_harm(scene: Scene) -> None:
    wait_until(lambda: time.time() > scene.begun["slow"] + 15, 30, "it to be slow for long")
    engine = scene.unharmed("slow")
    assert engine["requests"]["running"] >= 1
    assert engine["tokens_per_s"] > 10
    assert not {"stalled", "unreachable", "unresponsive"} & set(scene.reasons("slow", "degraded"))


def test_no_engine_was_touched_that_was_well(scene: Scene) -> None:
    restarted = {event["engine"] for event in scene.daemon.events("verdict")}
    assert restarted == {"low", "leak", "literal", "drained", "frozen", "idle", "dead", "refused"}
    assert all(scene.daemon.engine(name)["state"] == "ready" for name in scene.sims)
