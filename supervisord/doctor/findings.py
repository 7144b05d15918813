"""What a check comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How it is; NOT_CHECKED: nobody could look, and the message says why."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. `subject`: the engine or GPU meant, "" for the machine. `remedy`: "" when there is none."""

    verdict: Verdict
    message: str
    remedy: str = ""
    subject: str = ""


def ok(message: str, subject: str = "") -> Finding:
    """All is well."""
    return Finding(Verdict.OK, message, "", subject)


def warn(message: str, remedy: str, subject: str = "") -> Finding:
    """It works, or may; somebody should know."""
    return Finding(Verdict.WARN, message, remedy, subject)


def fail(message: str, remedy: str, subject: str = "") -> Finding:
    """An engine cannot work like this, or the supervisor cannot."""
    return Finding(Verdict.FAIL, message, remedy, subject)


def not_checked(message: str, remedy: str = "", subject: str = "") -> Finding:
    """Nobody could look."""
    return Finding(Verdict.NOT_CHECKED, message, remedy, subject)


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def listed(words: Iterable[str], most: int = 4) -> str:
    """A few words of a list, and how many more there are."""
    found = list(dict.fromkeys(words))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
