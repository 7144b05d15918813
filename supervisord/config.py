"""Reads, merges and validates the configuration: `config.toml`, then `conf.d/*.toml` beside it.

Tables merge, arrays replace, `[engine_defaults]` is merged under each engine. Every problem is found in one go. What a
key is called, means and may hold is in core/spec.py; no secret is read here, and none is repeated.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from supervisord import config_checks, config_world
from supervisord.config_flags import repeated_flag, with_flag_names
from supervisord.config_problems import (
    ConfigError,
    Finding,
    Parts,
    Problem,
    nearest,
    path_text,
    printable,
    problem_of,
)
from supervisord.config_reader import MISSING, Reader
from supervisord.config_trust import distrust
from supervisord.core.spec import EngineSpec, GpuSpec, NodeSpec, NotifySpec, SupervisorSpec

__all__ = [
    "DEFAULT_PATH",
    "ConfigError",
    "Loaded",
    "Problem",
    "Survey",
    "daemon_is_root",
    "load",
    "parse",
    "sentences",
    "survey",
]

DEFAULT_PATH: Final = Path("/etc/vllm-supervisor/config.toml")

_MAX_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 32
_TOKEN: Final = re.compile(r""""[^"\n]*"|'[^'\n]*'|[A-Za-z0-9_-]+|[ \t]+|[^"']|["']""")
"""What keys are made of: quoted and bare parts, dots, blanks."""
_NOWHERE: Final[Mapping[str, str]] = MappingProxyType({})
_TABLES: Final = ("supervisor", "gpu", "engine_defaults", "engine", "notify")
_NAMED: Final[Mapping[str, str]] = MappingProxyType({"engine": "an engine", "notify": "a receiver"})
"""Tables of tables, and what each of those in them is."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration.

    `origins`: the file that set a key, by key path. `tables`: all files merged, JSON-compatible: what `parse` needs to
    make the same `spec` again. They hold whatever the files hold, so a copy on disk must be 0600.
    """

    spec: NodeSpec
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    tables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Survey:
    """What could be read of a configuration, valid or not.

    `loaded`: with the defaults of keys whose values cannot be read. `problems`: why it is refused; none: it is valid.
    `refused`: the keys that are wrong. `whole`: every file was read.
    """

    loaded: Loaded
    problems: tuple[Problem, ...]
    refused: frozenset[Parts]
    whole: bool


def load(path: Path, *, trust: bool, check_files: bool = True) -> Loaded:
    """Read and validate a configuration; ConfigError with every problem.

    `trust`: the daemon is root, so only root may be able to change what is read, and engines need a user.
    `check_files` off: models, keys and prompts may be missing, as they are while a disk is not mounted yet; the launch
    plan of each engine then says so, and the other engines can start.
    """
    found = survey(path, trust=trust, check_files=check_files)
    if found.problems:
        raise ConfigError(found.problems)
    return found.loaded


def survey(path: Path, *, trust: bool, check_files: bool = True) -> Survey:
    """Do the same for who wants to go on with what is right. Parameters as of `load`."""
    tables: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    unread = False
    for file in _files(Path(os.path.abspath(path)), trust=trust, problems=problems):  # noqa: PTH100 (links stay)
        content = _content(file)
        if isinstance(content, Problem):
            unread = True
            problems.append(content)
        else:
            problems += _name_flags(content, str(file))
            _merge(tables, content, (), str(file), origins)
    spec, findings = _read(tables, strict=True)
    if unread:  # what seems to be missing may be in there
        findings = [finding for finding in findings if finding.message != MISSING]
    refused = {finding.at for finding in findings}
    findings += [finding for finding in config_world.user_findings(spec, as_root=trust) if finding.at not in refused]
    if check_files:
        of_files = config_world.file_findings(spec, as_root=trust)
        findings += [finding for finding in of_files if finding.at not in refused]
    problems += _problems(findings, origins)
    refused |= {finding.at for finding in findings}
    doubts = [*config_checks.warnings(spec), *config_world.user_warnings(spec, as_root=trust)]
    warnings = sentences((doubt for doubt in doubts if doubt.at not in refused), origins)
    loaded = Loaded(spec, MappingProxyType(origins), tuple(warnings), tables)
    return Survey(loaded, tuple(dict.fromkeys(problems)), frozenset(refused), whole=not unread)


def parse(tables: Mapping[str, Any], origins: Mapping[str, str] = _NOWHERE) -> NodeSpec:
    """Validate merged tables, e.g. a saved `Loaded.tables`, without a look at the machine; ConfigError otherwise."""
    if _too_deep(tables):
        raise ConfigError([_nested("the configuration")])
    spec, findings = _read(tables, strict=False)
    if problems := _problems(findings, origins):
        raise ConfigError(problems)
    return spec


def daemon_is_root(path: Path) -> bool:
    """Whether the daemon of this configuration is root: we are, or the file is root's and we cannot write it."""
    if os.geteuid() == 0:
        return True
    try:
        return path.stat().st_uid == 0 and not os.access(path, os.W_OK)
    except OSError:
        return False


