"""Daemon stand-ins for tests that kill one: processes of their own that use the plain launcher.

    hold STATE LAUNCH     launch, say the pid, then wait to be killed
    take STATE            recover, adopt, say what was found, then the exit, then what a sweep leaves
    cut STATE LAUNCH      for every step of a spawn: die before it, then look whether all or nothing is there

LAUNCH is JSON: argv and env. What is said are JSON lines on stdout.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from supervisord.core.model import LaunchPlan
from supervisord.launcher.plain import PlainLauncher
from supervisord.launcher.statedir import lock_state_dir
from tests.sim.engine import free_port, processes_with_marker, title_of, wait_until

NOTHING, EVERYTHING = 10, 11
SYSTEM = {"posix", "_posixsubprocess", "select", "signal"}

Exits = queue.SimpleQueue[tuple[str, int, int | None, int | None]]


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def plan_of(text: str) -> LaunchPlan:
    facts = json.loads(text)
    env = {"PATH": "/usr/bin:/bin", **facts.get("env", {})}
    return LaunchPlan("qwen", tuple(facts["argv"]), env, None, "127.0.0.1", free_port(), "plan-1")


def launcher(state_dir: Path, exits: Exits | None = None) -> PlainLauncher:
    def on_exit(engine: str, generation: int, code: int | None, number: int | None) -> None:
        if exits is not None:
            exits.put((engine, generation, code, number))

    return PlainLauncher(state_dir, on_exit, lambda message: say(trouble=message))


def hold(state_dir: Path, plan: LaunchPlan) -> None:
    with lock_state_dir(state_dir):
        process = launcher(state_dir).launch(plan, 1)
        say(pid=process.pid)
        signal.pause()


def take(state_dir: Path) -> None:
    exits: Exits = queue.SimpleQueue()
    with lock_state_dir(state_dir):
        mine = launcher(state_dir, exits)
        for found in mine.recover():
            mine.adopt(found.engine, found.generation)
            say(
                engine=found.engine,
                generation=found.generation,
                pid=found.process.pid if found.process is not None else None,
                leftovers=found.leftovers,
                plan_id=found.plan_id,
                members=mine.members(found.engine),
                tail=mine.tail(found.engine, 5),
            )
            if found.process is not None:
                say(exit=exits.get(timeout=30))
            say(remaining=mine.sweep(found.engine, found.generation))
        say(done=True)


def cut(state_dir: Path, plan: LaunchPlan) -> None:
    step, found, died = 0, [], True
    while died:
        step += 1
        died = os.WIFSIGNALED(in_child(die_before, state_dir, plan, step))
        status = in_child(check, state_dir, step)
        if os.WEXITSTATUS(status) not in {NOTHING, EVERYTHING} or os.WIFSIGNALED(status):
            say(failed=step)
            return
        found.append(os.WEXITSTATUS(status) == EVERYTHING)
    say(found=found)


def in_child(job: Callable[..., None], *args: Any) -> int:
    child = os.fork()
    if child == 0:
        job(*args)
    return os.waitpid(child, 0)[1]


def die_before(state_dir: Path, plan: LaunchPlan, step: int) -> None:
    """Launch, and die before the `step`th call to the system, counted from the fork."""
    mine = launcher(state_dir)
    left, born = step, False

    def count(_frame: FrameType, event: str, what: Any) -> None:
        nonlocal left, born
        if event == "c_call" and what.__module__ in SYSTEM:
            born = born or what.__name__ == "fork_exec"
            left -= born
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    mine.launch(plan, step)
    sys.setprofile(None)
    os._exit(0)


def check(state_dir: Path, step: int) -> None:
    """Either nothing lives in a moment, or the next daemon finds it by its record."""
    state = str(state_dir)

    def living() -> list[int]:
        return processes_with_marker("SUPERVISED_STATE", state)

    # What was held ends by itself as soon as it notices; what was released becomes the engine.
    wait_until(lambda: all(title_of(pid).startswith("/bin/sleep") for pid in living()), 5, "the held child")
    mine = launcher(state_dir)
    lives = False
    for one in mine.recover():  # also what was held, and has ended
        assert one.process is not None
        assert (one.generation, one.plan_id) == (step, "plan-1")
        mine.adopt("qwen", step)
        lives = bool(living())
        assert mine.members("qwen") == ((one.process.pid,) if lives else ())
        assert mine.sweep("qwen", step) == ()
    assert not living()
    assert not list((state_dir / "tmp").iterdir())
    os._exit(EVERYTHING if lives else NOTHING)


if __name__ == "__main__":
    mode, where, *rest = sys.argv[1:]
    if mode == "hold":
        hold(Path(where), plan_of(rest[0]))
    elif mode == "take":
        take(Path(where))
    elif mode == "cut":
        cut(Path(where), plan_of(rest[0]))
