"""The client of the control API: one bounded HTTP exchange over the Unix socket.

Every command pays for what this imports (http.client alone costs as much as the interpreter's start), so it speaks
the little HTTP that it needs itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

DEFAULT_SOCKET: Final = "/run/vllm-supervisor/control.sock"
ANSWER_S: Final = 10.0
"""How long an answer that nobody has to wait for may take."""

_HEAD_MAX_BYTES: Final = 16 * 1024
_BODY_MAX_BYTES: Final = 8 * 1024 * 1024
_DIGITS_MAX: Final = 18
_BUSY_RETRY_S: Final = 2.0
_HTTP_OK: Final = 200
_HTTP_REDIRECT: Final = 300
_HTTP_UNAVAILABLE: Final = 503


class ControlError(Exception):
    """The daemon's answer makes no sense, or is an internal error."""


class UnreachableError(ControlError):
    """Nobody listens on the socket."""


class DeniedError(ControlError):
    """The socket may not be used by this user."""


class SlowError(ControlError):
    """No answer in time, or the daemon has too many connections."""


class RefusedError(ControlError):
    """The daemon understood and said no. `code` is its word for it, `document` the whole answer."""

    def __init__(self, message: str, code: str, document: dict[str, Any]) -> None:
        super().__init__(message)
        self.code = code
        self.document = document


class Reply:
    """A good answer: headers have lower-case names."""

    __slots__ = ("body", "headers")

    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self.headers = headers
        self.body = body

    def document(self) -> dict[str, Any]:
        """Read the body as a JSON object."""
        found = _json(self.body)
        if found is None:
            raise ControlError("cannot read the daemon's answer: it is not JSON")
        return found

    def number(self, header: str) -> int:
        """Read a header that is a whole number."""
        text = self.headers.get(header, "")
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
            raise ControlError(f"cannot read the daemon's answer: no number in its header {header}")
        return int(text)


def get(path: str, target: str, timeout_s: float = ANSWER_S) -> Reply:
    """GET `target` from the daemon behind the socket `path`. Raises ControlError."""
    return _call(path, f"GET {target} HTTP/1.0\r\n\r\n".encode("ascii"), timeout_s)


def post(path: str, target: str, document: dict[str, Any] | None = None, timeout_s: float = ANSWER_S) -> Reply:
    """POST a JSON document, or nothing. Raises ControlError."""
    body = b"" if document is None else json.dumps(document).encode("ascii")
    return _call(
        path, f"POST {target} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode("ascii") + body, timeout_s
    )


def engine_target(name: str, what: str) -> str:
    """Path of what the API offers for one engine. Raises RefusedError for what cannot be an engine's name."""
    return f"/v1/engines/{engine_name(name)}/{what}"


def engine_name(name: str) -> str:
    """The same name; RefusedError for what cannot be one, and so never gets into a path or a query."""
    if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
        raise RefusedError(f"cannot find an engine {name!r}: names have letters, digits, - and _", "unknown_engine", {})
    return name


def _call(path: str, request: bytes, timeout_s: float) -> Reply:
    patience = time.monotonic() + _BUSY_RETRY_S
    while True:
        status, headers, body = _parse(_exchange(path, request, time.monotonic() + timeout_s))
        if _HTTP_OK <= status < _HTTP_REDIRECT:
            return Reply(headers, body)
        document = _json(body) or {}
        message = str(document.get("message", f"the daemon answered with HTTP status {status}"))
        code = str(document.get("error", ""))
        if status == _HTTP_UNAVAILABLE and time.monotonic() < patience:
            time.sleep(0.1)
        elif code in {"busy", "timeout", "too_slow"}:
            raise SlowError(message)
        elif code in {"unknown_engine", "unknown_gpu", "refused", "in_journal", "invalid_configuration"}:
            raise RefusedError(message, code, document)
        else:
            raise ControlError(message)


def _exchange(path: str, request: bytes, deadline: float) -> bytes:
    """Send and receive, until the peer has said everything or `deadline` (monotonic)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            _connect(sock, path, deadline)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(request)  # turned away before it was read: the answer says why
            return _receive(sock, deadline)
        except TimeoutError:
            text = f"cannot get an answer from the daemon at {path}: it did not come in time"
            raise SlowError(f"{text}; if it stays so: systemctl status vllm-supervisor") from None
        except OSError as error:
            raise ControlError(f"cannot talk to the daemon at {path}: {error.strerror}") from None


def _connect(sock: socket.socket, path: str, deadline: float) -> None:
    while True:
        _limit(sock, deadline)
        try:
            return sock.connect(path)
        except PermissionError:
            raise DeniedError(
                f"cannot talk to the daemon at {path}: permission denied; be root or in the group vllm-admin "
                "(usermod -aG vllm-admin USER, then log in again)"
            ) from None
        except BlockingIOError:  # its backlog is full
            time.sleep(0.02)
        except TimeoutError:
            raise
        except OSError as error:
            raise UnreachableError(
                f"cannot reach the daemon at {path}: {(error.strerror or str(error)).lower()}; "
                "start it with: systemctl start vllm-supervisor"
            ) from None


def _receive(sock: socket.socket, deadline: float) -> bytes:
    data = bytearray()
    need = _HEAD_MAX_BYTES + _BODY_MAX_BYTES
    while len(data) < need:
        _limit(sock, deadline)
        try:
            chunk = sock.recv(65536)
        except ConnectionResetError:
            break  # it left some of our request unread; what it said before that is here
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _limit(sock: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)


def _parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    if not answer:
        raise UnreachableError("cannot get an answer from the daemon: it closed the connection; is it ending?")
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    version, status = first[: len("HTTP/1.1 ")], first[len("HTTP/1.1 ") :][:3]
    if version not in {"HTTP/1.0 ", "HTTP/1.1 "} or not (status.isascii() and status.isdigit()):
        raise ControlError("cannot read the daemon's answer: it is no HTTP response")
    if headers.get("content-length") != str(len(body)):
        raise ControlError("cannot read the daemon's answer: it is not whole")
    return int(status), headers, body


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
