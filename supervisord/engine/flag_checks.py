"""What is wrong with giving some flags to an installed `vllm serve` on some GPUs, before anything is started.

An argument error ends vLLM with exit code 2 after seconds of imports; here it is a sentence with its remedy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisord.config_flags import flag_name
from supervisord.config_problems import Finding, Parts, nearest, shown
from supervisord.core.gpu_kinds import GENERATIONS, UNKNOWN, GpuKind
from supervisord.core.spec import EngineSpec, FlagValue
from supervisord.engine.flag_table import MOVED
from supervisord.engine.flags import MAYBE, NOTHING, SEVERAL, Flag, FlagSet
from supervisord.engine.version import Version

_CPU_BLOCK: Final = 32
_GPU_BLOCK: Final = 16
_LISTED: Final = 8
"""Choices that are shown; some flags have forty."""
_SLOW_KERNELS: Final = frozenset({"awq", "gptq"})
_RANKS: Final = ("tensor-parallel-size", "pipeline-parallel-size")
_ELSEWHERE: Final = ("data-parallel", "nnodes")


@dataclass(frozen=True, slots=True)
class Target:
    """What an engine will run on. `gpus`: the kinds of its GPUs, None: not known; a CPU engine has none at all."""

    version: str | None
    flags: FlagSet | None
    gpus: Sequence[GpuKind] | None


# --- names and values -------------------------------------------------------------------------------------------------


def name_and_value(name: str, value: FlagValue, target: Target, at: Parts) -> Finding | None:
    """What makes vLLM refuse this flag, whatever the machine; None when nothing is known against it."""
    head, dot, _ = name.partition(".")
    if (missing := _missing(head, value, target, at)) is not None or target.flags is None:
        return missing
    flag = target.flags.get(head)
    if flag is None:  # the negative form of a switch
        wrong = None if value is True else ("the flag takes no value", "write true")
    elif dot:  # a part of a JSON value
        wrong = ("the flag takes no value", "remove it") if flag.takes == NOTHING else None
    else:
        wrong = value_problem(flag, value)
    return None if wrong is None else Finding(at, *wrong, value=shown(value, at))


def command_flags(spec: EngineSpec, target: Target) -> Iterator[Finding]:
    """Flags in the command of an engine that its vLLM does not have."""
    at = ("engine", spec.name, "command")
    for word in spec.command[2:]:
        head = word.partition("=")[0].partition(".")[0]
        if head.startswith("--") and (found := _missing(flag_name(head[2:]), word, target, at)) is not None:
            yield found


def value_problem(flag: Flag, value: FlagValue) -> tuple[str, str] | None:
    """Message and remedy for a value that the flag does not take."""
    if value is True:
        needed = flag.takes not in {NOTHING, MAYBE}
        return ("the flag needs a value", "write one instead of true") if needed else None
    if value is False:
        if flag.negative:
            return None
        return f"this vLLM has no --no-{flag.name}", "remove it: without it the flag is off, or has its default"
    if flag.takes == NOTHING:
        return "the flag takes no value", "write true" + (" or false" if flag.negative else ", or remove it")
    if isinstance(value, tuple) and len(value) > 1 and flag.takes != SEVERAL:
        return "the flag takes one value", "write one, without brackets"
    if flag.choices:
        words = [item if isinstance(item, str) else json.dumps(item) for item in _items(value)]
        known = {choice.lower() for choice in flag.choices}
        if (wrong := next((word for word in words if word.lower() not in known), None)) is not None:
            return f"this vLLM takes only {_listed(flag.choices)}", _meant(wrong, flag.choices)
    return None


def _items(value: FlagValue) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _listed(choices: tuple[str, ...]) -> str:
    more = f" and {len(choices) - _LISTED} more" if len(choices) > _LISTED else ""
    return ", ".join(choices[:_LISTED]) + more


def _meant(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else "see vllm serve --help=all"


def _missing(name: str, value: FlagValue, target: Target, at: Parts) -> Finding | None:
    """The finding for a flag that this vLLM surely does not have. `name`: without dashes and without parts."""
    moved = MOVED.get(name)
    if target.flags is None:
        if moved is None or not moved.lacking(Version.parse(target.version or "")):
            return None
        known: Mapping[str, Flag] = {}
        remedy = moved.remedy
    else:
        known = target.flags.names
        positive = known.get(name.removeprefix("no-"))
        if name in known or (positive is not None and positive.negative):
            return None
        fits = moved is not None and (not moved.instead or any(flag in known for flag in moved.instead))
        remedy = moved.remedy if moved is not None and fits else _instead(name, known)
    release = f"vLLM {target.version}" if target.version else "this vLLM"
    return Finding(at, f"{release} has no --{name}", remedy, shown(value, at))


def _instead(name: str, known: Mapping[str, Flag]) -> str:
    """What was probably meant by a name that is not known."""
    if (short := known.get(f"-{name}")) is not None:
        return f"-{name} is --{short.name}: write that"
    longer = {flag.name for other, flag in known.items() if other.startswith(name)}
    if len(longer) == 1:
        # argparse would take it. But who reads the configuration, the supervisor as well, looks for the whole name.
        return f"it is an abbreviation: write {longer.pop()}"
    near = nearest(name, [*known, *(f"no-{flag.name}" for flag in known.values() if flag.negative)])
    return f"did you mean {near}?" if near else "remove it"


# --- the machine ------------------------------------------------------------------------------------------------------


def size_problems(spec: EngineSpec, args: Mapping[str, FlagValue]) -> Iterator[Finding]:
    """Numbers that vLLM refuses only once it runs: of memory, and of ranks."""
    at = ("engine", spec.name, "args")
    part = _number(args.get("gpu-memory-utilization"))
    if part is not None and not 0.0 < part <= 1.0:
        message = "it is a part of the memory of each GPU: more than 0, and 1 at most"
        value = shown(args["gpu-memory-utilization"])
        yield Finding((*at, "gpu-memory-utilization"), message, "write for example 0.9", value)
    sizes = {name: size for name in _RANKS if (size := _number(args.get(name))) is not None}
    ranks = math.prod(sizes.values())
    if spec.gpus and ranks > len(spec.gpus) and not _elsewhere(spec, args):
        largest = max(sizes, key=lambda name: sizes[name])
        what = " x ".join(f"{name} {size:g}" for name, size in sizes.items())
        message = f"{what} needs {ranks:g} GPUs, and gpus names {len(spec.gpus)}"
        yield Finding((*at, largest), message, "name that many in gpus, or lower it", shown(args[largest]))


def _elsewhere(spec: EngineSpec, args: Mapping[str, FlagValue]) -> bool:
    """Whether ranks may be on other machines, or their numbers in a file of vLLM's own."""
    of_command = [flag_name(word.partition("=")[0].lstrip("-")) for word in spec.command[1:] if word.startswith("-")]
    if args.get("distributed-executor-backend", "mp") != "mp" or "distributed-executor-backend" in of_command:
        return True
    return any(name.startswith(_ELSEWHERE) or name in {"config", "dp"} for name in (*of_command, *args))


