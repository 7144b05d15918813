"""What several checks need to know, gathered once: the configuration, the daemon's answer, NVML's, systemd's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from supervisord.config import Survey as ConfigSurvey
from supervisord.config import daemon_is_root, survey
from supervisord.config_users import ENGINE_USER, Account, own_account
from supervisord.control.client import ControlError, DeniedError, UnreachableError, get
from supervisord.core.gpu_samples import GpuPlace, GpuReading
from supervisord.core.gpus import as_seen
from supervisord.core.model import Gpu
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.core.telemetry import FIRST_DEADLINE_S
from supervisord.doctor.box import Box
from supervisord.doctor.lateness import LateError, in_time
from supervisord.gpu.protocol import Depths
from supervisord.gpu.protocol import Survey as GpuSurvey
from supervisord.gpu.survey import SurveyError, look
from supervisord.launcher.service import DAEMON

NVML_S: Final = FIRST_DEADLINE_S
"""Initialising the driver takes 1 to 3 s for each GPU while persistence mode is off."""
ASK_S: Final = 5.0
READ_S: Final = 10.0
MARGIN_S: Final = 3.0
"""More than a call that keeps a deadline of its own can need."""

_UNIT_PROPERTIES: Final = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "Result",
    "ExecMainStatus",
    "NeedDaemonReload",
    "TimeoutStopUSec",
    "LimitNOFILE",
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why something is not known. `code` says which way it is not, for checks that tell them apart."""

    why: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known.

    `as_root`: the daemon of this configuration is root. `daemon`: its status document. `unit`: what systemctl shows.
    """

    box: Box
    config_path: Path
    socket: str
    as_root: bool
    config: ConfigSurvey | Unknown
    daemon: Mapping[str, Any] | Unknown
    gpus: GpuSurvey | Unknown
    unit: Mapping[str, str] | Unknown

    @property
    def node(self) -> NodeSpec:
        """The configuration, as far as it is known."""
        return self.config.loaded.spec if isinstance(self.config, ConfigSurvey) else NodeSpec()

    @property
    def whole(self) -> bool:
        """Whether all that the configuration says is known; otherwise defaults stand for it."""
        return self.config.code == "missing" if isinstance(self.config, Unknown) else self.config.whole

    @property
    def engines(self) -> list[EngineSpec]:
        """Engines of the configuration."""
        return list(self.node.engines.values())

    @property
    def gpu_engines(self) -> list[EngineSpec]:
        """Those that need GPUs."""
        return [spec for spec in self.engines if spec.gpus]

    def user_of(self, spec: EngineSpec) -> Account | None:
        """Whom an engine runs as; None: there is no such account."""
        return self.box.account(spec.user or ENGINE_USER) if self.as_root else own_account()

    @property
    def readings(self) -> list[tuple[GpuReading, Depths]]:
        """Each GPU as NVML shows it."""
        if isinstance(self.gpus, Unknown):
            return []
        return list(zip(self.gpus.sweep.gpus, self.gpus.depths, strict=True))

    @property
    def inventory(self) -> dict[str, Gpu]:
        """The GPUs that answer, by UUID, for what the core knows of GPUs."""
        if isinstance(self.gpus, Unknown):
            return {}
        sweep = self.gpus.sweep
        seen = [reading for reading in sweep.gpus if reading.uuid and reading.error is None]
        return {reading.uuid: as_seen(Gpu(reading.uuid), reading, sweep) for reading in seen}

    @property
    def has_driver(self) -> bool:
        """Whether an NVIDIA driver is loaded."""
        answers = not isinstance(self.gpus, Unknown) and self.gpus.sweep.problem is None
        return answers or kernel_version(self.box) is not None

    @property
    def needs_driver(self) -> bool:
        """Whether there is one, or something for it to do: an engine or a card."""
        return self.has_driver or bool(self.gpu_engines or cards(self.box))


def gather(box: Box, config_path: Path, socket: str | None) -> Facts:
    """Ask everybody; bounded by the deadlines above. `socket`: None means the configured one."""
    # Not Path.exists: it raises where we may not look.
    as_root = daemon_is_root(config_path) if os.path.exists(config_path) else box.is_root  # noqa: PTH110
    config = bounded(READ_S, partial(_configuration, config_path, as_root=as_root))
    node = config.loaded.spec if isinstance(config, ConfigSurvey) else NodeSpec()
    place = socket or node.supervisor.socket
    daemon = bounded(ASK_S + MARGIN_S, partial(_daemon, place))
    return Facts(
        box=box,
        config_path=config_path,
        socket=place,
        as_root=as_root,
        config=config,
        daemon=daemon,
        gpus=bounded(NVML_S + MARGIN_S, partial(_gpus, daemon)),
        unit=bounded(READ_S, partial(_unit, box)),
    )


def bounded(timeout_s: float, ask: Callable[[], T | Unknown]) -> T | Unknown:
    """The answer, or why there is none."""
    try:
        return in_time(timeout_s, ask)
    except LateError as error:
        return Unknown(str(error), "late")
    except Exception as error:  # noqa: BLE001 - a bug in one source must not hide what the others know
        return Unknown(f"internal error: {type(error).__name__}: {error}; please report this", "trouble")


def kernel_version(box: Box) -> str | None:
    """Version of the NVIDIA driver that is loaded."""
    version = box.text("/sys/module/nvidia/version")
    return version.strip() if version and version.strip() else None


def cards(box: Box) -> list[str]:
    """PCI ids of NVIDIA's GPUs on the bus, whether there is a driver for them or not."""
    return _devices(box, ("0x0300", "0x0302"))


