"""What holds for every test here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nobodys_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed depends on the test, not on the terminal of who runs it (pytest-xdist tells its workers)."""
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
