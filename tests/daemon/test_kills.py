"""The daemon is killed at random moments, again and again, while its engines start, stop, crash and hang."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from supervisord.control import client
from tests.daemon.harness import Daemon
from tests.daemon.outside import Watcher, engine_processes
from tests.daemon.sims import Sim, section
from tests.sim.engine import SIM_PATH, alive, title_of, wait_until

KILLS = int(os.environ.get("VS_KILLS", "200"))
STORMS = 2
CALM_EVERY = 25
RESTART = {"backoff_reset_after_s": 0, "max_restarts": 10_000}
MOODS: tuple[dict[str, Any], ...] = (
    {},
    {"ready_delay_s": 0.2},
    {"ready_delay_s": 0.3, "swallow_sigterm_while_starting": False},
    {"ignore_sigterm": "all"},
    {"ignore_sigterm": "children", "escape": True},
    {"escape": True},
    {"exit": {"after_s": 0.2, "code": 0}},
    {"start_error": {"line": "boom", "code": 1}},
    {"stop_delay_s": 0.3},
)


class Storm:
    """What happens to the engines of a daemon while it lives, and between two of its lives. Replayed by its seed."""

    def __init__(self, daemon: Daemon, sims: list[Sim], seed: int) -> None:
        self._daemon = daemon
        self._sims = sims
        self._random = random.Random(seed)
        self.told: list[str] = []

    def life(self) -> None:
        """One life of the daemon: things happen until it is killed, at any moment of its start or later."""
        early, lasts_s = self._random.random() < 0.2, self._random.random() ** 2 * 0.6
        self.told.append(f"--- a life of {lasts_s:.3f} s{', whatever it has done by then' if early else ''}")
        self._daemon.start(wait=not early)
        until = time.monotonic() + lasts_s
        while time.monotonic() < until:
            self._something()
            pause_s = self._random.random() * 0.08
            time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
        assert self._daemon.process is not None
        assert self._daemon.process.poll() is None, "the daemon ended by itself"
        self._daemon.kill()
        if self._random.random() < 0.3:
            self._kill_part(self._random.choice(self._sims))

    def _something(self) -> None:
        sim = self._random.choice(self._sims)
        what = self._random.choice(("ask", "ask", "ask", "mood", "kill", "freeze"))
        if what == "ask":
            op = self._random.choice(("start", "start", "stop", "restart", "restart", "drain", "reset"))
            now = self._random.random() < 0.5
            self.told.append(f"{sim.name}: {op}{' now' if now else ''}")
            # Not waited for: the daemon may die over it.
            threading.Thread(target=self._ask, args=(sim.name, op, now), daemon=True).start()
        elif what == "mood":
            mood = self._random.choice(MOODS)
            self.told.append(f"{sim.name}: {mood}")
            sim.mood.set(**mood)
        else:
            self._kill_part(sim, signal.SIGSTOP if what == "freeze" else signal.SIGKILL)

    def _ask(self, name: str, op: str, now: bool) -> None:
        with contextlib.suppress(client.ControlError):
            client.post(str(self._daemon.socket), client.engine_target(name, op), {"now": now}, 5)

    def _kill_part(self, sim: Sim, number: signal.Signals = signal.SIGKILL) -> None:
        processes = [seen.pid for seen in engine_processes(self._daemon.state_dir) if seen.engine == sim.name]
        if processes:
            victim = self._random.choice(processes)
            self.told.append(f"{sim.name}: {number.name} to {victim} ({title_of(victim)[:40]})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)

    def calm(self) -> None:
        """Let everything come to rest, and look whether all is as it should be."""
        self.told.append("--- calm")
        for sim in self._sims:
            sim.mood.clear()
        self._daemon.start()
        for sim in self._sims:
            self._daemon.request("restart", sim.name, "--now", "--wait", "--timeout", "60")
        for sim in self._sims:
            engine = self._daemon.wait_state(sim.name, "ready")
            living = [seen for seen in engine_processes(self._daemon.state_dir) if seen.engine == sim.name]
            assert {seen.generation for seen in living} == {engine["generation"]}, living
            assert engine["pid"] in {seen.pid for seen in living}
            assert len(living) == 4, [title_of(seen.pid) for seen in living]


@contextlib.contextmanager
def look_alike(folder: Path) -> Iterator[int]:
    """Somebody else's `vllm serve`, which is none of the daemon's business."""
    other = Sim(folder, "other")
    arguments = [str(SIM_PATH), "serve", "tiny", "--host", "127.0.0.1", "--port", str(other.port)]
    environment = {**other.settings["env"], "SUPERVISED_ENGINE": "a", "VLLM_SIM_MAX_LIFE_S": "900"}
    foreign = subprocess.Popen(
        arguments, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield foreign.pid
    finally:
        os.killpg(foreign.pid, signal.SIGKILL)
        foreign.wait(10)


def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """Several nodes side by side, because a life of a daemon is mostly waiting. VS_SEED replays what happened."""
    seed = int(os.environ.get("VS_SEED", str(random.randrange(10**9))))
    print(f"VS_SEED={seed} VS_KILLS={KILLS}")
    with look_alike(tmp_path) as foreign, ThreadPoolExecutor() as pool:
        wait_until(lambda: alive(foreign), 10, "the foreign engine")
        for number in range(STORMS):
            (tmp_path / str(number)).mkdir()
        runs = [pool.submit(one_storm, tmp_path / str(n), seed + n, KILLS // STORMS) for n in range(STORMS)]
        for run in runs:
            print(run.result())
        assert alive(foreign)


def one_storm(folder: Path, seed: int, kills: int) -> Counter[str]:
    """So many lives of one daemon; what its log has told, by kind."""
    sims = [Sim(folder, name, stop_timeout_s=1, restart=RESTART, env={"VLLM_SIM_MAX_LIFE_S": "900"}) for name in "ab"]
    with Daemon(section(*sims)) as daemon, Watcher(daemon.state_dir) as watcher:
        storm = Storm(daemon, sims, seed)
        try:
            for number in range(1, kills + 1):
                storm.life()
                if number % CALM_EVERY == 0:
                    storm.calm()
                    daemon.kill()
                assert watcher.twins == []
            storm.calm()
            for sim in sims:
                numbers = Counter(start["env"]["SUPERVISED_GENERATION"] for start in sim.starts())
                assert not [number for number, times in numbers.items() if times > 1], "a generation ran twice"
                assert daemon.engine(sim.name)["generation"] >= len(numbers)
            assert daemon.events("trouble") == [], "what a killed daemon wrote can be read"
            assert daemon.stop() == 0
            assert engine_processes(daemon.state_dir) == []
            assert watcher.twins == []
            assert watcher.looks > kills
        except BaseException:
            print(f"seed {seed}", *storm.told[-60:], sep="\n")
            raise
        return Counter(event["kind"] for event in daemon.events())