# --- files ------------------------------------------------------------------------------------------------------------


def _files(path: Path, *, trust: bool, problems: list[Problem]) -> list[Path]:
    """The files to read, in order; what cannot be listed or trusted becomes a problem."""
    folder = path.parent / "conf.d"
    found = [path]
    try:
        # Editors and package managers leave hidden files and other endings behind.
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
        found += [folder / name for name in names if name.endswith(".toml")]
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(_file_problem(folder, f"cannot list {folder}: {error.strerror}", "correct or remove it"))
    if trust:
        problems += _trust_problems([path.parent, folder, *found])
    return found


def _trust_problems(places: Iterable[Path]) -> Iterator[Problem]:
    """One problem for everything that somebody else than root could change. Reading on does no harm."""
    known = set()
    for place in places:
        try:
            found = distrust(str(place))
        except OSError:
            continue  # no conf.d; or reading it will say why
        if found is not None and found.path not in known:
            known.add(found.path)
            message = f"cannot trust {place}: the daemon is root, and {found.path} is not root's alone: {found.reason}"
            yield _file_problem(place, message, found.remedy)


def _remedy(error: OSError) -> str:
    """What helps who cannot read a file. It may be closed for a reason: webhooks of notifications are secrets."""
    match error:
        case FileNotFoundError():
            return "name an existing file"
        case PermissionError():
            return "be root, or in the group that it belongs to (of the package's: vllm-admin)"
        case _:
            return "look at it, or name another file"


def _content(path: Path) -> dict[str, Any] | Problem:
    """The tables of one file."""
    try:
        text = _text(path)
    except OSError as error:
        return _file_problem(path, f"cannot read {path}: {error.strerror}", _remedy(error))
    except UnicodeDecodeError as error:
        return _file_problem(path, f"cannot read {path}: byte {error.start} is not UTF-8", "save it as UTF-8")
    if _has_deep_key(text):
        return _nested(str(path))
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return _file_problem(path, f"cannot read {path}: {printable(str(error))}", "correct the TOML there")
    except RecursionError:
        return _nested(str(path))
    except ValueError:
        return _file_problem(path, f"cannot read {path}: a number in it has thousands of digits", "write it shorter")
    return _nested(str(path)) if _too_deep(tables) else tables


def _text(path: Path) -> str:
    """The text of a regular file of bounded size; OSError otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file")
        content = os.read(descriptor, _MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_BYTES:
        raise OSError(0, f"it has more than {_MAX_BYTES} bytes")
    return content.decode()


def _file_problem(path: Path, message: str, remedy: str) -> Problem:
    return Problem(str(path), "", None, message, remedy)


def _has_deep_key(text: str) -> bool:
    """Whether there is a key of too many parts (a.b.c...): tomllib takes 1 GB for one of 32 KB."""
    dots, after_part = 0, False
    for found in _TOKEN.finditer(text):
        piece = found[0]
        if piece == ".":
            dots, after_part = dots + 1 if after_part else 0, False
            if dots >= _MAX_DEPTH:
                return True
        elif piece[0] not in " \t":
            is_part = piece[0].isalnum() or piece[0] in "_-" or len(piece) > 1
            dots = dots if is_part and not after_part else 0
            after_part = is_part
    return False


def _too_deep(tables: Mapping[str, Any]) -> bool:
    level: list[Any] = [tables]
    for _ in range(_MAX_DEPTH):
        inner = [value for item in level for value in (item.values() if isinstance(item, Mapping) else item)]
        level = [value for value in inner if isinstance(value, Mapping | list | tuple)]
        if not level:
            return False
    return True


def _nested(what: str) -> Problem:
    return Problem(what, "", None, f"cannot read {what}: it is nested more than {_MAX_DEPTH} deep")


# --- merging ----------------------------------------------------------------------------------------------------------


def _merge(base: dict[str, Any], over: Mapping[str, Any], at: Parts, file: str, origins: dict[str, str]) -> None:
    """Tables merge, everything else replaces; `origins` learns who set what."""
    for key, value in over.items():
        here = (*at, key)
        origins[path_text(here)] = file
        if isinstance(value, Mapping):
            kept = base.get(key)
            base[key] = kept if isinstance(kept, dict) else {}
            _merge(base[key], value, here, file, origins)
        else:
            base[key] = value


def _over(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an engine with the defaults under it."""
    merged: dict[str, Any] = {}
    _merge(merged, defaults, (), "", {})
    _merge(merged, table, (), "", {})
    return merged


