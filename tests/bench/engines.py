"""The engine that every supervisor is given: a script that tells of its first instruction and becomes the engine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

from tests.bench.processes import MARK
from tests.sim.engine import Mood, processes_with_marker, title_of, wait_until

LIFE_S = 900
"""Nothing that a broken run leaves lives longer."""
START_S = 120.0

_SCRIPT = """#!/bin/sh
case "$*" in *--help*|*--version*) ;; *) [ ! -p {fifo} ] || echo >{fifo} ;; esac
export {exports}
exec {command}
"""

_ANSWERS = """import socket, sys, time
port, until, tries = int(sys.argv[1]), time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < until:
    tries += 1
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as sock:
            sock.sendall(b"GET /health HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
            if b" 200 " in sock.recv(64):
                print(time.monotonic(), tries)
                break
    except OSError:
        pass
    time.sleep(0.002)
"""


def answers_argv(python: list[str], port: int, timeout_s: float) -> list[str]:
    """Prints the monotonic time when /health first answers 200, looking every 2 ms, and how many looks it took."""
    return [*python, "-c", _ANSWERS, str(port), str(timeout_s)]


def free_ports(count: int) -> list[int]:
    """So many different ones; one at a time the same could come twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class BenchEngine:
    """A simulated `vllm serve`, or something that only sleeps (`sleeps`).

    Where its mood `changes` it watches for that, which makes its end some milliseconds longer.

    `home` is its folder as the supervisor sees it, `outside` the same folder as we see it.
    """

    def __init__(
        self,
        name: str,
        port: int,
        home: str,
        outside: Path,
        sim: list[str],
        *,
        sleeps: bool = False,
        changes: bool = False,
        **mood: Any,
    ) -> None:
        self.name = name
        self.port = port
        self.mark = uuid.uuid4().hex
        self.mood = Mood(outside / f"{name}.mood", **mood)
        self.mood.path.chmod(0o644)
        self.script = f"{home}/{name}"
        self.fifo = outside / f"{name}.fifo"
        self._record = outside / f"{name}.starts"
        self._record.touch()
        self._record.chmod(0o666)  # engines may run as another user
        values = {
            MARK: self.mark,
            "VLLM_SIM_MOOD": f"{home}/{name}.mood",
            "VLLM_SIM_MOOD_WATCH": "yes" if changes else "no",
            "VLLM_SIM_RECORD": f"{home}/{name}.starts",
            "VLLM_SIM_MAX_LIFE_S": str(LIFE_S),
        }
        command = f"sleep {LIFE_S}" if sleeps else f'{shlex.join(sim)} "$@"'
        text = _SCRIPT.format(
            fifo=shlex.quote(f"{home}/{name}.fifo"),
            exports=" ".join(f"{key}={shlex.quote(value)}" for key, value in values.items()),
            command=command,
        )
        script = outside / name
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)

    @property
    def arguments(self) -> list[str]:
        """What a supervisor that adds none gives to the script."""
        return ["serve", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]

    def starts(self) -> int:
        """How often it was started (as a simulated vLLM)."""
        return len(self._record.read_text(encoding="utf-8").splitlines())

    def processes(self) -> list[int]:
        """All that belongs to it, as numbered out here."""
        return processes_with_marker(MARK, self.mark)

    def servers(self) -> list[int]:
        """Its API servers: one, where nobody started a second copy."""
        return [pid for pid in self.processes() if "/vllm serve" in title_of(pid)]

    def workers(self) -> list[int]:
        """EngineCore and its workers, which hold the memory."""
        return [pid for pid in self.processes() if title_of(pid).startswith("VLLM::")]

    def wait_servers(self) -> int:
        """The API server, once there is one."""
        return wait_until(self.servers, START_S, f"{self.name} to run")[0]

    @contextlib.contextmanager
    def telling(self) -> Iterator[Queue[float]]:
        """While this is open: the monotonic time of each first instruction."""
        os.mkfifo(self.fifo)
        self.fifo.chmod(0o666)
        told: Queue[float] = Queue()
        keep_open = os.open(self.fifo, os.O_RDWR)

        def listen() -> None:
            with self.fifo.open("rb", buffering=0) as reader:
                while byte := reader.read(1):
                    if byte != b"\n":
                        return
                    told.put(time.monotonic())

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield told
        finally:
            os.write(keep_open, b".")
            thread.join(10)
            self.fifo.unlink()
            os.close(keep_open)


_TIMER = """import json, subprocess, sys, time
runs, commands, times = int(sys.argv[1]), json.loads(sys.argv[2]), []
times = [[] for _ in commands]
for _ in range(runs):
    for argv, into in zip(commands, times):
        before = time.monotonic()
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        into.append((time.monotonic() - before) * 1000)
print(json.dumps(times))
"""
FLOOR = ["-c", "import argparse, json, socket"]
"""What a status command in Python cannot do without."""


def timer_argv(python: list[str], runs: int, *commands: list[str]) -> list[str]:
    """Prints the milliseconds that each command took, as JSON lists; they are run by turns."""
    return [*python, "-c", _TIMER, str(runs), json.dumps(commands)]


def own_python() -> list[str]:
    """This interpreter."""
    return [sys.executable]
