"""The machine as the checks see it: bounded looks at files and answers of commands.

`root` stands for / where the system itself is looked at (/proc, /sys, /dev, /etc); what a configuration names
(programs, models, homes) is looked at where it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisord.config_users import Account, account

COMMAND_S: Final = 5.0
"""For a command; `systemctl` takes milliseconds."""

_TEXT_BYTES: Final = 256 * 1024
_OUTPUT_CHARS: Final = 64 * 1024
_WHOLE: Final = re.compile(r"[0-9]{1,19}")


def run(argv: Sequence[str]) -> str | None:
    """What a command prints on stdout; None when it is not there, fails, or does not end within COMMAND_S."""
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError):
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        out, _ = child.communicate(timeout=COMMAND_S)
        return out.decode(errors="replace")[:_OUTPUT_CHARS] if child.returncode == 0 else None
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=1.0)
    return None


def text_of(path: Path) -> str | None:
    """The text of a regular file, its first part when it is long; None when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return file.read(_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return None


def whole(text: str) -> int | None:
    """A number as the system writes it; None for anything else."""
    return int(text) if _WHOLE.fullmatch(text) else None


def hidden(path: str) -> bool:
    """Whether we may not even look whether something is there."""
    try:
        os.stat(path)  # noqa: PTH116 (text of a configuration)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return False


@dataclass(frozen=True, slots=True)
class Box:
    """One machine."""

    root: Path = Path("/")
    euid: int = field(default_factory=os.geteuid)
    run: Callable[[Sequence[str]], str | None] = run
    account: Callable[[str], Account | None] = account

    @property
    def is_root(self) -> bool:
        """Whether we may look everywhere."""
        return self.euid == 0

    def path(self, path: str) -> Path:
        """A place of the system."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """See `text_of`."""
        return text_of(self.path(path))

    def names(self, folder: str) -> list[str]:
        """What is in a directory of the system; empty when it is not there or may not be listed."""
        try:
            return sorted(os.listdir(self.path(folder)))  # noqa: PTH208 (names)
        except OSError:
            return []

    def process(self, *names: str) -> bool:
        """Whether a process of one of these names (as /proc/PID/comm cuts them, to 15 characters) runs."""
        cut = {name[:15] for name in names}
        return any((self.text(f"/proc/{pid}/comm") or "").strip() in cut for pid in self.pids())

    def group(self, name: str) -> int | None:
        """The id of a group of the system itself; None when there is none."""
        for line in (self.text("/etc/group") or "").splitlines():
            fields = line.split(":")
            if fields[0] == name and fields[2:3] and (number := whole(fields[2])) is not None:
                return number
        return None

    def pids(self) -> list[int]:
        """Every process."""
        return [int(name) for name in self.names("/proc") if name.isdecimal()]

    @property
    def has_systemd(self) -> bool:
        """Whether systemd runs it (sd_booted(3))."""
        return self.path("/run/systemd/system").is_dir()
