"""Widths and wrapping of text that anybody may have written."""

from __future__ import annotations

import string
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.cli import render

TOWER = "Z" + "\u0335" * 50
ANYTHING = st.text(st.characters(codec="utf-8"), max_size=200)


@pytest.mark.parametrize(
    ("text", "size"), [("", 0), ("abc", 3), ("\u6a21\u578b", 4), ("e\u0301", 1), ("\uff21", 2), ("\U0001f600", 2)]
)
def test_columns_of_a_terminal(text: str, size: int) -> None:
    assert render.columns(text) == size
    assert render.columns(render.pad(text, 10)) == 10


@pytest.mark.parametrize(
    ("text", "room", "short"),
    [
        ("short", 8, "short"),
        ("/srv/models/qwen-9b", 8, "qwen-9b"),
        ("engine-with-a-long-name", 10, "engi..name"),
        ("\u6a21\u578b\u6a21\u578b\u6a21\u578b", 10, "\u6a21\u578b..\u6a21\u578b"),
        ("\u6a21\u578b\u6a21\u578b\u6a21\u578b", 9, "\u6a21\u578b..\u578b"),
    ],
)
def test_what_is_too_long_keeps_both_ends(text: str, room: int, short: str) -> None:
    assert render.shorten(text, room) == short


def test_a_sentence_keeps_its_beginning() -> None:
    assert render.clip("it does not answer", 10) == "it does .."
    assert render.clip("it is well", 10) == "it is well"


def test_only_blanks_part_words() -> None:
    uuid = "GPU-5135c0de-0003-4000-8000-000000000003"
    assert render.wrap(f"mend that, then: gpu clear {uuid}", 60) == ["  mend that, then: gpu clear", f"    {uuid}"]


def test_a_word_that_is_longer_than_a_line_is_cut() -> None:
    assert render.wrap("x" * 50, 24, "  ", "    ") == ["  " + "x" * 22, "    " + "x" * 20, "    " + "x" * 8]


def test_beside_a_wide_indentation_there_is_room_for_words() -> None:
    lines = render.wrap("some words that go on", 20, "label that is long  ", " " * 20)
    assert lines == ["label that is long  some words that", " " * 20 + "go on"]


def test_nothing_is_no_line() -> None:
    assert render.wrap("", 80) == []
    assert render.wrap(" \t\n", 80) == []


def test_towers_of_combining_marks_are_cut() -> None:
    assert len(render.cell(TOWER)) == 5
    assert render.clean(TOWER) == TOWER, "a log is shown as it is"


@given(ANYTHING, st.integers(20, 120))
def test_no_text_gets_beyond_its_width(text: str, width: int) -> None:
    for line in render.wrap(text, width):
        assert render.columns(line) <= width
        assert line.isprintable()
    assert render.columns(render.shorten(render.cell(text), width)) <= width
    assert render.columns(render.clip(render.cell(text), width)) <= width


@given(st.text(string.ascii_letters + " ", max_size=300), st.integers(20, 120))
def test_nothing_is_lost(text: str, width: int) -> None:
    assert "".join("".join(render.wrap(text, width)).split()) == "".join(text.split())


@pytest.mark.parametrize(("used", "total", "picture"), [(0, 10, "[....]"), (5, 10, "[##..]"), (99, 10, "[####]")])
def test_a_picture_of_what_is_used(used: float, total: float, picture: str) -> None:
    assert render.bar(used, total, 4) == picture


def test_no_picture_of_what_is_not_known() -> None:
    assert render.bar(None, 10, 4) == ""
    assert render.bar(1, None, 4) == ""
    assert render.bar(1, 0, 4) == ""


@pytest.mark.parametrize(("mib", "text"), [(None, "-"), (0, "0M"), (1023, "1023M"), (1024, "1.0G"), (59_494, "58.1G")])
def test_sizes_in_a_few_characters(mib: float | None, text: str) -> None:
    assert render.gib(mib) == text


@pytest.mark.parametrize("char", ["a", "\u6a21", "\u0335"])
def test_a_long_word_is_parted_quickly(char: str) -> None:
    begun = thread_time()
    render.wrap(char * 60_000, 16)
    assert thread_time() - begun < 3.0


@pytest.mark.parametrize(
    ("used", "total", "shown"), [(1.7e308, 0.5, "[####]"), (-1.0, 2.0, "[....]"), (1.0, 2.0, "[##..]"), (1.0, 0.0, "")]
)
def test_a_bar_of_any_numbers(used: float, total: float, shown: str) -> None:
    assert render.bar(used, total, 4) == shown
