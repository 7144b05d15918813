"""Reads TOML tables into the dataclasses of core/spec.py: names, types and bounds come from there and nowhere else."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from types import NoneType
from typing import Any, Final, Literal, TypeVar, cast

from supervisord.config_flags import check_number, check_text, flag_findings, flag_value, repeated_flag, with_flag_names
from supervisord.config_problems import Finding, Parts, Wrong, is_number, nearest, shown
from supervisord.core.spec import ProbeSpec, RestartSpec, SloSpec, WarmupSpec

T = TypeVar("T")

MISSING: Final = "it is missing"
"""The message for a required key that no file sets."""

_SUB_TABLES: Final[Mapping[str, type]] = {
    "probe": ProbeSpec,
    "warmup": WarmupSpec,
    "restart": RestartSpec,
    "slo": SloSpec,
}
_EXAMPLES: Final = {
    "model": '"/path/of/a/model" or "organisation/name"',
    "port": "8000",
    "url": '"https://alerts.example.com/hook"',
}


class Reader:
    """Collects findings while it reads. A key that cannot be read keeps its default, so that reading can go on."""

    def __init__(self) -> None:
        self.findings: Final[list[Finding]] = []

    def table(self, cls: type[T], table: Mapping[str, Any], at: Parts, *, partial: bool = False, **fixed: Any) -> T:
        """Read one table. `partial`: required keys may be missing. `fixed`: fields that are no keys."""
        hints = typing.get_type_hints(cls)
        known = {f.name: f for f in fields(cast("Any", cls)) if not f.metadata.get("internal")}
        for key in table:
            if key not in known:
                self._unknown(key, table[key], (*at, key), known)
        values = dict(fixed)
        for name, described in known.items():
            required = described.default is dataclasses.MISSING and described.default_factory is dataclasses.MISSING
            if name in table:
                self._read(hints[name], described, table[name], (*at, name), values)
            elif required and not partial:
                self.findings.append(Finding((*at, name), MISSING, f"add {name} = {_EXAMPLES.get(name, '...')}"))
            if required:
                values.setdefault(name, 0 if hints[name] is int else "")
        return cls(**values)

    def wrong(self, at: Parts, value: object, message: str, remedy: str = "") -> None:
        """Note a value that its key does not take."""
        self.findings.append(Finding(at, message, remedy, shown(value, at)))

    def _read(self, hint: Any, described: Field[Any], value: Any, at: Parts, into: dict[str, Any]) -> None:
        try:
            if is_dataclass(hint):
                into[described.name] = self.table(cast("type", hint), _as_table(value), at)
            elif typing.get_origin(hint) is Mapping:
                into[described.name] = self._mapping(hint, _as_table(value), at)
            else:
                into[described.name] = _convert(hint, value, described.metadata)
        except Wrong as wrong:
            self.wrong(at, value, wrong.message, wrong.remedy)

    def _mapping(self, hint: Any, table: Mapping[str, Any], at: Parts) -> dict[str, Any]:
        """A table with free keys: of texts, or of flags."""
        flags = typing.get_args(hint)[1] is not str
        if flags:
            table, repeated = with_flag_names(table)
            self.findings.extend(repeated_flag((*at, key)) for key in repeated)
        found: dict[str, Any] = {}
        for key, value in table.items():
            here = (*at, key)
            try:
                check_text(key)
                found[key] = flag_value(value) if flags else _text(value, lines=True)
            except Wrong as wrong:
                self.wrong(here, value, wrong.message, wrong.remedy)
            if flags:
                self.findings.extend(flag_findings(key, found.get(key, value), here))
        return found

    def _unknown(self, key: str, value: Any, at: Parts, known: Mapping[str, Field[Any]]) -> None:
        of_engine = "args" in known
        homes = [table for table, cls in _SUB_TABLES.items() if key in {f.name for f in fields(cls)}]
        if of_engine and homes:
            remedy = f"it belongs into the table {homes[0]} of the engine"
        elif (name := nearest(key, known)) is not None:
            remedy = f"did you mean {name}?"
        elif of_engine:
            remedy = "flags of vllm serve belong into the table args of the engine"
        else:
            remedy = f"known here: {', '.join(known)}"
        self.wrong(at, value, "there is no such key", remedy)


def _as_table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Wrong("must be a table")
    return value


def _convert(hint: Any, value: Any, metadata: Mapping[str, Any]) -> Any:
    inner = [arg for arg in typing.get_args(hint) if arg is not NoneType]
    if typing.get_origin(hint) is Literal:
        return _choice(inner, value)
    if typing.get_origin(hint) is tuple:
        return _texts(value)
    if inner:  # X | None: TOML has no null, so a value is an X
        return _convert(inner[0], value, metadata)
    if hint is bool:
        if not isinstance(value, bool):
            raise Wrong("must be true or false")
        return value
    if hint is str:
        return _text(value)
    return _number(hint, value, metadata["low"], metadata["high"])


def _text(value: Any, *, lines: bool = False) -> str:
    if not isinstance(value, str):
        raise Wrong("must be a text", "write it in quotes" if isinstance(value, bool) or is_number(value) else "")
    check_text(value, lines=lines)
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise Wrong("must be an array of texts", 'for example ["a", "b"]')
    return tuple(_item(number, item) for number, item in enumerate(value, start=1))


def _item(number: int, item: Any) -> str:
    try:
        return _text(item)
    except Wrong as wrong:
        raise Wrong(f"item {number} is {shown(item)} and {wrong.message}", wrong.remedy) from None


def _choice(choices: list[str], value: Any) -> str:
    if not isinstance(value, str) or value not in choices:
        near = nearest(value, choices) if isinstance(value, str) else None
        known = ", ".join(f'"{choice}"' for choice in choices)
        raise Wrong(f"must be one of {known}", f'did you mean "{near}"?' if near else "")
    return value


def _number(hint: Any, value: Any, low: float, high: float) -> float:
    kind = "a whole number" if hint is int else "a number"
    expected = f"must be {kind} from {_plain(low)} to {_plain(high)}"
    if not is_number(value) or (hint is int and not isinstance(value, int)):
        raise Wrong(expected, "write it without quotes" if isinstance(value, str) else "")
    check_number(value)
    if not low <= value <= high:
        raise Wrong(expected)
    return int(value) if hint is int else float(value)


def _plain(number: float) -> str:
    return f"{number:.10g}"
