"""Engines that answer slowly, endlessly or with garbage: the daemon stays small, quick and silent about it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.outside import rss_mib
from tests.daemon.sims import Sim, section
from tests.sim.engine import wait_until

RSS_MAX_MIB = 80
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e]")


def status_does_not_hang(daemon: Daemon) -> None:
    began = time.monotonic()
    assert daemon.cli("status").returncode in {0, 1}
    assert time.monotonic() - began < 20, "it takes 50 ms"


def test_hostile_answers_cost_little(tmp_path: Path) -> None:
    moods: dict[str, dict[str, object]] = {
        "drip": {"drip": {"bytes": 1, "interval_s": 0.3}},
        "huge": {"huge_mib": 64},
        "binary": {"garbage_page": "binary"},
        "html": {"garbage_page": "html"},
        "truncated": {"garbage_page": "truncated"},
        "control": {"garbage_page": "control"},
        "nan": {"garbage_page": "nan"},
        "nested": {"health": {"status": 200, "body": "[" * 60_000}},
        "numbers": {"health": {"status": 200, "json": {"block_table_stats": {"free_blocks": -1, "total_blocks": "x"}}}},
        "silent": {"hang": ["health", "metrics"]},
    }
    sims = [Sim(tmp_path, name, probe={"timeout_s": 1}) for name in moods]
    with Daemon(section(*sims), max_parallel_starts=len(sims)) as daemon:
        daemon.start()
        pids = {sim.name: daemon.wait_state(sim.name, "ready")["pid"] for sim in sims}
        for sim in sims:
            sim.mood.set(**moods[sim.name])
        until = time.monotonic() + 3
        highest_mib = 0.0
        while time.monotonic() < until:
            highest_mib = max(highest_mib, rss_mib(daemon.pid))
            status_does_not_hang(daemon)
        assert highest_mib < RSS_MAX_MIB
        document = daemon.status()
        assert not CONTROL.search(json.dumps(document, ensure_ascii=False).replace("\n", ""))
        for engine in document["engines"]:
            assert (engine["state"], engine["pid"]) == ("ready", pids[engine["name"]]), engine
        # What was known grows old; nothing is made up.
        assert daemon.engine("silent")["kv"]["age_s"] is None or daemon.engine("silent")["kv"]["age_s"] > 1
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 20, "drains end although nobody can say what is in flight"


def test_last_words_cannot_steer_a_terminal(tmp_path: Path) -> None:
    words = "Error: \x1b[2J\x1b]0;owned\x07\r\x00\u202egnp.exe \x9b31m end"
    sim = Sim(tmp_path, mood={"start_error": {"line": words, "code": 1}}, restart={"backoff_initial_s": 60})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        daemon.wait_state("a", "backoff")
        for text in (daemon.cli("status").stdout, daemon.cli("logs", "a").stdout, daemon.log.read_text("utf-8")):
            assert "end" in text
            assert not CONTROL.search(text.replace("\n", "")), repr(text)
        message = daemon.engine("a")["reasons"][0]["message"]
        assert not CONTROL.search(message)


def test_a_flood_of_lines_costs_the_daemon_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"spam": {"lines_per_s": 20_000, "line": "x" * 200}})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        pid = daemon.wait_state("a", "ready")["pid"]
        log = daemon.state_dir / "logs" / "a.log"
        wait_until(lambda: log.stat().st_size > 8 * 2**20, 60, "8 MiB of log")
        status_does_not_hang(daemon)
        os.kill(pid, signal.SIGKILL)
        exited = daemon.wait_event("exited", "a")
        assert len(exited["event"]) < 1000
        sim.mood.clear()
        daemon.wait_state("a", "ready", generation=2)
        assert rss_mib(daemon.pid) < RSS_MAX_MIB
        assert daemon.cli("logs", "a", "-n", "5").stdout.count("\n") == 5
