"""The manual page and the completions name every command and option that the parsers have."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from supervisord.cli import COMMANDS, PROGRAM, Parser

ROOT = Path(__file__).resolve().parents[2]


def text_of(kind: str) -> str:
    command = [sys.executable, str(ROOT / "scripts/cli_texts.py"), kind]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.fixture(scope="module", params=["man", "bash", "zsh"])
def text(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\\f[BIR]", "", text_of(request.param).replace("\\-", "-"))


def words_of(parser: argparse.ArgumentParser) -> set[str]:
    words: set[str] = set()
    for action in parser._actions:
        words |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                words |= {name} | words_of(inner)
    return words


def test_every_command_and_option_is_there(text: str) -> None:
    subparsers = Parser(prog=PROGRAM).add_subparsers()
    for module in {module for module, _ in COMMANDS.values()}:
        import_module(f"supervisord.cli.{module}").add_parser(subparsers)
    assert set(subparsers.choices) == set(COMMANDS)
    wanted = {name: words_of(parser) - {"-h", "--help", "--socket"} for name, parser in subparsers.choices.items()}
    assert "--socket" in text
    heads = re.compile(r'^(?:\.SS |    "|        )(?P<command>[a-z-]+)', re.MULTILINE)
    places = [(found["command"], found.start()) for found in heads.finditer(text)] + [("", len(text))]
    for name, words in wanted.items():
        own = [number for number, (command, _) in enumerate(places) if command == name]
        blocks = "".join(text[places[number][1] : places[number + 1][1]] for number in own)
        assert {word for word in words if not re.search(rf"(?<![\w-]){word}(?![\w-])", blocks)} == set(), name


def test_every_exit_code_is_in_the_page() -> None:
    from supervisord import app, cli  # noqa: PLC0415 - only this test needs the daemon

    names = ("OK", "NO", "INVALID", "NOT_RUNNING", "DENIED", "REFUSED", "TIMED_OUT", "USAGE", "INTERNAL")
    codes = {getattr(cli, name) for name in names} | {app.EXIT_BUSY}
    assert {int(code) for code in re.findall(r"^\.B (\d+)$", text_of("man"), re.MULTILINE)} == codes


def test_the_page_is_well_formed(tmp_path: Path) -> None:
    page = tmp_path / "vllm-supervisor.8"
    page.write_text(text_of("man"))
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True, check=False)
    assert done.stdout == ""


BASH = """
vllm-supervisor() { printf 'ENGINE  STATE\\nqwen  ready\\ncode  failed\\n\\n1 of 2\\n'; }
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_vllm_supervisor 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["sta"], {"status", "start"}),
        (["restart", ""], {"qwen", "code", "--now", "--wait", "--timeout", "--socket", "--help"}),
        (["restart", "q"], {"qwen"}),
        (["--socket", "/x", "why", "c"], {"code"}),
        (["events", "--engine", ""], {"qwen", "code"}),
        (["events", "--since", ""], {""}),
        (["gpu", "c"], {"clear"}),
        (["gpu", "persistence", "--d"], {"--dry-run"}),
    ],
)
def test_bash_offers(tmp_path: Path, line: list[str], offered: set[str]) -> None:
    script = tmp_path / "completion"
    script.write_text(text_of("bash"))
    command = ["bash", "-c", BASH, "bash", str(script), "vllm-supervisor", *line]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.removesuffix("\n").split("\n")) == offered


def test_zsh_can_read_it(tmp_path: Path) -> None:
    script = tmp_path / "_vllm-supervisor"
    script.write_text(text_of("zsh"))
    subprocess.run(["zsh", "-n", script], check=True)