def _name_flags(content: dict[str, Any], file: str) -> Iterator[Problem]:
    """Spell flags alike before files are merged: `max_model_len` in one replaces `max-model-len` in another."""
    engines = content.get("engine")
    tables = [(("engine", name), table) for name, table in engines.items()] if isinstance(engines, dict) else []
    for at, table in [(("engine_defaults",), content.get("engine_defaults")), *tables]:
        if isinstance(table, dict) and isinstance(table.get("args"), dict):
            table["args"], repeated = with_flag_names(table["args"])
            for key in repeated:
                yield problem_of(repeated_flag((*at, "args", key)), {path_text((*at, "args", key)): file})


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(tables: Mapping[str, Any], *, strict: bool) -> tuple[NodeSpec, list[Finding]]:
    """The specification and everything that is wrong with it."""
    reader = Reader()
    for key, value in tables.items():
        if key not in _TABLES:
            near = nearest(key, _TABLES)
            remedy = f"did you mean {near}?" if near else f"known here: {', '.join(_TABLES)}"
            reader.wrong((key,), value, "there is no such table", remedy)
    sections = {name: _section(tables, name, reader) for name in _TABLES}
    supervisor = reader.table(SupervisorSpec, sections["supervisor"], ("supervisor",))
    gpu = reader.table(GpuSpec, sections["gpu"], ("gpu",))
    defaults = sections["engine_defaults"]
    reader.table(EngineSpec, _named_gpus(defaults), ("engine_defaults",), partial=True, name="")
    engines = {
        name: reader.table(EngineSpec, _named_gpus(_over(defaults, table)), ("engine", name), name=name)
        for name, table in _named(sections["engine"], "engine", reader)
    }
    notify = {
        name: reader.table(NotifySpec, table, ("notify", name), name=name)
        for name, table in _named(sections["notify"], "notify", reader)
    }
    spec = NodeSpec(supervisor=supervisor, gpu=gpu, engines=engines, notify=notify)
    unreadable = {finding.at for finding in reader.findings}
    found = [*config_checks.findings(spec), *(config_checks.stricter(spec) if strict else ())]
    checked = [finding for finding in found if unreadable.isdisjoint({finding.at, *finding.related})]
    return spec, [*reader.findings, *checked]


def _section(tables: Mapping[str, Any], name: str, reader: Reader) -> Mapping[str, Any]:
    section = tables.get(name, {})
    if isinstance(section, Mapping):
        return section
    reader.wrong((name,), section, "must be a table", f"write [{name}{'.NAME' if name in _NAMED else ''}]")
    return {}


def _named(section: Mapping[str, Any], kind: str, reader: Reader) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables in one of `_NAMED` that have a right name."""
    for name, table in section.items():
        at = (kind, name)
        if not config_checks.valid_engine_name(name):
            rule = f"the name of {_NAMED[kind]} begins with a-z or 0-9 and goes on with at most 31 of a-z, 0-9, _ and -"
            reader.findings.append(Finding(at, rule, "rename it"))
        elif not isinstance(table, Mapping):
            reader.wrong(at, table, "must be a table", f"write [{kind}.{name}] above its keys")
        else:
            yield name, table


def _named_gpus(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """An index may be written as a number."""
    gpus = table.get("gpus")
    if not isinstance(gpus, list | tuple):
        return table
    named = [str(gpu) if isinstance(gpu, int) and not isinstance(gpu, bool) else gpu for gpu in gpus]
    return {**table, "gpus": named}


def _problems(findings: Iterable[Finding], origins: Mapping[str, str]) -> list[Problem]:
    return list(dict.fromkeys(problem_of(finding, origins) for finding in findings))


def sentences(findings: Iterable[Finding], origins: Mapping[str, str]) -> Iterator[str]:
    """Warnings as lines. One that several engines have from engine_defaults is told once, with their names."""
    engines: dict[Problem, list[str]] = {}
    for finding in findings:
        problem = problem_of(finding, origins)
        inherited = finding.at[:1] == ("engine",) and problem.path.startswith("engine_defaults.")
        engines.setdefault(problem, []).extend(finding.at[1:2] if inherited else ())
    for problem, names in engines.items():
        of = f" (engine{'s' if len(names) > 1 else ''} {', '.join(dict.fromkeys(names))})" if names else ""
        yield f"{problem.where}: {problem.message}; {problem.remedy}{of}"