def switches(box: Box) -> list[str]:
    """PCI ids of NVSwitches: what a fabric manager is for."""
    return _devices(box, ("0x0680",))


def _devices(box: Box, classes: tuple[str, ...]) -> list[str]:
    folder = "/sys/bus/pci/devices"
    return [
        name
        for name in box.names(folder)
        if (box.text(f"{folder}/{name}/vendor") or "").strip() == "0x10de"
        and (box.text(f"{folder}/{name}/class") or "").startswith(classes)
    ]


def _configuration(path: Path, *, as_root: bool) -> ConfigSurvey | Unknown:
    try:
        os.stat(path)  # noqa: PTH116 (the error tells the cases apart)
    except FileNotFoundError:
        return Unknown(f"{path} is not there", "missing")
    except PermissionError:
        return Unknown(f"{path} may not be looked at by this user", "denied")
    except OSError as error:
        return Unknown(f"{path}: {error.strerror}", "trouble")
    if not os.access(path, os.R_OK):
        return Unknown(f"{path} may not be read by this user", "denied")
    return survey(path, trust=as_root)


def _daemon(socket: str) -> Mapping[str, Any] | Unknown:
    try:
        document = get(socket, "/v1/status", ASK_S).document()
    except UnreachableError as error:
        return Unknown(str(error), "down")
    except DeniedError as error:
        return Unknown(str(error), "denied")
    except ControlError as error:
        return Unknown(str(error), "trouble")
    whole = isinstance(document.get("supervisor"), dict) and all(
        isinstance(document.get(key), list) and all(isinstance(item, dict) for item in document[key])
        for key in ("engines", "gpus")
    )
    return document if whole else Unknown("the daemon's answer makes no sense", "trouble")


def _gpus(daemon: Mapping[str, Any] | Unknown) -> GpuSurvey | Unknown:
    """Ask NVML, except where that would do harm: what an operator closed stays closed, a dead GPU is not touched."""
    avoid = []
    if not isinstance(daemon, Unknown):
        trouble = daemon["supervisor"].get("gpu_trouble")
        if isinstance(trouble, dict) and trouble.get("code") == "gpu_released":
            return Unknown(str(trouble.get("message")), "released")
        bad = [gpu for gpu in daemon["gpus"] if gpu.get("quarantined")]
        avoid = [GpuPlace(str(gpu.get("uuid")), str(gpu.get("pci_id") or ""), gpu.get("index")) for gpu in bad]
    try:
        return look(NVML_S, [place for place in avoid if place.pci_id])
    except SurveyError as error:
        return Unknown(str(error), "hangs" if error.hangs else "trouble")


def _unit(box: Box) -> Mapping[str, str] | Unknown:
    if not box.has_systemd:
        return Unknown("systemd does not run this machine", "absent")
    told = box.run(("systemctl", "show", DAEMON, f"--property={','.join(_UNIT_PROPERTIES)}"))
    if told is None:
        return Unknown("systemctl does not answer")
    return dict(line.partition("=")[::2] for line in told.splitlines())
