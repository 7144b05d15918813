"""/ready and /metrics of the real daemon: they follow its engines, and whatever happens to them is nothing to it."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from threading import Event, Thread

import psutil

from tests.daemon.harness import DEADLINE_S, Daemon
from tests.daemon.sims import Sim, section
from tests.sim.engine import free_port, http, wait_until


def ready(port: int, path: str = "/ready") -> tuple[int, str]:
    answer = http("GET", f"http://127.0.0.1:{port}{path}", timeout_s=20)
    return answer.status, answer.text.strip()


def test_readiness_follows_an_engine_through_its_life(tmp_path: Path) -> None:
    sim, port = Sim(tmp_path, mood={"ready_delay_s": 0.5}), free_port()
    with Daemon(section(sim), listen=f"127.0.0.1:{port}") as daemon:
        daemon.start()
        wait_until(lambda: ready(port) == (200, "ready"), DEADLINE_S, "to be ready")
        assert ready(port, "/ready/a") == (200, "ready")
        assert ready(port, "/ready/b") == (404, "unknown")
        daemon.request("drain", "a")
        assert ready(port) == ready(port, "/ready/a") == (503, "draining")
        daemon.request("start", "a")
        assert ready(port) == ready(port, "/ready/a") == (200, "ready")
        daemon.request("stop", "a", "--wait")
        assert ready(port) == ready(port, "/ready/a") == (503, "stopped")


def test_a_port_that_somebody_else_holds_stops_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Daemon(section(sim), listen=f"127.0.0.1:{port}") as daemon:
            daemon.start()
            told = daemon.wait_event("web_failed")
            assert f"127.0.0.1:{port} (supervisor.listen): the port is held by pid " in told["event"]
            daemon.wait_state("a", "ready")
            other.close()
            daemon.wait_event("web_listening")
            assert ready(port) == (200, "ready")
            assert len(daemon.events("web_failed")) == 1


def test_a_flood_takes_little_from_supervision(tmp_path: Path) -> None:
    sim, port, over = Sim(tmp_path), free_port(), Event()
    asked = []

    def flood(path: bytes) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 20) as sock:
                sock.sendall(b"GET " + path + b" HTTP/1.1\r\n\r\n")
                while sock.recv(65536):
                    pass
                asked.append(path)

    with Daemon(section(sim), listen=f"127.0.0.1:{port}") as daemon:
        daemon.start()
        daemon.wait_state("a", "ready")
        process = psutil.Process(daemon.pid)
        cpu_s, began = sum(process.cpu_times()[:2]), time.monotonic()
        floods = [Thread(target=flood, args=(path,)) for path in (b"/metrics", b"/ready/a") for _ in range(20)]
        for one in floods:
            one.start()
        waited_s = []
        while len(asked) < 400:
            asked_at = time.monotonic()
            assert daemon.engine("a")["state"] == "ready"
            waited_s.append(time.monotonic() - asked_at)
            time.sleep(0.02)
        share = (sum(process.cpu_times()[:2]) - cpu_s) / (time.monotonic() - began)
        over.set()
        for one in floods:
            one.join(DEADLINE_S)
        assert set(asked) == {b"/metrics", b"/ready/a"}
        assert share < 0.5, "measured: 0.1 of a core"
        assert sorted(waited_s)[len(waited_s) // 2] < 0.1, "measured: 1 ms"
