"""`vllm-supervisor check-config [FILE]`: whether the daemon would take a configuration, and all that is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from supervisord.config import DEFAULT_PATH, ConfigError, Loaded, daemon_is_root, load
from supervisord.config_problems import printable
from supervisord.control.client import ControlError, get
from supervisord.core.gpu_inventory import normal_pci_id
from supervisord.core.gpu_kinds import UNKNOWN, GpuKind
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.engine import profiles
from supervisord.engine.flags import FlagBook
from supervisord.engine.launch import Explanation, explain
from supervisord.engine.launch_flags import Knowledge

EXIT_OK: Final = 0
EXIT_INVALID: Final = 2

_ASK_S: Final = 5.0

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
        plans = _plans(loaded, path, as_root=as_root)
    except ConfigError as error:
        print_problems(error, path)
        return EXIT_INVALID
    for warning in (*loaded.warnings, *_launch_warnings(plans)):
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


class Machine:
    """What this machine has for the engines of a configuration: the flags of each vLLM, the GPUs, the profiles.

    Raises ConfigError for profiles that cannot be used. Reading flags can take a minute for each vLLM.
    """

    def __init__(self, node: NodeSpec, path: Path, *, as_root: bool) -> None:
        self._profiles = profiles.load(path.absolute().parent, trust=as_root)
        self._book = FlagBook(Path(node.supervisor.state_dir), as_root=as_root, base_env=os.environ)
        self._gpus = _gpus(node)

    def known(self, spec: EngineSpec) -> Knowledge:
        """What is known for one engine."""
        return Knowledge(flags=self._book.read(spec), gpus=self._kinds(spec), profiles=self._profiles)

    def _kinds(self, spec: EngineSpec) -> list[GpuKind] | None:
        """The kinds of an engine's GPUs; None unless all of them are known."""
        names = {str(gpu.get(key)): gpu for key in ("index", "pci_id", "uuid") for gpu in self._gpus}
        wanted = [normal_pci_id(name) if ":" in name else name for name in spec.gpus]
        found = [gpu for name in wanted if (gpu := names.get(name)) is not None]
        if len(found) != len(spec.gpus):
            return None
        return [GpuKind(gpu.get("generation") or UNKNOWN, gpu.get("class") or UNKNOWN) for gpu in found]


def _gpus(node: NodeSpec) -> Sequence[Mapping[str, Any]]:
    """The GPUs of this machine as the daemon knows them; none when it does not run, or does not let us ask."""
    if not any(spec.gpus for spec in node.engines.values()):
        return ()
    try:
        gpus = get(node.supervisor.socket, "/v1/status", timeout_s=_ASK_S).document().get("gpus", ())
    except ControlError:
        return ()
    return [gpu for gpu in gpus if isinstance(gpu, dict)]


def _plans(loaded: Loaded, path: Path, *, as_root: bool) -> list[Explanation]:
    """How each engine would be started. Raises ConfigError for flags that its vLLM does not take."""
    machine = Machine(loaded.spec, path, as_root=as_root)
    plans = [
        explain(spec, as_root=as_root, base_env=os.environ, origins=loaded.origins, known=machine.known(spec))
        for spec in loaded.spec.engines.values()
    ]
    if problems := [problem for found in plans for problem in found.flags.problems]:
        raise ConfigError(problems)
    return plans


def _launch_warnings(plans: list[Explanation]) -> list[str]:
    """What would keep an engine from starting here. Not the configuration's fault: vLLM may be installed later."""
    warnings = [warning for found in plans for warning in found.flags.warnings]
    errors = [f"engine {found.plan.engine} would not start: {error}" for found in plans for error in found.plan.errors]
    return [*warnings, *errors]
