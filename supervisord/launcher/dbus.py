"""Method calls on the system bus. Every wait has a bound: a bus that hangs costs an answer, never a thread.

jeepney's own connection waits for the answer to Hello for ever; here only its messages and its authentication are used.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

from jeepney import DBusAddress, new_method_call
from jeepney.auth import AuthenticationError
from jeepney.bus import get_bus
from jeepney.io.blocking import prep_socket
from jeepney.low_level import HeaderFields, Message, MessageType, Parser

CALL_S: Final = 10.0
"""PID 1 answers in less than a millisecond, and in seconds while it reloads its units."""

_CONNECT_S: Final = 5.0
_READ_BYTES: Final = 65536
_GONE: Final = frozenset({"org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject"})
_BUS: Final = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")


class BusError(Exception):
    """A call failed. `name` is the error's name on the bus; "" when there was no answer at all."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name

    @property
    def gone(self) -> bool:
        """Whether what was asked about does not exist (any more)."""
        return self.name in _GONE


class Call(NamedTuple):
    """One method call; `body` as jeepney wants it, one value for each type in `signature`."""

    address: DBusAddress
    method: str
    signature: str = ""
    body: tuple[Any, ...] = ()


class Bus:
    """A connection for one errand of one thread. Connecting costs about a millisecond; nothing is kept that may age."""

    def __init__(self, timeout_s: float = CALL_S) -> None:
        """Connect. Raises BusError."""
        self._timeout_s = timeout_s
        self._serials = itertools.count(1)
        self._parser = Parser()
        try:
            self._socket = prep_socket(get_bus("SYSTEM"), timeout=_CONNECT_S)
        except (OSError, AuthenticationError) as error:
            raise BusError("", f"cannot connect to the system bus: {_why(error)}") from None
        try:
            self.call(Call(_BUS, "Hello"))
        except BusError:
            self.close()
            raise

    def __enter__(self) -> Bus:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def call(self, call: Call) -> tuple[Any, ...]:
        """Make one call and wait for its answer. Raises BusError."""
        return self.calls([call])[0]

    def calls(self, calls: Sequence[Call]) -> list[tuple[Any, ...]]:
        """Make several calls in one go; their answers in the same order. Raises BusError for the first that failed."""
        deadline = time.monotonic() + self._timeout_s
        serials = [next(self._serials) for _ in calls]
        try:
            self._wait_until(deadline)
            self._socket.sendall(b"".join(map(_message, calls, serials)))
            answers: dict[int, Message] = {}
            while len(answers) < len(serials):
                answer = self._receive(deadline)
                to = answer.header.fields.get(HeaderFields.reply_serial)
                if to in serials:
                    answers[to] = answer
        except OSError as error:
            raise BusError("", f"cannot ask systemd ({calls[0].method}): {_why(error)}") from None
        return [_body(answers[serial]) for serial in serials]

    def _receive(self, deadline: float) -> Message:
        while (message := self._parser.get_next_message()) is None:
            self._wait_until(deadline)
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._parser.add_data(data)
        return message

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)


def _message(call: Call, serial: int) -> bytes:
    data: bytes = new_method_call(call.address, call.method, call.signature, call.body).serialise(serial=serial)
    return data


def _body(answer: Message) -> tuple[Any, ...]:
    if answer.header.message_type is not MessageType.error:
        return tuple(answer.body)
    name = str(answer.header.fields.get(HeaderFields.error_name, ""))
    raise BusError(name, str(answer.body[0]) if answer.body else name)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError | socket.timeout):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
