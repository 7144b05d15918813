"""A real vLLM as the benchmarks run it, and clients that cost little beside it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.daemon.harness import engine_toml

MODEL = "tiny"
MAX_NUM_SEQS = 8
READY_S = 600
"""Starts take 20 s on a quiet machine and minutes on a busy one."""

_ARGS: dict[str, Any] = {
    "served-model-name": MODEL,
    "max-model-len": 1024,
    "max-num-seqs": MAX_NUM_SEQS,
    "max-num-batched-tokens": 2048,
}
_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Build(NamedTuple):
    """A vLLM that is installed, with a model, and the flags and variables that the measurements give it."""

    vllm: Path
    model: Path
    args: dict[str, Any]
    env: dict[str, str]
    gpus: tuple[str, ...] = ()


def build(vllm: Path, model: Path, *, gpu: bool) -> Build:
    """The CPU build, or the CUDA build on GPU 0, there with its graphs and half of the memory."""
    if gpu:
        return Build(vllm, model, {**_ARGS, "gpu-memory-utilization": 0.5}, _ENV, ("0",))
    # One computing thread: on two cores an engine that takes both measures nothing but the fight for them.
    env = {**_ENV, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return Build(vllm, model, {**_ARGS, "block-size": 32, "enforce-eager": True}, env)


def section(build: Build, port: int, *wrapper: str) -> str:
    """The engine `a`; everything that is not about vLLM itself is at its default. `wrapper` goes before the command."""
    tables = "".join(
        f"[engine.a.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for name, values in (("args", build.args), ("env", build.env))
    )
    gpus = f"gpus = {json.dumps(build.gpus)}\n" if build.gpus else ""
    engine = engine_toml("a", [*wrapper, str(build.vllm), "serve"], port, str(build.model), gpus + tables)
    return f'[gpu]\npersistence = "leave"\n{engine}'  # a benchmark changes no setting of the machine


def argv(build: Build, port: int) -> list[str]:
    """The same engine as a command line of its own."""
    flags = [
        text
        for key, value in build.args.items()
        for text in ([f"--{key}"] if value is True else [f"--{key}", str(value)])
    ]
    return [str(build.vllm), "serve", str(build.model), "--host", "127.0.0.1", "--port", str(port), *flags]


def bare_environment(build: Build) -> dict[str, str]:
    """What it is started with when nobody supervises it: ours without what is about us."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**inherited, "PATH": f"{build.vllm.parent}:{inherited['PATH']}", **build.env}


class Answer(NamedTuple):
    """One streamed completion: seconds to its first token and to its end, and how many tokens it had."""

    first_s: float
    total_s: float
    tokens: int


class Client:
    """One connection, kept from request to request."""

    def __init__(self, port: int, timeout_s: float = 300) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)

    def complete(self, prompt: list[int], tokens: int) -> Answer:
        """Stream a completion of exactly so many tokens. Raises OSError, HTTPException, ValueError."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        parts = [answer.read1(65536)]
        first_s = time.monotonic() - began
        while parts[-1]:
            parts.append(answer.read1(65536))
        total_s = time.monotonic() - began
        text = b"".join(parts)
        usages = [line for line in text.splitlines() if b'"completion_tokens":' in line]
        if answer.status != http.HTTPStatus.OK or not usages:
            raise ValueError(f"HTTP status {answer.status}: {text[-200:]!r}")
        told = int(json.loads(usages[-1].removeprefix(b"data: "))["usage"]["completion_tokens"])
        if told != tokens:
            raise ValueError(f"{told} tokens instead of {tokens}: {text[-200:]!r}")
        return Answer(first_s, total_s, told)

    def close(self) -> None:
        """The next request connects again."""
        self._connection.close()


class Load:
    """A closed loop: at any time `streams` clients wait for an answer. Lengths vary, the same way in every run."""

    def __init__(self, port: int, most: int, prompts: tuple[int, int], tokens: tuple[int, int]) -> None:
        """At most so many streams; `prompts` and `tokens`: shortest and longest of each, in tokens."""
        self.streams = 0
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self._port = port
        self._prompts, self._tokens = prompts, tokens
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(most)]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 300) -> None:
        """No new requests; those under way end."""
        self._over.set()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        client = Client(self._port)
        while not self._over.is_set():
            if number >= self.streams:
                client.close()
                self._over.wait(0.1)
                continue
            prompt = [rng.randrange(10, 600) for _ in range(rng.randint(*self._prompts))]
            try:
                answer = client.complete(prompt, rng.randint(*self._tokens))
            except (OSError, http.client.HTTPException, ValueError) as error:
                client.close()
                with self._lock:
                    self.done["failed"] += 1
                    self.failures.append(f"{type(error).__name__}: {error}")
                self._over.wait(1)
            else:
                with self._lock:
                    self.done["ok"] += 1
                    self.done["tokens"] += answer.tokens


@contextlib.contextmanager
def load(port: int, most: int, prompts: tuple[int, int], tokens: tuple[int, int]) -> Iterator[Load]:
    """Load that ends with the block; what goes wrong in there does not wait for requests under way."""
    running = Load(port, most, prompts, tokens)
    try:
        yield running
    except BaseException:
        running.stop(0)
        raise
    running.stop()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGINT (which a background job inherits ignored) end the run, and with it all it started."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    old = [(number, signal.signal(number, end)) for number in ends]
    try:
        yield
    finally:
        for number, handler in old:
            signal.signal(number, handler)
