"""No reason code and no class of exit is without its meaning and its advice."""

from __future__ import annotations

import pytest

from supervisord.core import admission, advice
from supervisord.core.model import ExitClass
from tests.docs.codes import reasons


def test_every_code_has_an_entry_and_every_entry_a_code() -> None:
    assert reasons() == set(advice.REASONS) | set(advice.EXITS)


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
