"""Observations and the node as plain JSON values, and back: what a recording is made of.

The coders are made from the type hints of the dataclasses, so a new message needs nothing here. A field that has its
default is left out. What is decoded is checked: an unknown class, field or kind of value is a DecodeError.

`env` of an engine may hold secrets and no decision looks at it (its launch plan's hash does that): names only are kept.
Of `[notify.X]` nothing is, for the same reasons.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, cast

from supervisord.core.messages import Observation
from supervisord.core.model import Node
from supervisord.core.spec import EngineSpec, NodeSpec

Json = Any
"""None, bool, int, finite float, str, list of Json, dict of str to Json."""

T = TypeVar("T")

HIDDEN: Final = "(hidden)"

_TAG: Final = "is"
"""Where a union of dataclasses says which one it is."""

_UNKNOWN: Final = object()
_MAPPINGS: Final = (dict, MappingProxyType)


class EncodeError(TypeError):
    """A value is not what its type hint says."""


class DecodeError(ValueError):
    """This is not what an encoder of this program has written."""


@dataclass(frozen=True, slots=True)
class _Coder:
    """`values`: the classes of what it encodes; `kinds`: those of the JSON that it makes."""

    encode: Callable[[Any], Json]
    decode: Callable[[Json], Any]
    values: tuple[type, ...]
    kinds: tuple[type, ...]


def encode_observation(seen: Observation) -> Json:
    """One observation. Raises EncodeError."""
    return _coder(Observation).encode(seen)


def decode_observation(value: Json) -> Observation:
    """The same observation. Raises DecodeError."""
    return cast("Observation", _coder(Observation).decode(value))


def encode_node(node: Node) -> Json:
    """Everything that the core decides on. Raises EncodeError."""
    return _coder(Node).encode(node)


def decode_node(value: Json) -> Node:
    """The same node, but for the values of `env`. Raises DecodeError."""
    return cast("Node", _coder(Node).decode(value))


@cache
def _coder(hint: Any) -> _Coder:
    """The coder of a type hint; TypeError if there is none."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (UnionType, typing.Union):
        return _union(args)
    if origin is Literal:
        return _choice({value: value for value in args})
    if origin in (tuple, frozenset, Mapping):
        return _container(origin, args)
    if is_dataclass(hint):
        return _record(cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice({member: member.value for member in hint})
    raise TypeError(f"no coder for {hint!r}")


# --- plain values -----------------------------------------------------------------------------------------------------


def _exactly(*classes: type) -> _Coder:
    def encode(value: Any) -> Json:
        if type(value) not in classes:
            raise EncodeError(f"cannot encode {type(value).__name__} as {classes[0].__name__}")
        return value

    def decode(value: Json) -> Any:
        if type(value) not in classes:
            raise DecodeError(f"cannot decode {type(value).__name__} as {classes[0].__name__}")
        return value

    return _Coder(encode, decode, classes, classes)


def _float() -> _Coder:
    """Engines say NaN and infinity, JSON has no word for them: they are written as texts."""
    number = _exactly(float, int)

    def encode(value: Any) -> Json:
        return str(value) if type(value) is float and not math.isfinite(value) else number.encode(value)

    def decode(value: Json) -> Any:
        return float(value) if type(value) is str and value in {"nan", "inf", "-inf"} else number.decode(value)

    return _Coder(encode, decode, number.values, (float, int, str))


def _any() -> _Coder:
    """What TOML holds inside a table of a flag."""
    plain = (NoneType, bool, int, float, str)

    def convert(value: Any) -> Any:
        if type(value) in plain:
            return value
        if type(value) in (list, tuple):
            return [convert(item) for item in value]
        if type(value) in _MAPPINGS and all(type(key) is str for key in value):
            return {key: convert(item) for key, item in value.items()}
        raise EncodeError(f"cannot encode {type(value).__name__}")

    return _Coder(convert, convert, (*plain, list, tuple, *_MAPPINGS), (*plain, list, dict))


_PLAIN: Final[Mapping[Any, _Coder]] = {
    NoneType: _exactly(NoneType),
    bool: _exactly(bool),
    int: _exactly(int),
    str: _exactly(str),
    float: _float(),
    Any: _any(),
}


def _choice(written: Mapping[Any, Json]) -> _Coder:
    """One of a few values: members of an enum, or of a Literal."""
    back = {value: member for member, value in written.items()}

    def pick(table: Mapping[Any, Any], value: Any, error: type[Exception]) -> Any:
        found = table.get(value, _UNKNOWN) if isinstance(value, str | int | Enum) else _UNKNOWN
        if found is _UNKNOWN:
            raise error(f"cannot take {value!r}: it is none of {', '.join(map(repr, table))}")
        return found

    return _Coder(
        lambda value: pick(written, value, EncodeError),
        lambda value: pick(back, value, DecodeError),
        tuple({type(value) for value in written}),
        tuple({type(value) for value in back}),
    )


# --- containers -------------------------------------------------------------------------------------------------------


def _container(origin: Any, args: tuple[Any, ...]) -> _Coder:
    if origin is Mapping and args[0] is str:
        return _mapping(_coder(args[1]))
    if origin is frozenset and args[0] is str:
        return _text_set()
    if origin is tuple and args[1:] == (Ellipsis,):
        return _sequence(_coder(args[0]))
    if origin is tuple:
        return _fixed([_coder(arg) for arg in args])
    raise TypeError(f"no coder for {origin}[{args}]")


def _sequence(item: _Coder) -> _Coder:
    def encode(value: Any) -> Json:
        if type(value) is not tuple:
            raise EncodeError(f"cannot encode {type(value).__name__} as tuple")
        return [item.encode(inner) for inner in value]

    def decode(value: Json) -> Any:
        if type(value) is not list:
            raise DecodeError(f"cannot decode {type(value).__name__} as tuple")
        return tuple([item.decode(inner) for inner in value])

    return _Coder(encode, decode, (tuple,), (list,))


def _fixed(items: Sequence[_Coder]) -> _Coder:
    """A tuple of so many parts, each of its own kind."""
    count = len(items)

    def encode(value: Any) -> Json:
        if type(value) is not tuple or len(value) != count:
            raise EncodeError(f"cannot encode {type(value).__name__} as tuple of {count}")
        return [item.encode(inner) for item, inner in zip(items, value, strict=True)]

    def decode(value: Json) -> Any:
        if type(value) is not list or len(value) != count:
            raise DecodeError(f"cannot decode {type(value).__name__} as tuple of {count}")
        return tuple([item.decode(inner) for item, inner in zip(items, value, strict=True)])

    return _Coder(encode, decode, (tuple,), (list,))


def _text_set() -> _Coder:
    """A set of texts, written in order: what is equal looks equal."""
    texts = _sequence(_TEXT)

    def encode(value: Any) -> Json:
        if type(value) is not frozenset:
            raise EncodeError(f"cannot encode {type(value).__name__} as frozenset")
        return texts.encode(tuple(sorted(value)))

    return _Coder(encode, lambda value: frozenset(texts.decode(value)), (frozenset,), (list,))


def _mapping(item: _Coder) -> _Coder:
    def encode(value: Any) -> Json:
        if type(value) not in _MAPPINGS:
            raise EncodeError(f"cannot encode {type(value).__name__} as mapping")
        return {_TEXT.encode(key): item.encode(inner) for key, inner in value.items()}

    def decode(value: Json) -> Any:
        if type(value) is not dict:
            raise DecodeError(f"cannot decode {type(value).__name__} as mapping")
        return {_TEXT.decode(key): item.decode(inner) for key, inner in value.items()}

    return _Coder(encode, decode, _MAPPINGS, (dict,))


def _hidden_mapping() -> _Coder:
    names = _mapping(_TEXT)
    return _Coder(lambda value: dict.fromkeys(names.encode(value), HIDDEN), names.decode, names.values, names.kinds)


_TEXT: Final = _PLAIN[str]
_HIDDEN_FIELDS: Final = frozenset({(EngineSpec, "env")})
_LEFT_OUT: Final = frozenset({(NodeSpec, "notify")})


def _default(field: Field[Any]) -> Any:
    """What a field has when nobody sets it; _UNKNOWN when somebody must."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return _UNKNOWN if field.default is MISSING else field.default


def _record(cls: type) -> _Coder:
    """A dataclass as an object of those fields that differ from their defaults."""
    hints = typing.get_type_hints(cls)
    known = [f for f in fields(cast("Any", cls)) if (cls, f.name) not in _LEFT_OUT]
    coders = {f.name: _hidden_mapping() if (cls, f.name) in _HIDDEN_FIELDS else _coder(hints[f.name]) for f in known}
    parts = [(f.name, _default(f), coders[f.name].encode) for f in known]
    required = {name for name, default, _ in parts if default is _UNKNOWN}

    def encode(value: Any) -> Json:
        if type(value) is not cls:
            raise EncodeError(f"cannot encode {type(value).__name__} as {cls.__name__}")
        out = {}
        for name, default, write in parts:
            inner = getattr(value, name)
            if inner is default or (type(inner) is type(default) and inner == default):
                continue
            out[name] = write(inner)
        return out

    def decode(value: Json) -> Any:
        if type(value) is not dict or not required <= value.keys() <= coders.keys():
            raise DecodeError(f"cannot decode this as {cls.__name__}: {_shape(value)}")
        return cls(**{name: coders[name].decode(inner) for name, inner in value.items()})

    return _Coder(encode, decode, (cls,), (dict,))


def _shape(value: Json) -> str:
    return f"fields {', '.join(map(str, value))}" if type(value) is dict else type(value).__name__


def _union(args: tuple[Any, ...]) -> _Coder:
    """Told apart by the class of the value; several dataclasses by a tag."""
    records = {cast("type", arg).__name__: _coder(cast("type", arg)) for arg in args if is_dataclass(arg)}
    members = [_coder(arg) for arg in args if arg is not float and not is_dataclass(arg)]
    members += [_tagged(records)] if len(records) > 1 else records.values()
    members += [
        _coder(arg) for arg in args if arg is float
    ]  # the last: it takes integers and texts only if no other does
    writers: dict[type, Callable[[Any], Json]] = {}
    readers: dict[type, Callable[[Json], Any]] = {}
    for member in members:
        for cls in member.values:
            writers.setdefault(cls, member.encode)
        for kind in member.kinds:
            readers.setdefault(kind, member.decode)

    def encode(value: Any) -> Json:
        write = writers.get(type(value))
        if write is None:
            raise EncodeError(f"cannot encode {type(value).__name__} here")
        return write(value)

    def decode(value: Json) -> Any:
        read = readers.get(type(value))
        if read is None:
            raise DecodeError(f"cannot decode {type(value).__name__} here")
        return read(value)

    return _Coder(encode, decode, tuple(writers), tuple(readers))


def _tagged(records: Mapping[str, _Coder]) -> _Coder:
    names = {coder.values[0]: (name, coder.encode) for name, coder in records.items()}

    def encode(value: Any) -> Json:
        name, write = names[type(value)]
        return {_TAG: name, **write(value)}

    def decode(value: Json) -> Any:
        name = value.get(_TAG)
        coder = records.get(name) if isinstance(name, str) else None
        if coder is None:
            raise DecodeError(f"cannot decode an object that is {name!r}: it is none of {', '.join(records)}")
        return coder.decode({key: inner for key, inner in value.items() if key != _TAG})

    return _Coder(encode, decode, tuple(names), (dict,))
