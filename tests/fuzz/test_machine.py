"""What the machine says: the NVML helper, the kernel's log, and systemd over the system bus."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pynvml
import pytest
from jeepney import DBusAddress, new_method_call, new_method_return
from jeepney.low_level import Message, Parser

from supervisord.core.codec import encode_observation
from supervisord.core.gpu_samples import GpuPlace
from supervisord.gpu import client
from supervisord.gpu.client import _Helper
from supervisord.gpu.protocol import (
    ProtocolError,
    decode,
    decode_survey,
    persistence_request,
    survey_request,
    sweep_request,
)
from supervisord.launcher import dbus
from supervisord.launcher.dbus import BusError
from supervisord.launcher.units import Units
from supervisord.systemd.kmsg import Parser as Kmsg
from tests.adapters.test_gpu_protocol import SWEEP, UUID
from tests.fuzz.trying import bounded, costs, fuzz, json_bytes, mutated, nasty, peak_kib, pumped
from tests.sim.nvml import NvmlBox

SAID: Final = [
    SWEEP,
    {**SWEEP, "cuda": 13000},
    {"persistence": UUID, "on": True, "error": None},
    {"xid": 79, "gpu": UUID, "at": 12.5},
]


@fuzz(600)
def test_nvml_helper(rng: random.Random) -> None:
    data = json_bytes(SAID, rng)
    with bounded("NVML helper", data):
        try:
            seen = decode(data, 1, 1000.0, lambda pid: ("a", 1) if pid % 2 else None)
            encode_observation(seen)
            decode_survey(data, 1000.0)
        except ProtocolError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 300


def test_lines_of_the_helper_of_one_thing_over_and_over() -> None:
    for data in pumped((b"[", b"{", b'{"sweep":', b'"', b"\\u0000", b"1", b"[],", b"-", b"e", b" "), 1 << 20):

        def read(data: bytes = data) -> None:
            with pytest.raises(ProtocolError):
                decode(data, 1, 1.0, lambda _: None)

        took_s, peak = costs(read)
        assert took_s < 1.0
        assert peak < 64 << 20


@fuzz(300)
def test_the_daemon_s_end_of_the_helper(rng: random.Random) -> None:
    """What comes through its two pipes, in pieces that begin and end anywhere."""
    data = b"\n".join(json_bytes(SAID, rng) for _ in range(3))
    seen: list[object] = []
    helper = _Helper(1, seen.append, lambda _: None)
    try:
        with bounded("NVML helper's pipes", data):
            at = 0
            while at < len(data):
                size = rng.choice((1, 100, 65536))
                helper._heard(data[at : at + size])
                helper._complained(data[at : at + size])
                at += size
            assert len(seen) <= data.count(b"\n")
            told = helper._how(rng.choice((0, 1, -9)))
            assert told.isprintable()
            assert len(told) < 500
    finally:
        os.close(helper._stdin)
        helper._release()


def test_a_line_of_the_helper_that_never_ends_takes_no_memory() -> None:
    def read() -> None:
        helper = _Helper(1, lambda _: None, lambda _: None)
        for _ in range(400):
            helper._heard(b"[" * 65536)
            helper._complained(b"[" * 65536)
        assert "a line of more than" in helper._how(0)
        os.close(helper._stdin)
        helper._release()

    took_s, peak = costs(read)
    assert took_s < 5.0
    assert peak < 16 << 20


REQUESTS: Final = (
    sweep_request(1, slow=True, avoid=[GpuPlace("GPU-1", "0000:1b:00.0", 0)]),
    survey_request(),
    persistence_request("GPU-1", on=True),
)


@fuzz(8, slow=10)
def test_the_helper_s_end(rng: random.Random) -> None:
    """The real one, over a library whose GPUs say anything: it ends, and what it says is an answer or one line."""
    for name in ("name", "uuid", "temperature", "power_mw", "memory_total", "compute", "field/230"):
        if rng.random() < 0.3:
            (NVML.gpu(0).folder / name).write_bytes(nasty(rng))
    data = b"".join(mutated(REQUESTS, rng) if rng.random() < 0.6 else rng.choice(REQUESTS) for _ in range(3))
    with bounded("NVML helper's requests", data, start_s=_HELPER_S):
        code, said, complained = _helped(data)
        assert code in {0, 1}, (code, complained)
        assert complained.count(b"\n") == code, complained
        for line in said:
            with contextlib.suppress(ProtocolError):
                decode(line, 1, 1e9, lambda _: None)


_LAST: Final = 2**40 + 1
"""The number of the last request: its answer comes after all others."""
_HELPER_S: Final = 2.0
"""Of CPU, for an interpreter that starts and loads the library."""
_HELPER_KIB: Final = 64 << 10
"""The interpreter's own included: about 20 MiB."""


