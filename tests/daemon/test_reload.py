"""A changed configuration: refused as a whole, or applied with the least harm."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.outside import Watcher, engine_processes
from tests.daemon.sims import Sim, section
from tests.sim.engine import wait_until


def pids(daemon: Daemon) -> dict[str, tuple[int, int]]:
    return {engine["name"]: (engine["pid"], engine["generation"]) for engine in daemon.status()["engines"]}


def test_what_does_not_validate_changes_nothing(tmp_path: Path) -> None:
    a, b = Sim(tmp_path, "a"), Sim(tmp_path, "b")
    with Daemon(section(a, b)) as daemon:
        daemon.start()
        for name in ("a", "b"):
            daemon.wait_state(name, "ready")
        before = pids(daemon)
        good = daemon.config.read_text(encoding="utf-8")
        a.change(args={"max-model-len": 256})
        b.change(port=a.port, drain_timeout_s=-1, colour="red")
        daemon.configure(section(a, b))
        refused = daemon.cli("reload", "--wait")
        assert refused.returncode == 2
        for words in ("engine.b.port", "engine.b.drain_timeout_s", "engine.b.colour", str(daemon.config)):
            assert words in refused.stderr
        told = len(daemon.events("reload"))
        os.kill(daemon.pid, signal.SIGHUP)
        event = daemon.wait_event("reload", count=told + 1)
        assert event["level"] == "error"
        assert "nothing was changed" in event["event"]

        # Valid, but it cannot be launched here.
        daemon.write_config(good.replace('model = "tiny"', 'model = "/nonexistent/model"', 1))
        refused = daemon.cli("reload")
        assert refused.returncode == 2
        assert "/nonexistent/model" in refused.stderr
        daemon.config.unlink()
        refused = daemon.cli("reload")
        assert (refused.returncode, str(daemon.config) in refused.stderr) == (2, True)

        assert pids(daemon) == before
        assert {engine["state"] for engine in daemon.status()["engines"]} == {"ready"}
        daemon.write_config(good)
        assert "nothing changes" in daemon.request("reload", "--wait")
        assert pids(daemon) == before


def test_only_what_changed_is_restarted(tmp_path: Path) -> None:
    sims = {name: Sim(tmp_path, name) for name in ("args", "settings", "same", "removed", "drained", "off")}
    with Daemon(section(*sims.values())) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        for name in sims:
            daemon.wait_state(name, "ready")
        daemon.request("stop", "off", "--wait")
        daemon.request("drain", "drained")
        before = pids(daemon)
        for name in ("args", "drained", "off"):
            sims[name].change(args={"max-model-len": 256})
        sims["settings"].change(drain_timeout_s=7, stop_timeout_s=9, restart={"max_restarts": 9})
        removed, new = sims.pop("removed"), Sim(tmp_path, "new")
        daemon.configure(section(*sims.values(), new))
        said = daemon.request("reload", "--wait").splitlines()
        for words in (
            "args: its launch plan changed: it is restarted",
            "settings: its settings changed: applied without a restart",
            "removed: is no longer configured: it is stopped and forgotten",
            "new: is new",
            "drained: its launch plan changed: used at the next start",
            "off: its launch plan changed: used at the next start",
        ):
            assert words in said
        assert not [line for line in said if line.startswith("same")]
        after = pids(daemon)
        assert after.keys() == {"args", "settings", "same", "drained", "off", "new"}
        for name in ("settings", "same", "drained"):
            assert after[name] == before[name], name
        assert after["args"][1] == 2
        assert "--max-model-len" in sims["args"].starts()[-1]["args"]
        assert after["new"][1] == 1
        assert daemon.engine("drained")["state"] == "draining"
        assert daemon.engine("off")["state"] == "stopped"
        assert daemon.engine_processes("removed") == []
        told = {event["engine"] for event in daemon.events("reconfigured") if "engine" in event}
        assert {"args", "settings", "drained", "off"} <= told

        # Taken back into traffic, it gets what it was configured to be.
        daemon.request("start", "drained", "--wait")
        assert daemon.engine("drained")["generation"] == 2
        daemon.request("start", "off", "--wait")
        assert "--max-model-len" in sims["off"].starts()[-1]["args"]

        # The same once more, and an engine that is on its way out is wanted again.
        removed.mood.patch(stop_delay_s=1)
        daemon.configure(section(*sims.values(), new, removed))
        daemon.request("reload", "--wait")
        daemon.configure(section(*sims.values(), new))
        daemon.request("reload")
        assert daemon.engine("removed")["state"] in {"draining", "stopping"}
        assert daemon.cli("start", "removed").returncode == 5, "it is not configured any more"
        daemon.configure(section(*sims.values(), new, removed))
        daemon.request("reload", "--wait")
        assert daemon.engine("removed")["state"] == "ready"
        assert watcher.twins == []


def test_a_reload_clears_failures_of_what_it_changes(tmp_path: Path) -> None:
    config = Sim(tmp_path, "config", mood={"reject_flags": ["--max-model-len"]}, args={"max-model-len": 256})
    loop = Sim(tmp_path, "loop", mood={"start_error": {"line": "boom"}}, restart={"max_restarts": 0})
    with Daemon(section(config, loop)) as daemon:
        daemon.start()
        for name in ("config", "loop"):
            daemon.wait_state(name, "failed")
        assert "nothing changes" in daemon.request("reload")
        assert {engine["state"] for engine in daemon.status()["engines"]} == {"failed"}
        config.change(args={"max-model-len": 256, "block-size": 32})
        config.mood.clear()
        loop.change(restart={"max_restarts": 1})
        loop.mood.clear()
        daemon.configure(section(config, loop))
        daemon.request("reload", "--wait")
        assert {engine["state"] for engine in daemon.status()["engines"]} == {"ready"}


def test_reloads_while_engines_come_and_go(tmp_path: Path) -> None:
    """SIGHUP at any moment, hundreds of them: the loop is never caught in the middle of something."""
    sims = [Sim(tmp_path, name, mood={"exit": {"after_s": 0.1, "code": 1}}) for name in ("a", "b")]
    for sim in sims:
        sim.change(restart={"max_restarts": 10_000, "backoff_reset_after_s": 0})
    with Daemon(section(*sims)) as daemon, Watcher(daemon.state_dir) as watcher:
        daemon.start()
        ended = threading.Event()

        def storm() -> None:
            while not ended.wait(0.003):
                os.kill(daemon.pid, signal.SIGHUP)

        thread = threading.Thread(target=storm, daemon=True)
        thread.start()
        try:
            wait_until(lambda: len(daemon.events("exited")) >= 8, 60, "eight crashes", every_s=0.1)
        finally:
            ended.set()
            thread.join(10)
        for sim in sims:
            sim.mood.clear()
        daemon.request("reload", "--wait", "--timeout", "60")
        for sim in sims:
            daemon.wait_state(sim.name, "ready", 60)
        assert watcher.twins == []
        assert {event["level"] for event in daemon.events("reload")} == {"notice"}
        assert len({seen.generation for seen in engine_processes(daemon.state_dir)}) <= len(sims)
