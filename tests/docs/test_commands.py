"""Every command line of vllm-supervisor that the README and docs/ show is one that its parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from supervisord.cli import COMMANDS, PROGRAM, Parser
from tests.docs.pages import PAGES, ROOT, blocks, prose, read

SHELL = {"sh", "", "console", "bash"}
_SPAN = re.compile(r"`((?:sudo )?vllm-supervisor [^`\n]+)`")
_WORDS_AFTER = re.compile(r"^(?:\$ )?(?:sudo )?(vllm-supervisor (?![0-9]).*)")


@pytest.fixture(scope="module")
def parser() -> Parser:
    parser = Parser(prog=PROGRAM)
    parser.add_argument("--socket")
    parser.add_argument("--version", action="store_true")
    subparsers = parser.add_subparsers(dest="command")
    for module in dict.fromkeys(module for module, _ in COMMANDS.values()):
        import_module(f"supervisord.cli.{module}").add_parser(subparsers)
    return parser


def command_lines(text: str) -> Iterator[str]:
    """Those in blocks of code, also several on a line, and those in backticks."""
    for language, block in blocks(text):
        if language in SHELL:
            for line in block.splitlines():
                for part in re.split(r" && | \|\| | \| |; ", line):
                    found = _WORDS_AFTER.match(part.strip())
                    if found:
                        yield found[1]
    for span in _SPAN.findall(prose(text)):
        for part in span.split(" && "):
            found = _WORDS_AFTER.match(part)
            if found:
                yield found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_parser_takes_them(page: Path, parser: Parser, capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines(read(page)):
        words = shlex.split(line, comments=True)[1:]
        try:
            parser.parse_args(words)
        except SystemExit:
            pytest.fail(f"{line}: {capsys.readouterr().err}")


def test_there_are_some() -> None:
    """A test that looks for nothing would pass."""
    found = {shlex.split(line, comments=True)[1] for page in PAGES for line in command_lines(read(page))}
    assert set(COMMANDS) <= found
