"""Checks of each engine's vLLM: its program, its release, its CUDA against the driver's, what it compiles with.

Nothing of an engine's environment is executed: names and two lines of files in it are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from supervisord.core.gpu_inventory import find
from supervisord.core.spec import EngineSpec
from supervisord.doctor.box import hidden, text_of
from supervisord.doctor.facts import Facts, Unknown
from supervisord.doctor.findings import Finding, fail, listed, not_checked, ok, warn
from supervisord.engine import launch_env
from supervisord.engine.launch import explain
from supervisord.engine.launch_flags import Knowledge
from supervisord.engine.version import Version, installed_version, interpreter, resolve_program

OLDEST: Final = Version(0, 9, 0, 1)
"""The oldest release whose flags and metrics are known."""

Cuda = tuple[int, int]

GENERATION_NEEDS: Final[Mapping[int, Cuda]] = {9: (11, 8), 10: (12, 8), 12: (12, 8)}
"""The first CUDA that compiles for GPUs of this compute capability (major), by NVIDIA's CUDA release notes."""

_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=\n]*= *(?:'([0-9.]{1,16})'|None)", re.MULTILINE)
_TORCH: Final = re.compile(r"^__version__ *= *'([0-9A-Za-z.+]+)'", re.MULTILINE)
_RUNTIME: Final = re.compile(r"nvidia_cuda_runtime(?:_cu\d{1,4})?-(\d{1,4})\.(\d{1,4})(?!\d)\S*\.dist-info")
_INSTALL: Final = "scripts/install-vllm (the package has it in /usr/share/vllm-supervisor) installs one that fits"
_COMPILERS: Final = ("gcc", "clang")
_CAPABILITY_JIT: Final = 10
"""From Blackwell on vLLM's default attention kernels are FlashInfer's."""


def programs(facts: Facts) -> Iterator[Finding]:
    """What stands in the way of a launch: program, its user's rights, model, key."""
    for spec in facts.engines:
        about = f"engine {spec.name}"
        if facts.user_of(spec) is None:
            yield not_checked("its user does not exist", subject=about)
            continue
        if not spec.command:
            yield not_checked("it names no program", subject=about)
            continue
        if spec not in _visible(facts):
            yield not_checked(f"this user may not look at {spec.command[0]}", "run this as root", about)
            continue
        env = _base_env(facts)
        found = explain(spec, as_root=facts.as_root, base_env=env, origins=_origins(facts), known=Knowledge())
        secret = facts.as_root and not facts.box.is_root  # the key is nobody's business but the daemon's
        wrong = [one for one in found.obstacles if not (secret and one.key == "api_key_file")]
        for one in wrong:
            message, _, remedy = one.text.partition("; ")
            yield fail(message, remedy, about)
        if not wrong:
            who = f"user {found.plan.user}" if found.plan.user else "the user of the daemon"
            yield ok(f"{resolve_program(spec.command[0], launch_env.search_path(spec, env))}, as {who}", about)


def releases(facts: Facts) -> Iterator[Finding]:
    """Which vLLM it is."""
    for spec in _visible(facts):
        about = f"engine {spec.name}"
        text = installed_version(spec.command, launch_env.search_path(spec, _base_env(facts)))
        known = Version.parse(text) if text is not None else None
        if known is None:
            why = "its command is no script of a Python environment that has vLLM: its release is unknown"
            yield not_checked(why, _INSTALL, about)
        elif known < OLDEST:
            why = f"vLLM {text} is older than 0.9: its flags cannot be checked, and metrics are missing that rules need"
            yield warn(why, _INSTALL, about)
        else:
            yield ok(f"vLLM {text}", about)


def cuda(facts: Facts) -> Iterator[Finding]:
    """Whether the CUDA that its torch was built with works with this driver and these GPUs."""
    for spec in [spec for spec in _visible(facts) if spec.gpus]:
        libraries = _libraries(spec, facts)
        if libraries:
            yield _cuda_of(spec, facts, libraries)


def _cuda_of(spec: EngineSpec, facts: Facts, libraries: list[Path]) -> Finding:
    about = f"engine {spec.name}"
    version = next((text for library in libraries if (text := text_of(library / "torch" / "version.py"))), None)
    if version is None:
        return not_checked("torch/version.py is not in its environment, or may not be read", _INSTALL, about)
    said = _TORCH.search(version)
    name = f"torch {said[1]}" if said is not None else "its torch"
    built = _built_with(version, libraries)
    if built is None:
        return fail(f"{name} is a build without CUDA, and the engine has GPUs", _INSTALL, about)
    for kind in _capabilities(spec, facts):
        needs = GENERATION_NEEDS.get(kind[0])
        if needs is not None and built < needs:
            text = f"{name} has CUDA {_dots(built)}, and its GPU (compute {_dots(kind)}) needs {_dots(needs)} at least"
            return fail(text, _INSTALL, about)
    if isinstance(facts.gpus, Unknown) or facts.gpus.cuda is None:
        return not_checked(
            f"{name} has CUDA {_dots(built)}; the driver does not say up to which it goes", subject=about
        )
    newest = facts.gpus.cuda
    pair = f"{name} has CUDA {_dots(built)}, the driver goes up to {_dots(newest)}"
    if "compat" in spec.env.get("LD_LIBRARY_PATH", ""):
        return not_checked(f"{pair}; LD_LIBRARY_PATH names CUDA's forward compatibility libraries", subject=about)
    if built[0] > newest[0]:
        return fail(f"{pair}: it cannot begin", "install a newer driver, or a vLLM for the driver's CUDA", about)
    if built > newest:
        text = f"{pair}: kernels that are compiled at run time may fail"
        return warn(text, "install a newer driver, or a vLLM for the driver's CUDA", about)
    return ok(pair, about)


