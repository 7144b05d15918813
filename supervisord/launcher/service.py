"""The transient service that an engine runs as: its name, its properties, its environment file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from supervisord.core.spec import ENGINE_NAME_PATTERN
from supervisord.launcher.base import MARK_ENGINE, MARK_GENERATION, MARK_STATE, generation_of, log_identifier
from supervisord.launcher.choice import SLICE
from supervisord.launcher.preparing import Prepared
from supervisord.launcher.spawn import OOM_SCORE_ADJ, OPEN_FILES
from supervisord.launcher.units import Property

DAEMON: Final = "vllm-supervisor.service"
"""The unit of a daemon that was started by hand, for the order at shutdown."""

STOP_S: Final = 60
"""What systemd gives an engine after SIGTERM when not the daemon stops it (systemctl stop, shutdown)."""

_MARK_PLAN: Final = "SUPERVISED_PLAN"
_USEC: Final = 1_000_000
_INFINITY: Final = 2**64 - 1
_LINES_PER_S: Final = 2**32 - 1
"""As many as the property holds."""

_OPEN_FILES_MAX: Final = 524288
_UMASK: Final = 0o027
_PREFIX: Final = "vllm-engine-"
_SPECIAL: Final = re.compile(r'(["\\`$])')


class Marks(NamedTuple):
    """What a unit says of itself: all that is needed to adopt it, without any file."""

    engine: str
    generation: int
    plan_id: str


def unit_name(engine: str) -> str:
    """The unit of an engine."""
    return f"{_PREFIX}{engine}.service"


def engine_of(unit: str | None) -> str | None:
    """The engine of a unit; None when it is no engine's."""
    name = (unit or "").removeprefix(_PREFIX).removesuffix(".service")
    return name if re.fullmatch(ENGINE_NAME_PATTERN, name) and unit == unit_name(name) else None


def read_marks(unit: str, variables: Mapping[str, str], state_dir: str) -> Marks | None:
    """What a unit says of itself; None when it is not of a daemon with this state directory."""
    engine = engine_of(unit)
    if engine is None or variables.get(MARK_ENGINE) != engine or variables.get(MARK_STATE) != state_dir:
        return None
    return Marks(engine, generation_of(variables.get(MARK_GENERATION, "")), variables.get(_MARK_PLAN, ""))


def properties(marks: Marks, prepared: Prepared, *, env_file: Path, state_dir: str, daemon: str) -> list[Property]:
    """Everything that systemd is told (systemd.exec(5), systemd.service(5)). No secret: anybody can read it back.

    No device sandboxing, which a daemon-reload rewrites (A38); nothing that implies NoNewPrivileges, with which CUDA
    cannot load a missing module (nvidia-modprobe is setuid); no MemoryDenyWriteExecute, which ends every JIT.
    """
    public = {
        MARK_ENGINE: marks.engine,
        MARK_GENERATION: str(marks.generation),
        MARK_STATE: state_dir,
        _MARK_PLAN: marks.plan_id,
    }
    user: list[Property] = [("User", ("s", prepared.user.name))] if prepared.user is not None else []
    fields = {"VLLM_ENGINE": marks.engine, "VLLM_GENERATION": str(marks.generation)}
    return [
        ("Description", ("s", f"vLLM engine {marks.engine}, generation {marks.generation}")),
        ("Slice", ("s", SLICE)),
        # At shutdown the daemon goes first and ends its engines; the other way round its READY=1 would wait for us.
        ("Before", ("as", [daemon])),
        # `exec`: a program that cannot be executed is an error of the start. The exit status stays until StopUnit.
        ("Type", ("s", "exec")),
        ("RemainAfterExit", ("b", True)),
        ("Restart", ("s", "no")),
        # Not `ExecStartEx`, which has a flag for that: systemd 252 keeps it under that name, cannot read it at the next
        # daemon-reload, and takes the memory controller from a unit that it cannot read.
        ("ExecStart", ("a(sasb)", [(prepared.argv[0], [word.replace("$", "$$") for word in prepared.argv], False)])),
        *user,
        ("WorkingDirectory", ("s", str(prepared.directory))),
        ("UMask", ("u", _UMASK)),
        ("Environment", ("as", [f"{name}={value}" for name, value in public.items()])),
        ("EnvironmentFiles", ("a(sb)", [(str(env_file), False)])),
        ("StandardOutput", ("s", "journal")),
        ("StandardError", ("s", "journal")),
        ("SyslogIdentifier", ("s", log_identifier(marks.engine))),
        ("LogExtraFields", ("aay", [f"{name}={value}".encode() for name, value in fields.items()])),
        # journald's limit would drop the last words of a busy engine; its limits of size hold all the same. An interval
        # of 0 is no way to say that: systemd passes on to journald only what is not 0, and so its own limit holds.
        ("LogRateLimitIntervalUSec", ("t", _USEC)),
        ("LogRateLimitBurst", ("u", _LINES_PER_S)),
        # SIGTERM to the API server, which ends the rest; what it leaves gets SIGKILL.
        ("KillMode", ("s", "mixed")),
        ("TimeoutStopUSec", ("t", STOP_S * _USEC)),
        ("IgnoreSIGPIPE", ("b", False)),
        ("LimitCORE", ("t", 0)),
        ("LimitCORESoft", ("t", 0)),
        ("LimitMEMLOCK", ("t", _INFINITY)),
        ("LimitMEMLOCKSoft", ("t", _INFINITY)),
        ("LimitNOFILE", ("t", _OPEN_FILES_MAX)),
        ("LimitNOFILESoft", ("t", OPEN_FILES)),
        ("TasksMax", ("t", _INFINITY)),
        ("OOMScoreAdjust", ("i", OOM_SCORE_ADJ)),
        # The kernel ends all of an engine or nothing, and systemd says so (A29).
        ("OOMPolicy", ("s", "kill")),
        ("PrivateTmp", ("b", True)),
        # Of its own, so that nothing is left in it; as large as the machine's would be.
        ("TemporaryFileSystem", ("a(ss)", [("/dev/shm", "mode=1777,nosuid,size=50%")])),  # noqa: S108 (mounted there)
    ]


def write_environment(path: Path, env: Mapping[str, str]) -> None:
    """Write an EnvironmentFile that only root may read. Raises OSError, ValueError for text that it cannot hold."""
    lines = (f'{name}="{_SPECIAL.sub(_BACKSLASHED, value)}"\n' for name, value in env.items())
    data = "".join(lines).encode()
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


_BACKSLASHED: Final = r"\\\1"
