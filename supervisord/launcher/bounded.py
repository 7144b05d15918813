"""Asking another program something within a bound on time and size."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Final

DEATH_S: Final = 1.0
"""After a SIGKILL it is waited for so long; one that hangs in the kernel is left to itself."""


class BoundedError(Exception):
    """There is no answer; the message says why."""


def output_of(command: Sequence[str], timeout_s: float, max_bytes: int) -> bytes:
    """The end of what a program writes to stdout. Raises BoundedError; also when it fails."""
    try:
        # Into memory, not through a pipe: whoever holds a pipe's other end decides how long it is read.
        with open(os.memfd_create(command[0]), "w+b") as output:  # noqa: PTH123 (it has no path)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
            if not _ended(process, timeout_s):
                process.kill()
                _ended(process, DEATH_S)
                raise BoundedError(f"no answer within {timeout_s:g} s")
            if process.returncode:
                raise BoundedError(f"exit code {process.returncode}")
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - max_bytes))
            return output.read(max_bytes)
    except OSError as error:
        raise BoundedError(error.strerror or str(error)) from None


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
