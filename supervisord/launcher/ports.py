"""Whose an address is: before a launch nobody's, after it the engine's alone."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from supervisord.core.model import ExitClass
from supervisord.launcher import procfs
from supervisord.launcher.base import GateError, LaunchError, Ownership


def check_free(host: str, port: int) -> None:
    """Raise GateError when somebody listens there, LaunchError when nobody may.

    A bind without SO_REUSEPORT is refused by every listener, also by one with it; sockets in TIME_WAIT do not count.
    """
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:
        raise _refusal(host, port, error) from None


def _refusal(host: str, port: int, error: OSError | UnicodeError) -> GateError | LaunchError:
    where = f"cannot listen on port {port} of {host or 'all addresses'}"
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        who = holder(host, port) or "another process"
        return GateError("port_held", f"{where}: it is held by {who}; stop that one, or set another port")
    if number == errno.EACCES:
        return LaunchError(ExitClass.CONFIG, f"{where}: only root may; set a port above 1023")
    # The address is not there (yet): a network that comes up late, a name that does not resolve.
    why = error.strerror if isinstance(error, OSError) else "that is no host name"
    return LaunchError(ExitClass.EXTERNAL, f"{where}: {why}; set host to an address of this machine")


def holder(host: str, port: int) -> str | None:
    """Who listens there, in words; None: nobody that can be seen."""
    found = [listener for listener in procfs.listeners(port) if _meets(listener.address, host)]
    return _holder(found[0]) if found else None


def ownership(members: Iterable[int], host: str, port: int) -> Ownership:
    """Who gets connections to an address. Several sockets can share it (SO_REUSEPORT): any foreign one counts.

    A socket bound to the address itself is preferred by the kernel to one bound to all addresses. Where we may not look
    into members (another user's, without CAP_SYS_PTRACE, as in a container), a socket of their user counts as theirs.
    """
    found = [listener for listener in procfs.listeners(port) if _meets(listener.address, host)]
    exact = [listener for listener in found if any(listener.address)]
    wanted = _address(host)
    chosen = exact if exact and wanted is not None and any(wanted) else found
    if not chosen:
        return Ownership(ours=False)
    own: set[int] = set()
    hidden: set[int | None] = set()
    for pid in members:
        sockets = procfs.sockets(pid)
        if sockets is None:
            hidden.add(procfs.uid_of(pid))
        else:
            own |= sockets
    foreign = [listener for listener in chosen if listener.inode not in own and listener.uid not in hidden]
    return Ownership(ours=len(foreign) < len(chosen), holder=_holder(foreign[0]) if foreign else None)


def _meets(address: bytes, host: str) -> bool:
    """Whether a socket bound to `address` can get connections to `host`.

    That is so when they are the same, or one of them is all addresses; IPv6's "all" takes IPv4 in.
    """
    wanted = _address(host)
    if wanted is None or address == wanted:
        return True
    if not any(address) and not any(wanted):
        return True
    if not any(address):
        return len(address) >= len(wanted)
    return not any(wanted) and len(wanted) >= len(address)


def _address(host: str) -> bytes | None:
    """Packed address of a host, None when it does not resolve; "" is all addresses, like in bind."""
    family = _family(host)
    try:
        numeric = host if family == socket.AF_INET6 else socket.gethostbyname(host)
        return procfs.unwrapped(socket.inet_pton(family, numeric))
    except (OSError, UnicodeError):
        return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _holder(listener: procfs.Listener) -> str:
    pid = next((pid for pid in procfs.pids() if listener.inode in (procfs.sockets(pid) or ())), None)
    stat = procfs.read_stat(pid) if pid is not None else None
    return f"pid {pid} ({procfs.printable(stat.name)})" if stat is not None else f"a process of uid {listener.uid}"
