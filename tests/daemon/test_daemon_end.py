"""The daemon ends: with its engines, within bounds, whatever they are doing; killed, it leaves them to the next one."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.harness import Daemon, Document
from tests.daemon.outside import Watcher, engine_processes
from tests.daemon.sims import Sim, section
from tests.daemon.test_stops import busy, stream
from tests.sim.engine import SIM_PATH, alive, title_of, wait_until

SLACK_S = 10


def test_sigterm_ends_engines_in_every_state(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"stop_timeout_s": 2}
    sims = {
        "ready": Sim(tmp_path, "ready"),
        "starting": Sim(tmp_path, "starting", mood={"ready_delay_s": 60}),
        "warming": Sim(tmp_path, "warming", mood={"completion_delay_s": 60}, warmup={"enabled": True}, **quick),
        "backoff": Sim(tmp_path, "backoff", mood={"exit": {"code": 1}}, restart={"backoff_initial_s": 60}),
        "failed": Sim(tmp_path, "failed", mood={"start_error": {"capture": "badflag"}}),
        "draining": Sim(tmp_path, "draining"),
        "busy": Sim(tmp_path, "busy", mood={"tokens_per_s": 10}, **quick),
        "escape": Sim(tmp_path, "escape", mood={"escape": True, "ignore_sigterm": "all"}, **quick),
        "waiting": Sim(tmp_path, "waiting"),
    }
    with Daemon(section(*sims.values()), max_parallel_starts=9) as daemon, socket.socket() as holder:
        holder.bind(("127.0.0.1", sims["waiting"].port))
        holder.listen()
        daemon.start()
        for name in ("busy", "escape"):
            daemon.wait_state(name, "ready")
        daemon.wait_state("draining", "ready")
        daemon.request("drain", "draining")
        for name in sims.keys() - {"busy", "escape"}:
            daemon.wait_state(name, name)
        with stream(sims["busy"].port, 1000):
            busy(daemon, "busy")
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < 1 + 5 + SLACK_S, "drain, then stop"
        assert engine_processes(daemon.state_dir) == []
        assert not daemon.socket.exists()
        assert daemon.events()[-1]["kind"] == "daemon_ended"
        assert daemon.cli("status").returncode == 3

        # It was not the operator's stop: the next daemon starts again what was wanted.
        daemon.configure(section(sims["ready"], sims["draining"]))
        daemon.start()
        daemon.wait_state("ready", "ready", generation=2)
        assert daemon.engine("draining")["wanted"] == "running"


def test_a_second_sigterm_waits_for_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"drain_timeout_s": 600, "stop_timeout_s": 600}
    busy_one = Sim(tmp_path, "busy", mood={"tokens_per_s": 10}, **settings)
    stubborn = Sim(tmp_path, "stubborn", mood={"ignore_sigterm": "all"}, **settings)
    starting = Sim(tmp_path, "starting", mood={"ready_delay_s": 600, "ignore_sigterm": "all"}, **settings)
    with Daemon(section(busy_one, stubborn, starting)) as daemon:
        daemon.start()
        for name in ("busy", "stubborn"):
            daemon.wait_state(name, "ready")
        with stream(busy_one.port, 10000):
            busy(daemon, "busy")
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait_state("busy", "draining")
            daemon.wait_state("stubborn", "stopping")
            refused = daemon.cli("start", "busy")
            assert (refused.returncode, "shutting down" in refused.stderr) == (5, True)
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < SLACK_S


def test_signals_before_anything_runs(tmp_path: Path) -> None:
    """SIGTERM may come at any moment of the daemon's own start."""
    sim = Sim(tmp_path, mood={"ready_delay_s": 600, "swallow_sigterm_while_starting": False})
    with Daemon(section(sim)) as daemon:
        for delay_s in (0.05, 0.2, 0.3, 0.4, 0.5):
            daemon.start(wait=False)
            time.sleep(delay_s)
            assert daemon.stop() in {0, -signal.SIGTERM}
            assert engine_processes(daemon.state_dir) == []


def adopted(daemon: Daemon, name: str, before: Document) -> Document:
    after = daemon.wait_state(name, "ready")
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])
    assert after["restarts"] == before["restarts"]
    return after


