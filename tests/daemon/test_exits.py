"""Exits nobody asked for: one new generation, nothing left of the old one; and the budget that bounds them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tests.daemon.harness import Daemon, Document
from tests.daemon.outside import Watcher, engine_processes, titled
from tests.daemon.sims import Sim, section
from tests.sim.engine import alive, wait_until

BROKEN = {"start_error": {"line": "RuntimeError: nobody knows why", "code": 1}}


def seconds_between(first: Document, second: Document) -> float:
    moments = [datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")) for event in (first, second)]
    return (moments[1] - moments[0]).total_seconds()


def shared_memory_of(pids: list[int]) -> set[Path]:
    pages = [Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace") for pid in pids]
    links = [str(fd.readlink()) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return {Path(found) for found in re.findall(r"/dev/shm/[^\s/]+", "\n".join([*pages, *links]))}


def expect_one_new_generation(daemon: Daemon, name: str, end: Callable[[list[int]], None]) -> Document:
    """Let `end` do something to the processes of an engine; the engine as it is after it has come back."""
    before, old = daemon.engine(name), daemon.engine_processes(name)
    assert len(old) >= 4, "API server, resource tracker, EngineCore, Worker"
    shared = shared_memory_of(old)
    assert shared, "the simulated engine is to leave shared memory"
    end(old)
    after = daemon.wait_state(name, "ready", 30, before["generation"] + 1)
    assert not [pid for pid in old if alive(pid)], "of the old generation"
    assert {s.generation for s in engine_processes(daemon.state_dir) if s.engine == name} == {after["generation"]}
    assert not [path for path in shared if path.exists()], "shared memory of the old generation"
    assert after["restarts"] == before["restarts"] + 1
    assert after["last_exit"]["generation"] == before["generation"]
    assert (after["health"], after["reasons"]) == ("ok", [])
    exited = daemon.events("exited", name)[-1]
    assert (exited["generation"], exited["reason"]) == (before["generation"], "exited")
    assert exited["exit_class"] == after["last_exit"]["class"]
    return after


def test_every_death_makes_exactly_one_new_generation_at_once(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"dead_503_s": 0.1}, restart={"backoff_reset_after_s": 0})

    def kill(title: str, number: signal.Signals) -> Callable[[list[int]], None]:
        return lambda old: os.kill(titled(old, title), number)

    def main_process(number: signal.Signals) -> Callable[[list[int]], None]:
        return lambda _: os.kill(daemon.engine("a")["pid"], number)

    with Daemon(section(sim)) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        first = daemon.wait_state("a", "ready")
        assert (first["generation"], first["restarts"], first["last_exit"]) == (1, 0, None)
        deaths = {
            main_process(signal.SIGSEGV): (None, signal.SIGSEGV),
            main_process(signal.SIGKILL): (None, signal.SIGKILL),
            kill("VLLM::EngineCore", signal.SIGKILL): (0, None),
            kill("VLLM::Worker", signal.SIGKILL): (0, None),
            main_process(signal.SIGTERM): (0, None),
        }
        for death, (code, number) in deaths.items():
            after = expect_one_new_generation(daemon, "a", death)
            last = after["last_exit"]
            assert (last["code"], last["signal"], last["class"]) == (code, number, "crash")
            assert last["advice"]
        assert after["generation"] == 1 + len(deaths) == len(sim.starts())
        for exited, spawned in zip(daemon.events("exited"), daemon.events("spawned")[1:], strict=True):
            assert seconds_between(exited, spawned) < 1, "backoff_initial_s = 0 is at once"
        assert watcher.twins == []
        assert watcher.looks > 10


def test_exit_codes_and_a_backoff_that_status_shows(tmp_path: Path) -> None:
    sim = Sim(tmp_path, restart={"backoff_initial_s": 1, "backoff_reset_after_s": 0})
    with Daemon(section(sim)) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        daemon.wait_state("a", "ready")
        for number, code in enumerate((0, 1), 1):

            def leave(_: list[int], number: int = number, code: int = code) -> None:
                sim.mood.set(exit={"code": code})
                waiting = daemon.wait_state("a", "backoff")
                sim.mood.clear()
                assert waiting["next_start_at"] > waiting["since"]
                assert [reason["code"] for reason in waiting["reasons"]] == ["exited"]
                assert f"exit code {code}" in waiting["reasons"][0]["message"]
                assert (waiting["pid"], waiting["health"]) == (None, None)
                shown = daemon.cli("status")
                assert shown.returncode == 1
                assert f"exit code {code}" in shown.stdout
                daemon.wait_event("spawned", "a", number + 1)

            after = expect_one_new_generation(daemon, "a", leave)
            assert (after["last_exit"]["code"], after["last_exit"]["class"]) == (code, "crash")
            assert seconds_between(daemon.events("restart")[-1], daemon.events("spawned")[-1]) >= 1
        assert daemon.cli("status").returncode == 0
        assert watcher.twins == []


def test_crash_loop_of_a_plan_that_never_worked(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood=BROKEN, restart={"backoff_initial_s": 0.05, "backoff_max_s": 0.1, "max_restarts": 3})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        failed = daemon.wait_state("a", "failed")
        assert [reason["code"] for reason in failed["reasons"]] == ["crash_loop"]
        assert "nobody knows why" in failed["reasons"][0]["message"]
        assert len(sim.starts()) == 4, "the first and max_restarts more"
        assert failed["last_exit"]["class"] == "crash"
        for verb in ("start", "restart"):
            refused = daemon.cli(verb, "a", "--wait")
            assert refused.returncode == 5
            assert "crash_loop" in refused.stderr
            assert "vllm-supervisor reset a" in refused.stderr

        daemon.kill()
        daemon.start()
        assert daemon.engine("a")["state"] == "failed", "the loop is not started anew by a new daemon"
        daemon.stop()
        daemon.start()
        assert daemon.engine("a")["state"] == "failed"
        assert len(sim.starts()) == 4

        refused = daemon.cli("reset", "a", "--wait")
        assert refused.returncode == 1, "it fails again"
        assert len(sim.starts()) == 8, "with a fresh budget"
        sim.mood.clear()
        daemon.request("reset", "a", "--wait")
        ready = daemon.engine("a")
        assert (ready["state"], ready["generation"], ready["restarts"]) == ("ready", 9, 8)


def test_the_budget_survives_a_killed_daemon(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood=BROKEN, restart={"backoff_initial_s": 0.4, "backoff_max_s": 0.4, "max_restarts": 3})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        path = daemon.state_dir / "node.json"

        def saved_failures() -> int:
            saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"engines": {}}
            return len(saved["engines"].get("a", {}).get("restart_times", ()))

        wait_until(lambda: saved_failures() >= 2, 60, "two failures to be on the disk")
        daemon.kill()
        wait_until(lambda: daemon.engine_processes("a") == [], 60, "the last start to end")
        spent, starts = saved_failures(), len(sim.starts())
        daemon.start()
        failed = daemon.wait_state("a", "failed")
        assert failed["reasons"][0]["code"] == "crash_loop"
        assert len(sim.starts()) == starts + 4 - spent, "what was spent before counts"


def test_a_plan_that_once_worked_is_never_given_up(tmp_path: Path) -> None:
    restart = {"backoff_initial_s": 0.05, "backoff_max_s": 0.3, "max_restarts": 2}
    sim = Sim(tmp_path, restart=restart)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        pid = daemon.wait_state("a", "ready")["pid"]
        sim.mood.set(**BROKEN)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(sim.starts()) >= 4, 30, "more starts than the budget")
        daemon.kill()
        daemon.start()
        wait_until(lambda: len(sim.starts()) >= 7, 30, "still more")
        assert daemon.engine("a")["state"] in {"backoff", "starting", "stopping"}
        over = [e for e in daemon.events("restart") if e["restarts_in_window"] > e["max_restarts"]]
        assert over
        assert all(event["delay_s"] == restart["backoff_max_s"] for event in over), "slowly, at the cap"
        assert daemon.events("failed") == []
        sim.mood.clear()
        assert daemon.wait_state("a", "ready")["generation"] == len(sim.starts())
