"""`run`: hands over to the daemon, which no other command imports."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from supervisord.cli import main


@pytest.mark.parametrize(
    ("options", "path"),
    [(["--config", "/x/c.toml"], "/x/c.toml"), ([], "/etc/vllm-supervisor/config.toml")],
)
@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_daemon_gets_its_configuration_and_gives_its_exit_code(
    options: list[str], path: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def run(config: Path) -> int:
        seen.append(config)
        return code

    app = ModuleType("supervisord.app")
    app.run = run  # type: ignore[attr-defined] # a module made for this test
    monkeypatch.setitem(sys.modules, "supervisord.app", app)
    assert main(["run", *options]) == code
    assert seen == [Path(path)]
