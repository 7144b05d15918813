"""A measurement that fails is told in the page, and the others go on."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
FAILED = "cannot"
"""How notes of failed measurements begin."""
MISSING = "not measured"


class Attempts:
    """The measurements of one table; `notes` say which of them failed, and why."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def of(self, what: str, measure: Callable[[], _T]) -> _T | None:
        """What it measured; None when it failed."""
        began = time.monotonic()
        try:
            result = measure()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is told, and ends this measurement only)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.notes.append(f"{FAILED} measure {what}: {lines[0][:300]}")
            print(f"{self.notes[-1]}\n{''.join(traceback.format_exception(error)[-4:])}", flush=True)
            return None
        print(f"  {what}: {time.monotonic() - began:.0f} s", flush=True)
        return result
