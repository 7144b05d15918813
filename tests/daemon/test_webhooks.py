"""The real daemon, an engine that crashes, and receivers that work, are down, or never answer."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.adapters.fake_http import FakeServer, answer, unused_port
from tests.daemon.harness import DEADLINE_S, Daemon
from tests.daemon.sims import Sim, section, table
from tests.sim.engine import wait_until

SECRET = "0123456789abcdef"
PATH = "/services/T0/precious"


def receiver(name: str, port: int, **settings: Any) -> str:
    return table(f"notify.{name}", {"url": f"http://127.0.0.1:{port}{PATH}", **settings})


def documents(server: FakeServer, kind: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(request.body) for request in list(server.requests)]
    return [document for document in found if kind in {None, document["kind"]}]


def crash(daemon: Daemon, name: str = "a") -> dict[str, Any]:
    """Kill an engine's process; its generation and pid."""
    engine = daemon.wait_state(name, "ready")
    os.kill(engine["pid"], signal.SIGKILL)
    return engine


def everything_written(daemon: Daemon) -> str:
    files = [path for path in daemon.state_dir.rglob("*") if path.is_file() and path.name != "applied.json"]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in [*files, daemon.log])


def test_a_crash_is_told_within_a_moment_with_what_a_person_needs(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.write_text(f"Authorization: Bearer {SECRET}\n", encoding="utf-8")
    headers.chmod(0o600)
    sim = Sim(tmp_path, "a")
    with FakeServer(lambda _: answer(204)) as server:
        text = section(sim) + receiver("ops", server.port, headers_file=str(headers))
        with Daemon(text) as daemon:
            daemon.start()
            dead = crash(daemon)
            event = daemon.wait_event("exited", "a")
            wait_until(lambda: documents(server, "exited"), DEADLINE_S, "the message")
            daemon.wait_state("a", "ready", generation=dead["generation"] + 1)
            told = documents(server, "exited")[0]
            assert told["message"] == event["event"]
            assert (told["engine"], told["generation"], told["reason"]) == ("a", dead["generation"], "exited")
            assert (told["severity"], told["node"]) == ("error", os.uname().nodename)
            assert told["numbers"]["signal"] == signal.SIGKILL
            assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {SECRET}"}
            shown = daemon.request("status", "--json") + daemon.request("plan", "--config", str(daemon.config))
            assert daemon.stop() == 0
            ids = [document["id"] for document in documents(server)]
            assert len(ids) == len(set(ids))
            for secret in (SECRET, PATH):
                assert secret not in shown + everything_written(daemon)
            assert daemon.events("notify_failing") == []


def test_a_receiver_that_was_down_gets_everything_once(tmp_path: Path) -> None:
    port = unused_port()
    with Daemon(section(Sim(tmp_path, "a")) + receiver("ops", port, events=["exited"])) as daemon:
        daemon.start()
        crash(daemon)
        failing = daemon.wait_event("notify_failing")
        assert failing["level"] == "warning"
        assert f"cannot notify notify.ops (http://127.0.0.1:{port}/...)" in failing["event"]
        with FakeServer(lambda _: answer(200), port=port) as server:
            daemon.wait_event("notify_recovered")
            assert [document["engine"] for document in documents(server)] == ["a"]
        assert len(daemon.events("notify_failing")) == 1


def test_a_receiver_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, "a")
    with (
        FakeServer(lambda _: server.hang()) as server,
        Daemon(section(sim) + receiver("ops", server.port, events=["all"], timeout_s=60)) as daemon,
    ):
        daemon.start()
        dead = crash(daemon)
        daemon.wait_state("a", "ready", generation=dead["generation"] + 1)
        wait_until(lambda: server.requests, DEADLINE_S, "a message")
        daemon.request("stop", "a", "--wait", "--now")
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 45, "2 s, and as much as a busy machine adds; the receiver has 60"
        (lost,) = daemon.events("notify_lost")
        assert "did not get through before the end" in lost["event"]


def test_receivers_change_with_a_reload_and_engines_do_not(tmp_path: Path) -> None:
    sim = Sim(tmp_path, "a")
    with FakeServer(lambda _: answer(200)) as server, Daemon(section(sim)) as daemon:
        daemon.start()
        before = daemon.wait_state("a", "ready")
        daemon.configure(section(sim) + receiver("ops", server.port, events=["exited", "reload"]))
        assert "notify.ops: is new" in daemon.request("reload", "--wait")
        wait_until(lambda: documents(server, "reload"), DEADLINE_S, "news of that reload")
        assert daemon.engine("a")["pid"] == before["pid"]
        daemon.configure(section(sim) + receiver("ops", server.port, events=["exitted"]))
        refused = daemon.cli("reload")
        assert (refused.returncode, 'did you mean "exited"?' in refused.stderr) == (2, True)
        daemon.configure(section(sim))
        assert "notify.ops: is no longer configured" in daemon.request("reload", "--wait")
        count = len(server.requests)
        crash(daemon)
        daemon.wait_event("exited", "a")
        daemon.wait_state("a", "ready", generation=before["generation"] + 1)
        assert len(server.requests) == count


def test_notify_test_sends_what_a_daemon_would(tmp_path: Path) -> None:
    with FakeServer(lambda _: answer(200)) as server:
        with Daemon(section(Sim(tmp_path, "a")) + receiver("ops", server.port)) as daemon:
            out = daemon.request("notify", "test", "--config", str(daemon.config))
        assert out.startswith(f"notify.ops (http://127.0.0.1:{server.port}/...): delivered in ")
        (document,) = documents(server)
        assert (document["kind"], document["node"]) == ("notify_test", os.uname().nodename)
