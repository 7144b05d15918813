"""What engines say: metrics and health pages, HTTP answers, output, the help text of vLLM; and what processes claim."""

from __future__ import annotations

import contextlib
import io
import json
import random
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from supervisord.cli.logs import Lines
from supervisord.core import gpu_claims, watch
from supervisord.core.classify import classify
from supervisord.core.codec import encode_observation
from supervisord.core.messages import Exited, Sampled
from supervisord.core.spec import WarmupSpec
from supervisord.engine import canary, flags, metrics, version, warmup
from supervisord.engine.http import Answer, Client, Failure, Target
from supervisord.engine.probe import EngineProbe
from supervisord.engine.prompts import generated, is_sane
from supervisord.engine.wire import Connection
from supervisord.launcher import family, logs, procfs, service
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE
from tests.adapters.fake_http import answer
from tests.fuzz.trying import DATA, bounded, costs, fuzz, json_bytes, mutated, nasty, pumped, texts

PAGES: Final = [
    file.read_bytes()
    for file in sorted((*(DATA / "metrics").iterdir(), *(DATA / "cuda-0.24").glob("*.txt")))
    if b"\nvllm:" in file.read_bytes()
]
OUTPUTS: Final = [
    file.read_bytes()[-20_000:]
    for file in sorted(
        (*(DATA / "startfail").iterdir(), *(DATA / "logs").iterdir(), *(DATA / "cuda-0.24").glob("*.log"))
    )
]
WORDINGS: Final = (Path(__file__).parents[1] / "core" / "wordings.txt").read_bytes()
HELP: Final = (DATA / "help-all-0.32.0.txt").read_text(encoding="utf-8")
KEPT_BYTES: Final = 16 << 20
"""What a page may leave behind in memory, and what an answer may take while it is read, beside itself."""


# --- pages ------------------------------------------------------------------------------------------------------------


@fuzz(150)
def test_metrics_pages(rng: random.Random) -> None:
    page = mutated(PAGES, rng)
    with bounded("metrics page", page):
        found = metrics.parse(page)
        ranks = [rank.rank for rank in found.ranks]
        assert ranks == sorted(set(ranks))
        for rank in found.ranks:
            assert rank.kv_usage is None or 0 <= rank.kv_usage <= 1
            for count in (rank.running, rank.waiting, rank.iterations, rank.generation_tokens, rank.free_blocks):
                assert count is None or 0 <= count <= 2**53


PUMPED_LINES: Final = (
    b'vllm:num_requests_running{engine="%d"} 1\n',
    b'vllm:time_to_first_token_seconds_bucket{le="%d"} 1\n',
    b'vllm:request_success_total{finished_reason="%s"} 1\n',
    b'vllm:num_requests_waiting_by_reason{engine="1",reason="%s"} 2\n',
    b'vllm:cache_config_info{%s="1",num_gpu_blocks="%d"} 1\n',
    b'vllm:kv_cache_usage_perc{engine="%d",x="%s"} 0.5\n',
)


@pytest.mark.parametrize("line", PUMPED_LINES)
def test_large_pages(line: bytes) -> None:
    """A quarter of what a page may have, each line another one. What is kept of it, for minutes, is small."""
    lines, size, number = [], 0, 0
    while size < 2 << 20:
        word = "".join(string.ascii_lowercase[number // 26**place % 26] for place in range(5)).encode()
        lines.append(line.replace(b"%d", b"%d" % number).replace(b"%s", word))
        size += len(lines[-1])
        number += 1
    page = b"".join(lines)
    kept: list[Any] = []
    took_s, peak = costs(lambda: kept.append(metrics.parse(page)))
    assert took_s < 5.0
    assert peak < len(page) + KEPT_BYTES
    assert len(repr(kept[0])) < 1 << 20


PARTS: Final = (
    b"\nvllm:num_requests_running", b"{", b"}", b'"', b"\\", b"engine=", b"=", b",", b" ", b"a", b"0", b"\nvllm:",
    b'a="', b"\\\\", b"1 ",
)  # fmt: skip


def test_pages_of_one_thing_over_and_over() -> None:
    for page in pumped(PARTS, 200_000):
        with bounded("metrics page, pumped", page, 2e-6):
            metrics.parse(page)


# --- HTTP -------------------------------------------------------------------------------------------------------------

HEALTH: Final = {"status": "ok", "block_table_stats": {"free_blocks": 10, "total_blocks": 20, "x": [1]}}
MODELS: Final = {"object": "list", "data": [{"id": "org/a", "max_model_len": 4096, "root": "/m"}]}
DONE: Final = {
    "id": "cmpl-1", "model": "m", "choices": [{"index": 0, "text": "hello there", "message": {"role": "assistant",
    "content": "hi", "reasoning": None}}],
    "usage": {"completion_tokens": 8},
}  # fmt: skip
REFUSED: Final = {"error": {"message": "no token ids\x1b[2J", "type": "BadRequestError", "code": 400}}
HEADS: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n%b",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b",
)


def answers(rng: random.Random, body: bytes) -> bytes:
    """A whole answer with this body, changed or not."""
    head = rng.choice(HEADS)
    sizes = (len(body), body) if b"%d" in head or b"%x" in head else (body,)
    data = head % sizes
    return mutated([data], rng) if rng.random() < 0.7 else data


@contextmanager
def playing(*answers_: bytes) -> Iterator[None]:
    """Every connection to an engine gets the next of these answers, and then the end."""
    left, open_ = list(answers_), []

    def dial(_: Connection) -> socket.socket:
        ours, theirs = socket.socketpair()
        open_.append(ours)
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        theirs.send(left.pop(0) if left else b"")
        theirs.shutdown(socket.SHUT_WR)
        open_.append(theirs)  # it is read by nobody
        return ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "dial", dial)
        try:
            yield
        finally:
            for sock in open_:
                sock.close()


