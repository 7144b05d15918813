"""Makes the launcher that the configuration wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from supervisord.launcher.base import Launcher
from supervisord.launcher.choice import under_systemd
from supervisord.launcher.plain import PlainLauncher


def make(
    wanted: str,
    state_dir: Path,
    on_exit: Callable[[str, int, int | None, int | None], None],
    on_trouble: Callable[[str], None],
) -> Launcher:
    """`wanted` as in `supervisor.launcher`. Raises StateDirError."""
    if wanted == "plain" or (wanted == "auto" and not under_systemd()):
        return PlainLauncher(state_dir, on_exit, on_trouble)
    # Imported here: the D-Bus client costs memory that only this launcher needs.
    from supervisord.launcher.systemd import SystemdLauncher  # noqa: PLC0415

    return SystemdLauncher(state_dir, on_exit, on_trouble)