def compilers(facts: Facts) -> Iterator[Finding]:
    """What vLLM compiles with at run time: gcc and Python's headers for Triton, nvcc and ninja for FlashInfer."""
    for spec in _visible(facts):
        about = f"engine {spec.name}"
        env = _base_env(facts)
        base = launch_env.search_path(spec, env)
        program = resolve_program(spec.command[0], base)
        path = launch_env.program_path(base, program)
        chosen = spec.env.get("CC")  # Triton looks for no other one then
        compiler = next((word for word in ([chosen] if chosen else _COMPILERS) if resolve_program(word, path)), None)
        lacking = [*_header_lacking(program, path), *_flashinfer_lacking(spec, facts, path)]
        if compiler is None:
            eager = spec.args.get("enforce-eager") is True or not spec.gpus
            what = f"CC = {chosen} cannot be found" if chosen else "no C compiler"
            remedy = "correct CC in env" if chosen else "apt-get install gcc libc6-dev (or set CC in env)"
            text = f"{what} in {path}: Triton and torch.compile need one at run time"
            yield (warn if eager else fail)(text, remedy, about)
        for text, remedy in lacking:
            yield warn(text, remedy, about)
        if compiler is not None and not lacking:
            yield ok(f"{compiler} compiles for it", about)


def _header_lacking(program: str | None, path: str) -> Iterator[tuple[str, str]]:
    """Python.h of the interpreter that the environment was made with."""
    python = interpreter(program, path) if program is not None else None
    if python is None:
        return
    real = Path(os.path.realpath(python))
    found = re.fullmatch(r"python(3\.\d+)", real.name)
    header = str(real.parent.parent / "include" / real.name / "Python.h")
    if found is not None and not hidden(header) and not os.path.exists(header):  # noqa: PTH110 (no errors)
        text = f"{real} has no Python.h: Triton cannot compile what launches its kernels"
        yield text, f"apt-get install python{found[1]}-dev, or make the environment with uv's own Python"


def _flashinfer_lacking(spec: EngineSpec, facts: Facts, path: str) -> Iterator[tuple[str, str]]:
    """Only where its kernels are the default ones."""
    libraries = _libraries(spec, facts)
    built = _has(libraries, "flashinfer_jit_cache") or not _has(libraries, "flashinfer")
    if built or not any(kind[0] >= _CAPABILITY_JIT for kind in _capabilities(spec, facts)):
        return
    missing = [tool for tool in ("nvcc", "ninja") if resolve_program(tool, path) is None]
    if missing:
        text = f"no {listed(missing)} in {path}: FlashInfer compiles its kernels for this GPU at run time"
        yield text, "install CUDA's toolkit (nvcc in /usr/local/cuda/bin) and ninja, or flashinfer-jit-cache"


def _has(libraries: list[Path], package: str) -> bool:
    return any(os.path.isdir(library / package) for library in libraries)  # noqa: PTH112 (Path.is_dir raises)


def _capabilities(spec: EngineSpec, facts: Facts) -> list[Cuda]:
    """Compute capabilities of its GPUs, as far as they are known."""
    gpus = [find(facts.inventory, name) for name in spec.gpus]
    return [gpu.reading.compute for gpu in gpus if gpu is not None and gpu.reading and gpu.reading.compute]


def _built_with(version: str, libraries: list[Path]) -> Cuda | None:
    said = _TORCH_CUDA.search(version)
    if said is not None:
        return _pair(said[1]) if said[1] else None
    names = [entry.name for library in libraries for entry in library.glob("nvidia_cuda_runtime*.dist-info")]
    found = [(int(name[1]), int(name[2])) for text in names if (name := _RUNTIME.fullmatch(text))]
    return max(found, default=None)


def _pair(text: str) -> Cuda:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return int(major or 0), int(minor or 0)


def _libraries(spec: EngineSpec, facts: Facts) -> list[Path]:
    """The site-packages of its environment."""
    path = launch_env.search_path(spec, _base_env(facts))
    program = resolve_program(spec.command[0], path)
    python = interpreter(program, path) if program is not None else None
    return sorted(Path(python).parent.parent.glob("lib*/python3*/site-packages")) if python is not None else []


def _base_env(facts: Facts) -> Mapping[str, str]:
    """The environment that engines inherit: a service's PATH is not that of an operator's shell."""
    return {"PATH": launch_env.DEFAULT_PATH} if facts.as_root else os.environ


def _origins(facts: Facts) -> Mapping[str, str]:
    return {} if isinstance(facts.config, Unknown) else facts.config.loaded.origins


def _visible(facts: Facts) -> list[EngineSpec]:
    """Engines whose programs we may look at."""
    return [spec for spec in facts.engines if spec.command and not hidden(spec.command[0])]


def _dots(version: Cuda) -> str:
    return f"{version[0]}.{version[1]}"
