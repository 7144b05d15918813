"""Faults of one engine: its processes, its answers, its work, its starts, and what operators ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from tests.daemon.outside import engine_processes
from tests.daemon.staging import Clients
from tests.storm.faults import Fault, NotNowError, On, Undo, add, fault, frozen, ready, running, send
from tests.storm.stage import Stage

SHORT = (0.5, 3.0)
LONG = (3.0, 9.0)
"""Longer than the rules of the victims need."""

# --- processes --------------------------------------------------------------------------------------------------------


def _signal(number: signal.Signals, title: str, stage: Stage, engine: str, _: Random) -> Undo | None:
    send(running(stage, engine, title), number)
    return None


for _name, _number, _title in (
    ("main_sigkill", signal.SIGKILL, ""),
    ("main_sigsegv", signal.SIGSEGV, ""),
    ("main_sigterm", signal.SIGTERM, ""),
    ("core_sigkill", signal.SIGKILL, "VLLM::EngineCore"),
    ("worker_sigkill", signal.SIGKILL, "VLLM::Worker"),
):
    add(Fault(_name, On.ENGINE, partial(_signal, _number, _title)))


@fault(On.ENGINE, LONG)
def main_sigstop(stage: Stage, engine: str, _: Random) -> Undo | None:
    """HTTP hangs; nothing of it answers."""
    return frozen(stage, running(stage, engine))


@fault(On.ENGINE, LONG)
def core_sigstop(stage: Stage, engine: str, _: Random) -> Undo | None:
    """/health is 200 and no request ends (A01 to A03)."""
    return frozen(stage, running(stage, engine, "VLLM::EngineCore"))


@fault(On.ENGINE, LONG)
def core_sigstop_under_load(stage: Stage, engine: str, _: Random) -> Undo | None:
    """The same with requests in flight."""
    clients = Clients(_ready_port(stage, engine))
    go_on = frozen(stage, running(stage, engine, "VLLM::EngineCore"))

    def undo() -> None:
        go_on()
        clients.stop()

    return undo


@fault(On.ENGINE)
def whole_tree_sigkill(stage: Stage, engine: str, _: Random) -> Undo | None:
    """Everything of it at once, as the kernel does it to a cgroup."""
    running(stage, engine)
    for seen in stage.processes(engine):
        send(seen.pid, signal.SIGKILL)
    return None


@fault(On.ENGINE, SHORT)
def orphans_outlive(stage: Stage, engine: str, _: Random) -> Undo | None:
    """Its next life leaves the session and ignores SIGTERM; this one's children outlive their parent (A24)."""
    sim = stage.sims[engine]
    pid = running(stage, engine)
    sim.mood.patch(escape=True, ignore_sigterm="children")
    send(pid, signal.SIGKILL)
    return partial(sim.mood.clear, "escape", "ignore_sigterm")


# --- moods ------------------------------------------------------------------------------------------------------------


def _mood(values: Mapping[str, Any], stage: Stage, engine: str, _: Random) -> Undo | None:
    ready(stage, engine)
    return _set(stage, engine, values)


def _failing_start(values: Mapping[str, Any], stage: Stage, engine: str, _: Random) -> Undo | None:
    """It dies, and its next starts go like this."""
    pid = running(stage, engine)
    undo = _set(stage, engine, values)
    send(pid, signal.SIGKILL)
    return undo


def _reset(values: Mapping[str, Any], stage: Stage, engine: str, rng: Random) -> Undo | None:
    """The same for what is not tried again: an operator mends it and says so."""
    clear = _failing_start(values, stage, engine, rng)

    def undo() -> None:
        if clear is not None:
            clear()
        stage.ask(engine, "reset")
        stage.ask(engine, "start")

    return undo


def _set(stage: Stage, engine: str, values: Mapping[str, Any]) -> Undo:
    mood = stage.sims[engine].mood
    mood.patch(**values)
    return partial(mood.clear, *values)