def _helped(data: bytes) -> tuple[int, list[bytes], bytes]:
    """How the helper exits, and what it said. The end of its requests would end it before it answers any of them."""
    with subprocess.Popen(
        (sys.executable, "-IS", str(client._PROBE), str(Path(pynvml.__file__).resolve().parent)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **NVML.env},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            # They come a line at a time, and all fit into a pipe of 64 KiB.
            process.stdin.write(data[:60_000].removesuffix(b"\n") + b"\n" + sweep_request(_LAST, slow=False))
            process.stdin.flush()
            said = []
            for line in process.stdout:
                said.append(line)
                if str(_LAST).encode() in line:
                    assert peak_kib(process.pid) < _HELPER_KIB
                    break
            process.stdin.close()
            return process.wait(), said, process.stderr.read()
        finally:
            process.kill()


def test_the_helper_answers_what_it_is_asked() -> None:
    code, said, complained = _helped(b"".join(REQUESTS))
    assert (code, len(said), complained) == (0, 4, b"")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    global NVML  # noqa: PLW0603 (what is tried is no fixture of a function)
    NVML = NvmlBox.make(tmp_path_factory.mktemp("nvml") / "box", "h200", "rtx3090")


NVML: NvmlBox

RECORDS: Final = (
    b"6,1,2,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1122, name=python3, GPU has fallen off the bus.\n SUBSYSTEM=pci\n",
    b"4,5,6,-;NVRM: Xid (PCI:0000:05:00): 43, pid='<unknown>', name=<unknown>, Ch 00000008",
    b"6,1,2,c;NVRM: GPU at PCI:0000:06:00: GPU-1a2b\n",
    rb"3,1,2,-;NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: installed in this system has\x0aNVRM: fallen off the bus.",
)


@fuzz(500)
def test_kernel_log(rng: random.Random) -> None:
    data = mutated(RECORDS, rng)
    with bounded("kernel log", data):
        parser = Kmsg(lambda _: ("a", 1))
        for record in data.decode(errors="replace").split("\n"):
            for seen in parser.parse(record, 1.0):
                assert seen.text.isprintable()
                assert len(seen.text) <= 300
                encode_observation(seen)


def test_kernel_log_of_one_thing_over_and_over() -> None:
    parts = (
        b"NVRM: ",
        b"NVRM: Xid (",
        b"PCI:0000:01:00",
        b"GPU at ",
        b" installed in this ",
        b"fallen off the bus",
        b"\\x0a",
        b"a",
        b"1",
        b":",
        b" ",
        b")",
    )
    for data in pumped(parts, 60_000):
        for head in ("", "NVRM: ", "NVRM: Xid (PCI:0000:01:00"):
            with bounded("kernel log, pumped", data, 5e-6):
                Kmsg(lambda _: None).parse(f"3,1,2,-;{head}{data.decode()}", 1.0)


# --- systemd ----------------------------------------------------------------------------------------------------------

_STATE: Final[tuple[tuple[str, Any], ...]] = (
    ("(uo)", (0, "/")), ("s", "active"), ("u", 4711), ("u", 4711), ("i", 0), ("i", 0), ("s", "success"), ("s",
    "/vllm.slice/x"),
    ("t", 0), ("t", 0), ("ay", b"\x01" * 16),
)  # fmt: skip


def _call(serial: int) -> Message:
    """A call with this serial, to be answered."""
    call = new_method_call(DBusAddress("/", "a.b", "a.b"), "M")
    data = call.serialise(serial=serial)
    parser = Parser()
    parser.add_data(data)
    return parser.get_next_message()


def _answers(rng: random.Random) -> list[bytes]:
    """What `Units.look` hears: Hello, the unit's path, its properties; kinds and values now and then others."""
    told: list[tuple[str, tuple[Any, ...]]] = [("s", (":1.7",)), ("o", ("/org/freedesktop/systemd1/unit/x",))]
    told += [("v", (variant,)) for variant in _STATE]
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = rng.choice(
            [
                ("", ()),
                ("s", ("x",)),
                ("v", (("s", "\x00\x1b"),)),
                ("u", (5,)),
                ("v", (("as", ["a"]),)),
                ("v", (("v", ("s", "a")),)),
                ("as", (["a=b", "c"],)),
                ("ss", ("a", "b")),
                ("v", (("a{sv}", {"a": ("u", 1)}),)),
            ]
        )
        told[rng.randrange(len(told))] = other
    return [new_method_return(_call(serial), *one).serialise(serial=serial + 100) for serial, one in enumerate(told, 1)]


@contextmanager
def on_the_bus(data: bytes) -> Iterator[None]:
    """The system bus has said all this before it is asked anything, and then hangs up."""
    open_: list[socket.socket] = []

    def connect(*_: object, **__: object) -> socket.socket:
        ours, theirs = socket.socketpair()
        open_.append(theirs)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dbus, "prep_socket", connect)
        patch.setattr(dbus, "get_bus", lambda _: "")
        try:
            yield
        finally:
            for sock in open_:
                sock.close()


@fuzz(400)
def test_system_bus(rng: random.Random) -> None:
    said = _answers(rng)
    data = b"".join(said)
    if rng.random() < 0.7:
        place = rng.randrange(len(said))
        said[place] = mutated([said[place]], rng)
        data = b"".join(said)
    with bounded("system bus", data), on_the_bus(data):
        try:
            with Units() as units:
                seen = units.look("x.service")
                assert seen is None or isinstance(seen.active, str)
        except BusError as error:
            assert len(str(error)) < 500
    with bounded("system bus", data), on_the_bus(b"".join(said[:2]) + b"".join(rng.sample(said, 3))):
        try:
            with Units() as units:
                assert all(isinstance(value, str) for value in units.environment("x.service").values())
                assert all(isinstance(name, str) for name in units.names("x*"))
        except BusError as error:
            assert len(str(error)) < 500


def test_a_message_that_never_ends_takes_no_memory() -> None:
    head = bytearray(_answers(random.Random(1))[0])
    head[4:8] = struct.pack("<I", 1 << 27)
    with on_the_bus(bytes(head) + b"x" * (2 << 20)), pytest.raises(BusError):
        Units()
