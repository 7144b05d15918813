"""One release of vLLM under the real daemon, whichever the environment names (tests/e2e_cpu/conftest.py).

The tests build on each other, in their order: one daemon, one engine. What a release has is asked of its own help text,
never of its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime

import pytest

from supervisord.core.samples import RankMetrics
from supervisord.core.spec import EngineSpec
from supervisord.engine.flags import FlagBook, FlagSet
from supervisord.engine.metrics import PageMetrics, parse
from supervisord.engine.profiles import shipped
from tests.daemon.harness import Daemon, Document
from tests.e2e_cpu.conftest import RealVllm
from tests.e2e_cpu.test_real_vllm import complete, section, stream, titled
from tests.e2e_matrix.conftest import Record
from tests.sim.engine import alive, free_port

READY_S = 900
"""What takes a minute on a quiet machine took 774 s at a load of twenty for each core."""
STOP_S = 150
"""Longer than the 600 tokens of a stream take on that machine: it made 8 tokens a second."""
OWN_FLAGS = ("shutdown-timeout", "disable-access-log-for-endpoints")
"""What the supervisor adds to a command line where the release has it (supervisord/engine/launch.py)."""
OPTIONAL = {"draft_tokens", "accepted_tokens", "waiting_by_reason", "awake", "kv_cache_size_tokens"}
"""Signals that a rule can do without. Draft tokens: only with speculative decoding, which a CPU engine has not here."""


pytestmark = pytest.mark.timeout(2 * READY_S)


@dataclass
class Node:
    """The daemon with one engine, `a`."""

    daemon: Daemon
    vllm: RealVllm
    port: int

    @property
    def toml(self) -> str:
        """The engine's configuration."""
        own = {
            # Long enough for a stream to end: the release's own shutdown gets the same.
            "drain_timeout_s": STOP_S - 5,
            "stop_timeout_s": STOP_S,
            # The first answer of older releases took minutes on a busy machine; 0.18.1 compiles kernels for it.
            "max_rounds": f"2\ntimeout_s = {READY_S}",
            "VLLM_NO_USAGE_STATS": f'"1"\nTORCHINDUCTOR_CACHE_DIR = "{self.daemon.home}/kernels"',
        }
        text = section(self.vllm, "a", self.port)
        for key, value in own.items():
            text = re.sub(rf"^{key} = .*", f"{key} = {value}", text, flags=re.MULTILINE)
        return text

    def at(self, kind: str, count: int = 1) -> float:
        """When the engine's `count`-th event of this kind was."""
        return _time(self.daemon.wait_event(kind, "a", count, READY_S)["timestamp"])


@pytest.fixture(scope="module")
def node(vllm: RealVllm) -> Iterator[Node]:
    with Daemon("", poll_interval_s=30) as daemon:
        daemon.state_dir.mkdir()
        made = Node(daemon, vllm, free_port())
        daemon.configure(made.toml)
        yield made


@pytest.fixture(scope="module")
def flags(node: Node, record: Record) -> FlagSet:
    """Read as the daemon reads them, and where it looks for them."""
    command = (str(node.vllm.command), "serve")
    spec = EngineSpec(name="a", model=str(node.vllm.model), port=node.port, command=command)
    began = time.monotonic()
    found = FlagBook(node.daemon.state_dir, as_root=False, base_env=os.environ).read(spec, timeout_s=READY_S)
    assert isinstance(found, FlagSet), found
    record.note(flags=len(set(found.names.values())), flags_s=round(time.monotonic() - began, 1))
    return found


@pytest.fixture(scope="module")
def engine(node: Node, flags: FlagSet, record: Record) -> Node:
    """Started, and ready once."""
    node.daemon.start()
    node.daemon.wait_state("a", "ready", READY_S)
    record.note(ready_s=round(node.at("ready") - node.at("spawned"), 1))
    return node


# --- flags ------------------------------------------------------------------------------------------------------------


