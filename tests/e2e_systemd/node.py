"""The daemon as a service of a booted machine, with simulated engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from supervisord.control import client
from tests.daemon.sims import table
from tests.e2e_systemd.machine import INSIDE, Machine
from tests.sim.engine import wait_until

DEADLINE_S: Final = 60
UNIT: Final = "vllm-supervisor.service"
STATE_DIR: Final = "/var/lib/vllm-supervisor"
SOCKET: Final = "/run/vllm-supervisor/control.sock"
CONFIG: Final = "/etc/vllm-supervisor/config.toml"
USER: Final = "nobody"
VLLM: Final = f"{INSIDE}/tests/sim/vllm"

_UNIT_FILE: Final = """
[Unit]
Description=vLLM supervisor under test
After=dbus.service
Wants=dbus.service
StartLimitIntervalSec=0
[Service]
Type=notify
NotifyAccess=main
ExecStart={python} -m supervisord run --config {config}
Environment={environment}
Restart=on-failure
RestartSec=50ms
WatchdogSec=30
StateDirectory=vllm-supervisor
StateDirectoryMode=0711
RuntimeDirectory=vllm-supervisor
RuntimeDirectoryPreserve=yes
[Install]
WantedBy=multi-user.target
"""

_ASK: Final = """
import sys, time, urllib.request
# Without pause until told to end by the file that goes away; says how many answers came and what went wrong.
import os
answers, failures = 0, []
flag, url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"})
while os.path.exists(flag):
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
        answers += 1
    except OSError as error:
        failures.append(str(error))
    time.sleep(0.005)
print(answers, failures[:3])
"""

Document = dict[str, Any]


class SupervisedNode:
    """One daemon in one machine; `engines` are names, with ports from 8101 on."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        python, env = machine.python()
        environment = " ".join(f"{name}={value}" for name, value in env.items())
        text = _UNIT_FILE.format(python=" ".join(python), config=CONFIG, environment=environment)
        machine.write(f"/etc/systemd/system/{UNIT}", text)
        machine.write("/etc/vllm-supervisor/mood.json", "{}")
        machine.run("systemctl", "daemon-reload")

    def configure(
        self, *engines: str, launcher: str = "auto", supervisor: Mapping[str, Any] | None = None, **keys: Any
    ) -> None:
        """Write the configuration; `keys` are those of every engine, tables as mappings."""
        head = table("supervisor", {"listen": "", "launcher": launcher, "poll_interval_s": 0.5, **(supervisor or {})})
        parts = [self.engine_toml(name, 8101 + at, **keys) for at, name in enumerate(engines)]
        self.machine.write(CONFIG, head + "".join(parts), 0o600)

    @staticmethod
    def engine_toml(name: str, port: int, **keys: Any) -> str:
        """One engine's tables."""
        plain = {key: value for key, value in keys.items() if not isinstance(value, dict)}
        own = {"command": [VLLM, "serve"], "model": "m", "port": port, "user": USER, "drain_timeout_s": 2}
        text = table(f"engine.{name}", {**own, **plain})
        tables = {"env": {}, "restart": {}, **{key: value for key, value in keys.items() if isinstance(value, dict)}}
        tables["env"] = {
            "VLLM_SIM_MOOD": "/etc/vllm-supervisor/mood.json",
            "HF_TOKEN": "hf_quite-secret",
            **tables["env"],
        }
        tables["restart"] = {"backoff_initial_s": 0, **tables["restart"]}
        return text + "".join(table(f"engine.{name}.{key}", value) for key, value in tables.items())

    def start(self) -> None:
        """Start the daemon; it is READY when that returns."""
        self.machine.run("systemctl", "start", UNIT)

    @property
    def pid(self) -> int:
        """The daemon's pid, as in there."""
        return int(self.machine.show(UNIT, "MainPID")["MainPID"])

    def status(self) -> Document:
        """The status document."""
        return client.get(str(self.machine.path(SOCKET)), "/v1/status", timeout_s=DEADLINE_S).document()

    def engine(self, name: str) -> Document:
        """One engine of it; empty while no daemon answers."""
        with contextlib.suppress(client.ControlError, OSError):
            return next((e for e in self.status()["engines"] if e["name"] == name), {})
        return {}

    def wait_engine(
        self, name: str, test: Callable[[Document], bool], what: str, within_s: float = DEADLINE_S
    ) -> Document:
        """Wait until an engine is as wanted."""
        return wait_until(
            lambda: engine if (engine := self.engine(name)) and test(engine) else {}, within_s, what, every_s=0.02
        )

    def wait_state(
        self, name: str, state: str, generation: int | None = None, within_s: float = DEADLINE_S
    ) -> Document:
        """Wait for a state, of a generation if one is given."""

        def test(engine: Document) -> bool:
            return engine["state"] == state and generation in (None, engine["generation"])

        what = f"{name} to be {state} (generation {generation}): {self.engine(name)}"
        return self.wait_engine(name, test, what, within_s)

    def wait_new_daemon(self, old: int) -> int:
        """Wait until another daemon than the old one answers; its pid."""

        def look() -> int:
            with contextlib.suppress(client.ControlError, OSError):
                pid = int(self.status()["supervisor"]["pid"])
                return pid if pid != old else 0
            return 0

        return wait_until(look, DEADLINE_S, "the next daemon", every_s=0.02)

    def cli(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command as an operator would."""
        python, env = self.machine.python()
        return self.machine.run(*python, "-m", "supervisord", "--socket", SOCKET, *argv, check=check, env=env)

    def events(self, kind: str) -> list[Document]:
        """What was told under this kind, from the daemon's journal."""
        self.machine.run("journalctl", "--sync")
        matches = (f"_SYSTEMD_UNIT={UNIT}", f"VLLM_EVENT={kind}")
        lines = self.machine.run("journalctl", *matches, "-o", "json", "--no-pager").stdout.splitlines()
        return [{"event": entry["MESSAGE"], "kind": kind} for entry in map(json.loads, lines)]

    def mood(self, **mood: Any) -> None:
        """Change how all simulated engines behave."""
        self.machine.write("/etc/vllm-supervisor/mood.json.new", json.dumps(mood))
        self.machine.run("mv", "/etc/vllm-supervisor/mood.json.new", "/etc/vllm-supervisor/mood.json")

    def processes(self, name: str) -> list[int]:
        """All processes of an engine, as in there."""
        return self.machine.members(f"/vllm.slice/vllm-engine-{name}.service")

    def kill(self, pid: int, signal: str = "KILL") -> None:
        """Signal one process in there."""
        self.machine.run("kill", f"-{signal}", str(pid))

    def asking(self, port: int, path: str = "/health", body: Mapping[str, Any] | None = None) -> Asking:
        """Ask an engine again and again meanwhile; with a body by POST."""
        return Asking(self.machine, port, path, "" if body is None else json.dumps(body))


class Asking:
    """Somebody who asks an engine all the time."""

    def __init__(self, machine: Machine, port: int, path: str, body: str) -> None:
        self._machine = machine
        self._flag = f"/run/asking-{port}"
        machine.write(self._flag, "")
        command = ("/usr/bin/python3", "-c", _ASK, self._flag, f"http://127.0.0.1:{port}{path}", body)
        self._process = machine.popen(*command, stdout=subprocess.PIPE)

    def end(self) -> tuple[int, str]:
        """How many answers came, and the first failures ("[]": none)."""
        time.sleep(0.05)
        self._machine.path(self._flag).unlink()
        told = self._process.communicate(timeout=DEADLINE_S)[0].decode()
        answers, _, failures = told.partition(" ")
        return int(answers), failures.strip()