_ANSWERS: dict[str, dict[str, Any]] = {
    "exit_0": {"exit": {"after_s": 0.1, "code": 0}},
    "exit_3": {"exit": {"after_s": 0.1, "code": 3}},
    "health_503": {"health": 503},
    "health_500": {"health": 500},
    "completion_500": {"completion": 500},
    "completion_404": {"completion": 404},
    "completion_hangs": {"completion": "hang"},
    "output_garbage": {"completion": "garbage"},
    "output_empty": {"completion": "empty"},
    "models_500": {"models": 500},
    "metrics_500": {"metrics": 500},
    "metrics_binary": {"garbage_page": "binary"},
    "metrics_html": {"garbage_page": "html"},
    "metrics_truncated": {"garbage_page": "truncated"},
    "metrics_control": {"garbage_page": "control"},
    "metrics_nan": {"garbage_page": "nan"},
    "metrics_huge": {"huge_mib": 24},
    "metrics_without_blocks": {"blocks": "None"},
    "metrics_renamed": {"rename": {"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc"}},
    "health_nested": {"health": {"status": 200, "body": "[" * 60_000}},
    "health_odd_numbers": {"health": {"status": 200, "json": {"block_table_stats": {"free_blocks": -1}}}},
    "answers_drip": {"drip": {"bytes": 1, "interval_s": 0.3}},
    "all_hangs": {"hang": True},
    "probes_hang": {"hang": ["health", "metrics"]},
    "health_slow": {"health_delay_s": 2},
    "asleep": {"asleep": 1},
    "blocks_leaked": {"free_blocks": 3},
    "blocks_stale": {"free_blocks": {"value": 3, "until_step": True}},
    "not_admitting": {"admit": False, "gauges": {"vllm:num_requests_waiting": 6}},
    "first_request_slow": {"first_delay_s": 2, "first_delay_requests": 100},
    "log_flood": {"spam": {"lines_per_s": 5000, "line": "x" * 200}},
    "host_memory_grows": {"leak_mib_per_s": 5},
    "gpu_memory_grows": {"gpu_leak_mib_per_s": 100},
    "sigterm_ignored": {"ignore_sigterm": "all"},
    "stop_slow": {"stop_delay_s": 1.5},
}
for _name, _values in _ANSWERS.items():
    add(Fault(_name, On.ENGINE, partial(_mood, _values), LONG))

_STARTS: dict[str, dict[str, Any]] = {
    "start_crashes": {"start_error": {"line": "boom", "code": 1}},
    "start_port_in_use": {"start_error": {"capture": "port_in_use"}},
    "start_with_a_small_pool": {"blocks": 4000},
    "start_slow": {"ready_delay_s": 2.5},
    "start_deaf": {"ready_delay_s": 2.5, "swallow_sigterm_while_starting": True, "ignore_sigterm": "all"},
    "start_never_ready": {"ready_delay_s": 1000, "spam": {"lines_per_s": 20, "line": "Waiting for core engine 1"}},
}
for _name, _values in _STARTS.items():
    add(Fault(_name, On.ENGINE, partial(_failing_start, _values), LONG, spoils="blocks" in _values))

_FINAL: dict[str, dict[str, Any]] = {
    "start_bad_flag": {"start_error": {"capture": "badflag"}},
    "start_does_not_fit": {"start_error": {"capture": "maxlen_gt_kv"}},
    "start_without_model": {"start_error": {"capture": "missing_dir"}},
    "start_without_fabric": {"start_error": {"line": "RuntimeError: Error 802: system not yet initialized", "code": 1}},
    "start_hub_429": {"start_error": {"line": "HfHubHTTPError: 429 Client Error", "code": 1}},
}
for _name, _values in _FINAL.items():
    add(Fault(_name, On.ENGINE, partial(_reset, _values), SHORT))

# --- load, and a port that is somebody else's -------------------------------------------------------------------------


