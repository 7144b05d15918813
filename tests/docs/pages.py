"""The README and docs/ as data: headings with their anchors, links, blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')


@dataclass(frozen=True)
class Heading:
    """`code` is what stands in backticks in it; `body` ends at the next heading of its level or above."""

    level: int
    text: str
    body: str

    @property
    def codes(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.text)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Without blocks of code, in which nothing is a heading or a link."""
    return _FENCE.sub("", text)


def headings(text: str) -> list[Heading]:
    plain = prose(text)
    found = list(_HEADING.finditer(plain))
    ends = [
        next((later.start() for later in found[at + 1 :] if len(later[1]) <= len(one[1])), len(plain))
        for at, one in enumerate(found)
    ]
    return [Heading(len(one[1]), one[2], plain[one.end() : end]) for one, end in zip(found, ends, strict=True)]


def anchors(text: str) -> set[str]:
    """As GitHub makes them: lower case, words and hyphens, a number where one comes again; and those written out."""
    seen: dict[str, int] = {}
    made = set(_ANCHOR.findall(text))
    for heading in headings(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.text).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = seen[name] = seen.get(name, -1) + 1
        made.add(name if count == 0 else f"{name}-{count}")
    return made


def links(text: str) -> list[str]:
    """Targets of links, without those to other sites."""
    plain = re.sub(r"`[^`\n]*`", "``", prose(text))
    return [target for target in _LINK.findall(plain) if "://" not in target and not target.startswith("mailto:")]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each block of code."""
    for found in _FENCE.finditer(text):
        yield found[1], found[2]


def entries(page: Path) -> dict[str, str]:
    """The entries of a page by the code in their heading (level 3)."""
    return {code: heading.body for heading in headings(read(page)) if heading.level == 3 for code in heading.codes}


RUNBOOK = ROOT / "docs/runbook.md"
