"""The examples for operators: the daemon takes each of them, and so does the vLLM that is current."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from supervisord.config import Loaded, load
from supervisord.core.gpu_claims import assumed
from supervisord.core.gpu_kinds import GpuKind
from supervisord.engine.flags import FlagSet, parse_help
from supervisord.engine.launch_flags import Knowledge, settle

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "docs" / "examples"
RELEASE = "0.32.0"

AMPERE, ADA = GpuKind("ampere", "geforce"), GpuKind("ada", "geforce")
CARDS = {
    "demo-cpu": None,
    "one-3090": AMPERE,
    "two-models-one-card": AMPERE,
    "one-4090-fp8": ADA,
    "two-4090-70b": ADA,
    "one-a100": GpuKind("ampere", "datacenter"),
    "eight-h100": GpuKind("hopper", "datacenter"),
    "two-engines": ADA,
    "behind-haproxy": ADA,
}
"""What each one is written for."""


@pytest.fixture(scope="module")
def flags() -> FlagSet:
    known = parse_help((REPO / f"tests/data/help-all-{RELEASE}.txt").read_text(), RELEASE)
    assert known is not None
    return known


def loaded(name: str, folder: Path) -> Loaded:
    """As the daemon reads it, alone in its folder; models and keys are not on this machine."""
    shutil.copy(EXAMPLES / f"{name}.toml", folder / "config.toml")
    return load(folder / "config.toml", trust=False, check_files=False)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_the_daemon_takes_it_without_a_warning(name: str, tmp_path: Path) -> None:
    found = loaded(name, tmp_path)
    assert found.spec.engines
    assert found.warnings == ()


@pytest.mark.parametrize("name", CARDS)
def test_the_current_vllm_takes_its_flags(name: str, tmp_path: Path, flags: FlagSet) -> None:
    card = CARDS[name]
    for spec in loaded(name, tmp_path).spec.engines.values():
        settled = settle(spec, RELEASE, Knowledge(flags=flags, gpus=[] if card is None else [card] * len(spec.gpus)))
        assert settled.problems == ()
        assert settled.warnings == ()


@pytest.mark.parametrize("name", CARDS)
def test_gpus_are_named_by_uuid_and_are_as_many_as_the_engine_uses(name: str, tmp_path: Path) -> None:
    for spec in loaded(name, tmp_path).spec.engines.values():
        assert all(gpu.startswith("GPU-") and len(gpu) == 40 for gpu in spec.gpus)
        assert len(spec.gpus) == (0 if CARDS[name] is None else spec.args.get("tensor-parallel-size", 1))


@pytest.mark.parametrize("name", CARDS)
def test_engines_on_one_card_leave_some_of_it(name: str, tmp_path: Path) -> None:
    claims: dict[str, list[float]] = defaultdict(list)
    for spec in loaded(name, tmp_path).spec.engines.values():
        for gpu in spec.gpus:
            claims[gpu].append(assumed(spec) or 0.0)
    assert all(sum(parts) <= (0.96 if len(parts) == 1 else 0.9) for parts in claims.values())
    assert any(len(parts) > 1 for parts in claims.values()) == (name == "two-models-one-card")


def test_the_70b_model_gets_the_profile_for_large_models_unless_said_otherwise(tmp_path: Path, flags: FlagSet) -> None:
    (spec,) = loaded("two-4090-70b", tmp_path).spec.engines.values()
    choice = settle(spec, RELEASE, Knowledge(flags=flags, gpus=[ADA, ADA])).choice
    assert "geforce-prefill" in choice.used
    assert choice.args.keys().isdisjoint(spec.args)