def test_versions(vllm: RealVllm, record: Record) -> None:
    ask = (
        "import importlib.metadata, json, platform; version = importlib.metadata.version; print(json.dumps("
        "{'python': platform.python_version(), **{name: version(name) for name in ('vllm', 'torch', 'transformers')}}))"
    )
    done = subprocess.run([vllm.command.with_name("python"), "-c", ask], capture_output=True, text=True, check=True)
    record.note(**json.loads(done.stdout), env=vllm.env)


def test_flags(node: Node, flags: FlagSet, record: Record) -> None:
    lacking = [name for name in OWN_FLAGS if flags.get(name) is None]
    profiles = {name for profile in shipped() for name in profile.args}
    record.note(flags_lacking=lacking + sorted(name for name in profiles if flags.get(name) is None))

    done = node.daemon.cli("check-config", str(node.daemon.config), timeout_s=READY_S)
    assert done.returncode == 0, done.stderr
    plan = node.daemon.request("plan", "--config", str(node.daemon.config))
    for name in OWN_FLAGS:
        assert (f"--{name}" in plan) is (name not in lacking), plan

    gone = next((name for name in ("swap-space", "disable-log-requests") if flags.get(name) is None), "awq-wbits")
    wrong = {"max-modal-len": 1024, gone: 4, **dict.fromkeys(lacking, 5)}
    args = "".join(f"{name} = {value}\n" for name, value in wrong.items())
    node.daemon.configure(node.toml.replace("[engine.a.args]\n", f"[engine.a.args]\n{args}"))
    done = node.daemon.cli("check-config", str(node.daemon.config), timeout_s=READY_S)
    node.daemon.configure(node.toml)
    assert done.returncode == 2
    refusals = [line for line in done.stderr.splitlines() if line.startswith("cannot use engine.a.args.")]
    assert len(refusals) == len(wrong), done.stderr
    for name in wrong:
        assert f" has no --{name};" in done.stderr, done.stderr
    assert "has no --max-modal-len; did you mean max-model-len?" in done.stderr
    record.note(refusal=next(line for line in refusals if "max-modal-len" in line).partition(": ")[2])


# --- start, warm-up, metrics ------------------------------------------------------------------------------------------


def test_start_and_warm_up(engine: Node, record: Record) -> None:
    ready = engine.daemon.engine("a")
    assert (ready["generation"], ready["restarts"], ready["health"]) == (1, 0, "ok"), ready
    warmup = ready["warmup"]
    record.note(warmup=warmup)
    assert warmup["rounds"] >= 1
    assert 0 < warmup["settled_ms"] <= warmup["first_ms"]
    assert complete(engine.port)["usage"]["completion_tokens"] == 8


def test_metrics(engine: Node, record: Record) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/metrics", timeout=60) as answer:
        page = parse(answer.read())
    missing = [*_unknown(page.ranks[0]), *_unknown(page)]
    record.note(signals_missing=[name for name in missing if name not in {"draft_tokens", "accepted_tokens"}])
    assert set(missing) <= OPTIONAL
    rank = page.ranks[0]
    assert (rank.running, rank.waiting, rank.preemptions) == (0, 0, 0)
    assert rank.generation_tokens
    assert rank.iterations

    kv = engine.daemon.engine("a")["kv"]
    assert (kv["total_blocks"], kv["free_blocks"]) == (rank.total_blocks, rank.free_blocks)
    assert f"{rank.free_blocks}/{rank.total_blocks} free" in engine.daemon.request("status")
    record.note(blocks=rank.total_blocks, block_size=page.block_size)


def _unknown(values: RankMetrics | PageMetrics) -> list[str]:
    return [field.name for field in fields(values) if getattr(values, field.name) is None]


# --- deaths that nobody asked for -------------------------------------------------------------------------------------


def test_the_engine_process_is_killed(engine: Node, record: Record) -> None:
    last = _die(engine, "core_killed", titled(engine.daemon, "a", "VLLM::EngineCore"), signal.SIGKILL, record)
    assert last["class"] == "crash", last


