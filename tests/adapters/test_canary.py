"""The canary against scripted servers: what is an answer, what is evidence, what is neither; it is never cut off."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from supervisord.engine import canary
from supervisord.engine.canary import Outcome
from supervisord.engine.http import Target
from tests.adapters.fake_http import FakeServer, Request, Script, answer, unused_port, wait_for

MODELS = answer(200, {"object": "list", "data": [{"id": "tiny"}]})


def completion(text: str | None, **choice: Any) -> bytes:
    return answer(200, {"choices": [{"text": text, **choice}]})


def engine(completions: bytes, *, models: bytes = MODELS, chat: bytes | None = None) -> Script:
    """A server with these answers."""
    by_path = {"/v1/models": models, "/v1/completions": completions, "/v1/chat/completions": chat or answer(404)}
    return lambda request: by_path[request.path]


def ask(script: Script, key: str | None = None) -> tuple[Outcome | None, list[Request]]:
    with FakeServer(script) as server:
        outcome = canary.send(Target("127.0.0.1", server.port, key), threading.Event(), "tiny")
        return outcome, server.requests


def test_a_whole_answer_of_a_working_engine() -> None:
    outcome, requests = ask(engine(completion("the quick brown")))
    assert outcome == Outcome(ok=True, sane=True, possible=True, detail="answered")
    assert [request.path for request in requests] == ["/v1/models", "/v1/completions"]
    body = requests[1].json
    assert (body["model"], body["prompt"], body["max_tokens"], body["ignore_eos"]) == ("tiny", "Hello", 8, True)
    assert not body.get("stream"), "read to its end, nothing to abort"


@pytest.mark.parametrize("text", ["", "   ", "!!!!!!!!", None])
def test_garbage_is_an_answer_that_is_not_sane(text: str | None) -> None:
    outcome, _ = ask(engine(completion(text)))
    assert outcome == Outcome(ok=True, sane=False, possible=True, detail="answered")


@pytest.mark.parametrize("body", [answer(200, "no json"), answer(200, "[]"), answer(200, {"choices": []})])
def test_a_body_without_text_is_garbage(body: bytes) -> None:
    outcome, _ = ask(engine(body))
    assert outcome is not None
    assert (outcome.ok, outcome.sane) == (True, False)


@pytest.mark.parametrize("status", [500, 502, 503])
def test_server_errors_are_evidence(status: int) -> None:
    outcome, requests = ask(engine(answer(status)))
    assert outcome == Outcome(ok=False, sane=False, possible=True, detail=f"HTTP {status}")
    assert len(requests) == 2, "no second try beside it"
    outcome, _ = ask(engine(completion("x y"), models=answer(status)))
    assert outcome == Outcome(ok=False, sane=False, possible=True, detail=f"HTTP {status}")


@pytest.mark.parametrize("status", [408, 425, 429])
def test_an_engine_that_turns_us_away_for_the_moment_says_nothing(status: int) -> None:
    outcome, _ = ask(engine(answer(status), chat=answer(status)))
    assert outcome == Outcome(ok=False, sane=False, possible=True, detail=f"HTTP {status}", evidence=False)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422, 501])
def test_an_engine_that_cannot_be_asked_is_none(status: int) -> None:
    outcome, requests = ask(engine(answer(status), chat=answer(status)))
    assert outcome == Outcome(ok=False, sane=False, possible=False, detail=f"HTTP {status}")
    assert requests[-1].path == "/v1/chat/completions"
    outcome, _ = ask(engine(completion("x y"), models=answer(status)))
    assert outcome == Outcome(ok=False, sane=False, possible=False, detail=f"HTTP {status}")


def test_chat_is_asked_where_completions_are_not_there() -> None:
    chat = answer(200, {"choices": [{"message": {"content": None, "reasoning_content": "let us see"}}]})
    outcome, requests = ask(engine(answer(404), chat=chat))
    assert outcome == Outcome(ok=True, sane=True, possible=True, detail="answered")
    assert requests[-1].json["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("body", ["?", '{"data": []}', '{"data": [7]}', '{"data": [{"id": 7}]}'])
def test_an_engine_that_serves_no_model_cannot_be_asked(body: str) -> None:
    outcome, requests = ask(engine(completion("x y"), models=answer(200, body)))
    assert outcome == Outcome(ok=False, sane=False, possible=False, detail="no model is served")
    assert len(requests) == 1


def test_a_list_of_models_that_is_too_long_is_not_needed() -> None:
    adapters = [{"id": f"adapter-{number}", "padding": "x" * 500} for number in range(2200)]
    outcome, requests = ask(engine(completion("x y"), models=answer(200, {"data": adapters})))
    assert outcome == Outcome(ok=True, sane=True, possible=True, detail="answered")
    assert requests[-1].json["model"] == "tiny"


def test_the_key_goes_with_it_and_nowhere_else() -> None:
    outcome, requests = ask(engine(answer(401), models=answer(401)), "s3cret")
    assert {request.headers["authorization"] for request in requests} == {"Bearer s3cret"}
    assert "s3cret" not in repr(outcome)


def test_nobody_there_and_a_broken_connection_are_evidence() -> None:
    outcome = canary.send(Target("127.0.0.1", unused_port()), threading.Event(), "tiny")
    assert outcome is not None
    assert (outcome.ok, outcome.possible) == (False, True)
    assert outcome.detail
    outcome, _ = ask(lambda request: MODELS if request.path == "/v1/models" else None)
    assert outcome is not None
    assert (outcome.ok, outcome.possible) == (False, True)


def test_a_hanging_canary_is_not_aborted_and_comes_back_late() -> None:
    go = threading.Event()

    def slow(request: Request) -> bytes:
        if request.path == "/v1/models":
            return MODELS
        assert go.wait(20)
        return completion("late but whole")

    with FakeServer(slow) as server:
        found: list[Outcome | None] = []
        target = Target("127.0.0.1", server.port)
        thread = threading.Thread(
            target=lambda: found.append(canary.send(target, threading.Event(), "tiny")), daemon=True
        )
        thread.start()
        wait_for(lambda: len(server.requests) == 2)
        time.sleep(0.6)  # more than the quarter of a second in which a cancelled one would end
        assert thread.is_alive()
        go.set()
        thread.join(20)
        assert found == [Outcome(ok=True, sane=True, possible=True, detail="answered")]


def test_only_the_end_of_the_engine_cancels_it() -> None:
    with FakeServer(lambda request: MODELS if request.path == "/v1/models" else server.hang()) as server:
        found: list[Outcome | None] = []
        cancelled = threading.Event()
        target = Target("127.0.0.1", server.port)
        thread = threading.Thread(target=lambda: found.append(canary.send(target, cancelled, "tiny")), daemon=True)
        thread.start()
        wait_for(lambda: len(server.requests) == 2)
        cancelled.set()
        thread.join(20)
        assert found == [None]


def test_what_is_sent_is_json() -> None:
    _, requests = ask(engine(completion("a b")))
    assert json.loads(requests[1].body)["temperature"] == 1.0
