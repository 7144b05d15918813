"""sd_notify: what systemd is told. Sends never block; what a full socket did not take is said again a turn later.

A manager that is busy for a second or two has a full socket (net.unix.max_dgram_qlen), and a READY=1 that is lost has
the daemon killed at the end of TimeoutStartSec.
"""

from __future__ import annotations

import os
from typing import Final

from sdnotify import SystemdNotifier

_USEC: Final = 1_000_000


class Notifier:
    """Talks to the service manager, if there is one."""

    def __init__(self) -> None:
        self._notifier = SystemdNotifier() if os.environ.get("NOTIFY_SOCKET") else None
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.setblocking(False)
        self._status = ""
        self._owes_ready = self._stopping = False
        # Read once, and out of the environment: an engine that inherited them could speak for the daemon.
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            os.environ.pop(name, None)

    @property
    def active(self) -> bool:
        """Whether a service manager listens."""
        return self._notifier is not None and self._notifier.socket is not None

    def ready(self) -> None:
        """The daemon runs and its engines have settled."""
        self._owes_ready = not self._send("READY=1")

    def watchdog(self) -> None:
        """A turn of the loop was completed."""
        if self._owes_ready:
            self.ready()
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent only when it changes."""
        if text != self._status and self._send(f"STATUS={text}"):
            self._status = text

    def stopping(self) -> None:
        """The daemon ends; sent once."""
        if not self._stopping:
            self._stopping = self._send("STOPPING=1")

    def extend(self, seconds: float) -> None:
        """Starting or stopping goes on: do not time out for this long."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * _USEC)}")

    def _send(self, message: str) -> bool:
        """Whether there is no more to it: taken, or nobody is there. sdnotify tells neither, and encodes as Latin-1."""
        if self._notifier is not None and self._notifier.socket is not None:
            try:
                self._notifier.socket.send(message.encode())
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    def close(self) -> None:
        """Close the socket."""
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.close()
