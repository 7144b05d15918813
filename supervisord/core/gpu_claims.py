"""How much of its GPUs an engine will claim, as far as its configuration or vLLM itself says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from supervisord.core.model import Engine
from supervisord.core.spec import EngineSpec, FlagValue

CLAIM_DEFAULT: Final = 0.9
"""gpu-memory-utilization where nobody sets it; 0.92 in newer releases and in some profiles."""

_UTILIZATION: Final = "gpu-memory-utilization"
_ELSEWHERE: Final = ("config", "kv-cache-memory-bytes", "kv-cache-memory")
"""Flags after which the part is somewhere else, or not what counts."""
_REFUSED: Final = re.compile(r"desired GPU memory utilization \((0\.\d{1,6}|1(?:\.0{1,6})?),")
"""vLLM: Free memory on device ... on startup is less than desired GPU memory utilization (0.92, 128.6 GiB)."""


def stated(spec: EngineSpec) -> float | None:
    """The part of each GPU's memory that the configuration names; None: it does not, or not in parts."""
    if any(flag in spec.args for flag in _ELSEWHERE):
        return None
    part = _number(spec.args.get(_UTILIZATION))
    return part if part is not None and 0.0 < part <= 1.0 else None


def _number(value: FlagValue | None) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def assumed(spec: EngineSpec) -> float | None:
    """The same where it can be assumed; None: only vLLM can know (a wrapper, flags in the command, its own file)."""
    program, *words = spec.command
    plain = program.rpartition("/")[2] == "vllm" and words == ["serve"]
    if _UTILIZATION in spec.args or not plain or any(flag in spec.args for flag in _ELSEWHERE):
        return stated(spec)
    return CLAIM_DEFAULT


def of(engine: Engine) -> float | None:
    """What the gate goes by: more than is assumed, if vLLM has refused to start for that."""
    known = assumed(engine.spec)
    plan_id, refused = engine.refused_claim or ("", 0.0)
    return max(refused, known or 0.0) if refused and plan_id == engine.plan_id else known


def refused_in(tail: Iterable[str]) -> float | None:
    """The part that vLLM wanted and did not find free, in its last lines."""
    found = [match for line in tail for match in _REFUSED.finditer(line)]
    return float(found[-1][1]) if found else None
