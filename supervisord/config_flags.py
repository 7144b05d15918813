"""`[engine.X.args]` and `[engine.X.env]`: which flags and variables an engine may be given, and their spelling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from supervisord.config_problems import HIDDEN, Finding, Parts, Wrong, is_number, looks_secret, secret_path, shown

_FLAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*(\..+)?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_ENGINE_KEY: Final = "the supervisor passes it from the engine's own key"
_PLAIN_HTTP: Final = "the supervisor speaks plain HTTP to the engine at its host and port"
_TLS: Final = "end TLS in the gateway before the engine"
_REFUSED_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "host": (_ENGINE_KEY, 'write host = "..." in the table of the engine'),
    "port": (_ENGINE_KEY, "write port = ... in the table of the engine"),
    "model": (_ENGINE_KEY, 'write model = "..." in the table of the engine'),
    "api-key": (
        "a command line can be read by every user of the machine",
        "put the key into a file and name it with api_key_file",
    ),
    "disable-log-stats": (
        "it removes every vllm: metric, and the supervisor could not tell a stalled engine from an idle one",
        "remove it",
    ),
    "uds": (_PLAIN_HTTP, "remove it"),
    "grpc": (_PLAIN_HTTP, "remove it"),
    "headless": (_PLAIN_HTTP, "remove it"),
    "ssl-certfile": (_PLAIN_HTTP, _TLS),
    "ssl-keyfile": (_PLAIN_HTTP, _TLS),
}
_BY_SUPERVISOR: Final = "it belongs to the conversation between systemd and the supervisor"
_REFUSED_VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    "NOTIFY_SOCKET": (_BY_SUPERVISOR, "remove it"),
    "VLLM_API_KEY": (
        "the supervisor sets it, and needs the key itself to warm the engine up",
        "put the key into a file and name it with api_key_file",
    ),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": ("an engine that is dead must not keep its port", "remove it"),
}


# --- flags ----------------------------------------------------------------------------------------------------------


def flag_name(key: str) -> str:
    """The flag that a key means: `_` is `-`, except after the first dot, where the names of JSON keys begin."""
    head, dot, tail = key.partition(".")
    return head.replace("_", "-") + dot + tail


def with_flag_names(table: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same table under the names of the flags, and the keys that repeat a flag under another spelling."""
    named: dict[str, Any] = {}
    repeated = []
    for key, value in table.items():
        name = flag_name(key)
        if name in named:
            repeated.append(key)
        else:
            named[name] = value
    return named, tuple(repeated)


def repeated_flag(at: Parts) -> Finding:
    """The finding for a key that `with_flag_names` called repeated."""
    return Finding(at, f"the flag --{flag_name(at[-1])} is there already, in another spelling", "keep one of them")


def flag_value(value: Any) -> Any:
    """A flag's value as the specification holds it (arrays become tuples); Wrong if a command line cannot carry it."""
    if isinstance(value, list | tuple):
        return _several(value)
    if isinstance(value, Mapping):
        _check_json(value, ())
        return dict(value)
    _check_scalar(value)
    return value


def flag_findings(name: str, value: Any, at: Parts) -> Iterator[Finding]:
    """What is wrong with giving this flag to an engine."""
    if name.startswith("-"):
        yield Finding(at, "flags are written without their dashes", f"write {name.lstrip('-')} = ...")
    elif not _FLAG.fullmatch(name):
        yield Finding(at, "no flag is spelled like this", "use letters, digits and dashes")
    if (refused := _REFUSED_FLAGS.get(name)) is not None:
        yield Finding(at, *refused, value=shown(value, at))
    elif looks_secret(name) and isinstance(value, str | tuple | Mapping):
        yield Finding(
            at,
            "a command line can be read by every user of the machine, and this looks like a secret",
            "give it in [engine.X.env] (vLLM reads HF_TOKEN there) or in a file that the flag can name",
            HIDDEN,
        )


def _several(values: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise Wrong("an empty array gives the flag no value", "remove the key, or write true for a flag without value")
    for value in values:
        if isinstance(value, bool | list | tuple):
            raise Wrong("one flag with several values takes texts, numbers and tables", "write such values as tables")
        if isinstance(value, Mapping):
            _check_json(value, ())
        else:
            _check_scalar(value)
        if isinstance(value, str) and value.startswith("-") and len(values) > 1:
            raise Wrong("a value that begins with a dash would be read as a flag", "reorder or rename it")
    return tuple(values)


def _check_json(value: Any, at: Parts) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_text(key)
            _check_json(inner, (*at, key))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_json(inner, at)
    else:
        _check_scalar(value)
        if isinstance(value, str) and value and secret_path(at):
            raise Wrong(
                "a command line can be read by every user of the machine, and "
                f"{'.'.join(at)} in it looks like a secret",
                "give it in [engine.X.env] or in a file",
            )


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        check_text(value, lines=True)
    elif is_number(value):
        check_number(value)
    elif not isinstance(value, bool):
        raise Wrong("must be true, false, a number, a text, an array or a table", "write it in quotes")


# --- values that several readers share --------------------------------------------------------------------------------


def check_text(text: str, *, lines: bool = False) -> None:
    """Refuse what argv, an environment or a path cannot carry. `lines`: line breaks and tabs are fine."""
    allowed = "\n\t" if lines else ""
    for char in text:
        if (char < " " or "\x7f" <= char < "\xa0" or "\ud800" <= char <= "\udfff") and char not in allowed:
            raise Wrong(f"must not hold the control character U+{ord(char):04X}", "remove it")


def check_number(value: float) -> None:
    """Refuse nan, infinities, and integers that no program takes."""
    if isinstance(value, int):
        if abs(value) >= 1 << 64:
            raise Wrong("must be a number of at most 64 bits")
    elif not math.isfinite(value):
        raise Wrong("must be a finite number")


# --- environment ------------------------------------------------------------------------------------------------------


def variable_findings(name: str, value: str, *, has_gpus: bool, at: Parts) -> Iterator[Finding]:
    """What is wrong with giving this environment variable to an engine."""
    if not _VARIABLE.fullmatch(name):
        remedy = "use letters, digits and underscores"
        yield Finding(at, "no environment variable is spelled like this", remedy, shown(value, at))
    refused = _REFUSED_VARIABLES.get(name)
    if name.startswith("WATCHDOG_"):
        refused = _BY_SUPERVISOR, "remove it"
    elif name.startswith(("VLLM_SUPERVISOR_", "SUPERVISED_")):
        refused = "names that begin with VLLM_SUPERVISOR_ or SUPERVISED_ are the supervisor's own", "remove it"
    elif name == "CUDA_VISIBLE_DEVICES" and (value or has_gpus):
        refused = "the supervisor sets it from the key gpus", "name the GPUs in gpus, and remove this"
    if refused is not None:
        yield Finding(at, *refused, value=shown(value, at))