@fuzz(300)
def test_answers_of_engines(rng: random.Random) -> None:
    body = json_bytes([HEALTH, MODELS, DONE], rng)
    data = answers(rng, body)
    with bounded("engine's answer", data), playing(data):
        client = Client(Target("127.0.0.1", 1))
        found = client.get("/health", timeout_s=5.0)
        client.close()
        assert isinstance(found, Failure) or 200 <= found.status <= 999
        if isinstance(found, Answer):
            is_sane(generated(found))


@fuzz(150)
def test_looks_at_engines(rng: random.Random) -> None:
    pages = [
        answers(rng, body)
        for body in (json_bytes([HEALTH], rng), mutated(PAGES, rng), json_bytes([{"version": "0.32.0"}], rng))
    ]
    with bounded("look", b"".join(pages)), playing(*pages):
        probe = EngineProbe("127.0.0.1", 1, 5.0)
        sample = probe.look(1.0, 5)
        probe.close()
        json.dumps(encode_observation(Sampled("a", 1, sample)), allow_nan=False)
        watch.point_of(sample)


@fuzz(150)
def test_canaries(rng: random.Random) -> None:
    said = [answers(rng, json_bytes([MODELS], rng)), *(answers(rng, json_bytes([DONE], rng)) for _ in range(2))]
    with bounded("canary", b"".join(said)), playing(*said):
        outcome = canary.send(Target("127.0.0.1", 1), threading.Event(), "tiny")
        assert outcome is not None
        assert len(outcome.detail) < 200


