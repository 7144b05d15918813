"""No regular expression of the package takes more than linear time, whatever it is given."""

from __future__ import annotations

import re

import pytest

from tests.fuzz.pumping import Used, patterns, slow

ALL = patterns()


def test_all_are_found() -> None:
    """So many that the search itself cannot have come to nothing."""
    names = {used.where for used in ALL}
    assert len(ALL) > 80
    assert {"supervisord.core.classify.SIGNATURES", "supervisord.http_wire._HEADER"} <= names


@pytest.mark.parametrize("used", ALL, ids=lambda used: used.where)
def test_linear(used: Used) -> None:
    assert (found := slow(used)) is None, found


@pytest.mark.parametrize("text", [r"(a+)+$", r"x\s*\s*$", r"a[^\n]* to [^\n]*b", r"[a-z]+://", r"(?:.*\bx)?y"])
def test_what_is_slow_is_found(text: str) -> None:
    assert slow(Used("here", re.compile(text), ("search",))) is not None
