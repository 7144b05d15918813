"""`vllm-supervisor plan [ENGINE]`: what exactly would be started, and why each part of it.

Changes nothing and needs no daemon.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supervisord.cli import render
from supervisord.cli.check_config import EXIT_INVALID, EXIT_OK, print_problems
from supervisord.cli.machine import Machine
from supervisord.config import DEFAULT_PATH, ConfigError, daemon_is_root, load, sentences
from supervisord.config_problems import printable, problem_of
from supervisord.engine import profiles
from supervisord.engine.flags import FlagSet
from supervisord.engine.launch import explain

if TYPE_CHECKING:
    from supervisord.core.spec import EngineSpec, NodeSpec
    from supervisord.engine.flags import Unread
    from supervisord.engine.launch import Explanation
    from supervisord.engine.launch_flags import Knowledge

EXIT_UNKNOWN_ENGINE: Final = 5
_INDENT: Final = "  "

_DESCRIPTION: Final = "Show what exactly would be started, and where each part of it comes from. Changes nothing."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser("plan", help="show how engines would be started", description=_DESCRIPTION)
    parser.add_argument("engine", metavar="ENGINE", nargs="?", help="default: every engine")
    parser.add_argument("--config", metavar="FILE", type=Path, default=DEFAULT_PATH, help=f"default: {DEFAULT_PATH}")


def main(args: argparse.Namespace) -> int:
    """Print the plans. 0: all could be launched, 2: invalid configuration or plan, 5: unknown engine."""
    path: Path = args.config
    as_root = daemon_is_root(path)
    try:
        loaded = load(path, trust=as_root, check_files=False)
        machine = Machine(loaded.spec, profiles.load(path.absolute().parent, trust=as_root), as_root=as_root)
    except ConfigError as error:
        print_problems(error.problems, path)
        return EXIT_INVALID
    engines = loaded.spec.engines
    if args.engine is not None and args.engine not in engines:
        known = ", ".join(engines) or "none"
        told = printable(f'cannot plan engine "{args.engine}": {path} has no such engine; it has: {known}')
        print(told, file=sys.stderr)
        return EXIT_UNKNOWN_ENGINE
    for warning in (*loaded.warnings, *sentences(machine.gpu_warnings(), loaded.origins)):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if not engines:
        print(printable(f"no engines are configured in {path}"))
    failed = False
    for finding in machine.gpu_problems():
        failed = True
        print(printable(str(problem_of(finding, loaded.origins))), file=sys.stderr)
    for spec in engines.values() if args.engine is None else (engines[args.engine],):
        facts = machine.known(spec)
        found = explain(spec, as_root=as_root, base_env=os.environ, origins=loaded.origins, known=facts)
        page = _page(spec, found, loaded.spec, facts, machine.devices(spec))
        print("\n".join(line for head, text in page for line in _told(head, text)), end="\n\n")
        failed = failed or bool(found.plan.errors)
        for warning in found.flags.warnings:
            print(f"warning: {printable(warning)}", file=sys.stderr)
        for sentence in found.plan.errors:
            print(printable(sentence), file=sys.stderr)
    return EXIT_INVALID if failed else EXIT_OK


def _told(head: str, text: str) -> list[str]:
    """One line; on a terminal several that keep to their column. A command line is for copying: it is left as it is."""
    if not head.strip() or not sys.stdout.isatty():
        return [printable(f"{head}{text}")]
    width, _ = render.terminal()
    of_a_column = head.endswith(_INDENT)
    return render.wrap(text, width, head, " " * len(head) if of_a_column else _INDENT * 3)


def _page(
    spec: EngineSpec, found: Explanation, node: NodeSpec, known: Knowledge, devices: str | None
) -> Iterator[tuple[str, str]]:
    """Lines as what they begin with and what they say."""
    plan = found.plan
    yield "", f"engine {spec.name}"
    yield "  user     ", plan.user or "that of the daemon"
    yield "  vllm     ", found.version or "version unknown: only flags that every release has are added"
    yield "  flags    ", _checked(known.flags)
    yield "  profile  ", f"{spec.profile}: {', '.join(found.flags.choice.used) or 'adds no flags'}"
    yield from (("           ", note) for note in found.flags.choice.notes)
    yield "  plan     ", plan.plan_id[:16]
    yield "", "command"
    *lines, last = [fact.value for fact in found.command]
    yield from (("", f"{_INDENT}{line} \\") for line in lines)
    yield "", f"{_INDENT}{last}"
    yield "", "origin of its parts"
    width = max(len(fact.what) for fact in found.command)
    yield from ((f"  {fact.what:{width}}  ", fact.origin) for fact in found.command)
    yield "", "environment"
    for fact in found.environment:
        value, origin = fact.value, fact.origin
        if fact.what == "CUDA_VISIBLE_DEVICES" and devices is not None:
            value, origin = devices, f"supervisor: the indices of gpus ({fact.value}) now; each launch looks them up"
        yield f"  {fact.what}=", f"{value}  ({origin})"
    yield "  and inherited from the daemon (here: this shell): ", ", ".join(found.inherited) or "nothing"
    yield from ((f"  {name} ", "is set here, but engines do not get it") for name in found.left_out)
    yield "", "gates before a start"
    yield from ((f"  {names}: ", text) for names, text in _gates(spec, node))


def _checked(flags: FlagSet | Unread) -> str:
    if isinstance(flags, FlagSet):
        return f"checked against the {len(set(flags.names.values()))} that this vLLM has"
    return f"not checked: {flags.reason}"


def _gates(spec: EngineSpec, node: NodeSpec) -> Iterator[tuple[str, str]]:
    """The gates that this engine has to pass, by the codes that `status` shows."""
    if spec.gpus:
        gpus = f"(GPU {', '.join(spec.gpus)})"
        yield "driver_not_ready", "the NVIDIA driver answers"
        yield "gpu_missing, gpu_quarantined", f"present and healthy {gpus}"
        yield "gpu_busy_starting", f"no other engine starts or stops there {gpus}"
        yield "gpu_memory_held", f"as much memory is free as the engine will claim {gpus}"
    yield "port_held", f"nobody listens on {spec.host}:{spec.port}"
    yield "disk_full", f"free space for {node.supervisor.state_dir}, caches and /dev/shm"
    yield "max_parallel_starts", f"at most {node.supervisor.max_parallel_starts} engines start at a time"
