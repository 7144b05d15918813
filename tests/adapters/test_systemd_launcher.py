"""What the systemd launcher asks, and how it reads the answers; with a real systemd see tests/e2e_systemd."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from supervisord.core.model import ExitClass, LaunchPlan
from supervisord.launcher import choice, dbus, launchers, outcome, service
from supervisord.launcher.base import Ended, LaunchError, ManagerError
from supervisord.launcher.dbus import Bus, BusError
from supervisord.launcher.plain import PlainLauncher
from supervisord.launcher.preparing import Prepared
from supervisord.launcher.service import Marks
from supervisord.launcher.statedir import User
from supervisord.launcher.systemd import SystemdLauncher
from supervisord.launcher.units import ENDED_JUST_NOW, Units, UnitState
from tests.adapters.fake_bus import Answer, Refuse, a_bus
from tests.sim.engine import free_port

UNIT = "vllm-engine-a.service"
NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
MARKS = Marks("a", 7, "p1")
INVOCATION = "0123456789abcdef" * 2
RUNS: dict[str, Any] = {
    "Job": ("(uo)", (0, "/")),
    "ActiveState": ("s", "active"),
    "MainPID": ("u", 42),
    "ExecMainPID": ("u", 42),
    "ExecMainCode": ("i", 0),
    "ExecMainStatus": ("i", 0),
    "Result": ("s", "success"),
    "ControlGroup": ("s", f"/vllm.slice/{UNIT}"),
    "ActiveExitTimestampMonotonic": ("t", 0),
    "ExecMainExitTimestampMonotonic": ("t", 0),
    "InvocationID": ("ay", bytes.fromhex(INVOCATION)),
}


def state(**changed: Any) -> UnitState:
    return UnitState("active", None, 0, 42, 1, 0, "success", "", 0, 9, "")._replace(**changed)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bus"
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
    monkeypatch.setattr(dbus, "_CONNECT_S", 0.3)
    return path


def properties_of(values: dict[str, Any]) -> Any:
    def answer(method: str, body: tuple[Any, ...]) -> Answer | None:
        if method == "GetUnit":
            return "o", ("/unit",)
        assert method == "Get"
        if body[1] not in values:
            raise Refuse("org.freedesktop.DBus.Error.UnknownObject")
        return "v", (values[body[1]],)

    return answer


# --- the bus: every wait ends ---


def test_no_bus(address: Path) -> None:
    with pytest.raises(BusError, match="cannot connect to the system bus: No such file"):
        Bus()


def test_a_bus_that_accepts_nobody(address: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(0)
        began = time.monotonic()
        for _ in range(3):  # the queue of the kernel is full after the first or the second
            with pytest.raises(BusError, match="cannot connect to the system bus"):
                Bus()
        assert time.monotonic() - began < 5


def test_a_bus_that_hangs_costs_an_answer(address: Path) -> None:
    with a_bus(address, lambda *_: None):
        began = time.monotonic()
        with Units(0.2) as units, pytest.raises(BusError, match=r"cannot ask systemd \(GetUnit\): no answer in time"):
            units.look(UNIT)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "told",
    [
        {"GetUnit": ("s", ("x",))},
        {"GetUnit": ("", ())},
        {"Get": ("s", ("x",))},
        {"Get": ("v", (("s", "x"),))},
        {"Get": ("v", (("(uo)", (1, "/job")),))},
    ],
)
def test_answers_that_make_no_sense_are_none(address: Path, told: dict[str, Answer]) -> None:
    sound: dict[str, Answer] = {"GetUnit": ("o", ("/unit",)), "Get": ("v", (("u", 1),))}
    with (
        a_bus(address, lambda method, _: told.get(method, sound[method])),
        Units(5) as units,
        pytest.raises(BusError, match=r"cannot ask systemd \(\w+( \w+)?\): its answer makes no sense"),
    ):
        units.look(UNIT)


def test_a_bus_that_goes_away(address: Path) -> None:
    with a_bus(address, lambda *_: None):
        units = Units(5)
    with pytest.raises(BusError), units:
        units.look(UNIT)


def test_an_error_has_the_name_that_it_has_on_the_bus(address: Path) -> None:
    def refuse(*_: object) -> None:
        raise Refuse("org.freedesktop.DBus.Error.AccessDenied")

    with a_bus(address, refuse), Units(5) as units:
        with pytest.raises(BusError) as caught:
            units.look(UNIT)
        assert caught.value.name == "org.freedesktop.DBus.Error.AccessDenied"
        assert not caught.value.gone


# --- units ---


def test_a_unit_that_runs(address: Path) -> None:
    with a_bus(address, properties_of(RUNS)), Units(5) as units:
        seen = UnitState("active", None, 42, 42, 0, 0, "success", f"/vllm.slice/{UNIT}", 0, 0, INVOCATION)
        assert units.look(UNIT) == seen


def test_a_unit_that_is_not_there(address: Path) -> None:
    def answer(*_: object) -> None:
        raise Refuse(NO_SUCH_UNIT)

    with a_bus(address, answer) as bus, Units(5) as units:
        assert units.look(UNIT) is None
        assert units.environment(UNIT) == {}
        assert units.forget(UNIT, 1)
        assert ("StopUnit", (UNIT, "ignore-dependencies")) in bus.calls


def test_the_job_is_read_before_the_state_and_may_end_in_between(address: Path) -> None:
    with a_bus(address, properties_of({**RUNS, "Job": ("(uo)", (5, "/job/5"))})) as bus, Units(5) as units:
        seen = units.look(UNIT)
        assert seen is not None
        assert seen.job == ENDED_JUST_NOW
        assert [body[1] for method, body in bus.calls if method == "Get"][:2] == ["Job", "ActiveState"]
    with (
        a_bus(
            address.with_name("second"), properties_of({**RUNS, "Job": ("(uo)", (5, "/j")), "JobType": ("s", "stop")})
        ),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={address.with_name('second')}")
        with Units(5) as units:
            seen = units.look(UNIT)
            assert seen is not None
            assert seen.job == "stop"


# --- what a state means ---


def test_who_was_stopped_left_the_active_state_before_it_ended() -> None:
    assert not state(left_active_us=0).was_stopped, "ended by itself with 0: active (exited)"
    assert not state(left_active_us=10).was_stopped, "ended by itself with an error: failed afterwards"
    assert state(left_active_us=8).was_stopped
    assert not state(left_active_us=8, result="oom-kill").was_stopped


@pytest.mark.parametrize(
    ("seen", "kills", "expected"),
    [
        (state(exit_code=1, exit_status=3), 0, Ended(3, None)),
        (state(exit_code=2, exit_status=9), 0, Ended(None, 9)),
        (state(exit_code=3, exit_status=11), 0, Ended(None, 11)),
        (state(exit_code=2, exit_status=9, result="oom-kill"), 0, Ended(None, 9, oom_killed=True)),
        (state(exit_code=1, exit_status=1), 2, Ended(1, None, oom_killed=True)),
    ],
)
def test_how_it_ended(seen: UnitState, kills: int, expected: Ended) -> None:
    assert outcome.ended(seen, UNIT, kills) == expected


def test_somebody_who_stopped_it_is_named() -> None:
    assert outcome.ended(state(left_active_us=8), UNIT, 0).stopped_by == f"systemctl stop {UNIT}, or of its slice"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (state(job="restart"), True),
        (state(job="start", active="inactive"), True),
        (state(main_pid=8), True),
        (state(), False),
        (state(main_pid=7), False),
        (state(job="stop"), False),
        (state(job="reload", main_pid=7), False),
    ],
)
def test_somebody_who_restarts_it(seen: UnitState, expected: bool) -> None:
    assert outcome.begins_again(seen, 7) is expected


def test_codes_of_systemd_itself() -> None:
    assert outcome.never_ran(state(exit_status=203))
    assert not outcome.never_ran(state(exit_status=1))
    assert not outcome.never_ran(state(exit_status=203, main_pid=5))


# --- the unit ---


def prepared(tmp_path: Path, env: dict[str, str] | None = None) -> Prepared:
    user = User("nobody", 65534, 65534, ())
    return Prepared(("/opt/vllm", "serve", "$HOME"), env or {"HF_TOKEN": "hf_abc"}, user, tmp_path)


def told(tmp_path: Path) -> dict[str, Any]:
    properties = service.properties(
        MARKS,
        prepared(tmp_path),
        env_file=tmp_path / "env",
        state_dir="/state",
        daemon="d.service",
    )
    return {name: value for name, (_, value) in properties}


def test_a_unit_tells_no_secret_and_enough_to_be_adopted(tmp_path: Path) -> None:
    properties = told(tmp_path)
    assert "hf_abc" not in str(properties)
    assert properties["Before"] == ["d.service"]
    assert "After" not in properties
    assert properties["ExecStart"] == [("/opt/vllm", ["/opt/vllm", "serve", "$$HOME"], False)]
    variables = dict(pair.split("=", 1) for pair in properties["Environment"])
    assert service.read_marks(UNIT, variables, "/state") == MARKS


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    variables = dict(pair.split("=", 1) for pair in told(tmp_path)["Environment"])
    assert service.read_marks(UNIT, variables, "/other") is None
    assert service.read_marks("vllm-engine-b.service", variables, "/state") is None
    assert service.read_marks("vllm-engine-.service", variables, "/state") is None
    assert service.read_marks(UNIT, {}, "/state") is None
    broken = {**variables, "SUPERVISED_GENERATION": "x"}
    assert service.read_marks(UNIT, broken, "/state") == Marks("a", 0, "p1")
    endless = {**variables, "SUPERVISED_GENERATION": "9" * 5000}
    assert service.read_marks(UNIT, endless, "/state") == Marks("a", 0, "p1")
    assert service.engine_of("vllm-engine-a\n.service") is None
    assert service.engine_of(None) is None
    assert service.engine_of("vllm-engine-a@b.service") is None


def test_the_environment_file_is_quoted_and_private(tmp_path: Path) -> None:
    path = tmp_path / "env"
    service.write_environment(path, {"A": 'x "y" $z `w` \\', "B": "two\nlines"})
    assert path.read_text() == 'A="x \\"y\\" \\$z \\`w\\` \\\\"\nB="two\nlines"\n'
    assert path.stat().st_mode & 0o777 == 0o600
    service.write_environment(path, {"A": "new"})
    assert path.read_text() == 'A="new"\n'
    with pytest.raises(UnicodeEncodeError):
        service.write_environment(path, {"A": "\udcff"})


# --- the launcher without a systemd ---


def test_without_a_bus_nothing_is_started_and_nothing_is_guessed(address: Path, tmp_path: Path) -> None:
    troubles: list[str] = []
    launcher = SystemdLauncher(tmp_path / "state", lambda *_: None, troubles.append)
    try:
        with pytest.raises(ManagerError, match="cannot find out which engines run: cannot connect to the system bus"):
            launcher.recover()
        plan = LaunchPlan("a", ("/bin/true",), {"PATH": "/bin"}, None, "127.0.0.1", free_port(), "p1")
        with pytest.raises(LaunchError, match=f"cannot start a as {UNIT}: cannot connect to the system bus") as caught:
            launcher.launch(plan, 1)
        assert caught.value.kind is ExitClass.RESOURCE
        with pytest.raises(LaunchError, match="text that is not UTF-8") as caught:
            launcher.launch(LaunchPlan("a", ("/bin/true",), {"X": "\udcff"}, None, "127.0.0.1", free_port(), "p"), 1)
        assert caught.value.kind is ExitClass.CONFIG
        assert launcher.members("a") == ()
        assert launcher.sweep("a", 1) == ()
        assert launcher.host_bytes("a") is None
        assert launcher.ended("a", 1, None, None) == Ended(None, None)
        assert launcher.whose(os.getpid()) is None
        assert launcher.generations() == {}
    finally:
        launcher.close()


OF_NO_UNIT = {"GetUnit": NO_SUCH_UNIT, "KillUnit": NO_SUCH_UNIT, "StopUnit": NO_SUCH_UNIT}


@pytest.mark.parametrize(
    ("refusal", "message", "withdrawn"),
    [(None, "no answer in time", ["KillUnit", "StopUnit"]), ("org.freedesktop.DBus.Error.InvalidArgs", "no", [])],
)
def test_a_start_without_an_answer_is_taken_back_and_a_refused_one_need_not_be(
    address: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str | None,
    message: str,
    withdrawn: list[str],
) -> None:
    def answer(method: str, _: tuple[Any, ...]) -> Answer | None:
        if method == "StartTransientUnit" and refusal is None:
            return None
        raise Refuse(refusal if method == "StartTransientUnit" else OF_NO_UNIT[method])

    monkeypatch.setattr("supervisord.launcher.systemd.Units", lambda: Units(0.3))
    troubles: list[str] = []
    launcher = SystemdLauncher(tmp_path / "state", lambda *_: None, troubles.append)
    plan = LaunchPlan("a", ("/bin/true",), {"PATH": "/bin"}, None, "127.0.0.1", free_port(), "p1")
    try:
        with a_bus(address, answer) as bus:
            with pytest.raises(LaunchError, match=f"cannot start a as {UNIT}: .*{message}"):
                launcher.launch(plan, 1)
            asked = [method for method, _ in bus.calls if method != "Hello"]
    finally:
        launcher.close()
    assert asked == ["GetUnit", "StartTransientUnit", *withdrawn]
    assert troubles == []


def test_the_environment_of_engines_that_are_gone_is_removed(address: Path, tmp_path: Path) -> None:
    left = tmp_path / "state/environment/gone"
    launcher = SystemdLauncher(tmp_path / "state", lambda *_: None, lambda _: None)
    try:
        left.touch()
        with a_bus(address, lambda *_: ("a(ssssssouso)", ([],))):
            assert launcher.recover() == ()
        assert not left.exists()
    finally:
        launcher.close()


# --- which launcher ---


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm-supervisor.service\n", "vllm-supervisor.service"),
        ("1:name=systemd:/x.service\n0::/\n", None),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/x.service\n", None),
        ("0::/user.slice/user-0.slice/session-1.scope\n", None),
        ("0::/vllm.slice/vllm-engine-a.service\n", UNIT),
    ],
)
def test_the_service_of_a_process(monkeypatch: pytest.MonkeyPatch, cgroup: str, unit: str | None) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cgroup)
    assert choice.service_of(1) == unit


def test_plain_unless_systemd_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BOOTED", tmp_path / "absent")
    launcher = launchers.make("auto", tmp_path / "state", lambda *_: None, lambda _: None)
    launcher.close()
    assert isinstance(launcher, PlainLauncher)
    assert not launcher.keeps_engines()
    if os.geteuid() == 0:
        assert choice.no_systemd() == "systemd does not run this machine"
        monkeypatch.setattr(choice, "BOOTED", tmp_path)
        monkeypatch.setattr(choice, "UNIFIED", tmp_path / "absent")
        assert "unified cgroup hierarchy" in (choice.no_systemd() or "")
    else:
        assert choice.no_systemd() == "only root may start services"
