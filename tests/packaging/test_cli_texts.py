"""The manual page and the completions name every command and option that the parsers have."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from supervisord.cli import COMMANDS, PROGRAM, Parser

ROOT = Path(__file__).resolve().parents[2]


def text_of(kind: str, script: str = "cli_texts") -> str:
    command = [sys.executable, str(ROOT / f"scripts/{script}.py"), kind]
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


@pytest.mark.parametrize(
    ("script", "name"), [("cli_texts", "vllm-supervisor.8"), ("config_texts", "vllm-supervisor.toml.5")]
)
def test_the_pages_are_well_formed(tmp_path: Path, script: str, name: str) -> None:
    page = tmp_path / name
    page.write_text(text_of("man", script))
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_every_key_of_the_configuration_is_in_its_page() -> None:
    page = text_of("man", "config_texts").replace("\\-", "-")
    reference = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| `(\w+)` \|", reference, re.MULTILINE)  # and the groups of events, which stand at the end
    assert len(keys) > 50
    assert re.findall(r"^\\fB(\w+)\\fR(?: \(|$)", page, re.MULTILINE) == keys
    assert re.findall(r'^\.SH "(\[.+\])"$', page, re.MULTILINE) == re.findall(r"^## `(.+)`$", reference, re.MULTILINE)


STATUS = {
    "supervisor": {"pid": 1},
    "engines": [
        {"name": "qwen", "model": '{"name": "no-engine"}', "reasons": [{"code": "slo", "message": "x"}]},
        {"name": "code", "gpus": []},
    ],
    "gpus": [{"uuid": "GPU-1", "name": "GeForce", "processes": [{"pid": 1, "name": "python3"}]}],
}
PROGRAM_SAYS = """#!/bin/sh
[ "$*" = "status --json" ] || [ "$*" = "status --json --socket /x" ] || { echo "not for $*"; exit 64; }
cat "$0.json"
echo "a complaint" >&2
exit 1
"""


@pytest.fixture(params=[None, 2], ids=["compact", "indented"])
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a vllm-supervisor that knows two engines."""
    path = tmp_path / "vllm-supervisor"
    path.write_text(PROGRAM_SAYS)
    path.chmod(0o755)
    path.with_name("vllm-supervisor.json").write_text(json.dumps(STATUS, indent=request.param))
    return tmp_path


BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_vllm_supervisor
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
def test_bash_offers(program: Path, line: list[str], offered: set[str]) -> None:
    script = program / "completion"
    script.write_text(text_of("bash"))
    command = ["bash", "-c", BASH, "bash", str(script), "vllm-supervisor", *line]
    environment = os.environ | {"PATH": f"{program}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "complaint" not in done.stderr
    assert set(done.stdout.removesuffix("\n").split("\n")) == offered


def test_zsh_can_read_it(tmp_path: Path) -> None:
    script = tmp_path / "_vllm-supervisor"
    script.write_text(text_of("zsh"))
    subprocess.run(["zsh", "-n", script], check=True)


ZSH = """
compadd() { print -l -- "${(@P)2}"; }
_arguments() {
  [[ "$*" == *_vllm_supervisor_engines* ]] && _vllm_supervisor_engines
  line=(restart) state=argument
}
words=(vllm-supervisor --socket /x restart "")
source "$1"
"""
"""The functions of completion itself, as far as they matter; the script calls its own when it is loaded first."""


def test_zsh_offers_engines(program: Path) -> None:
    script = program / "_vllm-supervisor"
    script.write_text(text_of("zsh"))
    environment = os.environ | {"PATH": f"{program}:{os.environ['PATH']}"}
    command = ["zsh", "-f", "-c", ZSH, "zsh", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout.split(), done.stderr) == (["qwen", "code"], "")
