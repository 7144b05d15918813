"""Whose a port is: the gate before a launch, and the listener after it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from supervisord.core.model import ExitClass
from supervisord.launcher import ports, procfs
from supervisord.launcher.base import GateError, LaunchError, Ownership
from tests.sim.engine import free_port

HOST = "127.0.0.1"


def listening(host: str = HOST, port: int = 0, *, share: bool = False) -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind((host, port))
    server.listen()
    return server


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port


@contextmanager
def foreign(host: str, port: int, *, share: bool = False) -> Iterator[int]:
    """Another process that listens there; gives its pid."""
    code = (
        "import socket, sys\n"
        f"s = socket.socket(socket.AF_INET6 if ':' in {host!r} else socket.AF_INET)\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        f"s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, {int(share)})\n"
        f"s.bind(({host!r}, {port}))\ns.listen()\nprint('ok', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-IS", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ok\n"
        try:
            yield child.pid
        finally:
            child.kill()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost", ""])
def test_a_free_port_is_free(host: str) -> None:
    ports.check_free(host, free_port())


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("127.0.0.1", ""),
        ("::", "127.0.0.1"),
        ("::1", "::"),
        ("127.0.0.1", "localhost"),
    ],
)
def test_a_holder_is_named(theirs: str, ours: str, share: bool) -> None:
    port = free_port()
    with foreign(theirs, port, share=share) as pid:
        name = name_of(pid)
        with pytest.raises(GateError) as caught:
            ports.check_free(ours, port)
    assert caught.value.code == "port_held"
    assert str(caught.value) == (
        f"cannot listen on port {port} of {ours or 'all addresses'}: it is held by pid {pid} ({name}); "
        "stop that one, or set another port"
    )


def test_another_address_is_no_matter() -> None:
    with closing(listening("127.0.0.2")) as server:
        ports.check_free(HOST, port_of(server))


def test_time_wait_is_no_holder() -> None:
    with closing(listening()) as server:
        port = port_of(server)
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first stays in TIME_WAIT
        client.close()
    ports.check_free(HOST, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_an_address_that_is_not_here(host: str) -> None:
    with pytest.raises(LaunchError, match=r"^cannot listen on port 8001 of .*; set host to an address") as caught:
        ports.check_free(host, 8001)
    assert caught.value.kind is ExitClass.EXTERNAL


def test_nobody() -> None:
    assert ports.ownership([os.getpid()], HOST, free_port()) == Ownership(ours=False)


@pytest.mark.parametrize(("bound", "host"), [(HOST, HOST), ("0.0.0.0", HOST), ("::", HOST), ("0.0.0.0", "0.0.0.0")])
def test_ours(bound: str, host: str) -> None:
    with closing(listening(bound)) as server:
        assert ports.ownership([1, os.getpid()], host, port_of(server)) == Ownership(ours=True)


def test_foreign() -> None:
    port = free_port()
    with foreign(HOST, port) as pid:
        assert ports.ownership([os.getpid()], HOST, port) == Ownership(False, f"pid {pid} ({name_of(pid)})")
        assert ports.ownership([pid], HOST, port) == Ownership(ours=True)


def test_members_that_we_may_not_look_into(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(listening()) as server:
        monkeypatch.setattr(procfs, "sockets", lambda _: None)
        assert ports.ownership([os.getpid()], HOST, port_of(server)) == Ownership(ours=True)
        monkeypatch.setattr(procfs, "uid_of", lambda _: os.geteuid() + 1)
        by = f"a process of uid {os.geteuid()}"
        assert ports.ownership([os.getpid()], HOST, port_of(server)) == Ownership(False, by)


def test_a_foreign_socket_that_shares_the_port() -> None:
    with closing(listening(share=True)) as server:
        port = port_of(server)
        with foreign(HOST, port, share=True) as pid:
            assert ports.ownership([os.getpid()], HOST, port) == Ownership(True, f"pid {pid} ({name_of(pid)})")
        assert ports.ownership([os.getpid()], HOST, port) == Ownership(ours=True)


def test_the_address_itself_is_preferred_to_all_addresses() -> None:
    with closing(listening(share=True)) as server:
        port = port_of(server)
        with foreign("0.0.0.0", port, share=True) as pid:
            assert ports.ownership([os.getpid()], HOST, port) == Ownership(ours=True)
            assert ports.ownership([os.getpid()], "0.0.0.0", port).holder == f"pid {pid} ({name_of(pid)})"
            assert ports.ownership([pid], HOST, port) == Ownership(False, f"pid {os.getpid()} ({name_of(os.getpid())})")
