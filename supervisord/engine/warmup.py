"""Warm-up of an engine through its own port, before it counts as ready.

Only the process that will serve can be warmed: kernels are compiled or loaded at the first request of a shape, and
workspaces grow at the first large prefill batch (measured: 2 MiB of growth under load after this, 1,066 MiB without).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from supervisord.core.model import Reason, Warmup
from supervisord.core.spec import WarmupSpec
from supervisord.engine import metrics
from supervisord.engine.http import Answer, Client, Failure, Target
from supervisord.engine.prompts import batch_lengths, generated, is_sane, new_ids, new_text, read_prompt

BATCH_TOKENS: Final = 8192
"""max_num_batched_tokens when nobody knows it: vLLM's default for a server on a large GPU."""

_BATCH_ROUNDS: Final = 6
_BATCH_PROMPTS_MAX: Final = 256
_STILL_BYTES: Final = 8 << 20
"""Memory that moves by no more than this between two rounds has its final size."""
_SETTLED: Final = 0.2
_LINGER_S: Final = 600.0
_MESSAGE_CHARS: Final = 200
_OK: Final = 200
_UNAUTHORIZED: Final = (401, 403)
_NOT_THIS_WAY: Final = (400, 404, 405, 422, 501)
"""Answers to a request that this engine does not take in this form: no such route, no such task, no token ids."""
_SERVER_ERROR: Final = 500
_DECODE_PROMPT: Final = "Write a few sentences about the sea."
_DECODE_PROMPT_TOKENS: Final = 64
"""More than that prompt has with any tokenizer."""
_CHAT_TEMPLATE_TOKENS: Final = 256
_CHAT_S: Final = 10.0
_CHAT_SETTLED: Final = 4
"""How long an engine that is warm without it may take to stream two tokens of a chat: this, or so many prefills."""


class _Route(Enum):
    """Ways to make an engine work, in the order in which they are tried: path, prompts as token ids, makes text."""

    COMPLETIONS = ("/v1/completions", True, True)
    COMPLETIONS_TEXT = ("/v1/completions", False, True)
    CHAT = ("/v1/chat/completions", False, True)
    EMBEDDINGS = ("/v1/embeddings", True, False)
    POOLING = ("/pooling", True, False)

    def __init__(self, path: str, ids: bool, generates: bool) -> None:
        self.path = path
        self.ids = ids
        self.generates = generates


