"""What this machine has for the engines of a configuration, for `check-config` and `plan`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from supervisord import config_gpus
from supervisord.config_problems import Finding
from supervisord.control.client import ControlError, get
from supervisord.core.gpu_inventory import MIG, named, places
from supervisord.core.gpu_kinds import UNKNOWN, GpuKind
from supervisord.core.model import Gpu
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.engine.flags import FlagBook
from supervisord.engine.launch_flags import Knowledge
from supervisord.engine.profiles import Profiles

_ASK_S: Final = 5.0


class Machine:
    """The flags of each vLLM, the GPUs that the daemon knows, the profiles.

    Reading flags can take a minute for each vLLM. Without a daemon, or one that lets us ask, no GPU is known.
    """

    def __init__(self, node: NodeSpec, profiles: Profiles, *, as_root: bool) -> None:
        self._node = node
        self._profiles = profiles
        self._book = FlagBook(Path(node.supervisor.state_dir), as_root=as_root, base_env=os.environ)
        self._gpus, self._seen = _inventory(node)

    def known(self, spec: EngineSpec) -> Knowledge:
        """What is known for one engine."""
        return Knowledge(flags=self._book.read(spec), gpus=self.kinds(spec), profiles=self._profiles)

    def kinds(self, spec: EngineSpec) -> list[GpuKind] | None:
        """The kinds of an engine's GPUs; None unless all of them are known."""
        gpus = named(self._gpus, spec.gpus)
        if len(gpus) != len(spec.gpus):
            return None
        return [GpuKind(gpu.generation or UNKNOWN, gpu.kind or UNKNOWN) for gpu in gpus]

    def devices(self, spec: EngineSpec) -> str | None:
        """CUDA_VISIBLE_DEVICES that an engine would get now; None: it has no GPUs, or one that is not seen."""
        gpus = named(self._gpus, spec.gpus)
        seen = self._seen and all(gpu.absent_since is None for gpu in gpus)
        if not seen or not gpus or len(gpus) != len(spec.gpus) or spec.gpus[0].upper().startswith(MIG):
            return None
        return ",".join(map(str, places(self._gpus, gpus)))

    def gpu_problems(self) -> Iterator[Finding]:
        """What is wrong with the GPUs that a configuration names, where it is known which they are."""
        if self._seen:
            yield from config_gpus.too_much_here(self._node, self._gpus)

    def gpu_warnings(self) -> Iterator[Finding]:
        """What is probably not meant about them."""
        if not self._seen:
            yield from config_gpus.unchecked(self._node)
            return
        yield from config_gpus.unknown(self._node, self._gpus)
        yield from config_gpus.perhaps_too_much_here(self._node, self._gpus)
        yield from config_gpus.unused_overrides(self._node.gpu, self._gpus)


def _inventory(node: NodeSpec) -> tuple[dict[str, Gpu], bool]:
    """The GPUs as the daemon knows them, and whether it sees all of them now."""
    if not node.gpu.persistence_override and not any(spec.gpus for spec in node.engines.values()):
        return {}, False
    try:
        document = get(node.supervisor.socket, "/v1/status", timeout_s=_ASK_S).document()
    except ControlError:
        return {}, False
    found = [
        _gpu(gpu) for gpu in document.get("gpus", ()) if isinstance(gpu, dict) and isinstance(gpu.get("uuid"), str)
    ]
    daemon = document.get("supervisor")
    seen = isinstance(daemon, dict) and bool(daemon.get("driver")) and daemon.get("gpu_trouble") is None
    return {gpu.uuid: gpu for gpu in found}, seen


def _gpu(told: Mapping[str, Any]) -> Gpu:
    """One GPU of the status document, where persistence mode is known of all that answer."""
    persistence = told.get("persistence")
    answers = isinstance(persistence, dict) and persistence.get("wanted") is not None
    return Gpu(
        told["uuid"],
        pci_id=told.get("pci_id") or "",
        index=told.get("index"),
        name=told.get("name") or "",
        generation=told.get("generation") or "",
        kind=told.get("class") or "",
        absent_since=None if answers else 0.0,
    )
