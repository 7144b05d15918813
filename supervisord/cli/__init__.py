"""The command line: finds the subcommand, imports its module and no other, turns errors into words and exit codes.

A subcommand is a line in COMMANDS and a module with `add_parser(subparsers)` and `main(args) -> int`. `args.socket`
is the control socket to use.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from importlib import import_module

from supervisord import __version__
from supervisord.control.client import (
    DEFAULT_SOCKET,
    ControlError,
    DeniedError,
    RefusedError,
    SlowError,
    UnreachableError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final, NoReturn

PROGRAM: Final = "vllm-supervisor"
_ENV: Final = "VLLM_SUPERVISOR_SOCKET"

OK: Final = 0
NO: Final = 1
INVALID: Final = 2
NOT_RUNNING: Final = 3
DENIED: Final = 4
REFUSED: Final = 5
TIMED_OUT: Final = 6
USAGE: Final = 64
INTERNAL: Final = 70
_HELP_WIDTH: Final = 78
_INTERRUPTED: Final = 130
_PIPE_CLOSED: Final = 141
_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

COMMANDS: Final = {
    "run": ("run", "run the daemon in the foreground (systemd does this)"),
    "check-config": ("check_config", "say everything that is wrong with a configuration"),
    "plan": ("plan", "show how engines would be started; change nothing"),
    "status": ("status", "show engines and GPUs"),
    "why": ("why", "tell why an engine was restarted, failed or waits"),
    "events": ("events", "show what was decided, with reasons and numbers"),
    "start": ("request", "start an engine"),
    "stop": ("request", "stop an engine"),
    "restart": ("request", "restart an engine"),
    "drain": ("request", "keep an engine running, but out of traffic"),
    "reset": ("request", "let a failed engine try again"),
    "reload": ("reload", "apply a changed configuration"),
    "gpu": ("gpu", "show the GPUs; clear, release, persistence"),
    "doctor": ("doctor", "check what a machine needs for vLLM, each with its remedy"),
    "notify": ("notify", "send a test message to receivers of notifications"),
    "logs": ("logs", "show the log of an engine"),
}


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for usage errors (its own, 2, means an invalid configuration here)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Say what cannot be understood and end. Words of a command line may come from anywhere, by copy and paste."""
        from supervisord.cli.render import clean  # noqa: PLC0415 - not every command prints

        told = f"{self.prog}: cannot understand the command line: {message}; try: {self.prog} --help"
        self.exit(USAGE, f"{clean(told)}\n")


def _formatter(prog: str) -> argparse.HelpFormatter:
    # Without a width argparse imports shutil for each parser, which costs a tenth of the whole command.
    return argparse.HelpFormatter(prog, width=_HELP_WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Only bugs in the interpreter get past this."""
    _fill_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="replace")  # a model's name may not fit the terminal's encoding
    try:
        try:
            code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        except SystemExit as ended:  # argparse: help, version, usage
            code = ended.code if isinstance(ended.code, int) else OK
        print(end="", flush=True)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _PIPE_CLOSED
    except ControlError as error:
        complain(str(error))
        return _code_of(error)
    except Exception as error:  # noqa: BLE001 - an operator gets a sentence, never a traceback
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
            _drop_stdout()
            complain(f"cannot write what there is to say: {error.strerror}")
            return INTERNAL
        complain(f"internal error: {type(error).__name__}: {error} ({_place(error)}); please report this")
        return INTERNAL
    return code


def complain(message: str) -> None:
    """Write a line to stderr, cleaned of what could drive a terminal."""
    from supervisord.cli.render import clean  # noqa: PLC0415 - not every command prints

    print(f"{PROGRAM}: {clean(message)}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    command = _command_of(argv)
    parser = Parser(prog=PROGRAM, description="Starts vLLM engines, proves that they answer, and repairs them.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--socket", metavar="PATH", help=f"control socket (default: ${_ENV} or {DEFAULT_SOCKET})")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog=PROGRAM)
    if command is None:
        for name, (_, text) in COMMANDS.items():
            subparsers.add_parser(name, help=text)
        parser.parse_args(argv)
        raise AssertionError("argparse accepts no command line without a command")
    module = import_module(f"supervisord.cli.{COMMANDS[command][0]}")
    module.add_parser(subparsers)
    own = subparsers.choices[command]
    own.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help="control socket")
    args, rest = parser.parse_known_args(argv)
    if rest:
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    args.socket = args.socket or os.environ.get(_ENV) or DEFAULT_SOCKET
    code: int = module.main(args)
    return code


def _command_of(argv: list[str]) -> str | None:
    """Return the known command of this line; None lets argparse say what it is instead."""
    words = iter(argv)
    for word in words:
        if word == "--socket":
            next(words, None)
        elif word in {"-h", "--help"}:
            return None
        elif not word.startswith("-"):
            if word not in COMMANDS:
                _unknown(word)
            return word
    return None


def _unknown(word: str) -> NoReturn:
    from difflib import get_close_matches  # noqa: PLC0415 - costs as much as all else here, and only this needs it

    near = get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    complain(f"cannot find the command {word!r}; " + (f"did you mean {near[0]}?" if near else f"try: {PROGRAM} --help"))
    raise SystemExit(USAGE)


def _code_of(error: ControlError) -> int:
    match error:
        case UnreachableError():
            return NOT_RUNNING
        case DeniedError():
            return DENIED
        case RefusedError():
            return REFUSED
        case SlowError():
            return TIMED_OUT
        case _:
            return INTERNAL


def _place(error: Exception) -> str:
    """Module and line of where an exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "?"
    return f"{trace.tb_frame.f_globals.get('__name__', '?')}, line {trace.tb_lineno}"


def _fill_streams() -> None:
    """Whoever closed an output (`>&-`) wants the exit code alone."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 (no pathlib; for good)


def _drop_stdout() -> None:
    """Nobody reads our output any more: what is still buffered must not complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
