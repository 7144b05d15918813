"""The real HAProxy with the example of the documentation, in front of simulated engines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest

from supervisord.config import load
from tests.daemon.harness import DEADLINE_S, Daemon
from tests.daemon.sims import Sim, section
from tests.sim.engine import Answer, free_port, http, wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
GATEWAY = "bind 127.0.0.1:8000"


class Gateway:
    """The engines of behind-haproxy.toml, their daemon, and HAProxy in front of them."""

    def __init__(self, daemon: Daemon, sims: dict[str, Sim], port: int) -> None:
        self.daemon = daemon
        self.sims = sims
        self._url = f"http://127.0.0.1:{port}/v1/completions"

    def ask(self, prompt: str = "hello", hint: str | None = None, tokens: int = 1) -> Answer:
        """One completion through HAProxy."""
        headers = {} if hint is None else {"X-Model-Hint": hint}
        body = {"model": "auto", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        return http("POST", self._url, body, headers=headers, timeout_s=DEADLINE_S)

    def served(self, engine: str) -> float:
        """How many requests the living process of an engine has finished."""
        page = http("GET", f"http://127.0.0.1:{self.sims[engine].port}/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def who(self, prompt: str, hint: str | None = None) -> str:
        """Which engine answers this."""
        before = {name: self.served(name) for name in self.sims}
        assert self.ask(prompt, hint).status == 200
        return next(name for name in self.sims if self.served(name) > before[name])


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """Start all of it: the files as they are, but for their ports."""
    (tmp_path / "config.toml").write_text((EXAMPLES / "behind-haproxy.toml").read_text(), encoding="utf-8")
    specs = load(tmp_path / "config.toml", trust=False, check_files=False).spec.engines
    sims = {
        name: Sim(
            tmp_path,
            name,
            replica_group=spec.replica_group,
            drain_min_s=spec.drain_min_s,
            drain_timeout_s=spec.drain_timeout_s,
            # As vLLM does: after SIGTERM it accepts for a while (5.3 s), and answers 500.
            args={"served-model-name": ["auto"], "shutdown-timeout": 30},
            mood={"tokens_per_s": 100, "drain_idle_s": 2},
        )
        for name, spec in specs.items()
    }
    for sim in sims.values():
        if sim.settings["replica_group"] is None:
            del sim.settings["replica_group"]
    front, listen = free_port(), free_port()
    text = (EXAMPLES / "haproxy.cfg").read_text(encoding="utf-8")
    ports = {GATEWAY: f"bind 127.0.0.1:{front}", "port 9401": f"port {listen}"}
    ports |= {f"127.0.0.1:{specs[name].port}": f"127.0.0.1:{sim.port}" for name, sim in sims.items()}
    for old, new in ports.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "haproxy.cfg").write_text(text, encoding="utf-8")
    with Daemon(section(*sims.values()), listen=f"127.0.0.1:{listen}") as daemon:
        daemon.start()
        for name in sims:
            daemon.wait_state(name, "ready")
        with running_haproxy(tmp_path):
            gateway = Gateway(daemon, sims, front)
            wait_until(lambda: answers(gateway), DEADLINE_S, "HAProxy to answer")
            yield gateway
        os.kill(daemon.pid, signal.SIGTERM)
        daemon.wait_event("daemon_ending")  # another one follows: nothing is drained at the end of a test


@contextlib.contextmanager
def running_haproxy(folder: Path) -> Iterator[None]:
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            ["/usr/sbin/haproxy", "-db", "-f", str(folder / "haproxy.cfg")], stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(30)
        print((folder / "haproxy.log").read_text(encoding="utf-8"))


def answers(gateway: Gateway) -> bool:
    with contextlib.suppress(OSError):
        return gateway.ask().status == 200
    return False


class Load:
    """Clients that ask one thing after the other, with a pause between."""

    def __init__(self, gateway: Gateway, clients: int, tokens: int, pause_s: float) -> None:
        self._gateway = gateway
        self._tokens = tokens
        self._pause_s = pause_s
        self._over = Event()
        self._lock = Lock()
        self.outcomes: Counter[Any] = Counter()
        self._threads = [Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:  # noqa: PYI034 (typing.Self came with Python 3.11)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _ask(self) -> None:
        while not self._over.wait(self._pause_s):
            try:
                answer = self._gateway.ask(tokens=self._tokens)
                whole = answer.status == 200 and answer.json["usage"]["completion_tokens"] == self._tokens
                outcome: Any = "whole" if whole else (answer.status, answer.text)
            except (OSError, ValueError, KeyError) as error:
                outcome = repr(error)
            with self._lock:
                self.outcomes[outcome] += 1


@pytest.mark.parametrize(
    ("clients", "tokens", "pause_s"),
    [
        pytest.param(6, 20, 0.0, id="heavy"),
        # An engine that is idle when its drain begins would be stopped before HAProxy has heard of it.
        pytest.param(2, 1, 0.05, id="light"),
    ],
)
def test_a_graceful_restart_loses_no_request(gateway: Gateway, clients: int, tokens: int, pause_s: float) -> None:
    with Load(gateway, clients, tokens, pause_s) as load:
        wait_until(lambda: load.outcomes["whole"] >= 20, DEADLINE_S, "some answers")
        assert min(gateway.served("fast-a"), gateway.served("fast-b")) > 0, "both have their part"
        gateway.daemon.request("restart", "fast-a", "--wait")
        gateway.daemon.wait_state("fast-a", "ready", generation=2)
        wait_until(lambda: gateway.served("fast-a") >= 5, DEADLINE_S, "fast-a to get requests again")
    assert set(load.outcomes) == {"whole"}
    assert gateway.daemon.events("drain_timeout") == []
    assert gateway.served("coder") == 0


def test_an_engine_that_dies_is_not_asked(gateway: Gateway) -> None:
    """Until HAProxy has seen it, its requests are refused, and go to the other one."""
    gateway.sims["fast-a"].mood.patch(ready_delay_s=3600)
    gateway.sims["fast-a"].mood.patch(exit={"after_s": 0, "code": 1})
    wait_until(lambda: gateway.daemon.engine("fast-a")["state"] != "ready", DEADLINE_S, "fast-a to end")
    assert {gateway.ask().status for _ in range(20)} == {200}


def test_a_model_is_chosen_by_header_and_by_words(gateway: Gateway) -> None:
    fast = {"fast-a", "fast-b"}
    assert gateway.who("what is the weather like?") in fast
    assert gateway.who("why does my Python script end?") == "coder"
    assert gateway.who("please debug this") == "coder"
    assert gateway.who("decode this barcode") in fast, "words, not parts of words"
    assert gateway.who("hello", "CODE") == "coder"
    assert gateway.who("python", "fast") in fast, "the header goes before the words"
