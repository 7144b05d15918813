"""What systemd is told, without systemd: readiness, a line of status, a watchdog that is fed only after real turns."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.daemon.harness import Daemon
from tests.daemon.sims import Sim, section
from tests.sim.engine import wait_until

NAMES = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "INVOCATION_ID"}


class Manager:
    """The receiving end of sd_notify."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self._socket = sock
        self.told: list[str] = []
        self.env = {
            "NOTIFY_SOCKET": str(path),
            "WATCHDOG_USEC": "20000000",
            "WATCHDOG_PID": "1",
            "LISTEN_FDS": "0",
            "LISTEN_PID": "1",
            "INVOCATION_ID": "0123456789abcdef",
        }

    def hear(self) -> list[str]:
        """Everything so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.told += self._socket.recv(65536).decode().splitlines()
        return self.told

    def count(self, word: str) -> int:
        """How often something was said."""
        return self.hear().count(word)

    def wait(self, word: str, timeout_s: float = 30) -> None:
        """Wait until something begins like this."""
        wait_until(lambda: any(line.startswith(word) for line in self.hear()), timeout_s, f"{word} in {self.told}")


@contextlib.contextmanager
def manager(folder: Path) -> Iterator[Manager]:
    folder.mkdir(exist_ok=True)
    path = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.setblocking(False)
        yield Manager(sock, path)


def test_the_protocol_from_start_to_end(tmp_path: Path) -> None:
    sim = Sim(tmp_path, mood={"ready_delay_s": 0.5})
    with manager(tmp_path) as systemd, Daemon(section(sim), systemd.env, poll_interval_s=0.2) as daemon:
        daemon.start()
        systemd.wait("READY=1")
        wait_until(lambda: systemd.count("WATCHDOG=1") >= 5, 30, "the watchdog to be fed")
        daemon.wait_state("a", "ready")
        systemd.wait("STATUS=1 of 1 wanted engines ready")
        assert systemd.count("READY=1") == 1
        assert next(line for line in systemd.told if line.startswith("STATUS=")).endswith(("a stopped", "a starting"))
        assert not NAMES & sim.starts()[0]["env"].keys()

        # A loop that does not turn feeds nothing.
        os.kill(daemon.pid, signal.SIGSTOP)
        systemd.hear()
        time.sleep(0.3)  # what was under way
        systemd.hear()
        systemd.told.clear()
        time.sleep(1.5)
        assert systemd.hear() == []
        os.kill(daemon.pid, signal.SIGCONT)
        systemd.wait("WATCHDOG=1")

        sim.mood.patch(stop_delay_s=0.5)
        os.kill(daemon.pid, signal.SIGTERM)
        systemd.wait("STOPPING=1")
        systemd.wait("EXTEND_TIMEOUT_USEC=")
        assert daemon.stop() == 0
        assert systemd.count("STOPPING=1") == 1


def test_ready_waits_for_engines_if_it_is_told_to(tmp_path: Path) -> None:
    slow, broken = Sim(tmp_path, "slow", mood={"ready_delay_s": 1.5}), Sim(tmp_path, "broken")
    broken.mood.patch(start_error={"capture": "badflag"})
    never = Sim(tmp_path, "never", mood={"ready_delay_s": 600, "swallow_sigterm_while_starting": False})
    later = Sim(tmp_path, "later", autostart=False)
    with manager(tmp_path) as systemd, Daemon(section(slow, broken, later), systemd.env, ready_timeout_s=60) as daemon:
        daemon.start()
        daemon.wait_state("broken", "failed")
        assert systemd.count("READY=1") == 0
        daemon.wait_state("slow", "ready")
        systemd.wait("READY=1", 5)
    with manager(tmp_path / "never") as systemd, Daemon(section(never), systemd.env, ready_timeout_s=1) as daemon:
        daemon.start()
        systemd.wait("READY=1")
        assert daemon.engine("never")["state"] == "starting"


def test_a_manager_that_does_not_listen_stops_nothing(tmp_path: Path) -> None:
    sim = Sim(tmp_path, restart={"backoff_reset_after_s": 0})
    with manager(tmp_path) as systemd, Daemon(section(sim), systemd.env, poll_interval_s=0.2) as daemon:
        daemon.start()
        pid = daemon.wait_state("a", "ready")["pid"]
        # Nobody has read a word so far; a datagram socket takes 10 of them by default.
        for number in range(2, 5):
            os.kill(pid, signal.SIGKILL)
            pid = daemon.wait_state("a", "ready", generation=number)["pid"]
        Path(systemd.env["NOTIFY_SOCKET"]).unlink()
        os.kill(pid, signal.SIGKILL)
        daemon.wait_state("a", "ready", generation=5)
        assert daemon.stop() == 0