class _EndedError(Exception):
    """The warm-up cannot go on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    max_len: int | None

    def clip(self, tokens: int, reserved: int) -> int:
        """`tokens` as far as they fit beside `reserved` ones."""
        return tokens if self.max_len is None else max(1, min(tokens, self.max_len - reserved))


def run(
    target: Target,
    spec: WarmupSpec,
    *,
    model: str,
    batch_tokens: int | None,
    memory: Callable[[], int | None],
    note: Callable[[str], None],
    cancelled: threading.Event,
    clock: Callable[[], float],
) -> Warmup:
    """Warm up one engine; never raises. `Warmup.problem` says what did not work.

    `model` is what the configuration calls it, for a list of models (with LoRA adapters) that is too long to be read.
    `batch_tokens` is max_num_batched_tokens. `memory` reads the engine's GPU memory now, in bytes (None: unknown).
    `note` gets one short line a step. Setting `cancelled` ends it within a second, the request under way included.
    Otherwise no request is ever cut off, because aborts in mid-decode have wedged engines: what is still running at
    `spec.timeout_s`, or on a chat route that does not answer, is left to finish.
    """
    started = clock()
    session = _Session(target, spec.timeout_s, cancelled, clock)
    work = _Work(session, spec, batch_tokens or BATCH_TOKENS, memory, note)
    problem = None
    try:
        work.find_model(model)
        work.rounds_until_settled()
        work.stream()
        work.prime()
    except _EndedError as ended:
        problem = ended.reason
    session.close()
    return Warmup(
        first_ms=work.first_ms,
        settled_ms=work.settled_ms,
        rounds=work.rounds,
        problem=problem,
        memory_bytes=memory(),
        took_s=clock() - started,
    )


class _Session:
    """Requests within the time of the whole warm-up, one after the other."""

    def __init__(
        self, target: Target, timeout_s: float, cancelled: threading.Event, clock: Callable[[], float]
    ) -> None:
        self._open = partial(Client, target, cancelled)
        self._client = self._open()
        self._secret = target.api_key
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock() + timeout_s

    def left_s(self) -> float:
        """What is left of the warm-up's time."""
        return max(0.0, self._deadline - self._clock())

    def ask(
        self, stage: str, path: str, payload: Mapping[str, Any] | None = None, within_s: float | None = None
    ) -> tuple[Answer, float]:
        """POST (GET without payload): the answer and its latency in ms. 4xx is an answer, but for 401 and 403.

        `within_s`: it is not waited for longer than this, by default for what is left of the whole time.
        """
        started = self._clock()
        result = self._exchange(stage, path, payload, within_s)
        latency_ms = (self._clock() - started) * 1000
        if isinstance(result, Failure):
            code = "warmup_cancelled" if result.kind == "cancelled" else "warmup_failed"
            raise _EndedError(code, f"cannot finish the warm-up: {stage}: {result.detail}")
        if result.status in _UNAUTHORIZED:
            raise _EndedError(
                "warmup_refused",
                f"cannot warm up: {path} answered {result.status}; set api_key_file to the key that the engine has",
            )
        if result.status >= _SERVER_ERROR and result.status not in _NOT_THIS_WAY:
            raise _EndedError("warmup_failed", f"cannot finish the warm-up: {stage}: {self.said(path, result)}")
        return result, latency_ms

    def _exchange(
        self, stage: str, path: str, payload: Mapping[str, Any] | None, within_s: float | None
    ) -> Answer | Failure:
        """In a thread of its own, so that time can run out without closing the connection under the request."""
        box: SimpleQueue[Answer | Failure] = SimpleQueue()
        client, left_s = self._client, self.left_s()

        def exchange() -> None:
            if payload is None:
                box.put(client.get(path, timeout_s=left_s + _LINGER_S))
            else:
                box.put(client.post(path, payload, timeout_s=left_s + _LINGER_S))

        late = _EndedError(
            "warmup_timeout",
            f"cannot finish the warm-up within {self._timeout_s:g} s: {stage} had {left_s:.1f} s left and no answer",
        )
        if left_s <= 0:
            raise late
        threading.Thread(target=exchange, name="warmup-request", daemon=True).start()
        try:
            return box.get(timeout=left_s if within_s is None else min(left_s, within_s))
        except Empty:
            self._client = self._open()  # the request keeps the old one
            if within_s is not None and within_s < left_s:
                raise _EndedError("warmup_timeout", f"no answer within {within_s:g} s") from None
            raise late from None

    def said(self, path: str, answer: Answer) -> str:
        """One answer for people: status and, cleaned, the engine's own sentence."""
        body = answer.json_object()
        error = body.get("error")
        message = (error if isinstance(error, dict) else body).get("message")
        if not isinstance(message, str):
            return f"{path} answered {answer.status}"
        if self._secret:
            message = message.replace(self._secret, "***")
        clean = "".join(char if char.isprintable() else " " for char in message[:_MESSAGE_CHARS])
        return f"{path} answered {answer.status} ({clean.strip()})"

    def close(self) -> None:
        """Give the connection back; one on which a request still runs is no longer ours."""
        self._client.close()


