"""A system bus of our own that says what a test wants: enough of D-Bus for method calls."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jeepney import new_error, new_method_return
from jeepney.low_level import HeaderFields, Message, Parser

Answer = tuple[str, tuple[Any, ...]]
"""Signature and body."""


class Refuse(Exception):  # noqa: N818 (an answer, not an error of the test)
    """Answer with an error of this name."""


class FakeBus:
    """`answer(method, body)` gives an Answer, raises Refuse, or gives None for silence."""

    def __init__(self, path: Path, answer: Callable[[str, tuple[Any, ...]], Answer | None]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._answer = answer
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; connections end with it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connection = connection
            with connection, contextlib.suppress(OSError):
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        rest = b""
        while b"BEGIN\r\n" not in rest:
            data = connection.recv(4096)
            if not data:
                return
            rest += data
            if b"AUTH" in data:
                connection.sendall(b"OK 0123456789abcdef0123456789abcdef\r\n")
        parser = Parser()
        parser.add_data(rest.partition(b"BEGIN\r\n")[2])
        while True:
            message = parser.get_next_message()
            if message is None:
                data = connection.recv(65536)
                if not data:
                    return
                parser.add_data(data)
                continue
            self._reply(connection, message)

    def _reply(self, connection: socket.socket, message: Message) -> None:
        method = str(message.header.fields[HeaderFields.member])
        self.calls.append((method, message.body))
        try:
            told = ("s", (":1.1",)) if method == "Hello" else self._answer(method, message.body)
        except Refuse as refusal:
            connection.sendall(new_error(message, str(refusal), "s", ("no",)).serialise(serial=1))
            return
        if told is not None:
            connection.sendall(new_method_return(message, *told).serialise(serial=1))


@contextlib.contextmanager
def a_bus(path: Path, answer: Callable[[str, tuple[Any, ...]], Answer | None]) -> Iterator[FakeBus]:
    """Serve for as long as the context lasts."""
    bus = FakeBus(path, answer)
    try:
        yield bus
    finally:
        bus.close()
