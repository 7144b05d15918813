"""Every code that an operator can meet, read from the source: reasons, gates, exit classes, kinds of failure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import supervisord
from supervisord.core.model import ExitClass, FailedKind
from supervisord.core.telemetry import NO_DRIVER

SOURCE = Path(supervisord.__file__).parent

CARRIERS = {"Reason": 0, "GateError": 0, "_EndedError": 0}
"""What carries a code, and which argument it is."""
COMPUTED = {
    "core/durable.py": {"gpu_fault"},
    "core/rules/creep.py": {"gpu_creep", "host_creep"},
    "core/telemetry.py": {code for code, _ in NO_DRIVER.values()} | {"driver_error"},
    "core/status.py": {kind.value for kind in FailedKind},
}
"""Codes of calls whose argument is no literal, by file; a file that is not named here may only pass codes on."""
PASSED_ON = (".code", "code")
"""How arguments end that only hand on a code which was made elsewhere."""


def reasons() -> set[str]:
    """All of them."""
    found = {kind.value for kind in ExitClass} | {kind.value for kind in FailedKind}
    for path in sorted(SOURCE.rglob("*.py")):
        found |= _of_file(path)
    return found


def _of_file(path: Path) -> set[str]:
    name = path.relative_to(SOURCE).as_posix()
    literal, other = set[str](), list[str]()
    for argument in _arguments(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            literal.add(argument.value)
        elif not ast.unparse(argument).endswith(PASSED_ON):
            other.append(ast.unparse(argument))
    assert not other or name in COMPUTED, f"{name} makes codes that this test cannot read: {other}"
    return literal | (COMPUTED[name] if other else set())


def _arguments(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CARRIERS and node.args:
            yield node.args[CARRIERS[node.func.id]]
