"""Starts that fail: classified from what vLLM printed, retried only where that can help, bounded in time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from threading import Thread

from tests.daemon.harness import Daemon
from tests.daemon.sims import Sim, section
from tests.sim.engine import wait_until

CAPTURES = {
    "badchoice": "--kv-cache-dtype: invalid choice: 'fp17'",
    "badflag": "remove or rename it",
    "badvalue": "--max-model-len: invalid",
    "config_unknown_key": "remove or rename it",
    "empty_dir": "Invalid repository ID or local directory",
    "gpu_mem_util_bad": "CacheConfig",
    "hub_name_offline": "downloads are off",
    "maxlen_gt_kv": "max-model-len",
    "maxlen_gt_model": "max_model_len",
    "missing_dir": "correct `model`",
    "spec_old_flag": "remove or rename it",
}
"""Captured failures of a real vLLM whose cause is the configuration, and a word that the advice has to hold."""


def failing(folder: Path, capture: str) -> Sim:
    name = capture.replace("_", "-")
    return Sim(folder, name, mood={"start_error": {"capture": capture}})


def test_a_wrong_configuration_is_said_and_not_retried(tmp_path: Path) -> None:
    sims = {capture: failing(tmp_path, capture) for capture in CAPTURES}
    taken = failing(tmp_path, "port_in_use")
    hub = Sim(tmp_path, "hub", mood={"start_error": {"line": "HfHubHTTPError: 429 Client Error", "code": 1}})
    with Daemon(section(*sims.values(), taken, hub), max_parallel_starts=3) as daemon:
        daemon.start()
        for capture, word in CAPTURES.items():
            engine = daemon.wait_state(sims[capture].name, "failed")
            assert [reason["code"] for reason in engine["reasons"]] == ["config"], capture
            assert engine["last_exit"]["class"] == "config"
            assert word in engine["last_exit"]["advice"], capture
            assert engine["last_exit"]["advice"] in engine["reasons"][0]["message"]
            assert engine["next_start_at"] is None
        shown = daemon.cli("status").stdout
        assert "failed" in shown
        assert "Traceback" not in json.dumps(daemon.status())

        engine = daemon.wait_state(taken.name, "waiting")
        assert engine["last_exit"]["class"] == "resource"
        assert "the port is taken" in engine["reasons"][0]["message"]

        engine = daemon.wait_state("hub", "backoff")
        assert engine["last_exit"]["class"] == "external"
        again_at = datetime.fromisoformat(engine["next_start_at"].replace("Z", "+00:00"))
        assert (again_at - datetime.now(timezone.utc)).total_seconds() > 50, "asking the hub at once does not help"
        daemon.request("start", "hub")
        wait_until(lambda: len(hub.starts()) == 2, 30, "a start that somebody asked for")

        refused = daemon.cli("start", "badflag")
        assert refused.returncode == 5
        assert "vllm-supervisor reset badflag" in refused.stderr

        assert all(len(sim.starts()) == 1 for sim in sims.values()), "none was tried twice"
        assert daemon.stop() == 0
        daemon.start()
        for sim in sims.values():
            daemon.wait_state(sim.name, "failed", generation=2)
        assert all(len(sim.starts()) == 2 for sim in sims.values()), "once more by a new daemon"

        sims["badflag"].mood.clear()
        daemon.request("reset", "badflag", "--wait")
        assert daemon.engine("badflag")["generation"] == 3


def test_what_cannot_be_launched_is_not_spawned(tmp_path: Path) -> None:
    model, key = tmp_path / "model", tmp_path / "key"
    no_model = Sim(tmp_path, "no-model", model=str(model))
    no_program = Sim(tmp_path, "no-program", command=[str(tmp_path / "vllm"), "serve"])
    no_key = Sim(tmp_path, "no-key", api_key_file=str(key))
    good = Sim(tmp_path, "good")
    with Daemon(section(no_model, no_program, no_key, good)) as daemon:
        daemon.start()
        for sim, missing in ((no_model, model), (no_program, tmp_path / "vllm"), (no_key, key)):
            engine = daemon.wait_state(sim.name, "failed")
            assert engine["reasons"][0]["code"] == "config"
            assert str(missing) in engine["reasons"][0]["message"]
            assert (engine["generation"], engine["pid"], sim.starts()) == (0, None, [])
        daemon.wait_state("good", "ready")
        assert daemon.cli("status").returncode == 1
        model.mkdir()
        daemon.request("reset", "no-model", "--wait")
        assert daemon.engine("no-model")["generation"] == 1


def test_a_start_may_take_long_but_not_stand_still(tmp_path: Path) -> None:
    def sim(name: str, **mood: object) -> Sim:
        timeouts = {"start_timeout_s": 2, "start_timeout_max_s": 4 if name == "endless" else 60}
        return Sim(tmp_path, name, mood={"ready_delay_s": 60, **mood}, restart={"max_restarts": 0}, **timeouts)

    still = sim("still")
    repeats = sim("repeats", spam={"lines_per_s": 50, "line": "Waiting for core engine process(es) 1 of 2"})
    endless = sim("endless", leak_mib_per_s=20)
    words = [f"loading {chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(100)]
    slow = sim("slow", ready_delay_s=6, start_lines=words)
    with Daemon(section(still, repeats, endless, slow), poll_interval_s=0.3) as daemon:
        daemon.start()
        for name in ("still", "repeats"):
            engine = daemon.wait_state(name, "failed")
            told = daemon.events("stopping", name)
            assert [event["reason"] for event in told] == ["start_timeout"]
            assert "no progress for 2 s" in engine["reasons"][0]["message"]
        engine = daemon.wait_state("endless", "failed")
        assert "not answering after 4 s in all" in engine["reasons"][0]["message"]
        engine = daemon.wait_state("slow", "ready")
        assert (engine["generation"], len(slow.starts())) == (1, 1), "6 s of new lines with start_timeout_s = 2"


def test_a_timed_out_start_is_tried_again(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"ready_delay_s": 60, "swallow_sigterm_while_starting": False}, start_timeout_s=1)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        daemon.wait_event("stopping", "a")
        sim.mood.clear()
        engine = daemon.wait_state("a", "ready", generation=2)
        assert engine["last_exit"]["generation"] == 1
        assert daemon.events("restart", "a")[0]["reason"] == "start_timeout"


def test_answering_is_noticed_within_100_ms(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"ready_delay_s": 0.3})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready")
        delays_s = []
        for number in range(2, 7):
            daemon.request("stop", "a", "--wait")
            listening = when(lambda: listens(sim.port))
            daemon.request("start", "a", "--wait")
            told = daemon.wait_event("answering", "a", number)
            at = datetime.fromisoformat(told["timestamp"].replace("Z", "+00:00")).timestamp()
            delays_s.append(at - listening())
        assert statistics.median(delays_s) < 0.1, delays_s


def when(condition: Callable[[], bool]) -> Callable[[], float]:
    """Look all the time, in a thread, until it is so; the result gives the time since the epoch."""
    seen: list[float] = []

    def look() -> None:
        wait_until(condition, 30, "the engine to listen", every_s=0.002)
        seen.append(time.time())

    thread = Thread(target=look, daemon=True)
    thread.start()

    def result() -> float:
        thread.join(30)
        return seen[0]

    return result


def listens(port: int) -> bool:
    row = f":{port:04X} 00000000:0000 0A "
    return row in Path("/proc/net/tcp").read_text(encoding="ascii")
