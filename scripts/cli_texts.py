"""The manual page and the completions of bash and zsh, made from the parsers of the command line.

usage: .venv/bin/python scripts/cli_texts.py man|bash|zsh

They are made when the package is, so they cannot differ from the program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from roff import roff, title_line  # noqa: E402 - its folder is not on the path before

from supervisord.cli import COMMANDS, PROGRAM, Parser  # noqa: E402 - the same

EXIT_CODES = (
    (0, "it worked; the answer is yes"),
    (
        1,
        "the answer is no: an engine is not ready, a GPU is not well, a check failed, what was awaited did not come",
    ),
    (2, "the configuration is invalid"),
    (3, "the daemon does not run"),
    (4, "permission denied"),
    (5, "unknown engine, or the request was refused"),
    (6, "timed out"),
    (64, "wrong usage"),
    (70, "internal error"),
    (75, "another daemon uses the state directory"),
)
FILES = (
    ("/etc/vllm-supervisor/config.toml", "the configuration; conf.d/*.toml beside it is read after it"),
    ("/var/lib/vllm-supervisor", "state, history, evidence, logs of engines"),
    ("/var/lib/vllm", "home of the user vllm, as whom engines run"),
    ("/run/vllm-supervisor/control.sock", "the control socket, open to root and to the group vllm-admin"),
    ("/usr/share/vllm-supervisor/scripts/install-vllm", "installs vLLM into an environment of its own"),
)
SOCKET = ("--socket",)
"""Which every command has, and which is described once."""


class Option(NamedTuple):
    """An option: its names, the word for its value ("" when it takes none), and what it does."""

    names: tuple[str, ...]
    value: str
    text: str


class Command(NamedTuple):
    """A command, or an action of one ("gpu clear")."""

    words: tuple[str, ...]
    text: str
    more: str
    positionals: tuple[tuple[str, bool], ...]
    options: tuple[Option, ...]
    actions: tuple[str, ...]


def commands() -> list[Command]:
    """Every command in the order of --help, each followed by its actions."""
    holder = Parser(prog=PROGRAM)
    subparsers = holder.add_subparsers()
    for module in dict.fromkeys(module for module, _ in COMMANDS.values()):
        import_module(f"supervisord.cli.{module}").add_parser(subparsers)
    return [command for name in COMMANDS for command in _described((name,), subparsers.choices[name])]


def _described(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Command]:
    options, positionals, inner = [], [], {}
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
            inner = dict(action.choices)
        elif action.option_strings:
            value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
            options.append(Option(tuple(action.option_strings), value, str(action.help or "")))
        else:
            positionals.append((str(action.metavar or action.dest.upper()), action.nargs == "?"))
    known = [option for option in options if "--help" not in option.names and option.names != SOCKET]
    more = parser.epilog or ""
    yield Command(words, parser.description or "", more, tuple(positionals), tuple(known), tuple(inner))
    for name, one in inner.items():
        yield from _described((*words, name), one)


def man() -> str:
    """vllm-supervisor(8)."""
    lines = [
        title_line("VLLM-SUPERVISOR", 8, "System administration"),
        ".SH NAME",
        r"vllm\-supervisor \- starts vLLM engines, proves that they answer, and repairs them",
        ".SH SYNOPSIS",
        r".B vllm\-supervisor",
        r"[\fB\-\-socket\fR \fIPATH\fR] \fICOMMAND\fR [\fIARGUMENTS\fR]",
        ".SH DESCRIPTION",
        r"One daemon per machine (\fBrun\fR, which systemd starts) owns the engines of its configuration. Every other",
        "command asks that daemon, or the configuration.",
        ".PP",
        r".B \-\-socket \fIPATH\fR",
        r"names the daemon's control socket, before or after the command; by default \fB$VLLM_SUPERVISOR_SOCKET\fR, or",
        roff("/run/vllm-supervisor/control.sock."),
        ".SH COMMANDS",
    ]
    for command in commands():
        lines += _man_command(command)
    lines.append(".SH EXIT STATUS")
    for code, text in EXIT_CODES:
        lines += [".TP", f".B {code}", roff(text)]
    lines.append(".SH FILES")
    for path, text in FILES:
        lines += [".TP", f".I {roff(path)}", roff(text)]
    lines += [
        ".SH SEE ALSO",
        r".BR vllm\-supervisor.toml (5),",
        ".BR systemctl (1),",
        ".BR journalctl (1)",
        ".PP",
        roff("/usr/share/doc/vllm-supervisor/"),
    ]
    return "\n".join(lines) + "\n"


def _man_command(command: Command) -> Iterator[str]:
    shown = [f"\\fB{roff(' '.join(command.words))}\\fR"]
    shown += [f"[{_man_option(option)}]" for option in command.options]
    for name, optional in command.positionals:
        shown.append(f"[\\fI{roff(name)}\\fR]" if optional else f"\\fI{roff(name)}\\fR")
    yield from (".SS " + " ".join(shown), roff(" ".join(command.text.split())))
    for option in command.options:
        yield from (".TP", _man_option(option), roff(option.text))
    if command.more:
        yield from (".PP", roff(" ".join(command.more.split())))


def _man_option(option: Option) -> str:
    names = ", ".join(f"\\fB{roff(name)}\\fR" for name in option.names)
    return f"{names} \\fI{roff(option.value)}\\fR" if option.value else names


BASH = r"""# bash completion for vllm-supervisor
# Names of the engines that the running daemon has; nothing when none answers within two seconds.
_vllm_supervisor_engines() {
  timeout 2 vllm-supervisor status --json "${socket[@]}" 2>/dev/null </dev/null |
    tr -d ' \n' | grep -oE '[{]"name":"[a-z0-9_-]+"' | cut -d '"' -f 4
}

