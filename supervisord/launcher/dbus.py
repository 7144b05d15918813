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

NONSENSE: Final = "its answer makes no sense"

_CONNECT_S: Final = 5.0
_READ_BYTES: Final = 65536
_ANSWER_MAX_BYTES: Final = 16 << 20
"""Of all that comes while answers are awaited; a list of all units of a large machine has a tenth of it."""
_QUOTED_CHARS: Final = 300
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
    """One method call; `body` as jeepney wants it, one value for each type in `signature`.

    `told`: the types of an answer that makes sense; None: it is not looked at.
    """

    address: DBusAddress
    method: str
    signature: str = ""
    body: tuple[Any, ...] = ()
    told: str | None = None


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
            answers = self._answers(serials, deadline)
        except OSError as error:
            raise BusError("", f"cannot ask systemd ({calls[0].method}): {_why(error)}") from None
        return [_body(call, answers[serial]) for call, serial in zip(calls, serials, strict=True)]

    def _answers(self, serials: Sequence[int], deadline: float) -> dict[int, Message]:
        """The answers to these calls. Raises OSError."""
        answers: dict[int, Message] = {}
        left = _ANSWER_MAX_BYTES
        while len(answers) < len(serials):
            message = self._parsed()
            if message is not None:
                to = message.header.fields.get(HeaderFields.reply_serial)
                if to in serials:
                    answers[to] = message
                continue
            self._wait_until(deadline)
            data = self._socket.recv(_READ_BYTES)
            left -= len(data)
            if not data or left < 0:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._parser.add_data(data)
        return answers

    def _parsed(self) -> Message | None:
        """The next whole message, if it is there. jeepney has no one error for what is none."""
        try:
            message: Message | None = self._parser.get_next_message()
        except Exception:  # noqa: BLE001 - AssertionError, KeyError, struct.error, UnicodeDecodeError, ... (seen)
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG)) from None
        return message

    def _wait_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)


def _message(call: Call, serial: int) -> bytes:
    data: bytes = new_method_call(call.address, call.method, call.signature, call.body).serialise(serial=serial)
    return data


def _body(call: Call, answer: Message) -> tuple[Any, ...]:
    fields = answer.header.fields
    if answer.header.message_type is not MessageType.error:
        if call.told not in {None, fields.get(HeaderFields.signature, "")}:
            raise BusError("", f"cannot ask systemd ({call.method}): {NONSENSE}")
        return tuple(answer.body)
    name = str(fields.get(HeaderFields.error_name, ""))
    raise BusError(name, str(answer.body[0])[:_QUOTED_CHARS] if answer.body else name)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError | socket.timeout):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
