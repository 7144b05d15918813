"""journald's native protocol: messages with priority and fields, to be asked for with `journalctl VLLM_ENGINE=qwen`.

Wire format: systemd's docs/JOURNAL_NATIVE_PROTOCOL.md. What a datagram cannot hold goes as a sealed memfd.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, TextIO

from supervisord.core.messages import Record
from supervisord.log import Sent, printable
from supervisord.systemd.message_ids import MESSAGE_IDS

PATH: Final = Path("/run/systemd/journal/socket")
IDENTIFIER: Final = "vllm-supervisor"

WAIT_S: Final = 0.5
"""How long one send may wait for journald, and how often one that is away is looked for."""

_HEAD: Final = f"SYSLOG_IDENTIFIER={IDENTIFIER}\nSYSLOG_FACILITY=3\n".encode()
"""3 is daemon, as for lines that services write; without it syslog would file them under user."""

_NAME_CHARS: Final = 64 - len("VLLM_")
"""journald ignores fields with longer names."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_TOO_LARGE: Final = frozenset({errno.EMSGSIZE, errno.ENOBUFS})
_AWAY: Final = frozenset({errno.ECONNREFUSED, errno.ENOENT, errno.ECONNRESET, errno.ENOTCONN})


def is_stream(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether journald reads `stream`: $JOURNAL_STREAM is its device and inode (systemd.exec(5))."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def connect(stream: TextIO, environ: Mapping[str, str], path: Path = PATH) -> JournalSocket | None:
    """The way to journald if it reads `stream` anyway; None: write to `stream`."""
    return JournalSocket(path) if is_stream(stream, environ) and path.is_socket() else None


class JournalSocket:
    """journald as a log.Sink. It is addressed anew by each message, so one that was restarted needs no care."""

    hindrance = "journald was away, or too slow"

    def __init__(self, path: Path = PATH) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Not settimeout(): without a connection poll() does not see that the queue of journald is full.
        whole_s = int(WAIT_S)
        patience = struct.pack("@ll", whole_s, int((WAIT_S - whole_s) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    def send(self, record: Record) -> Sent:
        """Send it; waits at most WAIT_S where journald does not take it."""
        try:
            self._send(encode(record))
        except BlockingIOError:
            return Sent.LATER
        except OSError as error:
            if error.errno not in _AWAY:
                return Sent.LOST
            time.sleep(WAIT_S)
            return Sent.LATER
        return Sent.TAKEN

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, entry: bytes) -> None:
        """Raises OSError."""
        try:
            self._socket.sendto(entry, self._path)
        except OSError as error:
            if error.errno not in _TOO_LARGE:
                raise
        else:
            return
        with os.fdopen(os.memfd_create(IDENTIFIER, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", 0) as file:
            left = memoryview(entry)
            while left:
                left = left[file.write(left) :]
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            fd = struct.pack("@i", file.fileno())
            self._socket.sendmsg([], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd)], 0, self._path)


def encode(record: Record) -> bytes:
    """One entry, as journald reads it. Text that came from outside holds no control characters but newlines."""
    fields: dict[str, str] = {_name(name): str(value) for name, value in record.numbers.items() if value is not None}
    if record.engine is not None:
        fields["VLLM_ENGINE"] = record.engine
    if record.generation is not None:
        fields["VLLM_GENERATION"] = str(record.generation)
    if record.reason is not None:
        fields["VLLM_REASON"] = record.reason
    fields["VLLM_EVENT"] = record.kind
    message_id = MESSAGE_IDS.get(record.kind)
    if message_id is not None:
        fields["MESSAGE_ID"] = message_id
    head = (_field("MESSAGE", record.message), b"PRIORITY=%d\n" % record.severity.value, _HEAD)
    return b"".join((*head, *(_field(name, value) for name, value in fields.items())))


def _field(name: str, text: str) -> bytes:
    """`NAME=value`, or with lines in it the name, a length of 64 bits and the value."""
    if text.isprintable():
        return f"{name}={text}\n".encode()
    lines = [printable(line) for line in text.split("\n")]
    value = "\n".join(lines).encode()
    if len(lines) == 1:
        return b"%s=%s\n" % (name.encode(), value)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(value)), value)


@lru_cache(256)
def _name(name: str) -> str:
    """`delay_s` to `VLLM_DELAY_S`."""
    return f"VLLM_{re.sub('[^A-Z0-9_]', '_', name.upper())[:_NAME_CHARS]}"
