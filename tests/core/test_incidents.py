"""Golden incidents: each failure mode of production as a transcript that is reviewed as a diff (see incidents.py).

TRANSCRIPTS=write writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.core import incidents

FOLDER = Path(__file__).parents[1] / "data" / "incidents"
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_incident(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    now, broken = incidents.play(text)
    assert not broken, f"{path.name}: {broken}\n{now}"
    if os.environ.get("TRANSCRIPTS") == "write":
        path.write_text(now, encoding="utf-8")
    assert now == text or os.environ.get("TRANSCRIPTS") == "write", now
    assert "must: " in text
    assert "must not: " in text


def test_there_are_incidents() -> None:
    assert len(FILES) >= 12