def test_a_killed_daemon_leaves_its_engines_to_the_next(tmp_path: Path) -> None:
    kept = Sim(tmp_path, "kept", warmup={"enabled": True, "prefill_tokens": 16, "decode_tokens": 2})
    orphans = Sim(tmp_path, "orphans")
    changed = Sim(tmp_path, "changed")
    removed = Sim(tmp_path, "removed", mood={"escape": True})
    stopped = Sim(tmp_path, "stopped")
    early = Sim(tmp_path, "early", mood={"ready_delay_s": 600})
    sims = [kept, orphans, changed, removed, stopped, early]
    with Daemon(section(*sims)) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        before = {sim.name: daemon.wait_state(sim.name, "ready") for sim in sims if sim is not early}
        before["early"] = daemon.wait_state("early", "starting", generation=1)
        daemon.request("stop", "stopped", "--wait")
        processes = {sim.name: daemon.engine_processes(sim.name) for sim in sims}
        daemon.kill()
        os.kill(before["orphans"]["pid"], signal.SIGKILL)
        wait_until(lambda: not alive(before["orphans"]["pid"]), 10, "the main process to die")
        assert [pid for pid in processes["orphans"] if alive(pid)], "orphans"
        changed.change(args={"max-model-len": 512})
        early.mood.patch(ready_delay_s=0)
        daemon.configure(section(kept, orphans, changed, stopped, early))
        daemon.start()

        after = adopted(daemon, "kept", before["kept"])
        assert after["kv"]["age_s"] is not None or daemon.wait_engine(
            "kept", lambda engine: engine["kv"]["age_s"] is not None, 30, "to be probed"
        )
        assert len([event for event in daemon.events("ready", "kept") if "first answer" in event["event"]]) == 1
        told = daemon.events("adopted", "kept")
        assert [(event["generation"], event["level"]) for event in told] == [(1, "notice")]
        assert {event["engine"] for event in daemon.events("leftover")} == {"changed", "removed"}
        assert "orphans ended while " in daemon.wait_event("exited", "orphans")["event"]

        for name in ("orphans", "changed"):
            daemon.wait_state(name, "ready", generation=2)
            assert not [pid for pid in processes[name] if alive(pid)]
        assert changed.starts()[-1]["args"][-4:] != kept.starts()[-1]["args"][-4:]
        wait_until(lambda: not [pid for pid in processes["removed"] if alive(pid)], 30, "the removed one to end")
        wait_until(lambda: "removed" not in {e["name"] for e in daemon.status()["engines"]}, 30, "to be forgotten")
        assert daemon.engine("stopped")["state"] == "stopped"

        # What was starting goes on starting; its end is noticed although it is no child of the daemon.
        os.kill(before["early"]["pid"], signal.SIGKILL)
        again = daemon.wait_state("early", "ready", generation=2)
        assert again["last_exit"]["code"] is again["last_exit"]["signal"] is None
        os.kill(after["pid"], signal.SIGKILL)
        daemon.wait_state("kept", "ready", generation=2)
        assert not [pid for pid in processes["kept"] if alive(pid)]
        assert watcher.twins == []


def test_an_engine_that_ends_while_no_daemon_runs_is_told_and_not_counted(tmp_path: Path) -> None:
    sims = [Sim(tmp_path, name, restart={"backoff_initial_s": 0.2}) for name in ("whole", "orphans")]
    with Daemon(section(*sims)) as daemon:
        daemon.start()
        for sim in sims:
            daemon.wait_state(sim.name, "ready")
        daemon.kill()
        for seen in engine_processes(daemon.state_dir):
            if seen.engine == "whole" or " serve " in title_of(seen.pid):
                os.kill(seen.pid, signal.SIGKILL)
        wait_until(lambda: not daemon.engine_processes("whole"), 20, "its end")
        daemon.start()
        for sim in sims:
            daemon.wait_state(sim.name, "ready", generation=2)
            told = daemon.wait_event("exited", sim.name)["event"]
            assert f"{sim.name} ended while " in told
            assert ": ended, exit code unknown (crash): " in told
            assert daemon.engine(sim.name)["last_exit"]["class"] == "crash"
            again = daemon.wait_event("restart", sim.name)
            assert "is started again in " in again["event"]
            assert again["restarts_in_window"] == 0
        assert {seen.generation for seen in engine_processes(daemon.state_dir)} == {2}


