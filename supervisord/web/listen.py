"""The listening TCP socket of `supervisor.listen`."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Final

BACKLOG: Final = 128

Holder = Callable[[str, int], "str | None"]
"""Who listens on an address, in words; None: nobody that can be named."""


class ListenError(Exception):
    """Nothing can be served there now; the message says why and what to do. `number`: of the system's error."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


def listen(host: str, port: int, holder: Holder) -> socket.socket:
    """Listen on an address, or on all of them ("0.0.0.0"; "::" takes IPv4 in). Raises ListenError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        raise ListenError(_why(host, port, error, number, holder), number) from None
    return sock


def _why(host: str, port: int, error: Exception, number: int | None, holder: Holder) -> str:
    where = f"cannot serve /ready and /metrics on {named(host, port)} (supervisor.listen)"
    if number == errno.EADDRINUSE:
        who = holder(host, port) or "another process"
        return f"{where}: the port is held by {who}; stop that one, or set another port"
    if number == errno.EACCES:
        return f"{where}: this port is not for everybody; set one above 1023"
    why = error.strerror if isinstance(error, OSError) and error.strerror else "that is no host name"
    return f"{where}: {why}; set an address of this machine"


def named(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
