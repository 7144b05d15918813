"""Completions: what a client sees of them, and what they leave in the metrics."""

from __future__ import annotations

import json
import os
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .page import RankStats
    from .ranks import Rank
    from .scheduler import Step
    from .server import App
    from .wire import Connection, Request

_TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wizards quietly mix new potions and every "
    "river finds its own way down to some open sea under bright evening light"
)
_WORDS = _TEXT.split()
_VOCABULARY = 32000
DEAD_TEXT = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def tokens_of(prompt: str | list[int]) -> list[int]:
    """Four characters are a token here; lists of ids are taken as they are."""
    if isinstance(prompt, list):
        return prompt
    return [
        zlib.crc32(prompt[at : at + 4].encode("utf-8", "replace")) % _VOCABULARY for at in range(0, len(prompt), 4)
    ] or [0]


def prompt_of_chat(messages: list[Any]) -> str:
    parts = []
    for message in messages:
        content = message.get("content", "") if isinstance(message, dict) else ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        parts.append(f"<|{message.get('role', 'user')}|>{content}")
    return "".join(parts) + "<|assistant|>"


class Refused(Exception):  # noqa: N818 (an answer, not an error of ours)
    """A request that is answered with an error."""

    def __init__(self, status: int, kind: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        error = {"message": text, "type": kind, "param": param, "code": status}
        self.body = json.dumps({"error": error}, separators=(",", ":")).encode()


class PrefixCache:
    """Which prompt prefixes were computed before, in whole blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[int] = set()

    def cached(self, tokens: list[int]) -> int:
        """How many leading tokens need no prefill; remembers this prompt."""
        size = self._block_size
        chain, hits, hitting = 0, 0, True
        if len(self._known) > 20000:
            self._known.clear()
        for end in range(size, len(tokens) + 1, size):
            chain = hash((chain, tuple(tokens[end - size : end])))
            hitting = hitting and chain in self._known
            hits += size if hitting else 0
            self._known.add(chain)
        return hits if hits < len(tokens) else max(0, hits - size)


class Completion:
    """One request for tokens, from its arrival to its last byte."""

    def __init__(self, work: Work, connection: Connection, body: dict[str, Any], chat: bool) -> None:
        self.work = work
        self.connection = connection
        self.chat = chat
        self.stream = bool(body.get("stream"))
        options = body.get("stream_options") or {}
        self.usage_wanted = bool(options.get("include_usage"))
        self.model = work.app.model_name
        self.kind = work.app.mood["completion"]
        self.id = ("chatcmpl-" if chat else "cmpl-") + os.urandom(8).hex()
        self.created = int(time.time())
        self.tokens = work.prompt_of(body, chat)
        self.cached = 0
        self.limit, self.eos = work.limits(body, chat, len(self.tokens))
        self.job = 0
        self.rank: Rank | None = None
        self.text: list[str] = []
        self.generated = 0
        self.arrived = self.scheduled = self.first = self.last = time.monotonic()
        self.started_answer = False

    # times

    def on_scheduled(self, stats: RankStats) -> None:
        self.scheduled = time.monotonic()
        stats.histograms["vllm:request_queue_time_seconds"].observe(self.scheduled - self.arrived)
        stats.add("vllm:prefix_cache_queries_total", len(self.tokens))
        stats.add("vllm:prefix_cache_hits_total", self.cached)
        stats.add("vllm:prompt_tokens_by_source_total|local_cache_hit", self.cached)
        stats.add("vllm:prompt_tokens_cached_total", self.cached)

    def on_token(self, count: int, reason: str | None, stats: RankStats) -> None:
        now = time.monotonic()
        if count == 1:
            self.first = now
            stats.histograms["vllm:time_to_first_token_seconds"].observe(now - self.arrived)
        else:
            stats.histograms["vllm:inter_token_latency_seconds"].observe(now - self.last)
        self.last = now
        self.generated = count
        word = self._word(count)
        self.text.append(word)
        if self.stream:
            self._say(word, reason)
        if reason:
            self._observe(reason, stats)
            self._finish(reason)

    def _word(self, count: int) -> str:
        if self.kind == "empty":
            return ""
        if self.kind == "garbage":
            return "!"
        return " " + _WORDS[(self.job * 11 + count * 7) % len(_WORDS)]

    def _observe(self, reason: str, stats: RankStats) -> None:
        stats.add(f"vllm:request_success_total|{reason}")
        seconds = {
            "e2e_request_latency": self.last - self.arrived,
            "request_inference_time": self.last - self.scheduled,
            "request_prefill_time": self.first - self.scheduled,
            "request_decode_time": self.last - self.first,
            "request_time_per_output_token": (self.last - self.first) / max(1, self.generated - 1),
        }
        for name, value in seconds.items():
            stats.histograms[f"vllm:{name}_seconds"].observe(value)
        stats.histograms["vllm:request_prompt_tokens"].observe(len(self.tokens))
        stats.histograms["vllm:request_generation_tokens"].observe(self.generated)
        stats.histograms["vllm:request_params_max_tokens"].observe(self.limit)

    # bytes

    def open_stream(self) -> None:
        if self.stream and not self.started_answer and not self.connection.closed:
            self.started_answer = True
            self.connection.start(200, "text/event-stream; charset=utf-8")

    def _event(self, payload: dict[str, Any] | str) -> None:
        text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
        self.connection.chunk(f"data: {text}\n\n".encode())

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and self.stream:
            kind += ".chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _say(self, word: str, reason: str | None) -> None:
        self.open_stream()
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["delta"] = {"content": word}
        else:
            choice |= {"text": word, "stop_reason": None}
        self._event({**self._head(), "choices": [choice]})

    def _usage(self) -> dict[str, Any]:
        prompt = len(self.tokens)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.generated,
            "completion_tokens": self.generated,
            "prompt_tokens_details": None,
        }

    def _finish(self, reason: str) -> None:
        self.work.forget(self)
        if self.connection.closed:
            return
        if self.stream:
            if self.usage_wanted:
                self._event({**self._head(), "choices": [], "usage": self._usage()})
            self._event("[DONE]")
            self.connection.end()
            return
        text = "".join(self.text)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice |= {"text": text, "stop_reason": None, "prompt_logprobs": None}
        body = {**self._head(), "choices": [choice], "usage": self._usage()}
        self.connection.respond(200, json.dumps(body, separators=(",", ":")).encode())

    def abort(self) -> None:
        """The server gives up this request and says so."""
        if self.stream:
            self._say("", "abort")
        self._finish("abort")

    def fail(self) -> None:
        """The engine has died under this request."""
        self.work.forget(self)
        refused = Refused(500, "InternalServerError", DEAD_TEXT)
        if self.connection.closed:
            return
        if self.started_answer:
            self._event(refused.body.decode())
            self._event("[DONE]")
            self.connection.end()
        else:
            self.connection.respond(500, refused.body)

    def on_lost(self) -> None:
        """The client has gone."""
        self.work.forget(self)
        if self.rank and self.job:
            self.rank.send(("abort", self.job))


class Work:
    """All requests for tokens of one server."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.active: set[Completion] = set()
        self.jobs: dict[int, Completion] = {}
        cached = app.options.values.get("enable-prefix-caching") is not False
        self.prefixes = PrefixCache(app.block_size) if cached else None
        self._count = 0
        self.traffic = [0, 0]  # prompt and generation tokens since the last statistics line

    # requests

    def accept(self, connection: Connection, request: Request, chat: bool) -> None:
        app = self.app
        try:
            self._refuse_as_told()
            completion = Completion(self, connection, self._body(request), chat)
        except Refused as refused:
            connection.respond(refused.status, refused.body)
            return
        self.active.add(completion)
        connection.on_lost = completion.on_lost
        if completion.kind == "hang" or app.hangs("completion"):
            completion.open_stream()
            return
        if delay_s := app.mood["completion_delay_s"]:
            app.loop.later(delay_s, lambda: self._submit(completion))
        else:
            self._submit(completion)

    def _refuse_as_told(self) -> None:
        status = self.app.mood["completion"]
        if isinstance(status, int) and status != 200:
            raise Refused(status, "InternalServerError", "simulated failure")
        if self.app.life.state == "dead":
            raise Refused(500, "InternalServerError", DEAD_TEXT)
        if self.app.life.state == "draining":
            raise Refused(500, "InternalServerError", "cannot schedule new futures after shutdown")

    def _body(self, request: Request) -> dict[str, Any]:
        try:
            body = json.loads(request.body)
        except ValueError as error:
            raise Refused(400, "Bad Request", f"JSON decode error: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "Bad Request", "Input should be a valid dictionary")
        model = body.get("model") or self.app.model_name
        if model not in self.app.model_names:
            text = f"The model `{model}` does not exist."
            raise Refused(404, "NotFoundError", text, "model")
        return body

    def prompt_of(self, body: dict[str, Any], chat: bool) -> list[int]:
        prompt = body.get("messages" if chat else "prompt")
        if chat and isinstance(prompt, list) and prompt:
            return tokens_of(prompt_of_chat(prompt))
        if isinstance(prompt, str) and not chat:
            return tokens_of(prompt)
        if isinstance(prompt, list) and prompt and not chat:
            if all(isinstance(token, int) for token in prompt):
                return prompt
            if len(prompt) == 1 and isinstance(prompt[0], (str, list)):
                return tokens_of(prompt[0])
        text = "the simulated engine takes one prompt: text or a list of token ids"
        raise Refused(400, "BadRequestError", text)

    def limits(self, body: dict[str, Any], chat: bool, prompt: int) -> tuple[int, int]:
        """How many tokens at most, and after how many the model would stop by itself (0: never)."""
        longest = self.app.max_model_len
        wanted = body.get("max_tokens") or body.get("max_completion_tokens")
        limit = wanted or (max(1, min(64, longest - prompt)) if chat else 16)
        if not isinstance(limit, int) or limit < 1:
            text = "max_tokens must be at least 1"
            raise Refused(400, "BadRequestError", text, "max_tokens")
        if prompt + limit > longest:
            text = (
                f"This model's maximum context length is {longest} tokens. However, you requested "
                f"{limit} output tokens and your prompt contains {prompt} input tokens, for a "
                f"total of {prompt + limit} tokens. Please reduce the length of the input prompt "
                "or the number of requested output tokens."
            )
            raise Refused(400, "BadRequestError", text, "input_tokens")
        if self.app.mood["completion"] == "empty":
            return limit, 1
        eos: int = 0 if body.get("ignore_eos") else self.app.mood["eos_after"]
        return limit, eos

    def _submit(self, completion: Completion) -> None:
        if completion not in self.active:
            return  # the client went away meanwhile
        if self.prefixes:
            completion.cached = self.prefixes.cached(completion.tokens)
        self._count += 1
        completion.job = self._count
        completion.rank = min(self.app.ranks, key=lambda rank: rank.inflight)
        completion.rank.inflight += 1
        self.jobs[completion.job] = completion
        completion.open_stream()
        prompt = len(completion.tokens)
        completion.rank.send(("add", completion.job, prompt, completion.cached, completion.limit, completion.eos))

    def forget(self, completion: Completion) -> None:
        completion.connection.on_lost = None
        self.active.discard(completion)
        if self.jobs.pop(completion.job, None) and completion.rank:
            completion.rank.inflight -= 1
        self.app.life.on_request_gone()

    # steps

    def on_step(self, rank: Rank, step: Step) -> None:
        outputs, started, prompt, tokens, iterations, running, waiting, used, preemptions = step
        stats = rank.stats
        for number in started:
            if number in self.jobs:
                self.jobs[number].on_scheduled(stats)
        simple = stats.simple
        simple["vllm:num_requests_running"] = float(running)
        simple["vllm:num_requests_waiting"] = float(waiting)
        simple["vllm:num_requests_waiting_by_reason|capacity"] = float(waiting)
        simple["vllm:kv_cache_usage_perc"] = used / self.app.pool
        simple["vllm:num_preemptions_total"] = float(preemptions)
        stats.add("vllm:prompt_tokens_total", prompt)
        stats.add("vllm:prompt_tokens_by_source_total|local_compute", prompt)
        stats.add("vllm:generation_tokens_total", len(outputs))
        if iterations:
            stats.histograms["vllm:iteration_tokens_total"].observe(tokens)
            self.app.stepped = True
        self.traffic[0] += prompt
        self.traffic[1] += len(outputs)
        for number, count, reason in outputs:
            if number in self.jobs:
                self.jobs[number].on_token(count, reason, stats)
