"""One attempt to deliver a message: a POST that is over in time, follows nothing and believes nothing.

requests' timeouts are for each read, so a receiver that sends a byte a second would hold it for ever. Here the whole
exchange has a deadline: the connection is shut down then, whatever it waits for. Resolving a name has the limits of
the machine's resolver (resolv.conf) instead; nothing can interrupt it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from threading import Timer
from typing import Any, Final
from urllib.parse import unquote, unquote_plus, urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, InvalidHeader
from urllib3.util.retry import Retry

from supervisord import __version__
from supervisord.config_notify import headers_of
from supervisord.config_problems import SECRET_CHARS, bare_urls, without
from supervisord.config_world import SecretError, read_secret
from supervisord.core.spec import NotifySpec
from supervisord.log import printable
from supervisord.webhook.outbox import Outcome

CERTIFICATES: Final = Path("/etc/ssl/certs")
"""What update-ca-certificates(8) keeps. As a directory it costs no memory: OpenSSL reads only what it needs."""

HEADERS: Final = {
    "Content-Type": "application/json",
    "User-Agent": f"vllm-supervisor/{__version__}",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
_SAID_BYTES: Final = 1024
_SAID_CHARS: Final = 100
_LATER: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


def send(spec: NotifySpec, message: bytes, timeout_s: float) -> Outcome:
    """Try once, within `timeout_s`. Raises nothing for what a network, a receiver or a file can do."""
    try:
        theirs = _headers(spec)
    except SecretError as error:
        return Outcome(ok=False, detail=f'headers_file "{spec.headers_file}": {error}; {error.remedy}', again=True)
    if spec.ca_file is not None and not os.access(spec.ca_file, os.R_OK):
        return Outcome(ok=False, detail=f'ca_file "{spec.ca_file}" is no readable file', again=True)
    exchange = _Exchange(timeout_s)
    try:
        with _Session() as session:
            session.trust_env = False  # no proxy, no .netrc, nobody else's certificates
            for scheme in ("http://", "https://"):
                session.mount(scheme, _Adapter(exchange))
            with session.post(
                spec.url,
                data=message,
                headers=HEADERS | theirs,
                timeout=timeout_s,
                allow_redirects=False,
                stream=True,
                verify=_authorities(spec),
            ) as answer:
                return _judged(answer, spec.url, _secrets(spec.url, theirs.values()))
    except (OSError, HTTPError, ValueError) as error:  # requests' errors are OSErrors
        return Outcome(ok=False, detail=exchange.how_ended(error), again=True)
    finally:
        exchange.end()


def _headers(spec: NotifySpec) -> dict[str, str]:
    """Those of the operator. Raises SecretError."""
    if spec.headers_file is None:
        return {}
    text = read_secret(spec.headers_file, as_root=os.geteuid() == 0)
    try:
        return headers_of(text)
    except ValueError as error:
        raise SecretError(str(error), "correct that line") from None


class _Session(requests.Session):
    """Takes redirects for answers: requests reads the whole body of one, however long, even to follow none."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        """There is none."""


class _Exchange:
    """The deadline of one exchange over one connection."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._timer: Timer | None = None
        self._sock: socket.socket | None = None
        self._why: str | None = None

    def connect(self, host: str, port: int) -> socket.socket:
        """Connect to the first address that answers. Raises OSError."""
        failure: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._left_s())
                sock.connect(address)
                self._bound(sock)
            except OSError as error:
                sock.close()
                failure = error
            else:
                return sock
        raise failure or OSError(0, "it has no address")

    def how_ended(self, error: BaseException) -> str:
        """Why there is no answer, in words."""
        # Connecting, TLS and requests have the same time, and on a busy machine may be before the timer.
        if any(isinstance(cause, TimeoutError) and cause.errno is None for cause in _causes(error)):
            self._late()
        return self._why or _why(error)

    def end(self) -> None:
        """The exchange is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._sock is not None:
            self._sock.close()

    def _bound(self, sock: socket.socket) -> None:
        self._sock = sock.dup()  # TLS takes the other one over
        self._timer = Timer(self._left_s(), self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            self._late()
            raise TimeoutError
        return left_s

    def _cut(self) -> None:
        self._late()
        if self._sock is not None:
            with contextlib.suppress(OSError):  # the receiver has gone already
                self._sock.shutdown(socket.SHUT_RDWR)

    def _late(self) -> None:
        self._why = f"no answer within {self._timeout_s:.3g} s"


class _Response(HTTPResponse):
    """An answer whose chunks have a size.

    http.client takes one of -1 bytes for all that ever comes: 225 MiB in 3 s, which took 485 MiB of memory (seen).
    """

    def _safe_read(self, amt: int) -> bytes:
        if amt < 0:
            raise ValueError(amt)
        data: bytes = super()._safe_read(amt)  # type: ignore[misc] # it is there in every Python, not in typeshed
        return data


class _Adapter(HTTPAdapter):
    """requests over connections with a deadline. Nothing is tried again here."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        super().__init__(pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Have connections made by the exchange."""
        super().init_poolmanager(*args, **kwargs)
        exchange = self._exchange

        class Plain(HTTPConnection):
            response_class = _Response

            def _new_conn(self) -> socket.socket:
                return exchange.connect(self.host.strip("[]"), self.port)

        class Secure(HTTPSConnection):
            response_class = _Response

            def _new_conn(self) -> socket.socket:
                return exchange.connect(self.host.strip("[]"), self.port)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}


