"""Makes the launcher that the configuration wants, or the one that what lives was started by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from supervisord.launcher import plain
from supervisord.launcher.base import Launcher
from supervisord.launcher.choice import living_units, no_systemd, under_systemd
from supervisord.launcher.plain import PlainLauncher


def make(
    wanted: str,
    state_dir: Path,
    on_exit: Callable[[str, int, int | None, int | None], None],
    on_trouble: Callable[[str], None],
) -> Launcher:
    """`wanted` as in `supervisor.launcher`. Raises StateDirError, ManagerError.

    While engines of an earlier daemon live, theirs is used whatever is wanted: it alone can find, watch and end them,
    and the other one would start them a second time.
    """
    name = wanted if wanted != "auto" else ("systemd" if under_systemd() else "plain")
    services, children = _services(state_dir), plain.living(state_dir)
    bound = "systemd" if services else "plain" if children else name
    if bound != name:
        on_trouble(
            f"the {bound} launcher goes on, because it started engines that live ({', '.join(services or children)}): "
            f'to use the {name} launcher (supervisor.launcher = "{wanted}"), stop the daemon, which ends them, and '
            "start it again; a restart does not do it"
        )
    if bound == "plain":
        return PlainLauncher(state_dir, on_exit, on_trouble)
    # Imported here: the D-Bus client costs memory that only this launcher needs.
    from supervisord.launcher.systemd import SystemdLauncher  # noqa: PLC0415

    return SystemdLauncher(state_dir, on_exit, on_trouble)


def _services(state_dir: Path) -> list[str]:
    """Engines of this state directory that live as services. Raises ManagerError."""
    units = living_units() if no_systemd() is None else []
    if not units:
        return []
    from supervisord.launcher.systemd import engines_of  # noqa: PLC0415 (as above)

    return engines_of(units, state_dir)
