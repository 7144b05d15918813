"""From an engine's configuration to the exact command line, environment and user of its process.

Nothing is executed. Whatever stands in the way of a launch becomes one of the plan's errors, a sentence each.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from supervisord.config_problems import HIDDEN, Parts, locate, looks_secret, path_text, without_password
from supervisord.config_users import ENGINE_USER, Account, account, may, own_account
from supervisord.config_world import SecretError, model_problem, read_key
from supervisord.core.model import LaunchPlan
from supervisord.core.spec import EngineSpec, FlagValue
from supervisord.engine import launch_env
from supervisord.engine.flags import FlagSet
from supervisord.engine.launch_env import Variable
from supervisord.engine.launch_flags import NOTHING_KNOWN, Knowledge, Settled, settle
from supervisord.engine.version import installed_version, interpreter, resolve_program, supports

INSTALLERS: Final = (
    Path(__file__).parents[2] / "scripts/install-vllm",
    Path("/usr/share/vllm-supervisor/scripts/install-vllm"),
)
"""The script that installs vLLM: of a checkout, of the package."""
_PROBED: Final = "/health,/metrics,/ping,/load"
_KILL_MARGIN_S: Final = 5
"""vLLM needs up to 5.4 s for its shutdown with nothing in flight (measured, 0.18 and 0.32)."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One part of a launch as `plan` shows it: what it is, its value, and where it comes from.

    Words of the command are quoted for a shell; secrets in the environment are hidden.
    """

    what: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A sentence that says why an engine cannot be launched, and the key of the engine that it rests on."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan with the origin of every part. `inherited` and `left_out` are names of environment variables.

    `flags`: what the profile and the checks of the flags came to. `obstacles`: what else stands in the way.
    """

    plan: LaunchPlan
    version: str | None
    flags: Settled
    obstacles: tuple[Obstacle, ...]
    command: tuple[Fact, ...]
    environment: tuple[Fact, ...]
    inherited: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Words:
    """Some words of the command line, and the key behind them, or where else they come from."""

    words: tuple[str, ...]
    key: Parts | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Draft:
    plan: LaunchPlan
    version: str | None
    flags: Settled
    obstacles: tuple[Obstacle, ...]
    words: tuple[_Words, ...]
    inherited: Mapping[str, str]
    variables: tuple[Variable, ...]


def build_plan(
    spec: EngineSpec, *, as_root: bool, base_env: Mapping[str, str], known: Knowledge = NOTHING_KNOWN
) -> LaunchPlan:
    """The launch plan of one engine. `as_root`: the daemon is root and switches to the engine's user."""
    return _draft(spec, as_root=as_root, base_env=base_env, known=known).plan


def explain(
    spec: EngineSpec,
    *,
    as_root: bool,
    base_env: Mapping[str, str],
    origins: Mapping[str, str],
    known: Knowledge = NOTHING_KNOWN,
) -> Explanation:
    """The same plan, with the origin of every part. `origins`: the file behind each key, as `config.load` gives it."""
    draft = _draft(spec, as_root=as_root, base_env=base_env, known=replace(known, origins=origins))
    command = tuple(
        Fact(_what(part), shlex.join(part.words), _origin(spec, part.key, part.source, origins)) for part in draft.words
    )
    environment = tuple(
        Fact(
            variable.name,
            HIDDEN if looks_secret(variable.name) else without_password(variable.value),
            _origin(spec, variable.key, f"supervisor: {variable.why}", origins),
        )
        for variable in {variable.name: variable for variable in draft.variables}.values()
    )
    set_here = {variable.name for variable in draft.variables}
    return Explanation(
        plan=draft.plan,
        version=draft.version,
        flags=draft.flags,
        obstacles=draft.obstacles,
        command=command,
        environment=environment,
        inherited=tuple(sorted(set(draft.inherited) - set_here)),
        left_out=launch_env.dropped_on_purpose(base_env),
    )


def flag_words(name: str, value: FlagValue) -> tuple[str, ...]:
    """A flag of the configuration as words of a command line.

    False becomes `--no-NAME`, which not every flag of every release has: flag_checks.py says so.
    """
    if isinstance(value, bool):
        return (f"--{name}",) if value else (f"--no-{name}",)
    values = [_word(item) for item in value] if isinstance(value, tuple) else [_word(value)]
    if len(values) == 1 and values[0].startswith("-"):
        return (f"--{name}={values[0]}",)
    return (f"--{name}", *values)


# --- the draft --------------------------------------------------------------------------------------------------------


def _draft(spec: EngineSpec, *, as_root: bool, base_env: Mapping[str, str], known: Knowledge) -> _Draft:
    obstacles: list[Obstacle] = []
    user = (spec.user or ENGINE_USER) if as_root else None
    who = own_account() if user is None else account(user)
    if who is None:
        text = f'cannot run engine {spec.name} as "{user}": no such user; useradd --system {user}'
        obstacles.append(Obstacle("user", text))
        who = own_account()
    path = launch_env.search_path(spec, base_env)
    program = resolve_program(spec.command[0], path)
    version = installed_version(spec.command, path)
    flags = settle(spec, version, known)
    words = (
        _Words((program or spec.command[0], *spec.command[1:]), ("command",)),
        _Words((spec.model,), ("model",)),
        _Words(("--host", spec.host), ("host",)),
        _Words(("--port", str(spec.port)), ("port",)),
        *(_Words(flag_words(name, value), None, at.source) for name, (value, at) in flags.choice.args.items()),
        *(_Words(flag_words(name, value), ("args", name)) for name, value in spec.args.items()),
        *_own_flags(spec, version, flags.flags),
    )
    variables = list(launch_env.contributed(spec, base_env, who=who, program=program, version=version))
    key = None
    if spec.api_key_file is not None:
        key = _read_key(spec.api_key_file, as_root=as_root, obstacles=obstacles)
        if key is not None:
            variables.append(Variable("VLLM_API_KEY", key, key=("api_key_file",)))
    obstacles += _obstacles(spec, who, program, path)
    kept = launch_env.inherited(base_env, other_user=who.uid != os.geteuid())
    plan = LaunchPlan(
        engine=spec.name,
        argv=tuple(word for part in words for word in part.words),
        env={**kept, **{variable.name: variable.value for variable in variables}},
        user=user,
        host=spec.host,
        port=spec.port,
        plan_id=_plan_id(spec, user, key, known),
        errors=(*(obstacle.text for obstacle in obstacles), *map(str, flags.problems)),
        api_key=key,
    )
    return _Draft(plan, version, flags, tuple(obstacles), words, kept, tuple(variables))