_vllm_supervisor() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command="" word position
  local -a socket=()
  for ((position = 1; position < COMP_CWORD; position++)); do
    word=${COMP_WORDS[position]}
    case $word in
      --socket) socket=(--socket "${COMP_WORDS[++position]}") ;;
      @VALUED@) ((position++)) ;;
      -*) ;;
      *) [[ $command == @NESTED@ || -z $command ]] && command="${command:+$command }$word" ;;
    esac
  done
  COMPREPLY=()
  case $previous in
    @FILED@) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
    @ENGINED@) mapfile -t COMPREPLY < <(compgen -W "$(_vllm_supervisor_engines)" -- "$current"); return ;;
    @OTHERS@) return ;;
  esac
  case $command in
    "") word="@COMMANDS@ --socket --version --help" ;;
@CASES@
  esac
  mapfile -t COMPREPLY < <(compgen -W "$word" -- "$current")
}
complete -F _vllm_supervisor vllm-supervisor
"""
TAKES_FILE = {"FILE", "PATH"}
TAKES_ENGINE = {"E", "ENGINE"}


def bash() -> str:
    """Completion for bash: commands, options, names of engines, files."""
    known = commands()
    options = [option for command in known for option in command.options] + [Option(SOCKET, "PATH", "")]

    valued = [(name, option.value) for option in options if option.value for name in option.names]

    def named(values: set[str]) -> str:
        return " | ".join(dict.fromkeys(name for name, value in valued if value in values))

    cases = []
    for command in known:
        words = [*command.actions, *(name for option in command.options for name in option.names), "--socket", "--help"]
        if any(name == "ENGINE" for name, _ in command.positionals):
            words.append("$(_vllm_supervisor_engines)")
        files = any(name == "FILE" for name, _ in command.positionals)
        words += ['$(compgen -f -- "$current")'] if files else []
        cases.append(f'    "{" ".join(command.words)}") word="{" ".join(words)}" ;;')
    text = BASH.replace("@CASES@", "\n".join(cases))
    text = text.replace("@COMMANDS@", " ".join(command.words[0] for command in known if len(command.words) == 1))
    text = text.replace("@FILED@", named(TAKES_FILE)).replace("@ENGINED@", named(TAKES_ENGINE))
    text = text.replace("@NESTED@", f"@({'|'.join(command.words[0] for command in known if command.actions)})")
    every = {value for _, value in valued}
    return text.replace("@OTHERS@", named(every - TAKES_FILE - TAKES_ENGINE)).replace("@VALUED@", named(every))


ZSH = r"""#compdef vllm-supervisor
# Names of the engines that the running daemon has; nothing when none answers within two seconds.
_vllm_supervisor_engines() {
  local -a engines
  engines=(${(f)"$(timeout 2 vllm-supervisor status --json $socket 2>/dev/null </dev/null |
    tr -d ' \n' | grep -oE '[{]"name":"[a-z0-9_-]+"' | cut -d '"' -f 4)"})
  compadd -a engines
}

_vllm_supervisor() {
  local curcontext=$curcontext state line
  local -a commands socket
  local -i at=${words[(I)--socket]}
  ((at == 0)) || socket=(--socket "$words[at + 1]")
  commands=(
@COMMANDS@
  )
  _arguments -C '--socket[control socket]:path:_files' '--version[show the version]' '--help[show help]' \
    '1:command:->command' '*::argument:->argument'
  case $state in
    command) _describe command commands ;;
    argument)
      case $line[1] in
@CASES@
      esac
      ;;
  esac
}

_vllm_supervisor "$@"
"""


def zsh() -> str:
    """Completion for zsh, with a word on each option."""
    known = commands()
    described = [f"    {_quoted(f'{name}:{text}')}" for name, (_, text) in COMMANDS.items()]
    cases = []
    for command in known:
        if len(command.words) > 1:
            continue
        options = [option for one in known if one.words[0] == command.words[0] for option in one.options]
        specs = [_zsh_option(name, option) for option in options for name in option.names]
        specs += [_quoted("--socket[control socket]:path:_files"), _quoted("--help[show help]")]
        if command.actions:
            specs.append(_quoted(f"1:action:({' '.join(command.actions)})"))
        for name, _ in command.positionals:
            specs.append(_quoted(f"1:{name.lower()}:{_zsh_values(name)}"))
        cases.append(f"        {command.words[0]}) _arguments {' '.join(dict.fromkeys(specs))} ;;")
    return ZSH.replace("@COMMANDS@", "\n".join(described)).replace("@CASES@", "\n".join(cases))


def _zsh_option(name: str, option: Option) -> str:
    text = option.text.replace("[", "(").replace("]", ")").replace(":", " -")
    return _quoted(f"{name}[{text}]" + (f":{option.value.lower()}:{_zsh_values(option.value)}" if option.value else ""))


def _zsh_values(value: str) -> str:
    return "_files" if value in TAKES_FILE else "_vllm_supervisor_engines" if value in TAKES_ENGINE else " "


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


TEXTS = {"man": man, "bash": bash, "zsh": zsh}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TEXTS:  # noqa: PLR2004 - the program and one word
        sys.exit(f"usage: scripts/cli_texts.py {'|'.join(TEXTS)}")
    print(TEXTS[sys.argv[1]](), end="")
