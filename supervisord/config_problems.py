"""What is wrong with a configuration, as data and as one readable line; and what must never be shown of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Parts = tuple[str, ...]
"""A key path by its parts: ("engine", "qwen", "args", "max-model-len")."""

HIDDEN: Final = "(hidden)"

SECRET_CHARS: Final = 6
"""Shorter values ("1", "none") are no secrets, and would be found in every second line."""

_SHOWN_CHARS: Final = 80
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SECRET: Final = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_COUNTED: Final = re.compile(r"(?i:tokeniz)|tokens|token[-_]threshold")
_USERINFO: Final = re.compile(r"(?<=://)[^/@\s]*@")
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31}://)(?:[^/?#\s]*@)?(?P<host>[^/?#@\s]*)(?P<rest>\S*)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a configuration is refused.

    `path` is the key path as it is written in `file`; "" when the file as a whole is meant, and then `message` is a
    sentence of its own. `value` is None when there is none to show, and never holds a secret.
    """

    file: str
    path: str
    value: str | None
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        """One line that begins with "cannot"."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        if not self.path:
            return f"{self.message}{remedy}"
        return f"cannot use {self.where}: {self.message}{remedy}"

    @property
    def where(self) -> str:
        """The key, its value and its file."""
        value = "" if self.value is None else f" = {self.value}"
        return f"{self.path}{value}" + (f" in {self.file}" if self.file else "")


class ConfigError(Exception):
    """A configuration that is refused, with every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Final = tuple(dict.fromkeys(problems))
        super().__init__(*self.problems)

    def __str__(self) -> str:
        """Every problem on a line of its own."""
        return "\n".join(map(str, self.problems))


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the key `at`, before it is known which file said so.

    `related` are other keys that it rests on: when one of them could not be read, the finding is dropped.
    """

    at: Parts
    message: str
    remedy: str = ""
    value: str | None = None
    related: tuple[Parts, ...] = ()


class Wrong(Exception):  # noqa: N818 (not an error of the program: it never leaves the reader)
    """A value that its key does not take."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message: Final = message
        self.remedy: Final = remedy
        super().__init__(message)


def looks_secret(name: str) -> bool:
    """Whether the value under this name (a key, a flag, an environment variable) must not be shown.

    Lower-case "tokens" is a count (`max-num-batched-tokens`); in the names of variables it hides the value too.
    """
    return _SECRET.search(_COUNTED.sub("", name)) is not None


def secrets_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """What of an environment nobody may quote; the longest first, since one may be a part of another."""
    found = {value for name, value in env.items() if looks_secret(name) and len(value) >= SECRET_CHARS}
    return tuple(sorted(found, key=len, reverse=True))


def without(secrets: Iterable[str], text: str) -> str:
    """Text without these secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def secret_path(at: Parts) -> bool:
    """Whether any part of a key path looks secret; the name of an engine or a receiver does not count."""
    parts = at[:1] + at[2:] if at[:1] in {("engine",), ("notify",)} else at
    return any(map(looks_secret, parts))


def without_password(text: str) -> str:
    """Text without the user and password of the URLs in it."""
    return _USERINFO.sub(f"{HIDDEN}@", text)


def bare_urls(text: str) -> str:
    """Text with nothing of the URLs in it but scheme and host: the rest of a webhook's is often its password."""
    return _URL.sub(lambda url: f"{url['scheme']}{url['host']}{'/...' if url['rest'] not in {'', '/'} else ''}", text)


def printable(text: str) -> str:
    """Text that is safe on a terminal: whatever cannot be printed is escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(value: object, at: Parts = ()) -> str:
    """A value as an operator may see it: in TOML's spelling, short, without secrets."""
    if secret_path(at):
        return HIDDEN
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, list | tuple):
        return "[...]" if value else "[]"
    if isinstance(value, str):
        of_receiver = at[:1] == ("notify",)
        if of_receiver and "://" not in value:  # perhaps a URL without its beginning
            return HIDDEN
        text = bare_urls(value) if of_receiver else without_password(value)
        cut = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        return f'"{printable(cut)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return str(value)[:_SHOWN_CHARS]
    except ValueError:  # an integer of more digits than Python converts
        return "a number of thousands of digits"


def path_text(at: Parts) -> str:
    """A key path as TOML spells it."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in at)


def locate(origins: Mapping[str, str], at: Parts) -> tuple[str, Parts]:
    """The file that set the key `at`, and the path under which it did: an engine's key may come from engine_defaults.

    A key that nobody set is placed in the nearest table around it.
    """
    in_defaults = ("engine_defaults", *at[2:])
    if at[:1] == ("engine",) and path_text(at) not in origins and path_text(in_defaults) in origins:
        return origins[path_text(in_defaults)], in_defaults
    for length in range(len(at), 0, -1):
        if (file := origins.get(path_text(at[:length]))) is not None:
            return file, at
    return "", at


def problem_of(finding: Finding, origins: Mapping[str, str]) -> Problem:
    """Say where a finding was written."""
    file, at = locate(origins, finding.at)
    return Problem(file, path_text(at), finding.value, finding.message, finding.remedy)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    import difflib  # noqa: PLC0415 (needed only for errors)

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def is_number(value: Any) -> bool:
    """A TOML integer or float: booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