def _own_flags(spec: EngineSpec, version: str | None, flags: FlagSet | None) -> Iterator[_Words]:
    """What the supervisor adds if this vLLM has it: as its help text says, or the table of releases."""
    name = "shutdown-timeout"
    if _has(flags, name, version, "shutdown_timeout") and name not in spec.args:
        seconds = int(max(1, min(spec.drain_timeout_s, spec.stop_timeout_s - _KILL_MARGIN_S)))
        why = "supervisor: requests in flight may finish when it stops"
        yield _Words((f"--{name}", str(seconds)), None, why)
    name = "disable-access-log-for-endpoints"
    if _has(flags, name, version, "access_log_endpoints") and name not in spec.args:
        yield _Words((f"--{name}", _PROBED), None, "supervisor: its own probes would fill the log")


def _has(flags: FlagSet | None, name: str, version: str | None, capability: str) -> bool:
    return supports(version, capability) if flags is None else flags.get(name) is not None


def _plan_id(spec: EngineSpec, user: str | None, key: str | None, known: Knowledge) -> str:
    """Identity of what the operator asked for.

    What the supervisor adds by itself, what is inherited, and the installed version stay out: after an upgrade of the
    supervisor, or a change of a time limit that it enforces itself, running engines must not be restarted. The same
    holds for shipped profiles and for the GPUs that they go by, which are not known at every time.
    """
    parts: list[Any] = [
        spec.command,
        spec.model,
        spec.host,
        spec.port,
        sorted(flag_words(name, value) for name, value in spec.args.items()),
        user,
        sorted(spec.env.items()),
        None if key is None else hashlib.sha256(key.encode()).hexdigest(),
        spec.gpus,
        spec.profile,
    ]
    if known.profiles is not None and (own := known.profiles.identity(spec)) is not None:
        parts.append(own)
    text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# --- what stands in the way -------------------------------------------------------------------------------------------


def _obstacles(spec: EngineSpec, who: Account, program: str | None, path: str) -> Iterator[Obstacle]:
    if (wrong := _program_problem(spec, who, program, path)) is not None:
        yield Obstacle("command", wrong)
    place = f"engine.{spec.name}"
    if (wrong := model_problem(spec.model)) is not None:
        text = f'cannot serve "{spec.model}" of {place}: {wrong}; correct the path, or mount what holds it'
        yield Obstacle("model", text)
    elif spec.model.startswith("/") and not may(who, spec.model, os.R_OK | _search(spec.model)):
        remedy = f"give that user access, for example: setfacl -R -m u:{who.name}:rX {spec.model}"
        text = f'cannot read "{spec.model}" of {place} as user "{who.name}": the modes forbid it; {remedy}'
        yield Obstacle("model", text)


def _program_problem(spec: EngineSpec, who: Account, program: str | None, path: str) -> str | None:
    place = f"engine.{spec.name}"
    if program is None:
        wanted = spec.command[0]
        looked = "it is not there" if "/" in wanted else f"it is not in {path}"
        installer = next(filter(Path.exists, INSTALLERS), INSTALLERS[-1])
        remedy = f"install vLLM ({installer} --prefix /opt/vllm), or write its absolute path into {place}.command"
        return f'cannot find the program "{wanted}" of {place}: {looked}; {remedy}'
    for file in (program, interpreter(program, path) or program):
        if not os.path.exists(file):  # noqa: PTH110 (text)
            return f'cannot execute "{program}" of {place}: its interpreter {file} is gone; install vLLM again'
        if not may(who, file, os.X_OK):
            remedy = "install it where that user can reach it, with modes that let it"
            return f'cannot execute "{file}" of {place} as user "{who.name}": the modes forbid it; {remedy}'
    return None


def _search(path: str) -> int:
    return os.X_OK if os.path.isdir(path) else 0  # noqa: PTH112 (text from the configuration)


def _read_key(path: str, *, as_root: bool, obstacles: list[Obstacle]) -> str | None:
    """The API key; None after it was said why not."""
    try:
        return read_key(path, as_root=as_root)
    except SecretError as error:
        text = f'cannot take the API key from "{path}": {error}; {error.remedy}'
        obstacles.append(Obstacle("api_key_file", text))
    return None


# --- words and origins ------------------------------------------------------------------------------------------------


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return value if isinstance(value, str) else json.dumps(value)


def _what(part: _Words) -> str:
    if part.key is not None and part.key[0] in {"command", "model"}:
        return part.key[0]
    return part.words[0].partition("=")[0]


def _origin(spec: EngineSpec, key: Parts | None, source: str, origins: Mapping[str, str]) -> str:
    if key is None:
        return source
    file, at = locate(origins, ("engine", spec.name, *key))
    return f"config: {file}: {path_text(at)}" if path_text(at) in origins else "default"
