"""Run as root inside the virtual machine, with its Python alone: the story, and what was seen of it.

The last argument is where the answer goes: one JSON line. `story` judges nothing: test_oom.py does.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

UNIT: Final = "vllm-supervisor.service"
SLICE: Final = "vllm.slice"
CONFIG: Final = Path("/etc/vllm-supervisor/config.toml")
DROP_IN: Final = Path("/etc/systemd/system/vllm-engine-b.service.d/memory.conf")
MOODS: Final = Path("/srv")
CGROUPS: Final = Path("/sys/fs/cgroup")
WITHIN_S: Final = 120
LEAK_MIB_PER_S: Final = 64

SLICE_MAX: Final = 384 * 1024 * 1024
"""For both engines, of which each has less than 80 MiB while nothing leaks."""

UNIT_MAX: Final = 160 * 1024 * 1024

_HEAD: Final = """
[supervisor]
listen = ""
poll_interval_s = 1
"""

_ENGINE: Final = """
[engine.{name}]
command = ["{vllm}", "serve"]
model = "m"
port = {port}
[engine.{name}.env]
VLLM_SIM_MOOD = "{mood}"
[engine.{name}.warmup]
enabled = false
[engine.{name}.restart]
# Long enough for this script to make the next generation one that does not leak.
backoff_initial_s = 15
"""

Document = dict[str, Any]
_T = TypeVar("_T")


def story(package: Path, vllm: Path) -> Document:
    """Install, start two engines, and let one after the other grow beyond a limit: the slice's, then its unit's."""
    seen: Document = {
        "machine": {
            "kernel": run("uname", "-r"),
            "systemd": run("systemctl", "--version").splitlines()[0],
            "controllers": (CGROUPS / "cgroup.controllers").read_text(encoding="ascii").split(),
        }
    }
    run("dpkg", "-i", str(package))
    names = ["a", "b"]
    for name in names:
        set_mood(name)
    engines = (_ENGINE.format(name=n, port=8101 + at, vllm=vllm, mood=mood_of(n)) for at, n in enumerate(names))
    CONFIG.write_text(_HEAD + "".join(engines), encoding="utf-8")
    run("systemctl", "reload", UNIT)
    for name in names:
        wait_ready(name, 1)
    seen["daemon"] = [daemon()]
    run("systemctl", "set-property", SLICE, f"MemoryMax={SLICE_MAX}")
    seen["slice"] = beyond("a", SLICE, neighbour="b")
    seen["daemon"].append(daemon())
    # `set-property` on the unit of an engine would be gone with its generation.
    DROP_IN.parent.mkdir()
    DROP_IN.write_text(f"[Service]\nMemoryMax={UNIT_MAX}\n", encoding="ascii")
    run("systemctl", "daemon-reload")
    seen["unit"] = beyond("b", "vllm-engine-b.service", neighbour="a")
    seen["daemon"].append(daemon())
    return seen


def beyond(name: str, limited: str, *, neighbour: str) -> Document:
    """Let the engine's child leak until the kernel acts for the limit of a unit, and see what came of it."""
    before, beside = engine(name), engine(neighbour)
    family = processes(name, 1)
    limits = [memory_max(limited)]
    set_mood(name, leak_mib_per_s=LEAK_MIB_PER_S)
    begun = time.monotonic()
    ended = wait_for(lambda: found if (found := engine(name))["last_exit"] else None, f"{name} to be ended")
    set_mood(name)
    after = wait_ready(name, 2)
    return {
        "limits": [*limits, memory_max(limited)],
        "before": before,
        "ended": ended,
        "after": after,
        "took_s": round(time.monotonic() - begun, 1),
        "family": family,
        "left": processes(name, 1),
        "group": (cgroup(f"vllm-engine-{name}.service") / "memory.oom.group").read_text(encoding="ascii").strip(),
        "neighbour": [beside, engine(neighbour)],
        "events": [json.loads(line) for line in cli("events", "--engine", name, "--json").splitlines()],
        "why": json.loads(cli("why", name, "--json")),
        "kernel": run("sh", "-c", "journalctl -k --no-pager -o cat | grep -i 'out of memory'").splitlines(),
    }


def daemon() -> dict[str, str]:
    """How systemd sees the daemon."""
    shown = run("systemctl", "show", UNIT, "--property=MainPID", "--property=NRestarts", "--property=ActiveState")
    return dict(line.partition("=")[::2] for line in shown.splitlines())


def engine(name: str) -> Document:
    """One engine of the status document."""
    # Its exit code says whether all are ready.
    told = subprocess.run(["vllm-supervisor", "status", "--json"], stdout=subprocess.PIPE, text=True, check=False)
    return next(engine for engine in json.loads(told.stdout)["engines"] if engine["name"] == name)


def wait_ready(name: str, generation: int) -> Document:
    """Wait for this generation to be ready."""

    def look() -> Document | None:
        found = engine(name)
        return found if (found["state"], found["generation"]) == ("ready", generation) else None

    return wait_for(look, f"generation {generation} of {name} to be ready")


def wait_for(look: Callable[[], _T | None], what: str) -> _T:
    """Look until there is something."""
    until = time.monotonic() + WITHIN_S
    while (found := look()) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"waited {WITHIN_S} s for {what}")
        time.sleep(0.1)
    return found


def processes(name: str, generation: int) -> list[str]:
    """What lives of a generation of an engine, wherever it is: by the marks in its environment."""
    marks = {f"SUPERVISED_ENGINE={name}".encode(), f"SUPERVISED_GENERATION={generation}".encode()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if marks <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(f"{entry.name} {(entry / 'comm').read_text(encoding='utf-8').strip()}")
    return found


def cgroup(unit: str) -> Path:
    """Where the kernel keeps a unit."""
    return CGROUPS / SLICE / ("" if unit == SLICE else unit)


def memory_max(unit: str) -> str:
    """The limit that the kernel knows for a unit: bytes, or max."""
    return (cgroup(unit) / "memory.max").read_text(encoding="ascii").strip()


def mood_of(name: str) -> Path:
    """The file by which a simulated engine is told how to behave."""
    return MOODS / f"{name}.mood"


def set_mood(name: str, **mood: int) -> None:
    """Tell it, and those after it."""
    new = MOODS / "new.mood"
    new.write_text(json.dumps(mood), encoding="utf-8")
    new.chmod(0o644)
    new.replace(mood_of(name))


def cli(*argv: str) -> str:
    """Run a command as an operator would."""
    return run("vllm-supervisor", *argv)


def run(*argv: str) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{argv}: exit status {done.returncode}: {done.stdout}")
    return done.stdout.strip()


def main() -> None:
    """Tell the story, or how far it came."""
    package, vllm, answer = map(Path, sys.argv[1:])
    try:
        seen = story(package, vllm)
    except Exception:  # noqa: BLE001 (whatever it was, the test has to hear of it)
        journal = subprocess.run(["journalctl", "-b", "--no-pager"], stdout=subprocess.PIPE, text=True, check=False)
        seen = {"error": traceback.format_exc(), "journal": journal.stdout[-20000:]}
    with answer.open("w", encoding="utf-8") as line:
        line.write(json.dumps(seen) + "\n")


main()
