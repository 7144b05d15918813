"""Gates before a start: what closes them is named, nothing is spent while they are closed, they open by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.outside import Watcher, engine_processes
from tests.daemon.sims import Sim, section
from tests.daemon.staging import small_disk
from tests.sim.engine import alive, wait_until


class Stranger(ThreadingHTTPServer):
    """Somebody else's server, healthy at first sight, that shares its port with others."""

    class _Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), self._Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()

    def __enter__(self) -> Stranger:  # noqa: PYI034 (typing.Self came with Python 3.11)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def test_a_port_that_somebody_else_holds(tmp_path: Path) -> None:
    held = Sim(tmp_path, "held")
    shared = Sim(tmp_path, "shared", mood={"reuse_port": True, "ready_delay_s": 1})
    me = f"pid {os.getpid()} ("
    with Daemon(section(held, shared)) as daemon:
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", held.port))
            holder.listen()
            daemon.start()
            daemon.wait_event("spawned", "shared")
            with Stranger(shared.port):
                waiting = daemon.wait_state("held", "waiting")
                assert [reason["code"] for reason in waiting["reasons"]] == ["port_held"]
                assert me in waiting["reasons"][0]["message"]
                assert str(held.port) in waiting["reasons"][0]["message"]
                assert waiting["next_start_at"] is not None
                assert me in daemon.cli("status").stdout
                # Stopped and wanted again while it waits.
                daemon.request("stop", "held", "--wait")
                daemon.request("start", "held")
                daemon.wait_state("held", "waiting")

                waiting = daemon.wait_state("shared", "waiting")
                assert [reason["code"] for reason in waiting["reasons"]] == ["port_held"]
                assert f"port {shared.port} is answered by {me}" in waiting["reasons"][0]["message"]
                assert waiting["last_exit"]["class"] == "resource"
                assert daemon.engine_processes("shared") == []
                assert daemon.events("ready") == []
        for name, generation in (("held", 1), ("shared", 2)):
            ready = daemon.wait_state(name, "ready")
            assert ready["generation"] == generation, "waiting takes no generation"
        assert (len(held.starts()), len(shared.starts())) == (1, 2)
        assert daemon.events("restart") == [], "and no budget"


def test_never_two_starts_at_once(tmp_path: Path) -> None:
    sims = [Sim(tmp_path, name, mood={"ready_delay_s": 0.5}) for name in ("a", "b", "c")]
    with Daemon(section(*sims), max_parallel_starts=1) as daemon:
        daemon.start()
        reasons: set[str] = set()

        def look() -> bool:
            engines = daemon.status()["engines"]
            assert sum(engine["state"] == "starting" for engine in engines) <= 1, engines
            reasons.update(r["code"] for engine in engines if engine["state"] == "waiting" for r in engine["reasons"])
            return all(engine["state"] == "ready" for engine in engines)

        wait_until(look, 30, "all to be ready")
        assert reasons == {"max_parallel_starts"}
        told = [e["kind"] for e in daemon.events() if e["kind"] in {"spawned", "answering"}]
        assert told == ["spawned", "answering"] * 3
        # One that fails lets the next one in, too.
        for sim in sims:
            sim.mood.patch(exit={"after_s": 0.2, "code": 1})
        wait_until(lambda: len(daemon.events("exited")) >= 3, 30, "all to fail")
        for sim in sims:
            sim.mood.clear()
        wait_until(look, 30, "all to be ready again")


def test_a_full_disk_stops_no_supervision(tmp_path: Path) -> None:
    sims = [Sim(tmp_path, name) for name in ("a", "b", "c")]
    daemon = Daemon(section(*sims))
    ballast = daemon.state_dir / "ballast"
    with daemon, small_disk(daemon.state_dir, 96), Watcher(daemon.state_dir) as watcher:
        daemon.start()
        before = {name: daemon.wait_state(name, "ready") for name in ("a", "b", "c")}
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        os.kill(before["a"]["pid"], signal.SIGKILL)
        waiting = daemon.wait_state("a", "waiting")
        assert [reason["code"] for reason in waiting["reasons"]] == ["disk_full"]
        assert str(daemon.state_dir) in waiting["reasons"][0]["message"]
        assert daemon.engine_processes("a") == []
        assert any("node.json" in event["event"] for event in daemon.events("trouble")), "what is lost is said"
        assert len([e for e in daemon.events("trouble") if "cannot write" in e["event"]]) == 1, "once"
        daemon.request("stop", "c", "--wait")
        assert daemon.cli("status").returncode == 1

        # A daemon that is killed now finds its engines with what it could still write.
        daemon.kill()
        daemon.start()
        adopted = daemon.wait_state("b", "ready")
        assert (adopted["pid"], adopted["generation"]) == (before["b"]["pid"], 1)
        assert daemon.wait_state("a", "waiting")["generation"] == 1
        ballast.unlink()
        assert daemon.wait_state("a", "ready")["generation"] == 2
        daemon.wait_state("b", "ready", generation=1)
        assert daemon.stop() == 0
        assert engine_processes(daemon.state_dir) == []
        assert watcher.twins == []
        daemon.assert_no_bug()


def test_identities_that_cannot_be_written(tmp_path: Path) -> None:
    """Then nothing may run: the next daemon could not know it."""
    sim = Sim(tmp_path)
    with Daemon(section(sim)) as daemon:
        daemon.start()
        pid = daemon.wait_state("a", "ready")["pid"]
        identities = daemon.state_dir / "identity"
        identities.rename(daemon.state_dir / "elsewhere")
        os.kill(pid, signal.SIGKILL)
        waiting = daemon.wait_state("a", "waiting")
        assert f"{identities}" in waiting["reasons"][0]["message"]
        assert "cannot start a" in waiting["reasons"][0]["message"]
        assert engine_processes(daemon.state_dir) == []
        assert len(sim.starts()) == 1, "the program was never executed"
        (daemon.state_dir / "elsewhere").rename(identities)
        ready = daemon.wait_state("a", "ready")
        assert alive(ready["pid"])
        assert len(sim.starts()) == 2
