"""One HTTP request and one response over a connected socket, each bounded in size and in total time.

Not http.server: its timeouts are per read (a client that drips a byte a second is served for hours), its limits are
per header, and the peer's credentials are out of its sight. One request a connection is all that our servers need.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl

HEAD_MAX_BYTES: Final = 16 * 1024
BODY_MAX_BYTES: Final = 64 * 1024
RESPONSE_MAX_BYTES: Final = 8 * 1024 * 1024

_END_OF_HEAD: Final = b"\r\n\r\n"
_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_HEADER: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~]*)")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")


class HttpError(Exception):
    """A request that is answered with an error. `code` is a stable word, the message a sentence for people."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Request:
    """`segments` are the parts of the path between slashes, as sent; names of headers are in lower case."""

    method: str
    segments: tuple[str, ...]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """Headers here are those beyond the type and the length of the body."""

    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, head_only: bool = False) -> bytes:
        """The whole response, ready to send; `head_only` is the answer to HEAD."""
        fields = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Connection": "close",
            **self.headers,
        }
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join(lines).encode("ascii") + _END_OF_HEAD + (b"" if head_only else self.body)


def read_request(sock: socket.socket, deadline: float) -> Request | None:
    """Read one request until `deadline` (monotonic); None when the peer left without a word. Raises HttpError."""
    data = bytearray()
    end = -1
    while end < 0 and len(data) <= HEAD_MAX_BYTES:
        before = len(data)
        if not _receive(sock, data, deadline):
            if not data:
                return None
            raise _malformed("it ends within its head")
        end = data.find(_END_OF_HEAD, max(0, before - len(_END_OF_HEAD) + 1))
    if not 0 <= end <= HEAD_MAX_BYTES:
        raise HttpError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "head_too_large",
            f"cannot read the request: its head is larger than {HEAD_MAX_BYTES} bytes",
        )
    method, target, headers, length = _parse_head(bytes(data[:end]))
    body = data[end + len(_END_OF_HEAD) :]
    while len(body) < length:
        if not _receive(sock, body, deadline):
            raise _malformed("it ends within its body")
    path, _, query = target.partition("?")
    return Request(method, tuple(path[1:].split("/")), _parse_query(query), bytes(body[:length]), headers)


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Send all of `data` until `deadline` (monotonic). Raises OSError (TimeoutError among them)."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    sock.sendall(data)  # its timeout is for the whole call


def _receive(sock: socket.socket, into: bytearray, deadline: float) -> bool:
    """Append what comes next; False at the end of the stream."""
    left_s = deadline - time.monotonic()
    try:
        sock.settimeout(max(0.001, left_s))
        chunk = sock.recv(HEAD_MAX_BYTES) if left_s > 0 else None
    except TimeoutError:
        chunk = None
    if chunk is None:
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT, "too_slow", "cannot read the request: it did not arrive in time"
        ) from None
    into += chunk
    return bool(chunk)


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str], int]:
    """Return method, target, headers and length of the body."""
    try:
        first, *lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise _malformed("its head is not ASCII") from None
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise _malformed("its first line is no HTTP/1 request line")
    headers: dict[str, str] = {}
    for text in lines:
        header = _HEADER.fullmatch(text)
        if header is None:
            raise _malformed("one of its header lines is not a header")
        name, value = header[1].lower(), header[2].strip(" \t")
        if name == "transfer-encoding":
            raise HttpError(
                HTTPStatus.LENGTH_REQUIRED, "length_required", "cannot read the request: send a Content-Length instead"
            )
        if headers.setdefault(name, value) == value:
            continue
        if name == "content-length":
            raise _malformed("its Content-Length is not one number")
        headers[name] += f", {value}"
    length = headers.get("content-length", "0")
    if not _LENGTH.fullmatch(length):
        raise _malformed("its Content-Length is not one number")
    if int(length) > BODY_MAX_BYTES:
        raise HttpError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "body_too_large",
            f"cannot read the request: its body is larger than {BODY_MAX_BYTES} bytes",
        )
    return line[1], line[2], headers, int(length)


def _parse_query(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=8)
    except ValueError:
        raise _malformed("its query is not key=value&...") from None
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _malformed("its query names a key twice")
    return found


def _malformed(how: str) -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed", f"cannot read the request: {how}")
