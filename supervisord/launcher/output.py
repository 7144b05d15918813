"""What engines that are services have written, from the journal.

journalctl reads it, in a process of its own that may hang without us: 6 to 9 ms of CPU a look, most of it its start
(measured, systemd 252, 1 and 30 journal files). So it is asked only while an engine starts and when one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisord.launcher import bounded
from supervisord.launcher.bounded import BoundedError
from supervisord.launcher.logs import TAIL_LINES

READ_S: Final = 3.0
SETTLE_S: Final = 2.0
_MAX_BYTES: Final = 1024 * 1024
_PROGRAM: Final = ("journalctl", "--no-pager", "--quiet")
_PRINTED: Final = "_TRANSPORT=stdout"
"""What came through its output: at most 48 KiB an entry. In other ways an engine may send far more in one."""


class Output:
    """Asks journald. A journal that cannot be read is told once until it can be again, and is as good as empty."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        self._on_trouble = on_trouble
        self._failing = False

    def read(self, invocation: str) -> bytes:
        """The last 200 lines of one run of a unit, oldest first, as the engine wrote them; 1 MiB at most."""
        if not invocation:
            return b""
        match = f"_SYSTEMD_INVOCATION_ID={invocation}"
        command = (*_PROGRAM, "--output=cat", f"--lines={TAIL_LINES}", match, _PRINTED)
        try:
            found = bounded.output_of(command, READ_S, _MAX_BYTES)
        except BoundedError as error:
            if not self._failing:
                self._failing = True
                told = "engines are supervised without what they write"
                self._on_trouble(f"cannot read the journal (journalctl {match}): {error}; {told}")
            return b""
        self._failing = False
        return found

    def settle(self) -> None:
        """Wait until journald has written down what it was sent: the last words of who just ended are under way."""
        try:
            bounded.output_of((*_PROGRAM, "--sync"), SETTLE_S, 0)
        except BoundedError as error:
            self._on_trouble(f"journald does not write down what it is sent (journalctl --sync): {error}")