class _Work:
    """The stages, and what they found out."""

    def __init__(
        self,
        session: _Session,
        spec: WarmupSpec,
        batch_tokens: int,
        memory: Callable[[], int | None],
        note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._spec = spec
        self._batch_tokens = batch_tokens
        self._memory = memory
        self._note = note
        self._model = _Model("", None)
        self._route = _Route.COMPLETIONS
        self._system_role = True
        self.first_ms: float | None = None
        self.settled_ms: float | None = None
        self.rounds = 0

    def find_model(self, configured: str) -> None:
        """Name and length limit of the base model; LoRA adapters are listed too and have a parent."""
        answer, _ = self._session.ask("asking for the model", "/v1/models")
        if answer.status != _OK:
            raise _EndedError("warmup_refused", f"cannot warm up: {self._session.said('/v1/models', answer)}")
        if answer.is_too_long:
            self._note(f"/v1/models answered {len(answer.body)} bytes, too many to be read: asking for {configured}")
            self._model = _Model(configured, None)
            return
        listed = answer.json_object().get("data")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry.get("parent") is None:
                max_len = entry.get("max_model_len")
                self._model = _Model(entry["id"], max_len if type(max_len) is int and max_len > 0 else None)
                return
        raise _EndedError("warmup_refused", "cannot warm up: /v1/models lists no model")

    def rounds_until_settled(self) -> None:
        """Prefill and decode, until two rounds differ by less than 20 %; large batches once, in the second round.

        By then a prefill has its usual speed, which tells how long the batches will take.
        """
        total = self._spec.max_rounds
        sane = 0
        previous: list[float] = []
        for number in range(1, total + 1):
            latencies = [self._prefill(number)]
            if number == min(2, total):
                self._fill_batches(latencies[0])
            if self._route.generates:
                decode_ms, text = self._decode(number)
                latencies.append(decode_ms)
                sane += is_sane(text)
            self.rounds = number
            if previous and all(map(_close, previous, latencies)):
                break
            previous = latencies
        if self._route.generates and not sane:
            raise _EndedError(
                "garbage",
                f"the engine generates no usable text: empty or one repeated character in {self.rounds} of "
                f"{self.rounds} answers",
            )

    def stream(self) -> None:
        """Answers in pieces, as most clients want them: the first is made by code that has not run yet.

        Seen on an H200 without this: 30 ms to the first token, 15 later. Who does not chat is no worse for it: a chat
        that fails in any way is left out, and has a short time of its own. It is not cut off then, and if it were, no
        decode would be aborted: two tokens take a moment, so what does not answer by then does not come to decode them.
        """
        if not self._route.generates:
            return
        self._stream(self._route)
        if self._route is _Route.CHAT:
            return
        try:
            self._stream(_Route.CHAT, max(_CHAT_S, _CHAT_SETTLED * (self.settled_ms or 0.0) / 1000))
        except _EndedError as ended:
            if ended.reason.code == "warmup_cancelled":
                raise
            self._system_role = False  # priming would meet the same
            self._note(f"streaming {_Route.CHAT.path} left out: {ended}")

    def prime(self) -> None:
        """Send the operator's system prompts, so that the prefix cache holds them. One that fails stops no other."""
        files = self._spec.prime if self._route.generates else ()
        problems = []
        for number, path in enumerate(files, 1):
            stage = f"priming {number}/{len(files)}"
            self._note(stage)
            try:
                text = read_prompt(path)
            except OSError as error:
                problems.append(f"cannot read {path}: {error.strerror}")
                continue
            answer, where = self._prime_one(stage, text)
            if answer.status != _OK:
                problems.append(f"{path}: {self._session.said(where, answer)}")
        if problems:
            raise _EndedError(
                "warmup_refused", f"cannot prime {len(problems)} of {len(files)} prompts; the first: {problems[0]}"
            )

    def _stream(self, route: _Route, within_s: float | None = None) -> None:
        stage = f"streaming {route.path}"
        payload = {**self._request([_DECODE_PROMPT], 2, route), "stream": True}
        answer, latency_ms = self._session.ask(stage, route.path, payload, within_s)
        if answer.status == _OK:
            self._note(f"{stage}: {latency_ms:.0f} ms")
        else:
            self._note(f"{stage} left out: {self._session.said(route.path, answer)}")

    def _prefill(self, number: int) -> float:
        stage = f"prefill {number}/{self._spec.max_rounds}"
        routes = list(_Route) if number == 1 else [self._route]
        answers = []
        for route in routes:
            self._route = route
            answer, latency_ms = self._session.ask(stage, route.path, self._prompts([self._prefill_tokens()]))
            if answer.status == _OK:
                self.first_ms = latency_ms if self.first_ms is None else self.first_ms
                self.settled_ms = latency_ms
                self._note(f"{stage}: {latency_ms:.0f} ms")
                return latency_ms
            answers.append(self._session.said(route.path, answer))
            if answer.status not in _NOT_THIS_WAY:
                break
        raise _EndedError("warmup_refused", f"cannot warm up: {', '.join(dict.fromkeys(answers))}")

    def _prefill_tokens(self) -> int:
        return self._model.clip(self._spec.prefill_tokens, self._reserved_tokens())

    def _reserved_tokens(self) -> int:
        """Room for the one token to be generated and one to spare; a chat template adds its own."""
        return 2 + _CHAT_TEMPLATE_TOKENS if self._route is _Route.CHAT else 2

    def _fill_batches(self, prefill_ms: float) -> None:
        """Prompts that fill the engine's largest batch, until that no longer moves its memory."""
        lengths = self._batch_lengths()
        tokens = sum(lengths)
        estimate_s = prefill_ms / 1000 * tokens / self._prefill_tokens()
        before = self._memory()
        for number in range(1, _BATCH_ROUNDS + 1):
            stage = f"batch {number}/{_BATCH_ROUNDS}"
            if estimate_s > self._session.left_s() / 2:
                self._note(f"{stage} left out: {tokens} tokens would take about {estimate_s:.0f} s")
                return
            answer, latency_ms = self._session.ask(stage, self._route.path, self._prompts(lengths))
            if answer.status != _OK:
                self._note(f"{stage} left out: {self._session.said(self._route.path, answer)}")
                return
            after = self._memory()
            if before is None or after is None:
                self._note(f"{stage}: {tokens} tokens, {latency_ms:.0f} ms")
                return
            self._note(f"{stage}: {tokens} tokens, {latency_ms:.0f} ms, memory {(after - before) / 2**20:+.0f} MiB")
            if abs(after - before) <= _STILL_BYTES:
                return
            before, estimate_s = after, latency_ms / 1000

    def _batch_lengths(self) -> list[int]:
        longest = self._model.clip(self._batch_tokens, self._reserved_tokens())
        if self._route is _Route.CHAT:
            return [longest]  # takes one prompt a request
        answer, _ = self._session.ask("reading metrics", "/metrics")
        page = metrics.parse(answer.body)
        ranks = len(page.ranks) or 1
        pool = page.kv_cache_size_tokens
        if pool is None and page.num_gpu_blocks is not None and page.block_size is not None:
            pool = page.num_gpu_blocks * page.block_size // ranks
        return (batch_lengths(self._batch_tokens, longest, pool) * ranks)[:_BATCH_PROMPTS_MAX]

    def _decode(self, number: int) -> tuple[float, str]:
        stage = f"decode {number}/{self._spec.max_rounds}"
        reserved = _DECODE_PROMPT_TOKENS + self._reserved_tokens()
        payload = self._request([_DECODE_PROMPT], self._model.clip(self._spec.decode_tokens, reserved))
        answer, latency_ms = self._session.ask(stage, self._route.path, {**payload, "ignore_eos": True})
        if answer.status != _OK:
            raise _EndedError(
                "warmup_refused", f"cannot warm up: {stage}: {self._session.said(self._route.path, answer)}"
            )
        self._note(f"{stage}: {latency_ms:.0f} ms")
        return latency_ms, generated(answer)

    def _prime_one(self, stage: str, text: str) -> tuple[Answer, str]:
        """As a system prompt, so that the tokens are those of real chats; as plain text where that is refused."""
        if self._system_role:
            messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
            path = _Route.CHAT.path
            payload = {"model": self._model.name, "messages": messages, "max_tokens": 1}
            answer, _ = self._session.ask(stage, path, payload)
            if answer.status == _OK or self._route is _Route.CHAT:
                return answer, path
        path = _Route.COMPLETIONS.path
        answer, _ = self._session.ask(stage, path, {"model": self._model.name, "prompt": text, "max_tokens": 1})
        if answer.status == _OK:
            self._system_role = False
        return answer, path

    def _prompts(self, lengths: list[int]) -> dict[str, Any]:
        """A request of one token for new prompts of these lengths."""
        make = new_ids if self._route.ids else new_text
        return self._request([make(length) for length in lengths], 1)

    def _request(self, prompts: list[Any], max_tokens: int, route: _Route | None = None) -> dict[str, Any]:
        """The body for a route, by default the one that works.

        Several prompts in one request reach the scheduler at once, and need no threads.

        No seed: a per-request seed kills CPU engines under load. Temperature 1, because a model with random weights
        decoded greedily says the same thing for ever, and so would look like garbage.
        """
        body: dict[str, Any] = {"model": self._model.name}
        prompt = prompts[0] if len(prompts) == 1 else prompts
        if not self._route.generates:
            return {**body, "input": prompt}
        body |= {"max_tokens": max_tokens, "temperature": 1.0}
        if (route or self._route) is _Route.CHAT:
            return {**body, "messages": [{"role": "user", "content": prompt}]}
        return {**body, "prompt": prompt}


def _close(one_ms: float, other_ms: float) -> bool:
    return abs(one_ms - other_ms) <= _SETTLED * max(one_ms, other_ms)
