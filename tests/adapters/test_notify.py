"""sd_notify: never blocks, UTF-8 on the wire, and nothing of it is left in the environment."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.systemd.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "20000000")
        yield receiver


def test_messages(manager: socket.socket) -> None:
    notifier = Notifier()
    assert notifier.active
    assert "NOTIFY_SOCKET" not in os.environ
    assert "WATCHDOG_USEC" not in os.environ
    notifier.ready()
    notifier.status("1 of 2 → half")
    notifier.status("1 of 2 → half")
    notifier.watchdog()
    notifier.extend(1.5)
    notifier.stopping()
    got = [manager.recv(4096).decode() for _ in range(5)]
    assert got == ["READY=1", "STATUS=1 of 2 → half", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=1500000", "STOPPING=1"]
    notifier.close()


def test_a_full_socket_does_not_block(manager: socket.socket) -> None:
    notifier = Notifier()
    began = time.monotonic()
    for _ in range(5000):
        notifier.watchdog()
    assert time.monotonic() - began < 5
    notifier.close()


def test_what_a_full_socket_did_not_take_is_said_again(manager: socket.socket) -> None:
    """A manager that was busy for a moment must hear of READY=1, or it ends the daemon when a start takes too long."""
    notifier = Notifier()
    for _ in range(5000):
        notifier.watchdog()
    notifier.ready()
    notifier.status("2 of 2")
    notifier.stopping()
    manager.setblocking(False)

    def heard() -> list[str]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(manager.recv(4096).decode())
        return found

    assert set(heard()) == {"WATCHDOG=1"}
    for _ in range(2):
        notifier.watchdog()
        notifier.status("2 of 2")
        notifier.stopping()
    assert heard() == ["READY=1", "WATCHDOG=1", "STATUS=2 of 2", "STOPPING=1", "WATCHDOG=1"]
    notifier.close()


def test_without_a_service_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    assert not notifier.active
    notifier.ready()
    notifier.close()
