"""Which launcher a daemon uses: the one that is wanted, or the one that what lives was started by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.launcher import cgroups, choice, dbus, launchers
from supervisord.launcher.base import Launcher, ManagerError
from supervisord.launcher.plain import PlainLauncher
from supervisord.launcher.systemd import SystemdLauncher
from tests.adapters.fake_bus import Answer, a_bus
from tests.adapters.launcher_box import ENGINE, SLEEP, Box, a_box

UNIT = f"vllm-engine-{ENGINE}.service"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with a_box(tmp_path / "out") as made:
        yield made


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with systemd, seen by root, on which no engine runs as a service."""
    root = tmp_path / "cgroup"
    root.mkdir()
    for module in (cgroups, choice):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(launchers, "no_systemd", lambda: None)
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path / 'bus'}")
    monkeypatch.setattr(dbus, "_CONNECT_S", 0.3)
    return root


def service(hierarchy: Path, *, populated: bool) -> None:
    directory = hierarchy / "vllm.slice" / UNIT
    directory.mkdir(parents=True)
    (directory / "cgroup.events").write_text(f"populated {populated:d}\nfrozen 0\n", encoding="utf-8")


def bus_with(state_dir: Path) -> Any:
    marks = {"ENGINE": ENGINE, "GENERATION": "3", "STATE": str(state_dir), "PLAN": "p"}
    variables = [f"SUPERVISED_{name}={value}" for name, value in marks.items()]

    def answer(method: str, body: tuple[Any, ...]) -> Answer:
        if method == "GetUnit":
            return "o", ("/unit",)
        assert (method, body[1]) == ("Get", "Environment")
        return "v", (("as", variables),)

    return answer


def made(wanted: str, state_dir: Path) -> tuple[Launcher, list[str]]:
    troubles: list[str] = []
    launcher = launchers.make(wanted, state_dir, lambda *_: None, troubles.append)
    launcher.close()
    return launcher, troubles


@pytest.mark.parametrize(("wanted", "kind"), [("plain", PlainLauncher), ("systemd", SystemdLauncher)])
def test_the_one_that_is_wanted(hierarchy: Path, tmp_path: Path, wanted: str, kind: type) -> None:
    service(hierarchy, populated=False)
    launcher, troubles = made(wanted, tmp_path / "state")
    assert isinstance(launcher, kind)
    assert troubles == []


def test_services_that_live_keep_theirs(hierarchy: Path, tmp_path: Path) -> None:
    service(hierarchy, populated=True)
    with a_bus(tmp_path / "bus", bus_with(tmp_path / "state")):
        launcher, (told,) = made("plain", tmp_path / "state")
        assert isinstance(launcher, SystemdLauncher)
        assert f"started engines that live ({ENGINE}): to use the plain launcher" in told
        launcher, troubles = made("systemd", tmp_path / "state")
        assert isinstance(launcher, SystemdLauncher)
        assert troubles == []


def test_services_of_another_daemon_are_its_own(hierarchy: Path, tmp_path: Path) -> None:
    service(hierarchy, populated=True)
    with a_bus(tmp_path / "bus", bus_with(tmp_path / "other")):
        launcher, troubles = made("plain", tmp_path / "state")
    assert isinstance(launcher, PlainLauncher)
    assert troubles == []


def test_services_that_nobody_can_tell_of_are_not_started_again(hierarchy: Path, tmp_path: Path) -> None:
    service(hierarchy, populated=True)
    with pytest.raises(ManagerError, match="cannot find out whose engines run: cannot connect to the system bus"):
        made("plain", tmp_path / "state")


def test_what_a_killed_plain_daemon_left_keeps_its_launcher(hierarchy: Path, box: Box) -> None:
    box.launch(*SLEEP)
    launcher, (told,) = made("systemd", box.state)
    assert isinstance(launcher, PlainLauncher)
    assert f"the plain launcher goes on, because it started engines that live ({ENGINE})" in told
    assert box.launcher.sweep(ENGINE, 1) == ()
    launcher, troubles = made("systemd", box.state)
    assert isinstance(launcher, SystemdLauncher)
    assert troubles == []
