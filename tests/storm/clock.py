"""A wall clock that jumps for the processes of one daemon: clock.c, preloaded.

The machine's own clock stays as it is, because everybody else has it too; so what the kernel stamps (files, journald)
does not jump along. Neither does CLOCK_BOOTTIME: suspending the machine is not staged.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


class Clock:
    """Start processes with `env`, then `jump`."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "clock"
        self._library = folder / "clock.so"
        self._offset.write_bytes(bytes(8))
        subprocess.run(["gcc", *_FLAGS, "-o", str(self._library), str(SOURCE)], check=True)

    @property
    def env(self) -> dict[str, str]:
        return {"STORM_CLOCK": str(self._offset), "LD_PRELOAD": str(self._library)}

    def jump(self, offset_s: int) -> None:
        """So far from the true time, from now on. In place: the file is mapped."""
        with self._offset.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", offset_s))
