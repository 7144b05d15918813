"""What the control API offers: each route, what it needs of the daemon (`Handlers`), how its answer looks.

GET  /v1/status[?after=SERIAL&timeout=S]         200 the status document, header Status-Serial;
                                                 with `after` as soon as the serial is another one
POST /v1/engines/NAME/OP   {"now": bool}         202 accepted, 404 unknown engine, 409 refused, 504 busy
POST /v1/gpus/clear        {"gpu": NAME}         202 accepted, 404 unknown GPU, 409 refused, 504 busy; NAME is a UUID,
                                                 a PCI id or an index
POST /v1/gpus/release                            202 accepted, 409 refused, 504 busy
POST /v1/reload                                  202 what changes, 422 every problem, 504 busy
GET  /v1/engines/NAME/log[?offset=&limit=&wait=] 200 text, headers Log-Offset, Log-Next-Offset, Log-Generation
GET  /v1/engines/NAME/why                        200 the story of its last restart (core.story.document)
GET  /v1/events[?engine=&since=&after=&limit=&timeout=]
                                                 200 {"events": [...], "last_id": ID, "more": bool}, oldest first: after
                                                 an id or since a time (epoch seconds), otherwise the newest ones; with
                                                 `timeout` as soon as there is one; the next come `after` last_id

Every error is `{"error": CODE, "message": SENTENCE}`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

from supervisord.core.messages import Answer, GpuOp, Op
from supervisord.core.spec import ENGINE_NAME_PATTERN
from supervisord.http_wire import HttpError, Request, Response

T = TypeVar("T")

LONG_POLL_MAX_S: Final = 25.0
LOG_MAX_BYTES: Final = 256 * 1024
_LOG_DEFAULT_BYTES: Final = 64 * 1024
EVENTS_MAX: Final = 1000
_EVENTS_DEFAULT: Final = 100
_SLICE_S: Final = 1.0
"""A long poll looks this often whether its client is still there."""
_LOG_LOOK_S: Final = 0.25

_ENGINE_NAME: Final = re.compile(ENGINE_NAME_PATTERN)
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_SECONDS: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_EPOCH: Final = re.compile(r"[0-9]{1,11}(\.[0-9]{1,6})?")
_OPS: Final = {op.value: op for op in Op}
_GPU_NAME: Final = re.compile(r"[0-9A-Za-z:.-]{1,64}")
_UNKNOWN_GPU: Final = "unknown_gpu"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What became of a reload. `messages`: every problem, or what changes, a sentence each.

    `engines` are those that are started, restarted or stopped because of it: `reload --wait` follows them.
    """

    accepted: bool
    messages: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Some bytes of an engine's log: where they begin, where to read on, and the generation that writes it now."""

    data: bytes
    offset: int
    next_offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class InJournal:
    """The daemon does not hold this log: journald does, under this identifier (`journalctl -t`)."""

    identifier: str


@dataclass(frozen=True, slots=True)
class EventPage:
    """Some events (history_read.document), and the id after which the next ones come; `more` are there already."""

    events: tuple[Mapping[str, Any], ...]
    last_id: int
    more: bool = False


class NoHistoryError(Exception):
    """The history cannot be read now; the message says why."""


