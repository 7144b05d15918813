"""A real vLLM without free KV blocks: saturation is load and left alone, a frozen engine is killed and comes back.

SATURATION_S: how long the load lasts (40).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from datetime import datetime

from tests.daemon.harness import Daemon, engine_toml
from tests.e2e_cpu.conftest import RealVllm
from tests.e2e_cpu.test_real_vllm import READY_S, complete, stream, titled
from tests.sim.engine import free_port, wait_until

LOAD_S = float(os.environ.get("SATURATION_S", "40"))
SAID_S = 240
"""Pressure is told after 30 s without a pause; many requests that end at once are one, and then it begins anew."""
CLIENTS = 32
PROMPT_TOKENS = 500
"""Taken at once: requests that begin together with nothing would grow and end together, and free blocks with them."""
STALL_AFTER_S = 15
ARGS = f"""drain_timeout_s = 5
stop_timeout_s = 20
[engine.a.args]
served-model-name = "tiny"
block-size = 32
num-gpu-blocks-override = 200
max-num-seqs = {CLIENTS}
max-model-len = 1024
enforce-eager = true
[engine.a.env]
VLLM_CPU_KVCACHE_SPACE = "1"
HF_HUB_OFFLINE = "1"
VLLM_NO_USAGE_STATS = "1"
[engine.a.warmup]
max_rounds = 2
[engine.a.restart]
free_blocks_min = 100
stall_after_s = {STALL_AFTER_S}
backoff_initial_s = 0.2
[engine.a.slo]
ttft_p95_ms = 0
"""


class Load:
    """So many clients that ask for long completions; all of them are counted, and none may fail."""

    def __init__(self, port: int, *, seeded: bool = False) -> None:
        self._port = port
        self._seeded = seeded
        self._over = threading.Event()
        self.done = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No new requests; those under way finish."""
        self._over.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"

    def _run(self, number: int) -> None:
        asked = 0
        while not self._over.is_set():
            asked += 1
            # Nothing in common with another request, from the first token on: else they would share cached blocks.
            prompt = [5 + (number * 7 + asked * 3 + place * (1 + number)) % 600 for place in range(PROMPT_TOKENS)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 350 + number * 4}
            if self._seeded:
                body["seed"] = asked
            request = urllib.request.Request(
                f"http://127.0.0.1:{self._port}/v1/completions",
                data=json.dumps({**body, "ignore_eos": True}).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=300) as answer:
                    json.load(answer)
                self.done += 1
            except (OSError, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                self._over.wait(1)


def test_saturation_is_left_alone_and_a_frozen_engine_is_not(vllm: RealVllm) -> None:
    port = free_port()
    toml = engine_toml("a", [str(vllm.command), "serve"], port, str(vllm.model), ARGS)
    with Daemon(toml, poll_interval_s=1) as daemon:
        daemon.start()
        ready = daemon.wait_state("a", "ready", READY_S)
        saturate(daemon, port)
        well = daemon.wait_engine("a", lambda e: (e["health"], e["kv"]["free_blocks"]) == ("ok", 199), 60, "to be well")
        assert (well["generation"], well["pid"], well["restarts"]) == (1, ready["pid"], 0)
        assert daemon.events("verdict") == []
        assert "kv_pressure" in {event["reason"] for event in daemon.events("recovered")}
        assert complete(port)["usage"]["completion_tokens"] == 8
        freeze(daemon, port)
        again = daemon.wait_state("a", "ready", READY_S, 2)
        assert (again["restarts"], again["last_exit"]["generation"]) == (1, 1)
        assert complete(port)["usage"]["completion_tokens"] == 8


def test_the_literal_rule_if_asked_for_and_a_real_engine_death(vllm: RealVllm) -> None:
    """`under_load = "restart"` is the plain rule to the letter; then a death that vLLM itself reports as exit 0.

    A `seed` in each request kills this CPU build within seconds of saturation.
    """
    port = free_port()
    literal = ARGS.replace(
        "free_blocks_min = 100", 'free_blocks_min = 100\nfree_blocks_for_s = 5\nunder_load = "restart"'
    )
    command = [str(vllm.command), "serve"]
    with Daemon(engine_toml("a", command, port, str(vllm.model), literal), poll_interval_s=1) as daemon:
        daemon.start()
        first = daemon.wait_state("a", "ready", READY_S)
        load = Load(port)
        verdict = daemon.wait_event("verdict", timeout_s=120)
        assert (verdict["reason"], verdict["min"]) == ("free_blocks", 100)
        assert verdict["low_s"] >= 5
        load.stop()
        daemon.wait_state("a", "ready", READY_S, 2)

        # Back to the default: settings of rules are applied to the running engine.
        daemon.configure(engine_toml("a", command, port, str(vllm.model), ARGS))
        assert daemon.cli("reload", "--wait").returncode == 0
        second = daemon.engine("a")
        assert (second["state"], second["generation"]) == ("ready", 2)
        assert second["pid"] != first["pid"]

        load = Load(port, seeded=True)
        # The load ends with the engine that it kills: it would kill the next one as well.
        daemon.wait_engine(
            "a", lambda e: (e["state"], e["generation"]) != ("ready", 2), 120, "to be killed by its load"
        )
        load.stop()
        third = daemon.wait_state("a", "ready", READY_S, 3)
        assert third["last_exit"]["class"] == "crash"
        assert third["last_exit"]["code"] in {0, None}, "its own exit, or the rule for 503 that was quicker (SIGKILL)"
        assert complete(port)["usage"]["completion_tokens"] == 8


def saturate(daemon: Daemon, port: int) -> None:
    """Fewer than 100 free blocks nearly all the time; every request succeeds and nothing is restarted."""
    load = Load(port)
    low = looks = 0
    seen: set[str] = set()
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < LOAD_S or ("kv_pressure" not in seen and passed_s < SAID_S):
        engine = daemon.engine("a")
        assert (engine["state"], engine["generation"]) == ("ready", 1), engine["reasons"]
        free = engine["kv"]["free_blocks"]
        looks += free is not None
        low += free is not None and free < 100
        seen |= {reason["code"] for reason in engine["reasons"]}
        time.sleep(0.5)
    busy = daemon.engine("a")
    load.stop()
    print(f"{low} of {looks} looks saw fewer than 100 free blocks; {load.done} requests done; {seen}")
    assert load.failures == []
    assert load.done >= CLIENTS
    assert low > looks / 2
    assert "kv_pressure" in seen
    assert not seen & {"free_blocks", "stalled", "unresponsive", "unreachable"}
    assert busy["tokens_per_s"] > 0
    assert busy["ranks"][0]["total_blocks"] == 200


def freeze(daemon: Daemon, port: int) -> None:
    """SIGSTOP of EngineCore with open requests and a stream: /health stays 200, no token comes."""
    core = titled(daemon, "a", "VLLM::EngineCore")
    load = Load(port)
    client = stream(port)
    daemon.wait_engine("a", lambda e: e["requests"]["running"] > 1, 30, "to be seen busy")
    began = time.time()
    os.kill(core, signal.SIGSTOP)
    verdict = daemon.wait_event("verdict", timeout_s=STALL_AFTER_S + 30)
    took_s = datetime.fromisoformat(verdict["timestamp"].replace("Z", "+00:00")).timestamp() - began
    print(f"verdict after {took_s:.1f} s: {verdict['event']}")
    assert verdict["reason"] == "stalled"
    assert took_s < STALL_AFTER_S + 5
    load.stop()
    with contextlib.suppress(OSError):
        client.close()
    path = daemon.state_dir / "evidence" / "a.1.stalled.txt"
    text = wait_until(lambda: path.exists() and path.read_text(encoding="utf-8"), 10, "the evidence") or ""
    assert "VLLM::EngineCor" in text
    assert "State:\tT (stopped)" in text
