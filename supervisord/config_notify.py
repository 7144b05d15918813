"""Checks of `[notify.X]`, and what of it may be shown: the URL of a webhook is often its password."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from supervisord.config_problems import Finding, Parts, bare_urls, nearest, printable, shown
from supervisord.core import kinds
from supervisord.core.spec import NotifySpec

_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\.?", re.ASCII)
_HEADER: Final = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\x21-\x7e]+(?:[ \t]+[\x21-\x7e]+)*)", re.ASCII)
_OURS: Final = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "expect"})
"""Headers that say how the message is written, which only who writes it knows."""


def findings(spec: NotifySpec) -> Iterator[Finding]:
    """What is wrong with one receiver."""
    at = ("notify", spec.name)
    if (wrong := _url_problem(spec.url)) is not None:
        yield Finding((*at, "url"), *wrong, value=shown(spec.url, at))
    yield from _events(spec, (*at, "events"))
    for key in ("headers_file", "ca_file"):
        path = getattr(spec, key)
        if path is not None and not path.startswith("/"):
            # The value is not shown: it may be the secret itself.
            yield Finding((*at, key), "must be the absolute path of a file")


def warnings(spec: NotifySpec) -> Iterator[Finding]:
    """What works, but is probably not meant."""
    if spec.headers_file is None or _url_problem(spec.url) is not None:
        return
    url = urlsplit(spec.url)
    if url.scheme == "http" and not _is_loopback(url.hostname or ""):
        message = "what headers_file holds can be read by everybody on the way"
        yield Finding(("notify", spec.name, "url"), message, "use https", bare_urls(spec.url))


def headers_of(text: str) -> dict[str, str]:
    """The headers in the text of a headers_file. Raises ValueError that quotes none of it."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        match = _HEADER.fullmatch(line.strip())
        if match is None:
            raise ValueError(f'line {number} is not "NAME: VALUE" in printable ASCII')
        if match[1].lower() in _OURS:
            raise ValueError(f"line {number} sets {match[1]}, which the supervisor sets itself")
        found[match[1]] = match[2]
    return found


def _url_problem(url: str) -> tuple[str, str] | None:
    """Message and remedy."""
    example = 'write for example "https://alerts.example.com/hook"'
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "it is no URL", example
    if parts.scheme not in {"https", "http"}:
        return "it must begin with https:// or http://", example
    if parts.username is not None or parts.password is not None:
        return "it must not hold a user or password", 'put "Authorization: Basic ..." into a headers_file'
    if not _is_host(parts.hostname or ""):
        return "it names no host", example
    if port == 0 or not url.isascii() or not url.isprintable() or " " in url:
        return "it has a port of 0, or characters that a URL must not have", "write them as %XX"
    if parts.fragment:
        return "it has a part after #, which is never sent", "remove that, or write # as %23"
    return None


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return _HOST.fullmatch(name) is not None
    return True


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _events(spec: NotifySpec, at: Parts) -> Iterator[Finding]:
    known = (*kinds.GROUPS, *sorted(kinds.KINDS))
    if not spec.events:
        yield Finding(at, "it names no event", f"name some, or a group: {', '.join(kinds.GROUPS)}", "[]")
    for name in spec.events:
        if name in kinds.UNSENT:
            yield Finding(
                at, "this is only told where it happens, in the log or the history", "remove it", _quoted(name)
            )
        elif name not in known:
            near = nearest(name, known)
            remedy = f'did you mean "{near}"?' if near else f"groups are {', '.join(kinds.GROUPS)}; kinds: see `events`"
            yield Finding(at, "there is no such kind or group of events", remedy, _quoted(name))


def _quoted(name: str) -> str:
    return f'"{printable(name[:80])}"'