def test_a_bad_configuration_leaves_no_engine_unwatched(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        pid = daemon.wait_state("a", "ready")["pid"]
        daemon.kill()
        daemon.write_config("[supervisor\n")
        daemon.start()
        assert "config.toml" in daemon.status()["supervisor"]["config_error"]
        assert daemon.wait_state("a", "ready")["pid"] == pid
        daemon.kill()
        (daemon.state_dir / "applied.json").unlink()
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 2
        assert "cannot watch a, left running: " in daemon.log.read_text(encoding="utf-8")
        daemon.configure(section(sim))
        daemon.start()
        assert daemon.status()["supervisor"]["config_error"] is None
        assert daemon.wait_state("a", "ready")["pid"] == pid


def test_an_operators_stop_outlives_daemons_but_not_boots(tmp_path: Path) -> None:
    stopped, manual = Sim(tmp_path, "stopped"), Sim(tmp_path, "manual", autostart=False)
    with Daemon(section(stopped, manual)) as daemon:
        daemon.start()
        daemon.wait_state("stopped", "ready")
        assert daemon.engine("manual")["state"] == "stopped"
        assert daemon.cli("status").returncode == 0
        daemon.request("stop", "stopped", "--wait")
        daemon.request("start", "manual", "--wait")
        for end in (daemon.kill, daemon.stop):
            end()
            daemon.start()
            daemon.wait_state("manual", "ready")
            assert daemon.engine("stopped")["state"] == "stopped"
        daemon.stop()
        path = daemon.state_dir / "node.json"
        saved = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**saved, "boot_id": "an earlier one"}), encoding="utf-8")
        daemon.start()
        assert daemon.wait_state("stopped", "ready")["generation"] == 2, "generations go on over boots"
        assert daemon.engine("manual")["state"] == "stopped"


