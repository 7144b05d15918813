"""The canary: one tiny completion, end to end, read to its end and never cut off by us.

An abort in mid-decode has wedged engines (A05), so there is no timeout worth the name here: the core counts the
deadlines that a canary outlives. It ends early only when the engine itself goes (`cancelled`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from supervisord.engine.http import Answer, Client, Failure, Target
from supervisord.engine.prompts import generated, is_sane

_TOKENS: Final = 8
"""Few, and enough to tell text from one repeated character."""

_NOT_NOW: Final = frozenset({408, 425, 429})
_RANK_HEADER: Final = "X-data-parallel-rank"
_LONGEST_S: Final = 86400.0
_OK: Final = 200
_CLIENT_ERRORS: Final = 400
_SERVER_ERRORS: Final = 500
_NOT_IMPLEMENTED: Final = 501


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a canary ended. `ok`: a whole answer of a working engine; `sane`: with text that is some.

    `possible` is False when this engine cannot be asked at all (no completions, another key, a prompt that it refuses:
    any 4xx): that is no evidence (A23).
    """

    ok: bool
    sane: bool
    possible: bool
    detail: str
    evidence: bool = True
    """False: turned away for the moment (429 and the like), which says nothing of the engine."""


def send(target: Target, cancelled: threading.Event, configured: str, rank: int | None = None) -> Outcome | None:
    """Send one and wait for its end. None when it was cancelled. Never raises.

    `configured`: what the configuration calls the model, for a list of models that is too long to be read.
    `rank`: the data-parallel rank that it should reach; releases that do not know the header choose one themselves.
    """
    client = Client(target, cancelled)
    try:
        model = _model(client, configured)
        if isinstance(model, Outcome):
            return model
        result = _complete(client, model, rank, chat=False)
        if isinstance(result, Answer) and _refused(result.status):
            result = _complete(client, model, rank, chat=True)
        return _judged(result)
    finally:
        client.close()


def _model(client: Client, configured: str) -> str | Outcome | None:
    """Name of the served model; an outcome when asking for it failed."""
    answer = client.get("/v1/models", timeout_s=_LONGEST_S)
    if isinstance(answer, Failure) or answer.status != _OK:
        return _judged(answer)
    if answer.is_too_long:
        return configured
    data = answer.json_object().get("data")
    first = data[0] if isinstance(data, list) and data else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else Outcome(ok=False, sane=False, possible=False, detail="no model is served")


def _refused(status: int) -> bool:
    return _CLIENT_ERRORS <= status < _SERVER_ERRORS or status == _NOT_IMPLEMENTED


def _complete(client: Client, model: str | None, rank: int | None, *, chat: bool) -> Answer | Failure:
    headers = {} if rank is None else {_RANK_HEADER: str(rank)}
    common = {"model": model, "max_tokens": _TOKENS, "temperature": 1.0, "ignore_eos": True}
    if chat:
        message = {"role": "user", "content": "Hello"}
        return client.post(
            "/v1/chat/completions", {**common, "messages": [message]}, timeout_s=_LONGEST_S, headers=headers
        )
    return client.post("/v1/completions", {**common, "prompt": "Hello"}, timeout_s=_LONGEST_S, headers=headers)


def _judged(result: Answer | Failure) -> Outcome | None:
    if isinstance(result, Failure):
        if result.kind == "cancelled":
            return None
        return Outcome(ok=False, sane=False, possible=True, detail=result.detail)
    if result.status in _NOT_NOW:
        return Outcome(ok=False, sane=False, possible=True, detail=f"HTTP {result.status}", evidence=False)
    if _refused(result.status):
        return Outcome(ok=False, sane=False, possible=False, detail=f"HTTP {result.status}")
    if result.status != _OK:
        return Outcome(ok=False, sane=False, possible=True, detail=f"HTTP {result.status}")
    return Outcome(ok=True, sane=is_sane(generated(result)), possible=True, detail="answered")
