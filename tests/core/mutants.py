"""Cores with one small mistake in them, made in memory: the tests of the tests.

The modules of the reducer are loaded anew with some text replaced; the shared types (model, messages, spec) stay the
same objects, so that a mutant can be driven by the same world. What only computes (watch, rules) is not loaded anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import supervisord.core

REDUCER = (
    "policy",
    "classify",
    "lifecycle",
    "turn",
    "telemetry",
    "gpu_inventory",
    "admission",
    "voluntary",
    "ending",
    "persistence",
    "gpu_faults",
    "gpus",
    "judging",
    "starting",
    "requests",
    "adoption",
    "node",
    "durable",
)
PACKAGE = supervisord.core.__name__


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in the module and becomes `new`; one of the invariants in `caught_by` has to notice."""

    name: str
    module: str
    old: str
    new: str
    caught_by: frozenset[str]


def load(mutant: Mutant | None) -> dict[str, ModuleType]:
    """The reducer's modules, fresh, with the mutation."""
    with _without_reducer():
        return {name: _load(name, mutant) for name in REDUCER}


def _load(name: str, mutant: Mutant | None) -> ModuleType:
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None
    assert spec.loader is not None
    source = spec.loader.get_source(spec.name)  # type: ignore[attr-defined]  # a source loader
    if mutant is not None and mutant.module == name:
        assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} is not in {name}.py exactly once"
        source = source.replace(mutant.old, mutant.new)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    setattr(supervisord.core, name, module)
    exec(compile(source, str(spec.origin), "exec"), module.__dict__)
    return module


@contextmanager
def _without_reducer() -> Iterator[None]:
    kept = {name: sys.modules.pop(f"{PACKAGE}.{name}") for name in REDUCER if f"{PACKAGE}.{name}" in sys.modules}
    try:
        yield
    finally:
        for name in REDUCER:
            sys.modules.pop(f"{PACKAGE}.{name}", None)
        for name, module in kept.items():
            sys.modules[f"{PACKAGE}.{name}"] = module
            setattr(supervisord.core, name, module)