def _number(value: FlagValue | None) -> float | None:
    """None for what is not there and for what is none; whether vLLM takes that is another question."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def machine_problems(spec: EngineSpec, args: Mapping[str, FlagValue], target: Target) -> Iterator[Finding]:
    """Flags that this hardware surely refuses."""
    at = ("engine", spec.name, "args")
    block = args.get("block-size")
    if not spec.gpus and type(block) is int and block % _CPU_BLOCK and _at_least(target.version, 0, 32):
        message = f"on a CPU vLLM takes only multiples of {_CPU_BLOCK}"
        yield Finding((*at, "block-size"), message, f"write {_CPU_BLOCK}, or remove it", shown(block))
    if (old := _oldest(target, before="turing")) is None:
        return
    for name in ("quantization", "kv-cache-dtype"):
        if _is_fp8(value := args.get(name)):
            message = f"{old.capitalize()} GPUs cannot compute with FP8, and vLLM has no way around it before Turing"
            remedy = "use an AWQ or GPTQ model, or other GPUs" if name == "quantization" else "remove it"
            yield Finding((*at, name), message, remedy, shown(value))


def machine_warnings(spec: EngineSpec, args: Mapping[str, FlagValue], target: Target) -> Iterator[Finding]:
    """Flags that this hardware takes at a price, or perhaps not at all."""
    at = ("engine", spec.name, "args")
    block = args.get("block-size")
    if type(block) is int and not spec.gpus and block % _CPU_BLOCK and not _at_least(target.version, 0, 32):
        message = f"newer releases take only multiples of {_CPU_BLOCK} on a CPU"
        yield Finding((*at, "block-size"), message, f"write {_CPU_BLOCK}", shown(block))
    if type(block) is int and spec.gpus and block % _GPU_BLOCK:
        message = f"the attention backends for NVIDIA take multiples of {_GPU_BLOCK}, and the start may fail"
        yield Finding((*at, "block-size"), message, "remove it: vLLM chooses a size that fits", shown(block))
    quantization = args.get("quantization")
    if isinstance(quantization, str) and quantization in _SLOW_KERNELS:
        message = f"it forces the slow kernels where {quantization}_marlin would do"
        yield Finding((*at, "quantization"), message, "remove it: vLLM then picks the fastest", shown(quantization))
    old = _oldest(target, before="ada")
    if old not in {"turing", "ampere"}:
        return
    if _is_fp8(quantization):
        message = f"{old.capitalize()} GPUs have no FP8 units: the weights are unpacked at each use, which saves memory"
        remedy = "keep it for that; an AWQ or GPTQ model (4 bits) is smaller and faster there"
        yield Finding((*at, "quantization"), message, remedy, shown(quantization))
    if _is_fp8(cache := args.get("kv-cache-dtype")):
        message = f"{old.capitalize()} GPUs have no FP8 units, and some attention backends refuse it there at the start"
        yield Finding((*at, "kv-cache-dtype"), message, 'remove it, or write "auto"', shown(cache))


def _oldest(target: Target, *, before: str) -> str | None:
    """The oldest generation among the GPUs, if it is older than `before`."""
    ages = [GENERATIONS.index(gpu.generation) for gpu in target.gpus or () if gpu.generation != UNKNOWN]
    oldest = min(ages, default=len(GENERATIONS))
    return GENERATIONS[oldest] if oldest < GENERATIONS.index(before) else None


def _is_fp8(value: FlagValue | None) -> bool:
    return isinstance(value, str) and ("fp8" in value.lower())


def _at_least(version: str | None, major: int, minor: int) -> bool:
    known = Version.parse(version) if version is not None else None
    return known is not None and known >= Version(major, minor, 0, 0)
