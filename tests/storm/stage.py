"""What a storm rages over: a node with engines, GPUs, a small disk, a webhook's receiver, a stranger, the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from supervisord.control import client
from tests.adapters.fake_http import FakeServer, Request, answer
from tests.daemon.harness import Daemon, Document
from tests.daemon.outside import Seen, engine_processes, pids
from tests.daemon.sims import Sim, section, table
from tests.daemon.staging import small_disk
from tests.sim.engine import SIM_PATH, free_port, title_of, wait_until
from tests.sim.nvml import NvmlBox, SimGpu
from tests.storm.clock import Clock

DISK_MIB = 192
LIFE_S = "7200"
"""Nothing that a broken storm leaves lives longer."""

END_S = 300.0
"""For what takes a second; a busy machine has been seen to take 33 s to start a daemon."""

PAIR = ("a", "b")
"""Replicas of each other."""

COOL_C = 35
FRESH_S = 0.1
BACKOFF_MAX_S = 2.0
HASTY: Mapping[str, Any] = {
    "start_timeout_s": 4,
    "start_timeout_max_s": 20,
    "stop_timeout_s": 2,
    "probe": {"timeout_s": 1, "canary_after_s": 2, "canary_deadline_s": 2},
    "restart": {
        "backoff_initial_s": 0.1,
        "backoff_max_s": BACKOFF_MAX_S,
        "backoff_reset_after_s": 10,
        "max_restarts": 5,
        "max_restarts_window_s": 30,
        "stall_after_s": 5,
        "unreachable_after_s": 6,
        "free_blocks_min": 100,
        "free_blocks_for_s": 2,
    },
}
"""Of engines that faults befall: they have to be over within seconds."""

PATIENT: Mapping[str, Any] = {"stop_timeout_s": 10, "probe": {"canary_after_s": 5}}
"""Of engines that nothing befalls: with the defaults, a machine that is short of breath harms nobody."""

WARM: Mapping[str, Any] = {"enabled": True, "prefill_tokens": 16, "decode_tokens": 2}


class Receiver:
    """Of webhooks: `mood` is ok, refuse, or hang."""

    def __init__(self) -> None:
        self.mood = "ok"
        self.received = 0
        self.server = FakeServer(self._answer)

    def _answer(self, _: Request) -> bytes | None:
        self.received += 1
        self.server.requests.clear()
        while self.mood == "hang" and not self.server.over.wait(0.1):
            pass
        return answer(200 if self.mood == "ok" else 503)


class Stage:
    """A node of which nothing is left afterwards. `victims` get faults, the other engines must never notice any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock(folder)
        self.box = NvmlBox.make(folder / "nvml", "h200", "h200", "rtx4090", "h200", "h200")
        self.receiver = Receiver()
        self.listen_port = free_port()
        self.sims = {sim.name: sim for sim in self._engines()}
        self.calm = frozenset({"calm", "calm-gpu"})
        self.victims = sorted(self.sims.keys() - self.calm)
        self.kills: list[float] = []
        """When the daemon was killed."""
        self.lives = 0
        """Changes whenever the daemon is started, stopped, frozen or killed."""
        self.up = False
        """The daemon runs, and nothing keeps it from answering."""
        self.began = 0.0
        """When the daemon was started last."""
        self.has_disk = False
        self.config_is_good = True
        self.stranger = 0
        self._shown_c = 0
        self._over = contextlib.ExitStack()
        self._known: Document = {}
        self._known_at = 0.0
        self.daemon: Daemon

    def _engines(self) -> Iterator[Sim]:
        gpus = [gpu.uuid for gpu in self.box.gpus()]
        env = {"VLLM_SIM_MAX_LIFE_S": LIFE_S}
        shared = {"gpu-memory-utilization": 0.45}
        yield Sim(self.folder, "calm", env=env, **PATIENT)
        yield Sim(self.folder, "calm-gpu", env=env, gpus=[gpus[2]], **PATIENT)
        yield Sim(self.folder, "a", env=env, replica_group="pair", warmup=WARM, **HASTY)
        yield Sim(self.folder, "b", env=env, replica_group="pair", **HASTY)
        yield Sim(self.folder, "g", env=env, gpus=[gpus[0]], warmup=WARM, **HASTY)
        yield Sim(self.folder, "h", env=env, gpus=[gpus[1]], args=shared, **HASTY)
        yield Sim(self.folder, "i", env=env, gpus=[gpus[1]], args=shared, **HASTY)
        yield Sim(self.folder, "tp", env=env, gpus=gpus[3:], args={"tensor-parallel-size": 2}, warmup=WARM, **HASTY)
        yield Sim(self.folder, "dp", env=env, args={"data-parallel-size": 2}, **HASTY)

    def __enter__(self) -> Stage:  # noqa: PYI034 (typing.Self came with Python 3.11)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.receiver.server)
            self.daemon = Daemon(
                self.engines_toml(),
                env={**self.box.env, **self.clock.env},
                listen=f"127.0.0.1:{self.listen_port}",
                max_parallel_starts=3,
            )
            stack.enter_context(self.daemon)
            with contextlib.suppress(pytest.skip.Exception):
                stack.enter_context(small_disk(self.daemon.state_dir, DISK_MIB))
                self.has_disk = True
            self.stranger = stack.enter_context(self._look_alike()).pid
            stack.callback(self._end)
            self._over = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._over.__exit__(kind, error, at)
        except Exception as hiding:
            if error is None:
                raise
            print(f"and the stage could not be cleared: {hiding!r}")  # what was seen before is what counts

    def _end(self) -> None:
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.daemon.process.send_signal(signal.SIGCONT)
            self.daemon.stop(END_S)

    @contextlib.contextmanager
    def _look_alike(self) -> Iterator[subprocess.Popen[bytes]]:
        """Somebody else's `vllm serve`, which is none of the daemon's business."""
        other = Sim(self.folder, "other")
        command = [str(SIM_PATH), "serve", "tiny", "--host", "127.0.0.1", "--port", str(other.port)]
        environment = {**other.settings["env"], "SUPERVISED_ENGINE": "a", "VLLM_SIM_MAX_LIFE_S": LIFE_S}
        null = subprocess.DEVNULL
        foreign = subprocess.Popen(command, env=environment, start_new_session=True, stdout=null, stderr=null)
        try:
            yield foreign
        finally:
            os.killpg(foreign.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is nobody's business any more
                foreign.wait(END_S)

    def engines_toml(self) -> str:
        url = f"http://127.0.0.1:{self.receiver.server.port}/storm"
        return section(*self.sims.values()) + table("notify.ops", {"url": url, "events": ["all"], "timeout_s": 2})

    # --- the daemon ---

    def start(self) -> None:
        """Start the daemon; it has to answer."""
        self.daemon.start()
        self.began = time.monotonic()
        self.lives += 1
        self.up = True

    def down(self) -> None:
        """From now on the daemon need not answer."""
        self.up = False
        self.lives += 1

    def kill(self) -> None:
        """SIGKILL to the daemon."""
        self.down()
        self.kills.append(time.monotonic())
        self.daemon.kill()

    def back(self) -> None:
        """It has to again."""
        self.lives += 1
        self.up = True

    def post(self, target: str, document: dict[str, Any] | None = None) -> None:
        """Ask, whatever comes of it, without waiting for that: the daemon may die over it."""

        def ask() -> None:
            with contextlib.suppress(client.ControlError):
                client.post(str(self.daemon.socket), target, document, 5)

        threading.Thread(target=ask, daemon=True).start()

    def ask(self, engine: str, op: str, *, now: bool = False) -> None:
        """An operator's request for an engine."""
        self.post(client.engine_target(engine, op), {"now": now})

    def reload(self) -> None:
        """Have the configuration read again."""
        self.post("/v1/reload")

    def engine(self, name: str) -> Document:
        """One engine of the status document of just now, {} when the daemon does not answer."""
        if time.monotonic() > self._known_at + FRESH_S:
            self._known = self.status()
            self._known_at = time.monotonic()
        return next((e for e in self._known.get("engines", ()) if e["name"] == name), {})

    def status(self) -> Document:
        """The status document, {} when the daemon does not answer."""
        if not self.up:
            return {}
        with contextlib.suppress(client.ControlError):
            return client.get(str(self.daemon.socket), "/v1/status", 5).document()
        return {}

    # --- processes ---

    def processes(self, name: str) -> list[Seen]:
        """Living processes of an engine."""
        return [seen for seen in engine_processes(self.daemon.state_dir) if seen.engine == name]

    def process(self, name: str, title: str = "") -> int | None:
        """The main process of an engine, or the one whose title begins so."""
        found = [seen.pid for seen in self.processes(name)]
        if not title:
            return next((pid for pid in found if " serve " in title_of(pid)), None)
        return next((pid for pid in found if title_of(pid).startswith(title)), None)

    def probe_helper(self) -> int | None:
        """The process that asks NVML."""
        for pid in pids():
            with contextlib.suppress(OSError, IndexError):
                stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
                if int(stat.split()[1]) == self.daemon.pid and "helper.py" in title_of(pid):
                    return pid
        return None

    # --- GPUs ---

    def gpus_of(self, *names: str) -> list[SimGpu]:
        """The GPUs of these engines."""
        named = {uuid for name in names for uuid in self.sims[name].settings.get("gpus", ())}
        return [gpu for gpu in self.box.gpus() if gpu.uuid in named]

    def sharing(self, name: str) -> list[str]:
        """The engines that use a GPU of this one, itself among them."""
        gpus = self.gpus_of(name)
        return [other for other in self.sims if other == name or set(gpus) & set(self.gpus_of(other))]

    def show(self) -> None:
        """Give a GPU that no fault befalls a number that no look at it has seen yet."""
        self._shown_c = self._shown_c % 30 + 1
        (gpu,) = self.gpus_of("calm-gpu")
        gpu.set(temperature=COOL_C + self._shown_c)

    def seen_in(self, document: Document) -> bool:
        """The daemon knows that number, and that all GPUs answer: who comes back is found within 30 s."""
        (gpu,) = self.gpus_of("calm-gpu")
        seen = {g["uuid"]: g["temperature_c"] for g in document["gpus"] if g["temperature_c"] is not None}
        return len(seen) == len(self.box.gpus()) and seen[gpu.uuid] == COOL_C + self._shown_c

    # --- rest ---

    def has_applied(self) -> bool:
        """The daemon has kept the configuration as it is: a full disk keeps it from that, a reload takes a moment."""
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads((self.daemon.state_dir / "applied.json").read_bytes())["tables"]["engine"]
            return all(kept[name]["env"] == sim.settings["env"] for name, sim in self.sims.items())
        return False

    def settle(self, timeout_s: float) -> None:
        """Everything that was done is undone: engines get ready again, with what only an operator can do done."""
        asked: dict[str, float] = {}
        last: list[Document] = []

        def rested() -> bool:
            document = self.status()
            last[:] = document.get("engines", [])
            if not last:
                return False
            self.operate(document, asked, self.sims)
            return all(e["state"] == "ready" for e in last) and document["supervisor"]["gpu_trouble"] is None

        try:
            wait_until(rested, timeout_s, "all engines to be ready", every_s=0.2)
        except AssertionError as error:
            told = [(e["name"], e["state"], e["reasons"], e["last_exit"], e["next_start_at"]) for e in last]
            trouble = self.status().get("supervisor", {}).get("gpu_trouble")
            raise AssertionError(f"{error}\n{told}\n{trouble}") from None

    def operate(self, document: Document, asked: dict[str, float], names: Collection[str]) -> None:
        """What stays as it is until somebody says otherwise. `asked`: when that was said last."""
        for engine in document["engines"]:
            state, last = engine["state"], engine["last_exit"] or {}
            external = state == "backoff" and last.get("class") == "external"
            if engine["name"] in names and (state in {"stopped", "failed", "draining"} or external):
                self._once(asked, engine["name"], "reset" if state == "failed" else "start")
        released = (document["supervisor"]["gpu_trouble"] or {}).get("code") == "gpu_released"
        ours = {gpu.uuid for gpu in self.gpus_of(*names)}
        named = {gpu["uuid"] for gpu in document["gpus"] if gpu["quarantined"] or released} & ours
        if released and ours:
            named.add(self.box.gpu(0).uuid)
        for uuid in named:
            if time.monotonic() > asked.get(uuid, 0) + 2:
                asked[uuid] = time.monotonic()
                self.post("/v1/gpus/clear", {"gpu": uuid})

    def _once(self, asked: dict[str, float], name: str, op: str) -> None:
        if time.monotonic() > asked.get(name, 0) + 2:
            asked[name] = time.monotonic()
            self.ask(name, op)
