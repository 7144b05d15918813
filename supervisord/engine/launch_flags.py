"""The flags of one launch: the profile's under the operator's, checked against the installed vLLM and the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisord.config_problems import Finding, Problem, path_text, problem_of
from supervisord.core.gpu_kinds import GpuKind
from supervisord.core.spec import EngineSpec, FlagValue
from supervisord.engine.flag_checks import (
    Target,
    command_flags,
    machine_problems,
    machine_warnings,
    name_and_value,
    size_problems,
)
from supervisord.engine.flags import FlagSet, Unread
from supervisord.engine.profiles import Choice, Profiles, shipped

NOT_ASKED: Final = Unread("nobody asked for them")


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of the machine when a launch is planned.

    `flags`: those of the installed vLLM, or why they are not known. `gpus`: the kinds of the engine's GPUs; None: not
    known. `profiles`: None: the shipped ones. `origins`: the file behind each key, as `config.load` gives it.
    """

    flags: FlagSet | Unread = NOT_ASKED
    gpus: Sequence[GpuKind] | None = None
    profiles: Profiles | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


NOTHING_KNOWN: Final = Knowledge()


@dataclass(frozen=True, slots=True)
class Settled:
    """`choice`: what the profile adds. `problems` stand in the way of a launch, `warnings` do not."""

    choice: Choice
    flags: FlagSet | None
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]


def settle(spec: EngineSpec, version: str | None, known: Knowledge) -> Settled:
    """Choose the profile's flags for an engine and judge all of its flags."""
    flags = known.flags if isinstance(known.flags, FlagSet) else None
    target = Target(version, flags, known.gpus if spec.gpus else ())
    profiles = known.profiles if known.profiles is not None else Profiles(shipped())
    choice = profiles.choose(spec, target)
    merged = _merged(spec, choice, flags)
    wrong = [*_of_operator(spec, target), *size_problems(spec, merged), *machine_problems(spec, merged, target)]
    if choice.finding is not None:
        wrong.insert(0, choice.finding)
    problems = [*choice.problems, *_placed(wrong, choice, known.origins)]
    doubtful = _placed(machine_warnings(spec, merged, target), choice, known.origins)
    warnings = [f"{problem.where}: {problem.message}; {problem.remedy}" for problem in doubtful]
    if isinstance(known.flags, Unread) and known.flags.failed:
        text = f"cannot read the flags of the vLLM of engine {spec.name}: {known.flags.reason}; they are not checked"
        warnings.insert(0, text)
    return Settled(choice, flags, tuple(problems), tuple(warnings))


def _merged(spec: EngineSpec, choice: Choice, flags: FlagSet | None) -> dict[str, FlagValue]:
    """All flags under their first names; the operator's hold."""
    of_operator = {name if flags is None else flags.canonical(name): value for name, value in spec.args.items()}
    return {**{name: value for name, (value, _) in choice.args.items()}, **of_operator}


def _of_operator(spec: EngineSpec, target: Target) -> Iterator[Finding]:
    yield from command_flags(spec, target)
    for name, value in spec.args.items():
        if (found := name_and_value(name, value, target, ("engine", spec.name, "args", name))) is not None:
            yield found


def _placed(findings: Iterable[Finding], choice: Choice, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Where each was written: in a profile, or in the configuration."""
    for found in findings:
        flag = found.at[-1]
        if flag in choice.args and found.at[-2:-1] == ("args",):
            profile = choice.args[flag][1]
            at = path_text((profile.name, "args", flag))
            yield Problem(profile.file, at, found.value, found.message, found.remedy)
        else:
            yield problem_of(found, origins)
