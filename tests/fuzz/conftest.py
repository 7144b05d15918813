"""Tells at the end what was tried."""

from __future__ import annotations

import pytest

from tests.fuzz.trying import EXAMPLES, SEED, TRIED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each target."""
    if not TRIED:
        return
    seed = f"FUZZ_EXAMPLES={EXAMPLES} FUZZ_SEED={SEED}" if EXAMPLES else "always the same inputs"
    terminalreporter.section(f"inputs tried ({seed})")
    for target, (count, size, took_s, longest_s, added_kib) in sorted(TRIED.items()):
        each = f"{count:8.0f} inputs {size / 2**20:8.1f} MiB {took_s:7.1f} s CPU, longest {longest_s * 1e3:6.0f} ms, "
        each += f"at most +{added_kib / 1024:.0f} MiB"
        terminalreporter.write_line(f"{target:32}{each}")