def test_the_api_server_is_killed(engine: Node, record: Record) -> None:
    last = _die(engine, "server_killed", engine.daemon.engine("a")["pid"], signal.SIGKILL, record)
    assert (last["class"], last["signal"]) == ("crash", signal.SIGKILL)


def test_somebody_else_ends_it(engine: Node, record: Record) -> None:
    last = _die(engine, "server_ended", engine.daemon.engine("a")["pid"], signal.SIGTERM, record)
    assert last["class"] in {"crash", "stopped"}, last


def _die(node: Node, name: str, pid: int, number: signal.Signals, record: Record) -> Document:
    """Signal a process of the ready engine; nothing of it is left, and it is ready again."""
    daemon = node.daemon
    before, processes = daemon.engine("a"), daemon.engine_processes("a")
    began = time.time()
    os.kill(pid, number)
    after = daemon.wait_state("a", "ready", READY_S, before["generation"] + 1)
    last: Document = after["last_exit"]
    left = [process for process in processes if alive(process)]
    gone_s = _time(last["at"]) - began
    seen = {key: last[key] for key in ("code", "signal", "class")}
    record.note(**{name: {**seen, "gone_s": round(gone_s, 1), "processes": len(processes), "left": len(left)}})
    assert after["restarts"] == before["restarts"] + 1
    assert last["generation"] == before["generation"]
    assert left == []
    assert complete(node.port)["usage"]["completion_tokens"] == 8
    return last


# --- stops ------------------------------------------------------------------------------------------------------------


class Streaming:
    """A client that reads a long stream to its end; `how` it ended: done, or what came instead."""

    def __init__(self, port: int) -> None:
        self._client = stream(port, tokens=600)
        self.how = "open"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        text = b""
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                text = (text + data)[-65536:]
                if b"data: [DONE]" in text:
                    break
        reasons = re.findall(rb'"finish_reason":\s*"(\w+)"', text)
        if b"data: [DONE]" not in text:
            self.how = "cut off"
        else:
            self.how = "complete" if reasons[-1:] == [b"length"] else b"/".join(reasons).decode() or "ended"

    def end(self) -> str:
        """How it ended, once the engine is gone."""
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RD)
        self._thread.join(30)
        self._client.close()
        return self.how


def test_stop_now_under_a_stream(engine: Node, flags: FlagSet, record: Record) -> None:
    """SIGTERM with a stream open: releases with --shutdown-timeout let it finish."""
    seen = _stop(engine, "--now")
    record.note(stop_now=seen)
    if flags.get("shutdown-timeout") is not None:
        assert (seen["stream"], seen["code"]) == ("complete", 0), seen


def test_drain_under_a_stream(engine: Node, record: Record) -> None:
    """The supervisor's own drain needs nothing of the release; the SIGTERM that follows meets an idle engine."""
    engine.daemon.request("start", "a")
    engine.daemon.wait_state("a", "ready", READY_S)
    seen = _stop(engine)
    record.note(drain=seen)
    assert (seen["stream"], seen["code"]) == ("complete", 0), seen
    assert seen["term_s"] < STOP_S


def _stop(node: Node, *options: str) -> Document:
    """Stop the engine under a stream. `term_s`: from SIGTERM until nothing is left."""
    daemon = node.daemon
    processes = daemon.engine_processes("a")
    counts = {kind: len(daemon.events(kind, "a")) + 1 for kind in ("stopping", "stopped")}
    client = Streaming(node.port)
    done = daemon.cli("stop", "a", *options, "--wait", timeout_s=4 * STOP_S)
    assert done.returncode == 0, done.stderr
    assert [process for process in processes if alive(process)] == []
    stopped = daemon.engine("a")
    assert stopped["state"] == "stopped"
    term_s = node.at("stopped", counts["stopped"]) - node.at("stopping", counts["stopping"])
    last = stopped["last_exit"]
    return {"term_s": round(term_s, 1), "code": last["code"], "signal": last["signal"], "stream": client.end()}


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
