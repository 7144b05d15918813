"""Warm-up against scripted engines. The clock belongs to the test: a script says how long its answer took."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.model import Warmup
from supervisord.core.spec import WarmupSpec
from supervisord.engine import warmup
from supervisord.engine.http import Answer, Target
from supervisord.engine.prompts import batch_lengths, generated, is_sane, new_ids, new_text
from tests.adapters.fake_http import FakeServer, Request, answer, wait_for
from tests.sim.engine import SimEngine, running

MIB = 1 << 20
SPEC = WarmupSpec()
MODEL = {"id": "tiny", "parent": None, "max_model_len": 4096}


def said(status: int, message: str = "no") -> bytes:
    return answer(status, {"error": {"message": message}})


@dataclass
class FakeEngine:
    """Answers like vLLM. `takes_s` are the times of its prefills, the last for ever; `texts` what it generates."""

    key: str | None = None
    models: bytes = field(default_factory=lambda: answer(200, {"data": [MODEL]}))
    refuse: dict[str, bytes] = field(default_factory=dict)
    """Answer by path; "ids" and "batch" and "decode" are kinds of completions."""
    takes_s: Iterable[float] = (0.1,)
    texts: Iterable[str] = ("The sea is wide.",)
    metrics: bytes = field(default_factory=lambda: answer(404))
    now: float = 1000.0
    posts: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._takes, self._said = list(self.takes_s), list(self.texts)

    def __call__(self, request: Request) -> bytes | None:
        authorized = self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"
        if request.path.startswith("/v1/") and not authorized:
            return answer(401, {"error": "Unauthorized"})
        if request.method == "GET":
            return {"/v1/models": self.models, "/metrics": self.metrics}[request.path]
        self.posts.append(request)
        for kind in (request.path, *kinds(request)):
            if kind in self.refuse:
                return self.refuse[kind]
        if is_prefill(request):
            self.now += self._takes.pop(0) if len(self._takes) > 1 else self._takes[0]
        if "input" in request.json:
            return answer(200, {"data": [{"embedding": [0.1]}]})
        text = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        choice = {"message": {"content": text}} if "messages" in request.json else {"text": text}
        return answer(200, {"choices": [choice]})

    def of(self, kind: str) -> list[Request]:
        return [request for request in self.posts if kind in kinds(request)]


def kinds(request: Request) -> set[str]:
    body = request.json
    prompt = body.get("prompt", body.get("input", body.get("messages")))
    if body.get("stream"):
        return {"stream"}
    found = {"decode"} if body.get("ignore_eos") else set()
    if isinstance(prompt, list) and "messages" not in body:
        found |= {"batch"} if isinstance(prompt[0], list | str) else set()
        found |= {"ids"} if isinstance(prompt[0], int | list) else set()
    return found or {"text"}


def is_prefill(request: Request) -> bool:
    return not kinds(request) & {"decode", "batch", "stream"}


@dataclass
class Ran:
    result: Warmup
    notes: list[str]

    @property
    def code(self) -> str | None:
        return None if self.result.problem is None else self.result.problem.code

    @property
    def figures(self) -> tuple[int, float | None, float | None]:
        """Rounds, first and settled latency in seconds."""
        result = self.result
        first, settled = (None if ms is None else round(ms / 1000, 6) for ms in (result.first_ms, result.settled_ms))
        return result.rounds, first, settled

    @property
    def message(self) -> str:
        return "" if self.result.problem is None else self.result.problem.message


def run(
    engine: Callable[[Request], bytes | None],
    spec: WarmupSpec = SPEC,
    *,
    key: str | None = None,
    batch_tokens: int | None = None,
    memory: Iterable[int | None] = (None,),
    clock: Callable[[], float] | None = None,
    cancelled: threading.Event | None = None,
    server: FakeServer | None = None,
) -> Ran:
    notes: list[str] = []
    levels = list(memory)

    def on(running: FakeServer) -> Warmup:
        return warmup.run(
            Target(running.host, running.port, key),
            spec,
            model="configured",
            batch_tokens=batch_tokens,
            memory=lambda: levels.pop(0) if len(levels) > 1 else levels[0],
            note=notes.append,
            cancelled=cancelled or threading.Event(),
            clock=clock or (lambda: engine.now if isinstance(engine, FakeEngine) else time.monotonic()),
        )

    if server is not None:
        return Ran(on(server), notes)
    with FakeServer(engine) as own:
        return Ran(on(own), notes)


# --- the stages -----------------------------------------------------------------------------------------------------


def test_requests_of_a_warm_up() -> None:
    engine = FakeEngine(key="sesame")
    ran = run(engine, key="sesame")
    assert ran.result.problem is None
    prefill, *_ = engine.posts
    assert prefill.path == "/v1/completions"
    assert prefill.json["model"] == "tiny"
    assert (len(prefill.json["prompt"]), prefill.json["max_tokens"]) == (512, 1)
    decode = engine.of("decode")[0].json
    assert (decode["max_tokens"], decode["ignore_eos"], decode["temperature"]) == (32, True, 1.0)
    assert isinstance(decode["prompt"], str)
    assert not any("seed" in request.json for request in engine.posts)


def test_prompts_are_token_ids_that_nobody_has_sent() -> None:
    engine = FakeEngine()
    run(engine)
    prompts = [tuple(request.json["prompt"]) for request in engine.of("ids") if is_prefill(request)]
    assert len(prompts) == len(set(prompts)) == 2
    assert all(100 <= token <= 250 for prompt in prompts for token in prompt)


def test_the_last_requests_are_streamed_as_clients_want_them() -> None:
    engine = FakeEngine()
    ran = run(engine)
    completion, chat = engine.of("stream")
    assert (completion.path, completion.json["prompt"], completion.json["max_tokens"]) == (
        "/v1/completions", "Write a few sentences about the sea.", 2
    )  # fmt: skip
    assert (chat.path, chat.json["messages"][0]["role"]) == ("/v1/chat/completions", "user")
    assert engine.posts[-2:] == [completion, chat]
    assert [note.partition(":")[0] for note in ran.notes[-2:]] == [f"streaming {r.path}" for r in (completion, chat)]


@pytest.mark.parametrize("refusal", [said(400, "no chat template"), said(500, "broken template")])
def test_an_engine_that_does_not_chat_is_no_worse_for_it(refusal: bytes) -> None:
    ran = run(FakeEngine(refuse={"/v1/chat/completions": refusal}))
    assert ran.result.problem is None
    assert "streaming /v1/chat/completions left out" in ran.notes[-1]


@pytest.mark.parametrize("refusal", [said(403), said(500, "broken template")])
def test_an_engine_whose_chat_fails_is_primed_with_text(tmp_path: Path, refusal: bytes) -> None:
    engine = FakeEngine(refuse={"/v1/chat/completions": refusal})
    ran = run(engine, WarmupSpec(prime=(prompt_file(tmp_path, "clerk", "You are a clerk."),)))
    assert ran.result.problem is None
    assert [body.get("prompt") for body in primed(engine)] == ["You are a clerk."]


def test_a_chat_that_hangs_has_a_short_time_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_CHAT_S", 0.5)
    finish = threading.Event()
    engine = FakeEngine()

    def script(request: Request) -> bytes | None:
        if "chat" in request.path:
            assert finish.wait(60)
        return engine(request)

    with FakeServer(script) as server:
        spec = WarmupSpec(timeout_s=50, prime=(prompt_file(tmp_path, "clerk", "You are a clerk."),))
        ran = run(engine, spec, server=server, clock=time.monotonic)
        assert ran.result.problem is None
        assert ran.result.took_s < 40
        assert "streaming /v1/chat/completions left out: no answer within " in ran.notes[-2]
        assert [body.get("prompt") for body in primed(engine)] == ["You are a clerk."]
        (chat,) = [request for request in server.requests if "chat" in request.path]
        connection = server.sockets[chat.connection]
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):  # it is not cut off
            connection.recv(1)
        finish.set()
        wait_for(lambda: connection.fileno() == -1)


def test_cancelling_ends_a_chat_that_hangs() -> None:
    cancelled = threading.Event()
    engine = FakeEngine()

    def script(request: Request) -> bytes | None:
        if "chat" in request.path:
            cancelled.set()
            server.hang()
        return engine(request)

    with FakeServer(script) as server:
        ran = run(engine, server=server, clock=time.monotonic, cancelled=cancelled)
    assert ran.code == "warmup_cancelled"


def test_an_engine_that_breaks_off_streams_has_failed() -> None:
    ran = run(FakeEngine(refuse={"stream": said(500, "boom")}))
    assert ran.code == "warmup_failed"
    assert "streaming /v1/completions" in ran.message


def test_an_engine_that_only_chats_streams_once() -> None:
    engine = FakeEngine(refuse={"/v1/completions": said(404)})
    assert run(engine).result.problem is None
    assert [request.path for request in engine.of("stream")] == ["/v1/chat/completions"]


def test_settles_when_two_rounds_are_alike() -> None:
    ran = run(FakeEngine(takes_s=[5.2, 3.3, 3.4]))
    assert (ran.figures, ran.code) == ((3, 5.2, 3.4), None)
    assert ran.result.took_s == pytest.approx(11.9)
    assert [note for note in ran.notes if note.startswith("prefill")] == [
        "prefill 1/5: 5200 ms",
        "prefill 2/5: 3300 ms",
        "prefill 3/5: 3400 ms",
    ]


def test_rounds_end_at_the_limit() -> None:
    ran = run(FakeEngine(takes_s=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]), WarmupSpec(max_rounds=4))
    assert (ran.figures, ran.code) == ((4, 1.0, 2.0), None)


def test_one_round() -> None:
    engine = FakeEngine()
    assert run(engine, WarmupSpec(max_rounds=1)).result.rounds == 1
    assert [sorted(kinds(request)) for request in engine.posts] == [
        ["ids"],
        ["batch", "ids"],
        ["decode"],
        ["stream"],
        ["stream"],
    ]


@pytest.mark.parametrize(("max_len", "prefill", "decode"), [(100, 98, 32), (20, 18, 1), (None, 512, 32)])
def test_lengths_are_clipped(max_len: int | None, prefill: int, decode: int) -> None:
    engine = FakeEngine(models=answer(200, {"data": [{**MODEL, "max_model_len": max_len}]}))
    run(engine)
    assert len(engine.posts[0].json["prompt"]) == prefill
    assert engine.of("decode")[0].json["max_tokens"] == decode


def test_base_model_is_chosen_among_adapters() -> None:
    lora = {"id": "lora", "parent": "base", "max_model_len": 1}
    engine = FakeEngine(models=answer(200, {"data": [lora, {**MODEL, "id": "base"}]}))
    run(engine)
    assert {request.json["model"] for request in engine.posts} == {"base"}


def test_a_list_of_models_that_is_too_long_is_not_needed() -> None:
    adapters = [{"id": f"adapter-{number}", "parent": "tiny", "padding": "x" * 500} for number in range(2200)]
    body = answer(200, {"data": [MODEL, *adapters]})
    engine = FakeEngine(models=body)
    ran = run(engine)
    assert ran.result.problem is None
    assert {request.json["model"] for request in engine.posts} == {"configured"}
    size = len(body.partition(b"\r\n\r\n")[2])
    assert ran.notes[0] == f"/v1/models answered {size} bytes, too many to be read: asking for configured"


# --- large batches --------------------------------------------------------------------------------------------------


def batches(ran: Ran) -> list[str]:
    return [note for note in ran.notes if note.startswith("batch")]


def test_batches_until_memory_stands_still() -> None:
    engine = FakeEngine()
    ran = run(engine, memory=[level * MIB for level in (1000, 1192, 1400, 1402, 1402)])
    assert batches(ran) == [
        "batch 1/6: 20474 tokens, 0 ms, memory +192 MiB",
        "batch 2/6: 20474 tokens, 0 ms, memory +208 MiB",
        "batch 3/6: 20474 tokens, 0 ms, memory +2 MiB",
    ]
    assert ran.result.memory_bytes == 1402 * MIB
    prompts = engine.of("batch")[0].json["prompt"]
    assert [len(prompt) for prompt in prompts] == [4094] * 3 + [1024] * 8


def test_at_most_six_batches() -> None:
    ran = run(FakeEngine(), memory=[level * 100 * MIB for level in range(20)])
    assert len(batches(ran)) == 6
    assert ran.result.problem is None


def test_one_batch_when_memory_is_unknown() -> None:
    assert len(batches(run(FakeEngine()))) == 1


def test_batches_follow_the_engine_s_own_size() -> None:
    engine = FakeEngine()
    run(engine, batch_tokens=1024)
    assert [len(prompt) for prompt in engine.of("batch")[0].json["prompt"]] == [1024, *[128] * 8]


@pytest.mark.parametrize(
    "page",
    [
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="320"} 1',
        'vllm:cache_config_info{kv_cache_size_tokens="5120",block_size="1",num_gpu_blocks="99999"} 1',
    ],
)
def test_batches_stay_within_the_pool(page: str) -> None:
    engine = FakeEngine(metrics=answer(200, page))
    run(engine)
    third = engine.posts[3].json["prompt"]  # prefill, decode, prefill, and now the batch
    assert len(third) == 4094


def test_batches_reach_every_rank() -> None:
    page = "\n".join(f'vllm:num_requests_running{{engine="{rank}"}} 0' for rank in range(4))
    engine = FakeEngine(metrics=answer(200, page))
    run(engine, batch_tokens=1024)
    assert len(engine.of("batch")[0].json["prompt"]) == 4 * 9


def test_batches_that_would_take_too_long_are_left_out() -> None:
    ran = run(FakeEngine(takes_s=[10.0]), WarmupSpec(timeout_s=100))
    assert batches(ran) == ["batch 1/6 left out: 20474 tokens would take about 400 s"]
    assert ran.result.problem is None


def test_refused_batch_is_no_failure() -> None:
    ran = run(FakeEngine(refuse={"batch": said(429, "too many")}))
    assert batches(ran) == ["batch 1/6 left out: /v1/completions answered 429 (too many)"]
    assert ran.result.problem is None


# --- routes ---------------------------------------------------------------------------------------------------------


def test_text_when_ids_are_refused() -> None:
    engine = FakeEngine(refuse={"ids": said(400)})
    assert run(engine).result.problem is None
    prompt = engine.posts[1].json["prompt"]
    assert isinstance(prompt, str)
    assert 400 < len(prompt) <= 512  # characters: never more tokens than that


def test_chat_when_there_are_no_completions() -> None:
    engine = FakeEngine(refuse={"/v1/completions": answer(404)})
    ran = run(engine)
    assert ran.result.problem is None
    assert engine.posts[-1].path == "/v1/chat/completions"
    assert engine.posts[-1].json["messages"][0]["role"] == "user"
    assert ran.result.rounds == 2


@pytest.mark.parametrize(
    ("missing", "route"),
    [
        (("/v1/completions", "/v1/chat/completions"), "/v1/embeddings"),
        (("/v1/completions", "/v1/chat/completions", "/v1/embeddings"), "/pooling"),
    ],
)
def test_pooling_models(missing: tuple[str, ...], route: str) -> None:
    engine = FakeEngine(refuse={path: answer(404, {"detail": "Not Found"}) for path in missing})
    ran = run(engine, WarmupSpec(prime=("/nonexistent",)))
    assert ran.result.problem is None
    assert engine.posts[-1].path == route
    assert "max_tokens" not in engine.posts[-1].json
    assert not engine.of("decode")
    assert len(engine.of("batch")) == 1


def test_no_route_at_all() -> None:
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/pooling")
    ran = run(FakeEngine(refuse={path: answer(404, {"detail": "Not Found"}) for path in paths}))
    assert ran.code == "warmup_refused"
    assert ran.message == (
        "cannot warm up: /v1/completions answered 404, /v1/chat/completions answered 404, "
        "/v1/embeddings answered 404, /pooling answered 404"
    )
    assert ran.figures == (0, None, None)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "wrong"])
def test_missing_or_wrong_key(key: str | None) -> None:
    ran = run(FakeEngine(key="sesame"), key=key)
    assert ran.code == "warmup_refused"
    assert ran.message == ("cannot warm up: /v1/models answered 401; set api_key_file to the key that the engine has")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (answer(403), "cannot warm up: /v1/models answered 403; set api_key_file to the key that the engine has"),
        (answer(404, {"detail": "Not Found"}), "cannot warm up: /v1/models answered 404"),
        (answer(200, "<html>"), "cannot warm up: /v1/models lists no model"),
        (answer(200, {"data": []}), "cannot warm up: /v1/models lists no model"),
        (
            answer(200, {"data": [1, {"id": 7}, {"id": "x", "parent": "y"}]}),
            "cannot warm up: /v1/models lists no model",
        ),
    ],
)
def test_models_that_cannot_be_read(models: bytes, message: str) -> None:
    ran = run(FakeEngine(models=models))
    assert (ran.code, ran.message) == ("warmup_refused", message)


def test_refused_decode() -> None:
    ran = run(FakeEngine(refuse={"decode": said(400, "ignore_eos is not allowed")}))
    assert ran.code == "warmup_refused"
    assert ran.message == ("cannot warm up: decode 1/5: /v1/completions answered 400 (ignore_eos is not allowed)")


def test_what_the_engine_says_is_cleaned_and_holds_no_key() -> None:
    message = "bad \x1b[31mkey sesame\n" + "x" * 500
    ran = run(FakeEngine(refuse={"/v1/completions": said(409, message)}), key="sesame")
    assert ran.code == "warmup_refused"
    assert "sesame" not in ran.message
    assert ran.message.isprintable()
    assert len(ran.message) < 300


# --- garbage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\n\n   ", "!!!!!!!!", "! ! ! ! !"])
def test_garbage(text: str) -> None:
    ran = run(FakeEngine(texts=[text]))
    assert ran.code == "garbage"
    assert "2 of 2 answers" in ran.message
    assert ran.figures == (2, 0.1, 0.1)


def test_one_sane_answer_is_enough() -> None:
    ran = run(FakeEngine(texts=["", "Blue.", "Blue.", ""]))
    assert ran.result.problem is None


def test_reasoning_is_text() -> None:
    message = {"content": None, "reasoning_content": "Let me think."}
    reply = answer(200, {"choices": [{"message": message}]})
    refuse = {"/v1/completions": answer(404), "decode": reply}
    assert run(FakeEngine(refuse=refuse)).result.problem is None


# --- time, cancel, death --------------------------------------------------------------------------------------------


def hanging_at(kind: str, server: Callable[[], FakeServer], engine: FakeEngine) -> Callable[[Request], bytes | None]:
    def script(request: Request) -> bytes | None:
        if request.method == "POST" and kind in kinds(request):
            server().hang()
            return None
        return engine(request)

    return script


def test_time_runs_out_and_the_request_is_not_cut_off() -> None:
    finish = threading.Event()
    engine = FakeEngine()

    def script(request: Request) -> bytes | None:
        if request.method == "POST" and "decode" in kinds(request):
            assert finish.wait(20)
        return engine(request)

    with FakeServer(script) as server:
        started = time.monotonic()
        ran = run(engine, WarmupSpec(timeout_s=1), server=server, clock=time.monotonic)
        assert time.monotonic() - started < 5
        assert ran.code == "warmup_timeout"
        assert ran.message.startswith("cannot finish the warm-up within 1 s: decode 1/5 had ")
        connection = server.sockets[server.requests[-1].connection]
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):  # neither bytes nor an end
            connection.recv(1)
        finish.set()
        wait_for(lambda: connection.fileno() == -1)  # the answer was taken and the connection closed


def test_time_that_has_run_out_starts_no_request() -> None:
    engine = FakeEngine(takes_s=[400.0])
    ran = run(engine, WarmupSpec(timeout_s=300))
    assert (ran.code, len(engine.posts)) == ("warmup_timeout", 1)
    assert ran.message == ("cannot finish the warm-up within 300 s: decode 1/5 had 0.0 s left and no answer")
    assert ran.result.first_ms == pytest.approx(400_000)


@pytest.mark.parametrize("kind", ["ids", "batch", "decode"])
def test_cancel_closes_a_hanging_request(kind: str) -> None:
    cancelled = threading.Event()
    engine = FakeEngine()
    with FakeServer(hanging_at(kind, lambda: server, engine)) as server:

        def stop() -> None:
            wait_for(lambda: any(request.method == "POST" and kind in kinds(request) for request in server.requests))
            cancelled.set()

        stopper = threading.Thread(target=stop)
        stopper.start()
        ran = run(engine, server=server, clock=time.monotonic, cancelled=cancelled)
        stopper.join()
    assert ran.code == "warmup_cancelled"
    assert ran.result.took_s < 10


def test_cancel_is_heard_while_nobody_answers() -> None:
    cancelled = threading.Event()
    with FakeServer(lambda _: server.hang()) as server:
        threading.Timer(0.3, cancelled.set).start()
        ran = run(FakeEngine(), server=server, clock=time.monotonic, cancelled=cancelled)
    assert ran.code == "warmup_cancelled"
    assert ran.result.took_s < 20


@pytest.mark.parametrize("kind", ["ids", "batch", "decode"])
def test_engine_that_dies(kind: str) -> None:
    engine = FakeEngine()

    def script(request: Request) -> bytes | None:
        return None if request.method == "POST" and kind in kinds(request) else engine(request)

    ran = run(script, clock=time.monotonic)
    assert ran.code == "warmup_failed"
    assert ran.message.endswith("the connection was closed before the answer was whole")


def test_engine_that_is_gone() -> None:
    with FakeServer(lambda _: None) as server:
        pass
    ran = run(FakeEngine(), server=server)
    assert ran.code == "warmup_failed"
    assert ran.message == "cannot finish the warm-up: asking for the model: connection refused"


def test_server_error() -> None:
    ran = run(FakeEngine(refuse={"decode": said(500, "EngineCore encountered an issue")}))
    assert ran.code == "warmup_failed"
    assert ran.message == (
        "cannot finish the warm-up: decode 1/5: /v1/completions answered 500 (EngineCore encountered an issue)"
    )
    assert ran.result.first_ms is not None


# --- priming --------------------------------------------------------------------------------------------------------


def prompt_file(directory: Path, name: str, text: str | bytes) -> str:
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def primed(engine: FakeEngine) -> list[Any]:
    return [
        request.json
        for request in engine.posts
        if request.json.get("max_tokens") == 1 and "temperature" not in request.json
    ]


def test_prime_sends_system_prompts(tmp_path: Path) -> None:
    engine = FakeEngine()
    files = tuple(prompt_file(tmp_path, f"{number}.txt", f"You are clerk {number}.") for number in range(3))
    ran = run(engine, WarmupSpec(prime=files))
    assert ran.result.problem is None
    assert ran.notes[-3:] == ["priming 1/3", "priming 2/3", "priming 3/3"]
    assert [body["messages"][0] for body in primed(engine)] == [
        {"role": "system", "content": f"You are clerk {number}."} for number in range(3)
    ]


def test_prime_as_text_where_chat_is_refused(tmp_path: Path) -> None:
    engine = FakeEngine(refuse={"/v1/chat/completions": said(400, "System role not supported")})
    files = tuple(prompt_file(tmp_path, f"{number}.txt", f"clerk {number}") for number in range(3))
    assert run(engine, WarmupSpec(prime=files)).result.problem is None
    assert [body.get("prompt") for body in primed(engine)] == [None, "clerk 0", "clerk 1", "clerk 2"]


def test_prime_reports_what_it_could_not_send(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    missing, huge = str(tmp_path / "none"), prompt_file(tmp_path, "huge", b"x" * (MIB + 1))
    good = prompt_file(tmp_path, "good", b"caf\xe9 \xff")
    engine = FakeEngine()
    ran = run(engine, WarmupSpec(prime=(missing, str(tmp_path / "pipe"), str(tmp_path), huge, good)))
    assert (ran.code, ran.result.rounds) == ("warmup_refused", 2)
    assert ran.message == (f"cannot prime 4 of 5 prompts; the first: cannot read {missing}: No such file or directory")
    assert [body["messages"][0]["content"] for body in primed(engine)] == ["caf\ufffd \ufffd"]


@pytest.mark.parametrize(("content", "why"), [(b"x" * (MIB + 1), "larger than 1 MiB"), (None, "not a regular file")])
def test_prime_says_why(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = str(tmp_path / "prompt")
    if content is None:
        os.mkfifo(path)
    else:
        prompt_file(tmp_path, "prompt", content)
    assert run(FakeEngine(), WarmupSpec(prime=(path,))).message.endswith(f"cannot read {path}: {why}")


def test_prompt_that_is_too_long(tmp_path: Path) -> None:
    too_long = said(400, "maximum context length is 4096 tokens")
    engine = FakeEngine(refuse={"/v1/chat/completions": too_long, "text": too_long})
    path = prompt_file(tmp_path, "long", "x" * 100)
    ran = run(engine, WarmupSpec(prime=(path,)))
    assert ran.message == (
        f"cannot prime 1 of 1 prompts; the first: {path}: "
        "/v1/completions answered 400 (maximum context length is 4096 tokens)"
    )


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "longest", "pool", "lengths"),
    [
        (8192, 100_000, None, [8192, *[1024] * 8]),
        (8192, 4096, None, [4096, 4096, *[1024] * 8]),
        (2048, 1000, None, [1000] * 3 + [256] * 8),
        (8192, 100_000, 12_000, [8192, 1024, 1024]),
        (8192, 2000, 2048, [2000]),
        (4, 100, None, [4, 1, 1, 1, 1]),
    ],
)
def test_batch_lengths(batch: int, longest: int, pool: int | None, lengths: list[int]) -> None:
    assert batch_lengths(batch, longest, pool) == lengths


@pytest.mark.parametrize(
    ("text", "sane"),
    [("", False), (" \n\t", False), ("aaaa", False), ("a a\naa", False), ("7", True), ("...", True), ("ab", True)],
)
def test_is_sane(text: str, sane: bool) -> None:
    assert is_sane(text) is sane


def test_new_prompts() -> None:
    assert len(new_ids(1000)) == 1000
    assert new_ids(20) != new_ids(20)
    assert len(new_text(512)) <= 512
    assert new_text(64) != new_text(64)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices": []}', b'{"choices": [1]}', b'{"choices": [{"text": 5}]}'])
def test_no_text(body: bytes) -> None:
    assert generated(Answer(200, body)) == ""


# --- a simulated engine -----------------------------------------------------------------------------------------------


def warm(sim: SimEngine, spec: WarmupSpec = SPEC, key: str | None = None) -> Ran:
    notes: list[str] = []
    result = warmup.run(
        Target("127.0.0.1", sim.port, key),
        spec,
        model="configured",
        batch_tokens=2048,
        memory=lambda: None,
        note=notes.append,
        cancelled=threading.Event(),
        clock=time.monotonic,
    )
    return Ran(result, notes)


def test_simulated_engine_is_slow_at_first(tmp_path: Path) -> None:
    with running(tmp_path, "--api-key", "sesame", mood={"first_delay_s": 0.6}) as sim:
        ran = warm(sim.wait_ready(), key="sesame")
    assert ran.code is None, ran
    assert ran.result.first_ms is not None
    assert ran.result.settled_ms is not None
    assert ran.result.first_ms > 600 > ran.result.settled_ms


@pytest.mark.parametrize(("completion", "code"), [("garbage", "garbage"), ("empty", "garbage"), (500, "warmup_failed")])
def test_simulated_engine_that_is_broken(tmp_path: Path, completion: object, code: str) -> None:
    with running(tmp_path, mood={"completion": completion}) as sim:
        assert warm(sim.wait_ready()).code == code


def test_simulated_engine_that_dies(tmp_path: Path) -> None:
    with running(tmp_path, mood={"completion_delay_s": 1, "exit": {"after_s": 0.8, "signal": "SIGKILL"}}) as sim:
        ran = warm(sim.wait_ready())
    assert ran.code == "warmup_failed"


def test_simulated_engine_that_hangs(tmp_path: Path) -> None:
    with running(tmp_path, mood={"completion": "hang"}) as sim:
        ran = warm(sim.wait_ready(), WarmupSpec(timeout_s=1))
    assert ran.code == "warmup_timeout"
