"""systemd with a plain unit, and us with engines as services, in a machine that is booted for it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.bench.engines import BenchEngine, answers_argv
from tests.bench.own import FAST, Settings, seen_in
from tests.bench.peer import DOWN, Peer, Seen
from tests.bench.processes import family, number_inside
from tests.daemon.outside import pids
from tests.e2e_systemd.machine import INSIDE, Machine
from tests.e2e_systemd.node import SOCKET, UNIT, USER, SupervisedNode

HOME = "/srv/bench"

# As guides write it: a user, after the driver's daemon, always, after 10 s, the journal.
_PLAIN_UNIT = """[Unit]
Description=vLLM engine {name}
After=network.target nvidia-persistenced.service
[Service]
User={user}
ExecStart={command}
Restart=always
RestartSec={restart}
StandardOutput=journal
StandardError=journal
[Install]
WantedBy=multi-user.target
"""


class InMachine(Peer):
    """A supervisor in a booted machine."""

    def __init__(self) -> None:
        super().__init__()
        self.outside.rmdir()
        self.machine = Machine()

    def __enter__(self) -> Peer:
        self.machine.__enter__()
        self.outside, self.home = self.machine.path(HOME), HOME
        self.outside.mkdir(mode=0o755)
        return self

    def end(self) -> None:
        self.machine.close()

    def sim(self) -> list[str]:
        return [f"{INSIDE}/tests/sim/vllm"]

    def python(self) -> list[str]:
        argv, env = self.machine.python()
        return ["env", *(f"{key}={value}" for key, value in env.items()), *argv]

    def run(self, argv: Sequence[str], timeout_s: float = 120) -> str:
        done = self.machine.run(*argv, check=False, timeout_s=timeout_s)
        return done.stdout + done.stderr

    def prober(self, engine: BenchEngine, timeout_s: float) -> subprocess.Popen[bytes]:
        return self.machine.popen(*answers_argv(self.python(), engine.port, timeout_s), stdout=subprocess.PIPE)

    def pid_outside(self, pid: int) -> int:
        """The process that has this number in there; 0: none."""
        space = Path(f"/proc/{self.machine.pid1}/ns/pid").readlink()
        for one in pids():
            with contextlib.suppress(OSError):
                if number_inside(one) == pid and Path(f"/proc/{one}/ns/pid").readlink() == space:
                    return one
        return 0


class PlainUnit(InMachine):
    name = "systemd, plain unit"
    what = "`Restart=always`, `RestartSec=10`, own user, output to the journal; PID 1 and journald are counted"
    can_be_killed = False
    restart = "10"

    def configure(self) -> None:
        for engine in self.engines:
            command = f"{engine.script} {' '.join(engine.arguments)}"
            text = _PLAIN_UNIT.format(name=engine.name, user=USER, command=command, restart=self.restart)
            self.machine.write(f"/etc/systemd/system/{self._unit(engine.name)}", text)

    @staticmethod
    def _unit(name: str) -> str:
        return f"vllm-{name}.service"

    def _units(self) -> list[str]:
        return [self._unit(engine.name) for engine in self.engines]

    def launch(self) -> None:
        self.machine.run("systemctl", "daemon-reload")
        self.machine.run("systemctl", "start", *self._units())

    def roots(self) -> list[int]:
        return [self.machine.pid1] if self.machine.pid1 else []

    def own(self) -> list[int]:
        journald = int(self.machine.show("systemd-journald.service", "MainPID")["MainPID"])
        return [self.machine.pid1, self.pid_outside(journald)]

    def status_argv(self) -> list[str]:
        return ["systemctl", "status", *self._units()]

    def seen(self, name: str) -> Seen:
        shown = self.machine.show(self._unit(name), "ActiveState", "MainPID")
        return Seen(shown["ActiveState"] == "active", self.pid_outside(int(shown["MainPID"])))

    def shut_down(self) -> None:
        """The machine goes as a whole."""


class DefaultUnit(PlainUnit):
    name = "systemd, `RestartSec=` left out"
    what = "the same unit with systemd's own delay of 100 ms"
    restart = "100ms"


class OursAsService(InMachine):
    name = "vllm-supervisor, services"
    what = "engines as services of systemd, no back-off, no warm-up, polled every 5 s"
    polls = True
    revives_itself = True
    settings = Settings()

    def __enter__(self) -> Peer:
        super().__enter__()
        self._node = SupervisedNode(self.machine)
        return self

    def configure(self) -> None:
        self._node.configure(launcher="systemd", supervisor=self.settings.supervisor)
        config = self.machine.path("/etc/vllm-supervisor/config.toml")
        parts = [
            self._node.engine_toml(
                engine.name,
                engine.port,
                command=[engine.script, "serve"],
                model="tiny",
                stop_timeout_s=5,
                warmup={"enabled": False},
                probe=self.settings.probe,
                restart={**FAST, **self.settings.restart},
            )
            for engine in self.engines
        ]
        with config.open("a", encoding="utf-8") as file:
            file.write("".join(parts))

    def launch(self) -> None:
        self._node.start()

    def revive(self) -> None:
        """systemd does."""

    def roots(self) -> list[int]:
        pid = self.pid_outside(self._node.pid) if self.machine.pid1 else 0
        return [pid] if pid else []

    def own(self) -> list[int]:
        return family(self.roots())

    def status_argv(self) -> list[str]:
        return [*self.python(), "-m", "supervisord", "--socket", SOCKET, "status"]

    def seen(self, name: str) -> Seen:
        seen = seen_in(self.run([*self.status_argv(), "--json"]), name)
        return Seen(seen.up, self.pid_outside(seen.pid or 0)) if seen.up else DOWN

    def wait_settled(self, engine: BenchEngine, starts: int) -> None:
        self._node.wait_state(engine.name, "ready", generation=starts)

    def wait_up(self, timeout_s: float = 600) -> None:
        for engine in self.engines:
            self._node.wait_state(engine.name, "ready", within_s=timeout_s)

    def shut_down(self) -> None:
        self.machine.run("systemctl", "stop", UNIT)
