"""supervisord, circus, runit and PM2, each configured as its manual has it for a server that must run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

from tests.bench.peer import DOWN, Peer, Seen, wait_gone
from tests.sim.engine import alive

PEERS = "VLLM_SUPERVISOR_BENCH_PEERS"
"""Names the folder where scripts/bench has installed them."""
_ANSWER_S = 60.0


def installed(path: str) -> str:
    """A program below that folder.

    Raises:
        FileNotFoundError: It is not there.
    """
    found = Path(os.environ.get(PEERS, "/nonexistent")) / path
    if not found.exists():
        raise FileNotFoundError(f"cannot find {found}: scripts/bench installs it and names its folder in {PEERS}")
    return str(found)


class _Child(Peer):
    """A supervisor that stays in the foreground, as our child."""

    _process: subprocess.Popen[bytes] | None = None

    def roots(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def reap(self) -> None:
        """Take note of its end, so that it is no zombie."""
        if self._process is not None:
            self._process.wait(_ANSWER_S)

    def end(self) -> None:
        super().end()
        self.reap()


class Supervisord(_Child):
    name = "supervisord"
    what = "`autorestart=true startsecs=1 stopasgroup=true killasgroup=true`, control by Unix socket"
    looks_every_s = 1

    def configure(self) -> None:
        head = (
            f"[unix_http_server]\nfile={self.home}/s\n[supervisord]\nnodaemon=true\nlogfile={self.home}/supervisord.log\n"
            f"pidfile={self.home}/pid\nchildlogdir={self.home}\n[supervisorctl]\nserverurl=unix://{self.home}/s\n"
            "[rpcinterface:supervisor]\n"
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n"
        )
        parts = [
            f"[program:{engine.name}]\ncommand={engine.script} {' '.join(engine.arguments)}\nautorestart=true\n"
            "startsecs=1\nstopasgroup=true\nkillasgroup=true\n"
            for engine in self.engines
        ]
        (self.outside / "c").write_text(head + "".join(parts), encoding="utf-8")

    def launch(self) -> None:
        self._process = self.spawn([installed("venv/bin/supervisord"), "-c", f"{self.home}/c"])

    def status_argv(self) -> list[str]:
        return [installed("venv/bin/supervisorctl"), "-c", f"{self.home}/c", "status"]

    def seen(self, name: str) -> Seen:
        found = re.search(rf"^{name} +(\w+) +(?:pid (\d+))?", self.run(self.status_argv()), re.MULTILINE)
        return Seen(found[1] == "RUNNING", int(found[2] or 0)) if found else DOWN

    def shut_down(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self.reap()


class Circus(_Child):
    name = "circus"
    what = "`numprocesses = 1`, `check_delay = 5` (its default), control by ipc"
    looks_every_s = 5

    def configure(self) -> None:
        head = f"[circus]\ncheck_delay = 5\nendpoint = ipc://{self.home}/ctl\npubsub_endpoint = ipc://{self.home}/pub\n"
        parts = [
            f"[watcher:{engine.name}]\ncmd = {engine.script} {' '.join(engine.arguments)}\nnumprocesses = 1\n"
            for engine in self.engines
        ]
        (self.outside / "c.ini").write_text(head + "".join(parts), encoding="utf-8")

    def launch(self) -> None:
        self._process = self.spawn([installed("venv/bin/circusd"), f"{self.home}/c.ini"])

    def status_argv(self) -> list[str]:
        return [installed("venv/bin/circusctl"), "--endpoint", f"ipc://{self.home}/ctl", "status"]

    def seen(self, name: str) -> Seen:
        return Seen(up=re.search(rf"^{name}: active$", self.run(self.status_argv()), re.MULTILINE) is not None)

    def shut_down(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self.reap()


class Runit(_Child):
    name = "runit"
    what = "`runsvdir` over one folder, a `run` script that execs the engine, no log service"

    def configure(self) -> None:
        for engine in self.engines:
            folder = self.outside / "service" / engine.name
            folder.mkdir(parents=True)
            run = folder / "run"
            run.write_text(f"#!/bin/sh\nexec {engine.script} {' '.join(engine.arguments)}\n", encoding="utf-8")
            run.chmod(0o755)

    def launch(self) -> None:
        self._process = self.spawn(["runsvdir", "-P", f"{self.home}/service"])

    def _services(self) -> list[str]:
        return [f"{self.home}/service/{engine.name}" for engine in self.engines]

    def status_argv(self) -> list[str]:
        return ["sv", "status", *self._services()]

    def seen(self, name: str) -> Seen:
        found = re.search(rf"^(\w+): \S+/{name}: \(pid (\d+)\)", self.run(self.status_argv()), re.MULTILINE)
        return Seen(found[1] == "run", int(found[2])) if found else DOWN

    def shut_down(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.run(["sv", "-w", "20", "force-shutdown", *self._services()])
            self._process.send_signal(signal.SIGHUP)
            self.reap()


class Pm2(Peer):
    name = "PM2"
    what = "an ecosystem file, `interpreter: none`, else its defaults; `pm2 save`, and later `pm2 resurrect`"

    def __init__(self) -> None:
        super().__init__()
        self._env |= {"PM2_HOME": f"{self.home}/pm2", "PM2_DISCRETE_MODE": "true"}

    def configure(self) -> None:
        apps = [
            {"name": engine.name, "script": engine.script, "args": engine.arguments, "interpreter": "none"}
            for engine in self.engines
        ]
        (self.outside / "ecosystem.json").write_text(json.dumps({"apps": apps}), encoding="utf-8")

    def _pm2(self, *argv: str) -> list[str]:
        return [installed("pm2/node_modules/.bin/pm2"), *argv]

    def launch(self) -> None:
        self.spawn(self._pm2("start", f"{self.home}/ecosystem.json")).wait(_ANSWER_S * 3)
        self.run(self._pm2("save"))

    def revive(self) -> None:
        self.run(self._pm2("resurrect"))

    def roots(self) -> list[int]:
        pid = self.outside / "pm2" / "pm2.pid"
        return [int(pid.read_text())] if pid.exists() else []

    def status_argv(self) -> list[str]:
        return self._pm2("ls")

    def seen(self, name: str) -> Seen:
        told = self.run(self._pm2("jlist"))
        start = told.find('[{"')
        for app in json.JSONDecoder().raw_decode(told[start:])[0] if start >= 0 else []:
            if app["name"] == name:
                return Seen(app["pm2_env"]["status"] == "online", app["pid"])
        return DOWN

    def shut_down(self) -> None:
        roots = self.roots()
        if any(alive(pid) for pid in roots):
            self.run(self._pm2("kill"))
            wait_gone(roots)