def test_a_stop_that_was_answered_is_durable(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        for _ in range(4):
            daemon.request("start", "a", "--wait")
            daemon.request("stop", "a", "--now")
            daemon.kill()
            daemon.start()
            assert daemon.wait_state("a", "stopped")["wanted"] == "stopped"
            assert daemon.engine_processes("a") == []


def test_one_daemon_for_a_state_directory_and_a_socket(tmp_path: Path) -> None:
    sim, other = Sim(tmp_path, "a"), Sim(tmp_path, "b")
    with Daemon(section(sim)) as daemon:
        daemon.start()
        before = daemon.wait_state("a", "ready")
        first = daemon.process
        assert first is not None
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(30) == 75
        said = daemon.log.read_text(encoding="utf-8").splitlines()[-1]
        assert f"vllm-supervisor with pid {first.pid}" in said
        daemon.process = first
        with Daemon(section(other), socket=str(daemon.socket)) as second:
            second.start(wait=False)
            assert second.process is not None
            assert second.process.wait(30) == 75
            assert "another instance answers" in second.log.read_text(encoding="utf-8")
            assert engine_processes(second.state_dir) == []
            assert other.starts() == []
        assert daemon.engine("a") == {**daemon.engine("a"), "pid": before["pid"], "state": "ready"}
        # A socket on which nobody answers any more is replaced.
        daemon.kill()
        assert daemon.socket.exists()
        assert daemon.cli("status").returncode == 3
        daemon.start()
        adopted(daemon, "a", before)


GARBAGE = [
    b"\0" * 4096,
    b"[" * 100_000,
    b'{"version": 1, "boot_id": 3, "engines": []}',
    b'{"version": 99, "boot_id": "x", "engines": {}}',
]


@pytest.mark.parametrize("place", ["node.json", "identity/a.jsonl"])
def test_records_that_cannot_be_read(tmp_path: Path, place: str) -> None:
    """Nothing is doubled, nothing is lost; at worst an engine is restarted or its counters start anew."""
    sim = Sim(tmp_path, mood={"escape": True})
    with Daemon(section(sim)) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        engine = daemon.wait_state("a", "ready")
        path = daemon.state_dir / place
        for number, garbage in enumerate(GARBAGE, 1):
            daemon.kill()
            path.write_bytes(garbage)
            daemon.start()
            generation = engine["generation"] + (0 if place == "node.json" else 1)
            engine = daemon.wait_state("a", "ready", generation=generation)
            assert len(daemon.events("trouble")) == number, daemon.events("trouble")
            assert str(path) in daemon.events("trouble")[-1]["event"]
            assert {seen.generation for seen in engine_processes(daemon.state_dir)} == {generation}
        daemon.kill()
        path.unlink()
        path.mkdir()
        daemon.start()
        daemon.wait_engine("a", lambda e: e["state"] in {"ready", "waiting"}, 30, "to be ready or to wait")
        assert daemon.cli("stop", "a", "--wait").returncode == 0
        assert watcher.twins == []


@pytest.mark.parametrize("facts", [{"ended": True}, {"boot_id": "an earlier one"}, {"start_ticks": 1}])
def test_a_record_that_is_wrong_about_what_lives(tmp_path: Path, facts: dict[str, Any]) -> None:
    """Then the marks in the environment of the processes tell: they are ended, and only then comes a new generation."""
    sim = Sim(tmp_path, mood={"escape": True})
    with Daemon(section(sim)) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        daemon.wait_state("a", "ready")
        old = daemon.engine_processes("a")
        daemon.kill()
        path = daemon.state_dir / "identity" / "a.jsonl"
        identity, *later = path.read_text(encoding="utf-8").splitlines()
        changed = identity if "ended" in facts else json.dumps({**json.loads(identity), **facts})
        path.write_text("\n".join([changed, *later, json.dumps(facts)]) + "\n", encoding="utf-8")
        daemon.start()
        daemon.wait_state("a", "ready", generation=2)
        assert not [pid for pid in old if alive(pid)]
        assert watcher.twins == []


def test_hostile_values_in_the_saved_state(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        engine = daemon.wait_state("a", "ready")
        daemon.kill()
        path = daemon.state_dir / "node.json"
        saved = json.loads(path.read_text(encoding="utf-8"))
        saved["engines"]["a"] |= {
            "generation": -3,
            "wanted": "perhaps",
            "warm_generation": 1e400,
            "failures": 10**30,
            "restart_times": [float("nan"), float("inf"), -1e400, 10**400, "x", {}],
            "failed": {"kind": ["crash_loop"], "message": 3},
            "last_exit": {"class": "crash", "at": 1e300, "code": 10**30, "advice": "\x1b[2J" * 1000},
        }
        saved["engines"]["gone"] = {"generation": 7}
        path.write_text(json.dumps(saved), encoding="utf-8")
        daemon.start()
        adopted(daemon, "a", engine)
        assert daemon.cli("status").returncode == 0
        os.kill(engine["pid"], signal.SIGKILL)
        daemon.wait_engine("a", lambda e: e["state"] != "ready", 30, "to be noticed")
        daemon.request("reset", "a")
        daemon.wait_state("a", "ready", generation=2)


def test_a_foreign_process_is_never_touched(tmp_path: Path) -> None:
    """Even when a record names its pid, and though it looks the same."""
    sim, other = Sim(tmp_path, "a"), Sim(tmp_path, "b")
    with Daemon(section(sim)) as daemon:
        environment = {"PATH": os.environ["PATH"], **other.settings["env"]}
        arguments = [str(SIM_PATH), "serve", "tiny", "--host", "127.0.0.1", "--port", str(other.port)]
        foreign = os.posix_spawn(arguments[0], arguments, environment, setsid=True)
        try:
            daemon.start()
            daemon.wait_state("a", "ready")
            daemon.kill()
            for pid in daemon.engine_processes("a"):
                os.kill(pid, signal.SIGKILL)
            path = daemon.state_dir / "identity" / "a.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines()
            path.write_text(json.dumps({**json.loads(lines[0]), "pid": foreign}) + "\n", encoding="utf-8")
            daemon.start()
            daemon.wait_state("a", "ready", generation=2)
            assert alive(foreign)
            daemon.stop()
            assert alive(foreign)
        finally:
            os.killpg(foreign, signal.SIGKILL)
            os.waitpid(foreign, 0)
