"""Runs the checks side by side: one that hangs or has a bug costs its own answer and no other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from supervisord.config_problems import printable
from supervisord.doctor.checks import CHECKS, Check
from supervisord.doctor.facts import Facts
from supervisord.doctor.findings import Finding, Verdict, fail, not_checked
from supervisord.doctor.lateness import Call, LateError

VERSION: Final = 1
CHECKS_S: Final = 15.0
"""For all checks together: they run side by side."""


class Result(NamedTuple):
    """A finding, and which check found it."""

    check: Check
    finding: Finding


def examine(facts: Facts, checks: Sequence[Check] = CHECKS, within_s: float = CHECKS_S) -> list[Result]:
    """Do all checks; takes `within_s` at most."""
    until = time.monotonic() + within_s
    calls = [(check, Call(partial(_ask, check, facts))) for check in checks]
    return [Result(check, finding) for check, call in calls for finding in _outcome(call, until)]


def _ask(check: Check, facts: Facts) -> list[Finding]:
    return list(check.ask(facts))


def _outcome(call: Call[list[Finding]], until: float) -> list[Finding]:
    try:
        return call.result(until)
    except LateError as error:
        return [fail(str(error), "dmesg | tail; mount shows network file systems")]
    except Exception as error:  # noqa: BLE001 - a bug in one check must not hide what the others found
        text = f"internal error: {type(error).__name__}: {printable(str(error))}"
        return [not_checked(text, "please report this")]


def document(results: Sequence[Result]) -> dict[str, Any]:
    """The same for programs (doctor.schema.json). Text is printable: names of files and processes are anybody's."""
    return {
        "version": VERSION,
        "checks": [
            {
                "name": check.name,
                "group": check.group,
                "subject": printable(finding.subject) or None,
                "verdict": finding.verdict.value,
                "message": printable(finding.message),
                "remedy": printable(finding.remedy) or None,
            }
            for check, finding in results
        ],
    }


def failed(results: Sequence[Result]) -> bool:
    """Whether the machine is not fit."""
    return any(result.finding.verdict is Verdict.FAIL for result in results)
