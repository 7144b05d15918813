"""What is served on `supervisor.listen`: /ready, /ready/ENGINE and /metrics, each as plain text.

Gateways on other machines may ask whether an engine is ready. Metrics are for this machine, and for whoever has the
token of `supervisor.metrics_token_file`.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from supervisord.config_world import SecretError, read_key
from supervisord.core import readiness
from supervisord.core.model import Node, State
from supervisord.http_wire import HttpError, Request, Response
from supervisord.web.metrics import Page

TEXT: Final = "text/plain; charset=utf-8"
_FRESH: Final = {"Cache-Control": "no-store"}


class Site:
    """Answers from the published node alone.

    `booted`: whether the node knows what lives. Before, a running engine would be called stopped, so none is ready.
    """

    def __init__(self, node: Callable[[], Node], booted: Callable[[], bool], page: Page, *, as_root: bool) -> None:
        self._node = node
        self._booted = booted
        self._page = page
        self._as_root = as_root

    def answer(self, request: Request, connection: socket.socket) -> Response:
        """Answer one request. Raises HttpError."""
        match request.segments:
            case ("ready",) | ("ready", _) if not self._booted():
                _only_read(request)
                return _state(State.STARTING)
            case ("ready",):
                _only_read(request)
                return _state(readiness.of_node(self._node()))
            case ("ready", name):
                _only_read(request)
                engine = self._node().engines.get(name)
                if engine is None:
                    raise HttpError(HTTPStatus.NOT_FOUND, "unknown", "unknown")
                return _state(engine.state)
            case ("metrics",):
                _only_read(request)
                self._admit(request, connection)
                if not self._booted():
                    text = "cannot give metrics yet: the daemon is starting"
                    raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "starting", text)
                body, content_type = self._page.give(request.headers.get("accept", ""))
                return Response(HTTPStatus.OK, body, content_type, _FRESH)
            case _:
                text = "cannot find that: there are /ready, /ready/ENGINE and /metrics"
                raise HttpError(HTTPStatus.NOT_FOUND, "not_found", text)

    def error(self, error: HttpError) -> Response:
        """The form of an error."""
        headers = dict(_FRESH)
        if error.status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if error.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        return Response(error.status, f"{error}\n".encode(), TEXT, headers)

    def _admit(self, request: Request, connection: socket.socket) -> None:
        """Let pass who may read metrics; HttpError for everybody else."""
        if is_loopback(connection.getpeername()[0]):
            return
        path = self._node().spec.supervisor.metrics_token_file
        if path is None:
            text = "cannot give metrics to another machine: supervisor.metrics_token_file is not set there"
            raise HttpError(HTTPStatus.FORBIDDEN, "forbidden", text)
        try:
            token = read_key(path, as_root=self._as_root)
        except SecretError:
            text = "cannot give metrics: the token cannot be read there (vllm-supervisor check-config says why)"
            raise HttpError(HTTPStatus.FORBIDDEN, "no_token", text) from None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip(), token):
            text = "cannot give metrics: send Authorization: Bearer with the token of supervisor.metrics_token_file"
            raise HttpError(HTTPStatus.UNAUTHORIZED, "unauthorized", text)


def is_loopback(peer: str) -> bool:
    """Whether a peer is this machine, by its address as the socket gives it."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _only_read(request: Request) -> None:
    if request.method not in {"GET", "HEAD"}:
        text = f"cannot do {request.method} here: only GET and HEAD"
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "method", text)


def _state(state: State) -> Response:
    code = HTTPStatus.OK if state is State.READY else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(code, f"{state.value}\n".encode(), TEXT, _FRESH)
