"""`vllm-supervisor check-config [FILE]`: whether the daemon would take a configuration, and all that is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from supervisord.config import DEFAULT_PATH, ConfigError, Loaded, daemon_is_root, load
from supervisord.config_problems import printable
from supervisord.engine.launch import build_plan

EXIT_OK: Final = 0
EXIT_INVALID: Final = 2

_DESCRIPTION: Final = "Say whether the daemon would take a configuration, and everything that is wrong with it."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser("check-config", help="validate a configuration", description=_DESCRIPTION)
    parser.add_argument(
        "config", metavar="FILE", nargs="?", type=Path, default=DEFAULT_PATH, help=f"default: {DEFAULT_PATH}"
    )


def main(args: argparse.Namespace) -> int:
    """Validate; problems go to stderr, one a line. 0: valid, 2: not."""
    path: Path = args.config
    as_root = daemon_is_root(path)
    try:
        loaded = load(path, trust=as_root)
    except ConfigError as error:
        print_problems(error, path)
        return EXIT_INVALID
    for warning in (*loaded.warnings, *_launch_warnings(loaded, as_root=as_root)):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    names = ", ".join(loaded.spec.engines) or "none"
    print(f"{path} is valid; engines: {names}")
    return EXIT_OK


def print_problems(error: ConfigError, path: Path) -> None:
    """Every problem of a refused configuration and how many there are, on stderr."""
    for problem in error.problems:
        print(printable(str(problem)), file=sys.stderr)
    count = len(error.problems)
    print(f"cannot use the configuration {path}: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)


def _launch_warnings(loaded: Loaded, *, as_root: bool) -> list[str]:
    """What would keep an engine from starting here. Not the configuration's fault: vLLM may be installed later."""
    plans = [build_plan(spec, as_root=as_root, base_env=os.environ) for spec in loaded.spec.engines.values()]
    return [f"engine {plan.engine} would not start: {error}" for plan in plans for error in plan.errors]