class _AtOnce:
    """A thread that has done its work when it is started: what it takes is measured with its caller."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


@fuzz(150)
def test_warm_ups(rng: random.Random) -> None:
    said = [answers(rng, json_bytes([MODELS], rng)) if rng.random() < 0.3 else answer(200, json.dumps(MODELS))]
    for _ in range(6):
        body = mutated(PAGES, rng) if rng.random() < 0.2 else json_bytes([DONE, REFUSED], rng)
        said.append(answers(rng, body) if rng.random() < 0.5 else answer(rng.choice((200, 200, 400, 500)), body))
    notes: list[str] = []
    with bounded("warm-up", b"".join(said)), playing(*said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "threading", SimpleNamespace(Thread=_AtOnce))
        done = warmup.run(
            Target("127.0.0.1", 1),
            WarmupSpec(timeout_s=5.0, max_rounds=3, prime=(str(FOLDER / "prompt"),)),
            model="tiny",
            batch_tokens=rng.choice((None, 1, 8192)),
            memory=lambda: rng.choice((None, 0, 1 << 40)),
            note=notes.append,
            cancelled=threading.Event(),
            clock=time.monotonic,
        )
        told = "" if done.problem is None else done.problem.message
        assert all(text.isprintable() and len(text) < 600 for text in (told, *notes))


def test_json_that_is_large_as_values() -> None:
    for body in (b'{"a":[' + b"[]," * 2_700_000 + b"1]}", b'{"a":[' + b"{}," * 300_000 + b"1]}"):
        _, peak = costs(Answer(200, body).json_object)
        assert peak < 3 * KEPT_BYTES


# --- output -----------------------------------------------------------------------------------------------------------


@fuzz(150)
def test_output(rng: random.Random) -> None:
    data = mutated([*OUTPUTS, WORDINGS], rng)
    with bounded("output", data):
        tail = logs.last_lines(data, rng.choice((1, 200, 10_000)))
        assert len(tail) <= logs.TAIL_LINES
        for line in tail:
            assert not {"\x1b", "\n", "\r", "\x00", "\u202e", "\u2028"} & set(line)
        for code, signal in ((1, None), (2, None), (None, 9), (0, None)):
            _, advice = classify(code, signal, tail, answered=rng.random() < 0.3)
            assert advice
            assert len(advice) < 1500
            encode_observation(Exited("a", 1, code, signal, tail=tail))
        gpu_claims.refused_in(tail)
        counter = logs.DistinctLines()
        assert counter.add(logs.split(data)) <= logs._DISTINCT_MAX


def test_lines_that_are_one_thing_over_and_over() -> None:
    """A prompt may be in what an engine prints: whatever leads into one of the signatures, as long as a tail may be."""
    starts = [line.rpartition("|")[2].strip().encode() for line in WORDINGS.decode().splitlines() if "|" in line]
    for start in starts:
        for end in (len(start), len(start) // 2, len(start) - 3):
            for data in (start[:end] * (65_536 // end), start + start[:end][-9:] * 7000):
                with bounded("output, pumped", data, 4e-6):
                    tail = logs.last_lines(data, 200)
                    classify(1, None, tail)
                    gpu_claims.refused_in(tail)


@fuzz(100)
def test_a_log_that_grows(rng: random.Random) -> None:
    path = FOLDER / "a.log"
    path.unlink(missing_ok=True)
    follow = logs.LinesOfFile(path, rng.choice((0, 5, 10**6)))
    whole = b""
    for _ in range(3):
        data = mutated(OUTPUTS, rng)
        whole += data
        with bounded("log file", data):
            with path.open("ab" if rng.random() < 0.8 else "wb") as file:
                file.write(data)
            assert 0 <= follow.count() <= logs._DISTINCT_MAX
            assert len(follow._rest) <= logs.TAIL_BYTES


@fuzz(150)
def test_logs_as_they_are_shown(rng: random.Random) -> None:
    """What `logs` gets from the daemon or from journalctl, in pieces."""
    data = mutated(OUTPUTS, rng)
    with bounded("logs", data), contextlib.redirect_stdout(io.StringIO()) as out:
        lines = Lines()
        at = 0
        while at < len(data):
            size = rng.choice((1, 2, 100, 65536))
            lines.feed(data[at : at + size])
            at += size
        lines.end()
        shown = out.getvalue()
        assert shown.replace("\n", "").replace("\t", "").isprintable()
        assert len(shown) <= 2 * len(data) + 1


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER  # noqa: PLW0603 (what is tried is no fixture of a function)
    FOLDER = tmp_path_factory.mktemp("engines")
    (FOLDER / "prompt").write_text("You are helpful.")


FOLDER: Path

# --- help texts -------------------------------------------------------------------------------------------------------


@fuzz(40)
def test_help_texts(rng: random.Random) -> None:
    text = texts([HELP], rng)
    with bounded("help text", text):
        found = flags.parse_help(text, "0.32.0")
        assert found is None or found.get("host") is not None


def test_help_texts_of_one_thing_over_and_over() -> None:
    parts = (b"--a, ", b"--a ", b"  -", b", -", b"[", b"a", b",", b"{a,", b"  --host H, --no-host", b"\n  --a")
    for text in pumped(parts, 100_000):
        for head in (b"", b"  --x ", b"  "):
            with bounded("help text, pumped", text, 4e-6):
                flags.parse_help((head + text).decode())


@fuzz(200)
def test_versions(rng: random.Random) -> None:
    text = texts(["0.32.0", "v1.2.3rc4+cu129", "0.11.1.dev1"], rng)[:300]
    with bounded("version", text):
        version.Version.parse(text)


# --- processes --------------------------------------------------------------------------------------------------------

STAT: Final = Path("/proc/self/stat").read_bytes()


@fuzz(200)
def test_what_processes_claim(rng: random.Random) -> None:
    names = [b"a", b"engine-1", nasty(rng), nasty(rng)]
    marks = {MARK_ENGINE: rng.choice(names), MARK_GENERATION: rng.choice([b"7", nasty(rng)]), MARK_STATE: b"/state"}
    lines = frozenset(b"%b=%b" % (name.encode(), value) for name, value in marks.items())
    name = nasty(rng).replace(b"\x00", b"")[:15]
    with bounded("process", b"".join(lines)), pytest.MonkeyPatch.context() as patch:
        stat = procfs._parse_stat(7, b"7 (" + name + b") " + STAT.rpartition(b") ")[2])
        procfs.describe(stat)
        patch.setattr(procfs, "_read", lambda *_: b"\0".join(lines))
        found = family.read_marks(stat, "/state")
        assert found is None or (0 <= found.generation < 10**18 and found.engine.isascii())
        variables = {key: value.decode("utf-8", "surrogateescape") for key, value in marks.items()}
        maps = b"7f00-7f01 rw-s 00000000 00:01 5 /dev/shm/" + name + b"\n" + nasty(rng)
        patch.setattr(procfs, "_read", lambda *_: maps)
        assert all("/" not in name for name in procfs.shared_memory(0))
        service.read_marks(f"vllm-engine-{variables[MARK_ENGINE]}.service", variables, "/state")
