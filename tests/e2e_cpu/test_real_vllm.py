"""The daemon over a real vLLM: from nothing to ready, through deaths of every part, to nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.daemon.harness import Daemon, Document, engine_toml
from tests.e2e_cpu.conftest import RealVllm
from tests.sim.engine import alive, free_port, wait_until

READY_S = 240
"""Starts take 20 s on a quiet machine and up to 170 s on a busy one."""

NO_POLL_S = 300
"""Longer than a start takes."""

STOP_TIMEOUT_S = 20
ARGS = """drain_timeout_s = 5
stop_timeout_s = 20
[engine.NAME.args]
served-model-name = "tiny"
max-model-len = 1024
block-size = 32
max-num-seqs = 8
max-num-batched-tokens = 2048
enforce-eager = true
[engine.NAME.env]
VLLM_CPU_KVCACHE_SPACE = "1"
HF_HUB_OFFLINE = "1"
VLLM_NO_USAGE_STATS = "1"
ENV
[engine.NAME.warmup]
max_rounds = 2
[engine.NAME.restart]
backoff_initial_s = 0.2
"""


def section(vllm: RealVllm, name: str, port: int) -> str:
    extra = ARGS.replace("NAME", name).replace("ENV\n", f"{vllm.env}\n")
    return engine_toml(name, [str(vllm.command), "serve"], port, str(vllm.model), extra)


def complete(port: int, tokens: int = 8) -> Document:
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        document: Document = json.load(answer)
        return document


def titled(daemon: Daemon, name: str, title: str) -> int:
    """The process of an engine whose title begins with `title`."""
    for pid in daemon.engine_processes(name):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        if command.startswith(title):
            return pid
    raise AssertionError(f"no process {title} among {daemon.engine_processes(name)}")


def kill_and_expect_one_new_generation(daemon: Daemon, pid: int, port: int) -> Document:
    before = daemon.engine("a")
    old = daemon.engine_processes("a")
    os.kill(pid, signal.SIGKILL)
    after = daemon.wait_state("a", "ready", READY_S, before["generation"] + 1)
    assert after["generation"] == before["generation"] + 1
    assert after["restarts"] == before["restarts"] + 1
    assert not [p for p in old if alive(p)], "a process of the old generation still lives"
    assert complete(port)["usage"]["completion_tokens"] == 8
    return after


def stream(port: int, tokens: int = 900) -> socket.socket:
    """A client that streams a long answer and reads only its beginning."""
    body = json.dumps(
        {"model": "tiny", "prompt": "once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    assert client.recv(12).startswith(b"HTTP/1.1 200")
    return client


def test_one_engine_through_every_death(vllm: RealVllm) -> None:
    port = free_port()
    # No poll comes before the first death (they are due at multiples of this after the daemon's start): the engine is
    # then told dead by its exit, and not by two answers of 503 before that.
    with Daemon(section(vllm, "a", port), poll_interval_s=NO_POLL_S) as daemon:
        daemon.start()
        ready = daemon.wait_state("a", "ready", READY_S)
        assert ready["generation"] == 1
        assert ready["restarts"] == 0
        assert ready["health"] == "ok", ready
        assert ready["warmup"]["rounds"] >= 1
        assert ready["warmup"]["settled_ms"] > 0
        answer = complete(port)
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 8)
        assert daemon.cli("status").returncode == 0

        # The engine dies: vLLM's own process exits with 0 (fact 3.1), and that is no success.
        after = kill_and_expect_one_new_generation(daemon, titled(daemon, "a", "VLLM::EngineCore"), port)
        assert after["last_exit"]["class"] == "crash"
        assert (after["last_exit"]["code"], after["last_exit"]["generation"]) == (0, 1)

        # The API server dies alone: it leaves EngineCore and Worker behind (fact 3.2); we do not.
        after = kill_and_expect_one_new_generation(daemon, after["pid"], port)
        assert after["last_exit"]["signal"] == signal.SIGKILL

        # The daemon is killed: the engine goes on, and the next daemon takes it over as it is.
        daemon.kill()
        assert complete(port)["usage"]["completion_tokens"] == 8
        daemon.start()
        adopted = daemon.wait_state("a", "ready", 60)
        assert (adopted["pid"], adopted["generation"]) == (after["pid"], after["generation"])

        # Stop with an open stream: SIGTERM alone hangs (fact 3.3); the bound holds.
        processes = daemon.engine_processes("a")
        client = stream(port)
        began = time.monotonic()
        done = daemon.cli("stop", "a", "--wait", timeout_s=180)
        took_s = time.monotonic() - began
        client.close()
        assert done.returncode == 0, done.stderr
        assert took_s < 5 + STOP_TIMEOUT_S + 10
        assert not [p for p in processes if alive(p)]
        assert daemon.engine("a")["state"] == "stopped"
        assert daemon.cli("status").returncode == 0, "nothing is wanted, so nothing is missing"


def test_a_worker_dies_and_a_frozen_engine_is_stopped(vllm: RealVllm) -> None:
    port = free_port()
    with Daemon(section(vllm, "a", port)) as daemon:
        daemon.start()
        daemon.wait_state("a", "ready", READY_S)
        kill_and_expect_one_new_generation(daemon, titled(daemon, "a", "VLLM::Worker"), port)
        processes = daemon.engine_processes("a")
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        done = daemon.cli("stop", "a", "--now", "--wait", timeout_s=180)
        assert done.returncode == 0, done.stderr
        assert STOP_TIMEOUT_S <= time.monotonic() - began < STOP_TIMEOUT_S + 15
        assert not [p for p in processes if alive(p)]


def test_the_daemon_ends_while_an_engine_starts(vllm: RealVllm) -> None:
    with Daemon(section(vllm, "a", free_port())) as daemon:
        daemon.start()
        wait_until(lambda: _has_engine_core(daemon), READY_S, "EngineCore to appear", every_s=0.1)
        assert daemon.engine("a")["state"] == "starting"
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < STOP_TIMEOUT_S + 15
        assert daemon.leftovers() == []


def test_two_engines_at_once(vllm: RealVllm) -> None:
    ports = {"a": free_port(), "b": free_port()}
    with Daemon("".join(section(vllm, name, port) for name, port in ports.items())) as daemon:
        daemon.start()
        for name, port in ports.items():
            daemon.wait_state(name, "ready", 2 * READY_S)
            assert complete(port)["model"] == "tiny"
        other = daemon.engine("b")
        assert daemon.cli("stop", "a", "--wait").returncode == 0
        assert daemon.engine_processes("a") == []
        still: dict[str, Any] = daemon.engine("b")
        assert (still["state"], still["pid"]) == ("ready", other["pid"])
        assert complete(ports["b"])["model"] == "tiny"


def _has_engine_core(daemon: Daemon) -> bool:
    try:
        titled(daemon, "a", "VLLM::EngineCore")
    except (AssertionError, OSError):
        return False
    return True
