"""Launch plans for the daemon: the configuration, the profiles, and what is known of vLLM and of the GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from supervisord import config_gpus
from supervisord.config import Loaded
from supervisord.config_problems import Problem, problem_of
from supervisord.core import telemetry
from supervisord.core.gpu_inventory import find
from supervisord.core.gpu_kinds import GpuKind
from supervisord.core.model import LaunchPlan, Node
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.engine.flags import FlagBook
from supervisord.engine.launch import build_plan
from supervisord.engine.launch_flags import Knowledge
from supervisord.engine.profiles import Profiles

READ_FLAGS_S: Final = 100.0
"""How long a reload may ask the installed vLLMs for their flags, which is done once for each installation."""


class Planner:
    """Makes launch plans. `node` gives what is known of the GPUs, and which engines there are, now."""

    def __init__(
        self,
        state_dir: Path,
        profiles: Profiles,
        *,
        as_root: bool,
        base_env: Mapping[str, str],
        node: Callable[[], Node],
    ) -> None:
        self._profiles = profiles
        self._as_root = as_root
        self._base_env = base_env
        self._node = node
        self._flags = FlagBook(state_dir, as_root=as_root, base_env=base_env)

    def plan(self, spec: EngineSpec) -> LaunchPlan:
        """How an engine is launched now: nothing is asked for that takes time, its flags are known or they are not."""
        return self._build(spec, Knowledge(self._flags.known(spec), self._kinds(spec), self._profiles))

    def plan_ids(self, spec: NodeSpec) -> dict[str, str]:
        """The plan of each engine in short: it does not depend on what is known of vLLM or of the GPUs."""
        known = Knowledge(profiles=self._profiles)
        return {name: self._build(engine, known).plan_id for name, engine in spec.engines.items()}

    def plans_of(self, loaded: Loaded, profiles: Profiles) -> dict[str, LaunchPlan]:
        """How the engines of a new configuration would be launched; their vLLM is asked for its flags if need be."""
        until = time.monotonic() + READ_FLAGS_S
        plans = {}
        for name, spec in loaded.spec.engines.items():
            flags = self._flags.read(spec, max(0.0, until - time.monotonic()))
            plans[name] = self._build(spec, Knowledge(flags, self._kinds(spec), profiles, loaded.origins))
        return plans

    def gpu_problems(self, loaded: Loaded) -> list[Problem]:
        """What is wrong with the GPUs of a new configuration; nothing, unless all GPUs are seen now.

        What is in force already is left alone: a GPU that died meanwhile must not keep other changes out.
        """
        node = self._node()
        if node.telemetry.swept_at is None or telemetry.trouble(node) is not None:
            return []

        def there(engine: str, gpu: str) -> bool:
            in_force = node.spec.engines.get(engine)
            return (in_force is not None and gpu in in_force.gpus) or find(node.unseen_gpus, gpu) is not None

        found = [*config_gpus.unknown(loaded.spec, node.gpus, there)]
        old = set(config_gpus.too_much_here(node.spec, node.gpus))
        found += [finding for finding in config_gpus.too_much_here(loaded.spec, node.gpus) if finding not in old]
        return [problem_of(finding, loaded.origins) for finding in found]

    def use(self, profiles: Profiles) -> None:
        """Plan with these from now on."""
        self._profiles = profiles

    def _build(self, spec: EngineSpec, known: Knowledge) -> LaunchPlan:
        return build_plan(spec, as_root=self._as_root, base_env=self._base_env, known=known)

    def _kinds(self, spec: EngineSpec) -> list[GpuKind] | None:
        """The kinds of an engine's GPUs; None unless all of them are known."""
        known = self._node().gpus
        gpus = [gpu for name in spec.gpus if (gpu := find(known, name)) is not None and gpu.generation]
        return [GpuKind(gpu.generation, gpu.kind) for gpu in gpus] if len(gpus) == len(spec.gpus) else None