class Handlers(Protocol):
    """What the daemon does for the API. Called on the server's threads; every call must be bounded.

    The serial changes with every published state. What `request` and `reload` set in motion shows in the `status` of
    whoever asks after they returned: publish before answering, or `--wait` sees the state from before.
    """

    def status(self) -> tuple[int, dict[str, Any]]:
        """Give the serial and the document (`core.status.of`)."""

    def wait(self, after: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Do the same as soon as the serial is not `after`, or when `timeout_s` have passed."""

    def request(self, op: Op, engine: str, at_once: bool, actor: str) -> tuple[Answer, str]:
        """Hand a request to the loop and wait for its answer. Raises TimeoutError."""

    def gpu_request(self, op: GpuOp, gpu: str | None, actor: str) -> tuple[Answer, str]:
        """Do the same for a request about one GPU (by UUID, PCI id or index) or about all. Raises TimeoutError."""

    def reload(self, actor: str) -> Reloaded:
        """Read, validate and apply the configuration. Raises TimeoutError."""

    def log(self, engine: str, offset: int | None, limit: int) -> LogChunk | InJournal | None:
        """Read at most `limit` bytes from `offset`, or the last ones (None). None: no such engine.

        An offset beyond the end (the log was rotated or begun anew) reads from its beginning.
        """

    def events(self, engine: str | None, since: float | None, after: int | None, limit: int) -> EventPage | None:
        """Read at most `limit` events. None: no such engine. Raises NoHistoryError, TimeoutError."""

    def wait_event(self, last_id: int, timeout_s: float) -> None:
        """Return when there is an event after `last_id`, or when `timeout_s` have passed."""

    def why(self, engine: str) -> Mapping[str, Any] | None:
        """Tell what happened to an engine last. None: no such engine. Raises NoHistoryError, TimeoutError."""


def respond(request: Request, handlers: Handlers, actor: str, gone: Callable[[], bool]) -> Response:
    """Answer one request of `actor`; `gone` tells whether its client has left. Raises HttpError."""
    match (request.method, request.segments):
        case ("GET", ("v1", "status")):
            return _status(request, handlers, gone)
        case ("GET", ("v1", "engines", name, "log")):
            return _log(request, handlers, _engine_name(name), gone)
        case ("GET", ("v1", "engines", name, "why")):
            return _why(request, handlers, _engine_name(name))
        case ("GET", ("v1", "events")):
            return _events(request, handlers, gone)
        case ("POST", ("v1", "engines", name, op)) if op in _OPS:
            return _request(request, handlers, _OPS[op], _engine_name(name), actor)
        case ("POST", ("v1", "gpus", "clear")):
            return _gpu_request(request, handlers, GpuOp.CLEAR, _body_gpu(request), actor)
        case ("POST", ("v1", "gpus", "release")):
            _body_flag(request)
            return _gpu_request(request, handlers, GpuOp.RELEASE, None, actor)
        case ("POST", ("v1", "reload")):
            return _reload(request, handlers, actor)
        case (_, ("v1", "status" | "reload" | "events") | ("v1", "engines", _, _) | ("v1", "gpus", _)):
            raise HttpError(
                HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", "cannot do this: no such operation or wrong method"
            )
        case _:
            raise HttpError(HTTPStatus.NOT_FOUND, "not_found", "cannot find this path: see /v1/status")


def json_response(
    status: HTTPStatus, document: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Any document as a response; ASCII only, so that no text in it can reach a terminal as a control character."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Response(status, text.encode("ascii"), headers=headers or {})


def error_response(error: HttpError) -> Response:
    """The form of every error."""
    return json_response(error.status, {"error": error.code, "message": str(error)})


def _status(request: Request, handlers: Handlers, gone: Callable[[], bool]) -> Response:
    _known_keys(request.query, "after", "timeout")
    after = _whole(request, "after")
    timeout_s = _seconds(request, "timeout", LONG_POLL_MAX_S)
    if after is None:
        serial, document = handlers.status()
    else:
        deadline = time.monotonic() + timeout_s
        serial, document = handlers.wait(after, 0.0)
        while serial == after and (left_s := deadline - time.monotonic()) > 0 and not gone():
            serial, document = handlers.wait(after, min(left_s, _SLICE_S))
    return json_response(HTTPStatus.OK, document, {"Status-Serial": str(serial)})


def _request(request: Request, handlers: Handlers, op: Op, name: str, actor: str) -> Response:
    _known_keys(request.query)
    at_once = _body_flag(request, "now")
    try:
        answer, message = handlers.request(op, name, at_once, actor)
    except TimeoutError:
        raise _busy(f"{op.value} {name}") from None
    return _answered(answer, message, Answer.UNKNOWN_ENGINE.value)


def _gpu_request(request: Request, handlers: Handlers, op: GpuOp, gpu: str | None, actor: str) -> Response:
    _known_keys(request.query)
    try:
        answer, message = handlers.gpu_request(op, gpu, actor)
    except TimeoutError:
        raise _busy(f"{op.value} {'of GPUs' if gpu is None else f'of GPU {gpu}'}") from None
    return _answered(answer, message, _UNKNOWN_GPU)


def _answered(answer: Answer, message: str, unknown: str) -> Response:
    """What the loop said. `unknown`: the code for what does not exist."""
    match answer:
        case Answer.ACCEPTED:
            return json_response(HTTPStatus.ACCEPTED, {"answer": answer.value, "message": message})
        case Answer.UNKNOWN_ENGINE:
            raise HttpError(HTTPStatus.NOT_FOUND, unknown, message)
        case Answer.REFUSED:
            raise HttpError(HTTPStatus.CONFLICT, answer.value, message)


def _reload(request: Request, handlers: Handlers, actor: str) -> Response:
    _known_keys(request.query)
    _body_flag(request)
    try:
        outcome = handlers.reload(actor)
    except TimeoutError:
        raise _busy("reload") from None
    if outcome.accepted:
        document = {"answer": "accepted", "messages": outcome.messages, "engines": outcome.engines}
        return json_response(HTTPStatus.ACCEPTED, document)
    text = "cannot reload: the configuration is invalid; the one before stays in force"
    document = {"error": "invalid_configuration", "message": text, "messages": outcome.messages}
    return json_response(HTTPStatus.UNPROCESSABLE_ENTITY, document)


def _log(request: Request, handlers: Handlers, name: str, gone: Callable[[], bool]) -> Response:
    _known_keys(request.query, "offset", "limit", "wait")
    offset = _whole(request, "offset")
    limit = min(_whole(request, "limit") or _LOG_DEFAULT_BYTES, LOG_MAX_BYTES)
    deadline = time.monotonic() + _seconds(request, "wait", 0.0)
    while True:
        chunk = handlers.log(name, offset, limit)
        if chunk is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "unknown_engine", f"cannot show the log of {name}: no such engine")
        if isinstance(chunk, InJournal):
            text = f"cannot show the log of {name}: the journal has it (journalctl -t {chunk.identifier})"
            document = {"error": "in_journal", "message": text, "identifier": chunk.identifier}
            return json_response(HTTPStatus.CONFLICT, document)
        if chunk.data or time.monotonic() >= deadline or gone():
            break
        time.sleep(_LOG_LOOK_S)
    headers = {
        "Log-Offset": str(chunk.offset),
        "Log-Next-Offset": str(chunk.next_offset),
        "Log-Generation": str(chunk.generation),
    }
    return Response(HTTPStatus.OK, chunk.data, "text/plain; charset=utf-8", headers)


def _events(request: Request, handlers: Handlers, gone: Callable[[], bool]) -> Response:
    _known_keys(request.query, "engine", "since", "after", "limit", "timeout")
    engine = request.query.get("engine")
    if engine is not None:
        _engine_name(engine)
    since = _epoch(request, "since")
    limit = min(_whole(request, "limit") or _EVENTS_DEFAULT, EVENTS_MAX)
    deadline = time.monotonic() + _seconds(request, "timeout", 0.0)
    after = _whole(request, "after")
    while True:
        page = _of_history(partial(handlers.events, engine, since, after, limit))
        if page is None:
            raise _unknown(f"cannot show the events of {engine}")
        left_s = deadline - time.monotonic()
        if page.events or left_s <= 0 or gone():
            return json_response(HTTPStatus.OK, {"events": page.events, "last_id": page.last_id, "more": page.more})
        after = page.last_id
        handlers.wait_event(after, min(left_s, _SLICE_S))


def _why(request: Request, handlers: Handlers, name: str) -> Response:
    _known_keys(request.query)
    story = _of_history(partial(handlers.why, name))
    if story is None:
        raise _unknown(f"cannot tell about {name}")
    return json_response(HTTPStatus.OK, story)


def _of_history(read: Callable[[], T]) -> T:
    try:
        return read()
    except NoHistoryError as error:
        raise HttpError(HTTPStatus.CONFLICT, "refused", str(error)) from None
    except TimeoutError:
        text = "cannot read the history in time: the disk or the machine is too busy"
        raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, "timeout", text) from None


def _unknown(what: str) -> HttpError:
    return HttpError(HTTPStatus.NOT_FOUND, "unknown_engine", f"{what}: no such engine, and none in the history")


def _engine_name(name: str) -> str:
    if not _ENGINE_NAME.fullmatch(name):
        raise HttpError(
            HTTPStatus.NOT_FOUND, "unknown_engine", f"cannot find this engine: names match {ENGINE_NAME_PATTERN}"
        )
    return name


def _body(request: Request) -> object:
    """The JSON of a body; no body is an empty object."""
    try:
        return json.loads(request.body) if request.body else {}
    except (ValueError, RecursionError):
        raise _bad("body", "it is not JSON") from None


def _body_gpu(request: Request) -> str:
    """Read the only thing that a body may say: `{"gpu": NAME}`."""
    body = _body(request)
    if not isinstance(body, dict) or body.keys() != {"gpu"} or not isinstance(body["gpu"], str):
        raise _bad("body", 'it is not {"gpu": "NAME"}')
    name: str = body["gpu"]
    if not _GPU_NAME.fullmatch(name):
        text = "cannot find this GPU: it is named by its UUID, PCI id or index; see vllm-supervisor gpu"
        raise HttpError(HTTPStatus.NOT_FOUND, _UNKNOWN_GPU, text)
    return name


def _body_flag(request: Request, flag: str = "") -> bool:
    """Read the only thing that a body may say: `{FLAG: bool}`. No body says no."""
    body = _body(request)
    if not isinstance(body, dict) or not body.keys() <= {flag} or not isinstance(body.get(flag, False), bool):
        raise _bad("body", f'it is not {{"{flag}": true or false}}' if flag else "it has to be empty")
    return bool(body.get(flag, False))


def _known_keys(query: Mapping[str, str], *known: str) -> None:
    if not query.keys() <= set(known):
        raise _bad("query", f"known keys are {', '.join(known) or 'none'}")


def _whole(request: Request, key: str) -> int | None:
    text = request.query.get(key)
    if text is not None and not _WHOLE.fullmatch(text):
        raise _bad("query", f"{key} is not a whole number")
    return None if text is None else int(text)


def _seconds(request: Request, key: str, default: float) -> float:
    """Read seconds; more than a long poll may take is cut down to that."""
    text = request.query.get(key)
    if text is not None and not _SECONDS.fullmatch(text):
        raise _bad("query", f"{key} is not a number of seconds")
    return min(default if text is None else float(text), LONG_POLL_MAX_S)


def _epoch(request: Request, key: str) -> float | None:
    text = request.query.get(key)
    if text is not None and not _EPOCH.fullmatch(text):
        raise _bad("query", f"{key} is not a time in seconds since 1970")
    return None if text is None else float(text)


def _bad(part: str, how: str) -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed", f"cannot use the {part} of the request: {how}")


def _busy(what: str) -> HttpError:
    return HttpError(
        HTTPStatus.GATEWAY_TIMEOUT,
        "timeout",
        f"cannot say whether {what} was accepted: the daemon did not answer in time; look at: vllm-supervisor status",
    )
