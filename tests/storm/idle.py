"""A process that has nothing to do but to answer: how long that takes says how short of breath the machine is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.sim.engine import wait_until

_CODE = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
while True:
    with server.accept()[0] as connection:
        connection.sendall(connection.recv(16))
"""
_GIVE_UP_S = 60.0


class Idle:
    """Ask it again and again; `slowest_s` may be read at any time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "idle.sock"
        self._process = subprocess.Popen([sys.executable, "-S", "-c", _CODE, str(self._path)])
        self._answers: list[tuple[float, float]] = []
        self._asked_at: float | None = None

    def begin(self) -> None:
        """Wait until it can be asked."""
        wait_until(self._path.exists, _GIVE_UP_S, "the idle process to listen")

    def ask(self) -> None:
        """Take the time of one answer."""
        self._asked_at = began = time.monotonic()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_GIVE_UP_S)
            sock.connect(str(self._path))
            sock.sendall(b"?")
            sock.recv(16)
        self._asked_at = None
        now = time.monotonic()
        self._answers = [*((at, took) for at, took in self._answers if at > now - _GIVE_UP_S), (now, now - began)]

    def slowest_s(self, since: float) -> float:
        """The longest that an answer took since then, the one that is waited for included."""
        asked_at = self._asked_at
        waiting_s = time.monotonic() - asked_at if asked_at is not None else 0.0
        return max([waiting_s, *(took for at, took in self._answers if at >= since)])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a machine so busy must not hide what was seen on it
            self._process.wait(_GIVE_UP_S)
