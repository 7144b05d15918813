"""The history of a real daemon: it explains what happened, survives the daemon's death, and can be decided again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from supervisord.core import node as reducer
from supervisord.core.messages import Record, Sampled
from supervisord.history_read import Reader
from supervisord.history_store import FILE
from tests.daemon.harness import Daemon
from tests.daemon.sims import Sim, section
from tests.sim.engine import wait_until

OF_THE_CORE = {"requested", "spawned", "answering", "ready", "exited", "restart", "draining", "stopping", "stopped"}
OF_THE_CORE |= {"free_blocks_rule", "degraded", "recovered"}


def sections(text: str) -> list[str]:
    return [line[:5].strip() for line in text.splitlines() if line[:5].strip().isupper()]


def test_what_happened_is_explained_recorded_and_decided_again(tmp_path: Path) -> None:
    sim = Sim(tmp_path, env={"HF_TOKEN": "hf_precious"})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        first = daemon.wait_state("a", "ready")
        assert daemon.request("why", "a").startswith("a was never restarted\n")
        os.kill(first["pid"], signal.SIGKILL)
        daemon.wait_state("a", "ready", generation=2)
        wait_until(lambda: "spawned" in daemon.request("events", "--engine", "a"), 20, "the history to be written")
        wait_until(lambda: "ready " in daemon.request("why", "a").splitlines()[0], 20, "the story to be whole")
        told = daemon.request("why", "a")
        assert "a ended by itself (SIGKILL, crash); ready " in told.splitlines()[0]
        assert sections(told) == ["SEEN", "RULE", "DONE", "NOW", "DO"]
        assert "max_restarts is 5" in told

        daemon.kill()
        daemon.start()
        daemon.wait_state("a", "ready", generation=2)
        daemon.request("stop", "a", "--wait")
        assert daemon.cli("stop", "nobody").returncode == 5
        me = f"uid {os.getuid()} pid "
        wait_until(lambda: "refused" in daemon.request("events"), 20, "the last of it")
        lines = daemon.request("events", "--since", "1h").splitlines()
        assert any("stop of a requested by " + me in line for line in lines)
        assert any(f"refused to {me}" in line and "cannot stop nobody" in line for line in lines)
        assert sum("daemon_started" in line for line in lines) == 2
        assert any("adopted" in line for line in lines)
        daemon.stop()

        reader = Reader(daemon.state_dir / FILE)
        events = reader.page(None, None, 0, 1000).events
        decided: list[str] = []
        recordings = list(reader.recordings())
        assert len(recordings) == 2, "one of each daemon"
        for recording in recordings:
            node = recording.node
            for now, seen in recording.seen:
                node, actions = reducer.step(node, seen, now)
                decided += [action.message for action in actions if isinstance(action, Record)]
        assert [message for message in decided if message] == [
            event.message for event in events if event.kind in OF_THE_CORE | {"adopted", "daemon_ending"}
        ], "the same core reaches the same decisions"
        assert any(isinstance(seen, Sampled) for recording in recordings for _, seen in recording.seen)
        data = b"".join(path.read_bytes() for path in daemon.state_dir.glob("history.sqlite3*"))
        assert b"hf_precious" not in data
        assert (daemon.state_dir / FILE).stat().st_mode & 0o777 == 0o600
