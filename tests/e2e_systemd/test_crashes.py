"""The daemon is killed at each single step that it takes, under its real unit; the next one always converges."""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Callable

import pytest

from tests.e2e_systemd.crasher import PLAN, STEPS
from tests.e2e_systemd.machine import INSIDE
from tests.e2e_systemd.node import CONFIG, DEADLINE_S, STATE_DIR, UNIT, Document
from tests.e2e_systemd.packaged import PackagedNode
from tests.sim.engine import processes_with_marker, wait_until

CRASHING = f"""[Service]
ExecStart=
ExecStart=/usr/bin/python3 -IS {INSIDE}/tests/e2e_systemd/crasher.py run --config {CONFIG}
RestartSec=0
"""
STARTS = "/var/lib/vllm/starts"

ACTIONS = {"Launch", "Adopt", "WatchPort", "WarmUp", "AnnounceReady", "Reply", "Abandon", "Terminate", "Sweep"}
"""All that is done with an engine that nothing ails."""
SAVES = 9
"""At least three of a start, two of a restart, of a stop and of an end."""

Test = Callable[[Document], bool]


class CrashingNode:
    """One engine of a daemon that dies where it is told to, and what must be true after each death."""

    def __init__(self, node: PackagedNode, kind: str, how: str) -> None:
        self.node = node
        self._kind, self._how = kind, how
        self._marker = uuid.uuid4().hex
        env = {"CRASH_TEST": self._marker, "VLLM_SIM_RECORD": STARTS}
        warmup = {"prefill_tokens": 8, "decode_tokens": 4, "max_rounds": 2}
        node.drop_in(CRASHING)
        node.configure("a", env=env, warmup=warmup, drain_timeout_s=0)

    # --- dying ------------------------------------------------------------------------------------------------------

    def at_each_step(self, prepare: Callable[[], object], act: Callable[[], Test]) -> None:
        """Prepare, arm the daemon for its first step, act, see all converge; then for its second, until it had no more.

        What is done says what the engine must come to.
        """
        for at in itertools.count(1):
            prepare()
            old = self.node.pid
            plan = {"kind": self._kind, "at": at, "how": self._how}
            self.node.machine.write(f"{PLAN}.new", json.dumps(plan))
            self.node.machine.path(f"{PLAN}.new").rename(self.node.machine.path(str(PLAN)))
            test = act()
            self.converged(test)
            with contextlib.suppress(FileNotFoundError):
                self.node.machine.path(str(PLAN)).unlink()
                return
            self.node.wait_new_daemon(old)
            self.converged(test)

    def request(self, op: str) -> bool:
        """Whether a request was accepted. Without an answer nobody was promised anything."""
        done = self.node.machine.run("vllm-supervisor", op, "a", check=False)
        assert done.returncode in {0, 3}, f"{done.returncode} {done.stdout} {done.stderr}"
        return done.returncode == 0

    # --- converging ---------------------------------------------------------------------------------------------------

    def converged(self, test: Test) -> Document:
        """Wait until the engine is as wanted, and see that everything else is too."""
        engine = self.node.wait_engine("a", test, f"a to converge after {self.steps()}: {self.node.engine('a')}")
        lives = engine["state"] == "ready"

        def alone() -> bool:
            units = self.node.systemctl("list-units", "--all", "--no-legend", "--plain", "vllm-engine-*")
            ours = self.node.processes("a")
            everywhere = processes_with_marker("CRASH_TEST", self._marker)
            return len(units.splitlines()) == lives and len(ours) == len(everywhere) and bool(ours) == lives

        wait_until(alone, DEADLINE_S, f"nothing but {'one unit' if lives else 'nothing'} after {self.steps()}")
        generations = self.generations()
        assert generations == sorted(set(generations)), f"each is started once: {generations} after {self.steps()}"
        assert engine["generation"] == generations[-1]
        assert not list(self.node.machine.path(STATE_DIR).glob("bug-*")), self.node.machine.journal("-u", UNIT)
        return engine

    def generations(self) -> list[int]:
        """Of each start of the simulated vllm, as a process of it saw it."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            lines = self.node.machine.path(STARTS).read_text().splitlines()
        return [int(json.loads(line)["env"]["SUPERVISED_GENERATION"]) for line in lines]

    def steps(self) -> list[str]:
        """The steps that were died at."""
        with contextlib.suppress(FileNotFoundError):
            return self.node.machine.path(str(STEPS)).read_text().split()
        return []


def is_ready(engine: Document) -> bool:
    return bool(engine["state"] == "ready" and engine["wanted"] == "running")


def is_stopped(engine: Document) -> bool:
    return bool(engine["state"] == engine["wanted"] == "stopped")


def is_settled(engine: Document) -> bool:
    return is_ready(engine) or is_stopped(engine)


@pytest.mark.parametrize(("kind", "how"), [("action", "before"), ("action", "after"), ("save", "before")])
def test_the_next_daemon_converges_wherever_one_was_killed(packaged: PackagedNode, kind: str, how: str) -> None:
    crashing = CrashingNode(packaged, kind, how)

    def boot() -> Test:
        packaged.systemctl("--no-block", "start", UNIT)
        return is_ready

    def restart() -> Test:
        before = packaged.engine("a")["generation"]
        accepted = crashing.request("restart")
        return lambda engine: is_ready(engine) and (engine["generation"] > before or not accepted)

    def stop() -> Test:
        return is_stopped if crashing.request("stop") else is_settled

    def end() -> Test:
        packaged.systemctl("stop", UNIT, check=False)
        packaged.systemctl("start", UNIT)
        return is_ready

    def be_ready() -> None:
        assert crashing.request("start")
        crashing.converged(is_ready)

    def adopt() -> Test:
        engine = packaged.engine("a")
        packaged.kill(packaged.pid)
        return lambda after: (
            is_ready(after)
            and (after["pid"], after["generation"])
            == (
                engine["pid"],
                engine["generation"],
            )
        )

    crashing.at_each_step(lambda: packaged.systemctl("stop", UNIT), boot)
    for act in (restart, adopt, stop, end):
        crashing.at_each_step(be_ready, act)
    if kind == "save":
        assert len(crashing.steps()) > SAVES
    else:
        assert set(crashing.steps()) == ACTIONS
