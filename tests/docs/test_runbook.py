"""The runbook has an entry for every code that can be met, and quotes what the program says today."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from supervisord.systemd.message_ids import MESSAGE_IDS
from tests.docs.codes import SOURCE, reasons
from tests.docs.pages import ROOT, RUNBOOK, anchors, entries, links, prose, read

BY_REASON = {
    *("degraded", "exited", "failed", "gpu_degraded", "gpu_driver_trouble", "killing", "verdict", "waiting"),
}
"""Events that carry a reason, which is what is looked up."""
ONLY_TOLD = {"daemon_started", "refused", "stopped"}
NOTHING_TO_DO = "Nothing needs to be done"
WORDS_MAX = 150
"""It is read at three in the morning."""

COVERED_MIN = 0.65
"""Of the letters of a quoted line; the rest are names, and what others say."""
FRAGMENT_MIN = 4


def kinds_to_look_up() -> set[str]:
    """Kinds of events that ask something of an operator, as the journal's catalog has it."""
    catalog = (ROOT / "packaging/vllm-supervisor.catalog").read_text(encoding="utf-8")
    texts = {text.splitlines()[0].strip(): text for text in re.split(r"^-- ", catalog, flags=re.MULTILINE)[1:]}
    asking = {kind for kind, number in MESSAGE_IDS.items() if NOTHING_TO_DO not in texts[number]}
    return asking - BY_REASON - ONLY_TOLD


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    wanted = reasons() | kinds_to_look_up()
    written = set(entries(RUNBOOK))
    assert wanted - written == set(), "codes without an entry (### `code`) in docs/runbook.md"
    assert written - wanted == set(), "entries of the runbook whose code nothing says any more"


def test_the_index_leads_to_every_entry() -> None:
    text = read(RUNBOOK)
    index = text[: text.index("\n## ")]
    wanted = set(entries(RUNBOOK))
    assert wanted - {link.removeprefix("#") for link in links(index)} == set()
    assert wanted <= anchors(text)


@pytest.mark.parametrize("code", entries(RUNBOOK))
def test_an_entry_says_what_to_do_and_is_short(code: str) -> None:
    body = entries(RUNBOOK)[code]
    assert "\n- do: " in body
    assert len(body.split()) < WORDS_MAX


# --- quotations -------------------------------------------------------------------------------------------------------


@cache
def fragments() -> list[str]:
    """All that the program can say, cut where something is put in; the longest first."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {" ".join(part.split()) for part in re.split(r"\{[^}]*\}", node.value.replace("`", ""))}
    return sorted((part for part in found if len(part) >= FRAGMENT_MIN), key=len, reverse=True)


def covered(line: str) -> float:
    """How much of the letters of a line the program says; words with digits and the like are put in."""
    counted = [False] * len(line)
    for word in re.finditer(r"(?<!\S)[(\"]?([a-z][a-z-]*)(?=[\s,;:.)\"]|$)", line):
        counted[word.start(1) : word.end(1)] = [True] * len(word[1])
    own = [False] * len(line)
    for part in fragments():
        start = line.find(part)
        while start >= 0:
            own[start : start + len(part)] = [True] * len(part)
            start = line.find(part, start + 1)
    return sum(a and b for a, b in zip(counted, own, strict=True)) / max(1, sum(counted))


@pytest.mark.parametrize("line", re.findall(r"^- seen: `([^`]+)`", prose(read(RUNBOOK)), re.MULTILINE))
def test_quoted_lines_are_those_of_the_program(line: str) -> None:
    """A text that was changed has to be changed here too."""
    assert covered(line) >= COVERED_MIN, "the program does not say this (any more)"
