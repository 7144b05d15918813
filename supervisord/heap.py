"""The heap of the daemon's process."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8
"""malloc.h of glibc (mallopt(3))."""


def share_one_arena() -> None:
    """Let all threads allocate from one arena, before there are any.

    glibc gives threads arenas of their own, up to eight for each core, so that they do not wait for each other. Ours
    wait for the interpreter's lock anyway, and each arena keeps its peak for itself. Another libc has no such call.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