def _ready_port(stage: Stage, engine: str) -> int:
    ready(stage, engine)
    return stage.sims[engine].port


@fault(On.ENGINE, LONG)
def load(stage: Stage, engine: str, _: Random) -> Undo | None:
    """No fault: traffic."""
    return Clients(_ready_port(stage, engine)).stop


@fault(On.ENGINE, LONG)
def wedged_by_an_abort(stage: Stage, engine: str, _: Random) -> Undo | None:
    """A client goes away, and the engine does not step any more (A05)."""
    port = _ready_port(stage, engine)
    clear = _set(stage, engine, {"wedge_on_abort": True})
    request = {"model": "tiny", "prompt": "once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        sock.recv(1000)
    return clear


@fault(On.ENGINE, LONG)
def kv_pressure(stage: Stage, engine: str, _: Random) -> Undo | None:
    """Few free blocks while tokens flow (A31)."""
    clients = Clients(_ready_port(stage, engine))
    clear = _set(stage, engine, {"free_blocks": 20})

    def undo() -> None:
        clear()
        clients.stop()

    return undo


@fault(On.ENGINE, LONG)
def port_stolen(stage: Stage, engine: str, _: Random) -> Undo | None:
    """It dies and somebody else has its port before it is started again; the daemon is held up for that moment."""
    if not stage.up:
        raise NotNowError("the daemon cannot be held up")
    running(stage, engine)
    daemon, port = stage.daemon.pid, stage.sims[engine].port
    stage.down()
    send(daemon, signal.SIGSTOP)
    try:
        until = time.monotonic() + 2
        while (left := _of(stage, engine)) and time.monotonic() < until:
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)
        thief = socket.socket()
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind(("127.0.0.1", port))
        except OSError:
            thief.close()
            raise NotNowError(f"port {port} is not free") from None
        thief.listen()
    finally:
        send(daemon, signal.SIGCONT)
        stage.back()
    return thief.close


def _of(stage: Stage, engine: str) -> list[int]:
    return [seen.pid for seen in engine_processes(stage.daemon.state_dir) if seen.engine == engine]


# --- operators --------------------------------------------------------------------------------------------------------


def _operator(op: str, stage: Stage, engine: str, rng: Random) -> Undo | None:
    if not stage.up:
        raise NotNowError("nobody to ask")
    stage.ask(engine, op, now=rng.random() < 0.5)
    return partial(stage.ask, engine, "start") if op in {"stop", "drain"} else None


for _name in ("start", "stop", "restart", "drain", "reset"):
    add(Fault(f"operator_{_name}", On.ENGINE, partial(_operator, _name), SHORT))


@fault(On.ENGINE)
def operators_quarrel(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """Many requests at once, in any order."""
    if not stage.up:
        raise NotNowError("nobody to ask")
    for _ in range(12):
        stage.ask(engine, rng.choice(("start", "stop", "restart", "drain", "reset")), now=rng.random() < 0.5)
        time.sleep(rng.random() * 0.03)
    stage.ask(engine, "start")
    return None


@fault(On.ENGINE)
def reload_with_another_plan(stage: Stage, engine: str, rng: Random) -> Undo | None:
    """An engine's environment changes: it alone is restarted."""
    if not stage.up or not stage.config_is_good:
        raise NotNowError("nobody to ask")
    stage.sims[engine].change(env={"STORM": str(rng.randrange(10**9))})
    stage.daemon.configure(stage.engines_toml())
    stage.reload()
    return None


@fault(On.ENGINE, SHORT)
def engine_loses_its_files(stage: Stage, engine: str, _: Random) -> Undo | None:
    """Somebody cleans up: its log, and the temporary files of its engines."""
    running(stage, engine)
    with contextlib.suppress(OSError):
        os.unlink(stage.daemon.state_dir / "logs" / f"{engine}.log")  # noqa: PTH108 (as somebody's rm)
    return None
