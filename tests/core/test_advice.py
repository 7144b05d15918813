"""No reason code and no class of exit is without its meaning and its advice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisord.core import admission, advice, telemetry
from supervisord.core.model import ExitClass, FailedKind

PACKAGE = Path(__file__).parents[2] / "supervisord"
GIVE_CODES = {"Reason": 0, "GateError": 0, "GateClosed": 2, "_EndedError": 0}
"""Which argument is the code."""
IN_VARIABLES = {
    *(kind.value for kind in FailedKind),
    *(code for code, _ in telemetry.NO_DRIVER.values()),
    *("gpu_creep", "host_creep"),
    *("warmup_failed", "warmup_timeout"),
}
"""Codes that no literal gives."""


def literal_codes(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GIVE_CODES:
            place = GIVE_CODES[node.func.id]
            code = node.args[place] if len(node.args) > place else None
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield code.value


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    found = {code for path in PACKAGE.rglob("*.py") for code in literal_codes(path.read_text(encoding="utf-8"))}
    assert len(found) > 40
    codes = found | IN_VARIABLES | {telemetry.no_driver(77).code}
    assert codes == set(advice.REASONS)


def test_every_class_of_exit_has_an_entry() -> None:
    assert set(advice.EXITS) == {kind.value for kind in ExitClass}


def test_gates_are_told_as_gates() -> None:
    assert set(advice.GATES) >= admission.INTERNAL_GATES


@pytest.mark.parametrize("code", advice.REASONS)
def test_what_is_said_of_a_code(code: str) -> None:
    meaning, to_do = advice.meaning(code), advice.to_do(code, "qwen")
    for text in (meaning, to_do):
        assert text
        assert not text.endswith(".")
        assert "{" not in text
        assert len(text) < 260
    assert "NAME" not in to_do


def test_a_code_of_another_version_has_no_words() -> None:
    assert advice.meaning("from_the_future") == ""
    assert advice.to_do("from_the_future", "qwen") == ""


def test_what_operators_asked_for_is_there() -> None:
    """The table of their own documents: out of memory, long tail, low throughput."""
    assert "fp8 KV cache" in advice.EXITS["resource"][2]
    assert "max-num-seqs" in advice.EXITS["resource"][2]
    for flag in ("enable-chunked-prefill", "enable-prefix-caching", "max-num-seqs"):
        assert flag in advice.to_do("slo", "qwen")
    assert "awq_marlin" in advice.to_do("gpu_idle", "qwen")
