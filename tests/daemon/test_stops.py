"""Stops: whatever the engine does, it is gone within its bound, with all that belongs to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.outside import titled
from tests.daemon.sims import Sim, section
from tests.sim.engine import alive, http, wait_until

SLACK_S = 10
"""More than any bound, on a machine that does other things."""


def stream(port: int, tokens: int) -> socket.socket:
    """A client that streams an answer and has read its beginning."""
    body = json.dumps({"model": "tiny", "prompt": "once", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    assert client.recv(12, socket.MSG_WAITALL).startswith(b"HTTP/1.1 200")
    return client


def busy(daemon: Daemon, *names: str) -> None:
    """Wait until the gauges of these engines show a request: they move only when the engine steps."""
    for name in names:
        daemon.wait_engine(name, lambda engine: engine["requests"]["running"], 30, "to show its request")


def read_all(client: socket.socket) -> bytes:
    data = b""
    while b"[DONE]" not in data and (chunk := client.recv(65536)):
        data += chunk
    return data


def timed_stop(daemon: Daemon, *args: str) -> float:
    began = time.monotonic()
    daemon.request("stop", *args, "--wait")
    return time.monotonic() - began


def test_engines_that_do_not_want_to_end(tmp_path: Path) -> None:
    moods: dict[str, dict[str, object]] = {
        "idle": {},
        "parent": {"ignore_sigterm": "parent"},
        "children": {"ignore_sigterm": "children"},
        "all": {"ignore_sigterm": "all"},
        "escape": {"escape": True},
        "frozen": {},
        "busy": {"tokens_per_s": 10},
    }
    sims = {name: Sim(tmp_path, name, mood=mood, stop_timeout_s=2) for name, mood in moods.items()}
    with Daemon(section(*sims.values())) as daemon:
        daemon.start()
        for name in sims:
            daemon.wait_state(name, "ready")
        processes = {name: daemon.engine_processes(name) for name in sims}
        assert any("escaped" in Path(f"/proc/{pid}/comm").read_text() for pid in processes["escape"])
        for pid in processes["frozen"]:
            os.kill(pid, signal.SIGSTOP)
        with stream(sims["busy"].port, 1000), ThreadPoolExecutor() as pool:
            busy(daemon, "busy")
            took_s = dict(zip(sims, pool.map(lambda name: timed_stop(daemon, name), sims), strict=True))
        for name in sims:
            engine = daemon.engine(name)
            assert (engine["state"], engine["wanted"], engine["pid"]) == ("stopped", "stopped", None)
            assert not [pid for pid in processes[name] if alive(pid)], name
            assert engine["last_exit"]["class"] == "stopped", name
        drain_s, kill_s = 1, 2
        assert took_s["idle"] < SLACK_S / 2
        assert kill_s <= took_s["all"] < kill_s + SLACK_S
        assert kill_s <= took_s["parent"] < kill_s + SLACK_S
        assert drain_s + kill_s <= took_s["frozen"] < drain_s + kill_s + SLACK_S
        assert drain_s + kill_s <= took_s["busy"] < drain_s + kill_s + SLACK_S
        assert daemon.engine("idle")["last_exit"]["code"] == 0
        assert daemon.engine("all")["last_exit"]["signal"] == signal.SIGKILL
        assert {event["engine"] for event in daemon.events("drain_timeout")} == {"busy", "frozen"}
        assert daemon.cli("status").returncode == 0, "nothing is wanted, so nothing is missing"


def test_a_drain_lets_requests_finish(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"tokens_per_s": 100}, drain_timeout_s=60)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready")
        with stream(sim.port, 200) as client:
            busy(daemon, "a")
            daemon.request("stop", "a")
            draining = daemon.wait_state("a", "draining")
            assert draining["reasons"][0]["code"] == "operator"
            assert b"[DONE]" in read_all(client)
        daemon.wait_state("a", "stopped")
        assert daemon.engine("a")["last_exit"]["code"] == 0
        assert daemon.events("drain_timeout") == []


def test_asked_twice_and_now(tmp_path: Path) -> None:
    names = ("twice", "now", "restart-now")
    sims = {
        name: Sim(tmp_path, name, mood={"tokens_per_s": 10}, drain_timeout_s=600, stop_timeout_s=1) for name in names
    }
    with Daemon(section(*sims.values())) as daemon:
        daemon.start()
        for name in sims:
            daemon.wait_state(name, "ready")
        with stream(sims["twice"].port, 900), stream(sims["now"].port, 900), stream(sims["restart-now"].port, 900):
            busy(daemon, *names)
            daemon.request("stop", "twice")
            assert daemon.wait_state("twice", "draining")
            assert timed_stop(daemon, "twice") < 1 + SLACK_S
            assert timed_stop(daemon, "now", "--now") < 1 + SLACK_S
            daemon.request("restart", "restart-now", "--now", "--wait")
        assert daemon.engine("restart-now")["generation"] == 2
        assert {event["engine"] for event in daemon.events("draining")} == {"twice"}


def test_drain_holds_and_start_takes_it_back(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        ready = daemon.wait_state("a", "ready")
        daemon.request("drain", "a", "--wait")
        drained = daemon.engine("a")
        assert (drained["state"], drained["health"], drained["pid"]) == ("draining", None, ready["pid"])
        assert daemon.cli("status").returncode == 1
        wait_until(lambda: daemon.engine("a")["kv"]["age_s"] is not None, 30, "a look at it")
        assert http("GET", f"http://127.0.0.1:{sim.port}/health").status == 200, "it is kept"
        daemon.request("start", "a", "--wait")
        back = daemon.engine("a")
        assert (back["state"], back["pid"], back["generation"]) == ("ready", ready["pid"], 1)
        daemon.request("drain", "a")
        daemon.request("restart", "a", "--wait")
        assert daemon.engine("a")["generation"] == 2
        daemon.request("drain", "a")
        refused = daemon.cli("drain", "nobody")
        assert refused.returncode == 5
        assert timed_stop(daemon, "a") < 5 + SLACK_S
        refused = daemon.cli("drain", "a")
        assert (refused.returncode, "stopped, not ready" in refused.stderr) == (5, True)


def test_stops_on_the_way_to_ready(tmp_path: Path) -> None:
    starting = Sim(tmp_path, "starting", mood={"ready_delay_s": 60}, stop_timeout_s=20)
    imports = Sim(tmp_path, "imports", mood={"ready_delay_s": 60, "imports_s": 60}, stop_timeout_s=20)
    warming = Sim(tmp_path, "warming", mood={"completion_delay_s": 60}, warmup={"enabled": True}, stop_timeout_s=4)
    backoff = Sim(tmp_path, "backoff", mood={"exit": {"code": 1}}, restart={"backoff_initial_s": 60})
    with Daemon(section(starting, imports, warming, backoff)) as daemon:
        daemon.start()
        daemon.wait_state("warming", "warming")
        daemon.wait_state("backoff", "backoff")
        wait_until(lambda: len(daemon.engine_processes("starting")) >= 4, 30, "the tree of a starting engine")
        wait_until(imports.starts, 30, "its program to run")
        assert daemon.engine("starting")["state"] == daemon.engine("imports")["state"] == "starting"
        with ThreadPoolExecutor() as pool:
            names = ("starting", "imports", "warming", "backoff")
            took_s = dict(zip(names, pool.map(lambda name: timed_stop(daemon, name), names), strict=True))
        assert 2 <= took_s["starting"] < 2 + SLACK_S, "one SIGTERM is swallowed, it is repeated after 2 s"
        assert took_s["imports"] < SLACK_S / 2
        assert took_s["warming"] < 4 + SLACK_S
        assert took_s["backoff"] < SLACK_S / 2
        for name in names:
            engine = daemon.engine(name)
            assert (engine["state"], engine["generation"]) == ("stopped", 1)
            assert daemon.engine_processes(name) == []
        assert daemon.engine("backoff")["last_exit"]["class"] == "crash", "what happened before stays known"
        assert len(backoff.starts()) == 1


def test_several_clients_at_once(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"stop_delay_s": 0.3})
    with Daemon(section(sim)) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready")
        with ThreadPoolExecutor() as pool:
            both = list(pool.map(lambda _: daemon.cli("stop", "a", "--wait"), range(2)))
        assert [done.returncode for done in both] == [0, 0]
        assert len(daemon.events("stopped", "a")) == 1

        # Wanted again while it stops: exactly one new generation, and the one who stopped it hears of it.
        daemon.request("start", "a", "--wait")
        sim.mood.patch(stop_delay_s=1)
        with ThreadPoolExecutor() as pool:
            stopper = pool.submit(daemon.cli, "stop", "a", "--wait", "--now")
            daemon.wait_state("a", "stopping")
            daemon.request("start", "a", "--wait")
            assert stopper.result().returncode == 1
        assert daemon.engine("a")["generation"] == 3 == len(sim.starts())

        # A storm ends where the last request says.
        with ThreadPoolExecutor() as pool:
            verbs = ["restart", "stop", "start", "drain", "restart", "reset", "stop", "start"] * 3
            codes = {done.returncode for done in pool.map(lambda verb: daemon.cli(verb, "a", "--now"), verbs)}
        assert codes <= {0, 5}
        daemon.request("start", "a", "--wait")
        log = (daemon.state_dir / "logs" / "a.log").read_text(encoding="utf-8")
        spawned = re.findall(r"^--- vllm-supervisor: generation (\d+) ", log, re.MULTILINE)
        assert spawned == [str(number) for number in range(1, daemon.engine("a")["generation"] + 1)]
        daemon.request("stop", "a", "--wait")
        assert daemon.engine_processes("a") == []


def test_a_killed_main_process_while_draining_or_stopping(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"tokens_per_s": 10, "ignore_sigterm": "parent"}, drain_timeout_s=600, stop_timeout_s=60)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        processes = daemon.engine_processes("a") if daemon.wait_state("a", "ready") else []
        with stream(sim.port, 900):
            busy(daemon, "a")
            daemon.request("stop", "a")
            daemon.wait_state("a", "draining")
            os.kill(titled(processes, "VLLM::EngineCore"), signal.SIGKILL)
            daemon.wait_state("a", "stopped")
        daemon.request("start", "a", "--wait")
        pid = daemon.engine("a")["pid"]
        daemon.request("stop", "a", "--now")
        daemon.wait_state("a", "stopping")
        os.kill(pid, signal.SIGKILL)
        stopped = daemon.wait_state("a", "stopped")
        assert stopped["last_exit"]["class"] == "stopped"
        assert daemon.engine_processes("a") == []
        assert daemon.engine("a")["generation"] == 2
