"""What incidents are staged with, beside the moods of simulated engines: clients, and small disks."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


class Clients:
    """Three that ask an engine for completions, one after the other, until they are told to stop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        for number in range(3):
            thread = threading.Timer(0.15 * number, self._run)
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        body = json.dumps({"model": "tiny", "prompt": "once", "max_tokens": 50, "ignore_eos": True})
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=100)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                with connection.getresponse() as response:
                    response.read()
            self._over.wait(0.02)


@contextlib.contextmanager
def small_disk(place: Path, mib: int) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=711", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk, and not everywhere")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