def _authorities(spec: NotifySpec) -> str | bool:
    """Whose certificates are trusted: the operator's, the machine's, or else those that come with requests."""
    if spec.ca_file is not None:
        return spec.ca_file
    return str(CERTIFICATES) if (CERTIFICATES / "ca-certificates.crt").exists() else True


def _judged(answer: requests.Response, url: str, secrets: Iterable[str]) -> Outcome:
    status = answer.status_code
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return Outcome(ok=True, detail=f"HTTP {status}")
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        to = _leads_to(url, answer.headers.get("Location", ""))
        return Outcome(
            ok=False, detail=f"HTTP {status}, a redirect{to}: none is followed; write where it leads into url"
        )
    said = without(secrets, _said(answer))[:_SAID_CHARS]
    detail = f"HTTP {status}{': ' if said else ''}{said}"
    again = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _LATER
    return Outcome(ok=False, detail=detail, again=again, wait_s=_retry_after_s(answer) if again else 0.0)


def _leads_to(url: str, location: str) -> str:
    """Scheme and host of where a redirect leads; mostly it is the same URL, secrets and all, with a slash more."""
    try:
        parts = urlsplit(urljoin(url, location))
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return ""
    if not location or parts.scheme not in {"http", "https"} or not host:
        return ""
    return f" to {printable(bare_urls(f'{parts.scheme}://{host}/-'))[:_SAID_CHARS]}"


def _secrets(url: str, values: Iterable[str]) -> list[str]:
    """What an answer must not quote into our log: the words of the headers, the parts of the path and query.

    Those of the URL also as their receiver reads them.
    """
    rest = urlsplit(url)._replace(scheme="", netloc="").geturl()
    parts = [part for text in (rest, *values) for part in re.split(r"[\s/?&=]", text)]
    words = {word for part in parts for word in (part, unquote(part), unquote_plus(part)) if len(word) >= SECRET_CHARS}
    return sorted(words, key=len, reverse=True)


def _said(answer: requests.Response) -> str:
    """The first line of what it says to an error; "" if that does not come or is no text."""
    try:
        text = answer.raw.read(_SAID_BYTES).decode()
    except (OSError, HTTPError, ValueError):
        return ""
    return printable(text.strip().partition("\n")[0])


def _retry_after_s(answer: requests.Response) -> float:
    try:
        return float(Retry().parse_retry_after(answer.headers.get("Retry-After", "0")))
    except (InvalidHeader, ValueError, OverflowError):
        return 0.0


def _why(error: BaseException) -> str:
    """The cause at the bottom of what requests says, in words that quote no URL."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            remedy = "install who signed it (update-ca-certificates), or name that file in ca_file"
            return f"its certificate is not trusted: {cause.verify_message.rstrip('.')}; {remedy}"
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {_tls_words(cause)}"
    for cause in causes:
        if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException) and cause.strerror:
            return (
                f"{'cannot find its host' if isinstance(cause, socket.gaierror) else 'no connection'}: {cause.strerror}"
            )
    return "no whole HTTP answer"


def _tls_words(error: ssl.SSLError) -> str:
    return re.sub("_", " ", error.reason or "the connection was closed").lower()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that led to it, however its libraries wrapped that."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.append(found)
        yield found
        inner = (found.__cause__, found.__context__, getattr(found, "reason", None), *found.args)
        waiting += [one for one in inner if isinstance(one, BaseException)]
