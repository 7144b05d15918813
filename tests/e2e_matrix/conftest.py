"""What one release does is written down as it is seen, so that a failing test still leaves what was seen before."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e_cpu.conftest import vllm
from tests.e2e_matrix.page import commit, where

__all__ = ["vllm"]


class Record:
    """Observations of one release; kept in the JSON file that VLLM_SUPERVISOR_TEST_RECORD names, if it names one."""

    def __init__(self) -> None:
        self._file = os.environ.get("VLLM_SUPERVISOR_TEST_RECORD")
        today = time.strftime("%Y-%m-%d", time.gmtime())
        self._seen: dict[str, Any] = {"date": today, "commit": commit(), "machine": where()}
        self.failed: list[str] = []

    def note(self, **seen: Any) -> None:
        """Add to what was seen."""
        self._seen |= seen
        if self._file:
            Path(self._file).write_text(json.dumps(self._seen, indent=1) + "\n", encoding="utf-8")


RECORD = Record()


@pytest.fixture(scope="session")
def record() -> Record:
    return RECORD


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        RECORD.failed.append(report.location[2])


def pytest_sessionfinish() -> None:
    RECORD.note(failed=list(dict.fromkeys(RECORD.failed)))
