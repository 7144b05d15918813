"""`vllm-supervisor check-config [FILE]`: whether the daemon would take a configuration, and all that is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from supervisord.cli.machine import Machine
from supervisord.config import DEFAULT_PATH, ConfigError, Survey, daemon_is_root, sentences, survey
from supervisord.config_problems import Problem, printable, problem_of
from supervisord.core.spec import EngineSpec, NodeSpec, SupervisorSpec
from supervisord.engine import profiles
from supervisord.engine.launch import explain
from supervisord.engine.launch_flags import Knowledge, Settled, settle

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
    """Validate; problems and warnings go to stderr, one a line. 0: valid, and all engines could start; 2: not."""
    path: Path = args.config
    as_root = daemon_is_root(path)
    found = survey(path, trust=as_root)
    problems: list[object] = list(found.problems)
    warnings = list(found.loaded.warnings)
    if found.whole:  # what seems to be missing may be in a file that cannot be read
        check = _Check(found, path, as_root=as_root)
        problems += check.problems
        warnings += check.warnings
    for warning in dict.fromkeys(warnings):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if problems:
        print_problems(problems, path)
        return EXIT_INVALID
    names = ", ".join(found.loaded.spec.engines) or "none"
    print(f"{printable(str(path))} is valid; engines: {names}")
    return EXIT_OK


def print_problems(problems: Iterable[object], path: Path) -> None:
    """Every problem of a refused configuration and how many there are, on stderr."""
    lines = list(dict.fromkeys(map(str, problems)))
    for line in lines:
        print(printable(line), file=sys.stderr)
    count = len(lines)
    what = f"{count} problem{'s' if count > 1 else ''}"
    print(f"cannot use the configuration {printable(str(path))}: {what}", file=sys.stderr)


class _Check:
    """A configuration against this machine, as far as its keys are right: a key that was refused hides no other."""

    def __init__(self, found: Survey, path: Path, *, as_root: bool) -> None:
        self.problems: list[object] = []
        self.warnings: list[str] = []
        self._refused = found.refused
        self._origins = found.loaded.origins
        self._as_root = as_root
        node = self._usable(found.loaded.spec)
        try:
            known = profiles.load(path.absolute().parent, trust=as_root)
        except ConfigError as error:
            self.problems += error.problems
            known = profiles.Profiles(profiles.shipped())
            node = replace(node, engines={name: replace(spec, profile="none") for name, spec in node.engines.items()})
        self._machine = Machine(node, known, as_root=as_root)
        self._told = {(problem.file, problem.path) for problem in found.problems}
        for spec in node.engines.values():
            self._engine(spec, known)
        self.problems += self._new(problem_of(problem, self._origins) for problem in self._machine.gpu_problems())
        self.warnings += sentences(self._machine.gpu_warnings(), self._origins)

    def _usable(self, node: NodeSpec) -> NodeSpec:
        """Without what would lead us to a wrong place."""
        if ("supervisor", "state_dir") in self._refused:
            node = replace(node, supervisor=replace(node.supervisor, state_dir=SupervisorSpec().state_dir))
        return node

    def _engine(self, spec: EngineSpec, known: profiles.Profiles) -> None:
        at = ("engine", spec.name)
        if (*at, "command") in self._refused:  # there is no program that could be asked
            facts = Knowledge(gpus=self._machine.kinds(spec), profiles=known, origins=self._origins)
            self._settled(settle(replace(spec, command=()), None, facts))
            return
        facts = self._machine.known(spec)
        found = explain(spec, as_root=self._as_root, base_env=os.environ, origins=self._origins, known=facts)
        self.problems += [one.text for one in found.obstacles if (*at, one.key) not in self._refused]
        self._settled(found.flags)

    def _settled(self, flags: Settled) -> None:
        self.problems += self._new(flags.problems)
        self.warnings += flags.warnings

    def _new(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """Those of keys of which nothing was said yet."""
        return (problem for problem in problems if (problem.file, problem.path) not in self._told)
