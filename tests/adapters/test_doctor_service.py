"""`doctor` on the supervisor itself, on what competes with it, and on checks that hang or break."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord import __version__
from supervisord.core.model import Process
from supervisord.doctor import box as doctor_box
from supervisord.doctor.box import Box
from supervisord.doctor.checks import CHECKS, Check
from supervisord.doctor.examine import examine, failed
from supervisord.doctor.facts import Facts, Unknown
from supervisord.doctor.findings import Finding, Verdict, listed, ok
from supervisord.doctor.service import seconds
from supervisord.launcher.records import DIRECTORY, Record, Records
from tests.adapters.doctor_box import Sick

OK, WARN, FAIL, NOT_CHECKED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.NOT_CHECKED
ROOT = Path(__file__).resolve().parents[2]
SUPERVISOR = {"version": __version__, "pid": 7, "launcher": "systemd", "config_error": None}
UNIT = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "UnitFileState": "enabled",
    "NeedDaemonReload": "no",
    "TimeoutStopUSec": "2min",
}


@pytest.fixture
def box(tmp_path: Path) -> Sick:
    return Sick(tmp_path)


def status(**supervisor: Any) -> dict[str, Any]:
    return {"supervisor": {**SUPERVISOR, **supervisor}, "engines": [], "gpus": []}


# --- the supervisor ---------------------------------------------------------------------------------------------------


def test_a_configuration_with_problems_is_summed_up(box: Sick) -> None:
    box.text = '[engine.q]\nport = 99999\nmodel = "x"\n' + "".join(f"odd{number} = 1\n" for number in range(6))
    found = box.ask("configuration")
    assert [finding.verdict for finding in found] == [FAIL] * 5 + [WARN]
    assert found[0].message.startswith("cannot use engine.q.odd0 = 1 in ")
    assert "args" in found[0].remedy
    assert found[5].message == "and 2 problems and warnings more"
    assert found[5].remedy == f"vllm-supervisor check-config {box.folder}/config.toml"
    box.text = ""
    assert box.one("configuration")[0] is OK


def test_a_configuration_with_warnings(box: Sick) -> None:
    box.text = '[engine.q]\nmodel = "org/model"\nport = 8001\ngpus = ["0"]\n'
    verdict, text, _ = box.one("configuration")
    assert verdict is WARN
    assert text.startswith("engine.q.gpus = ")


@pytest.mark.parametrize(
    ("why", "verdict"),
    [("missing", FAIL), ("denied", NOT_CHECKED), ("late", FAIL), ("trouble", FAIL)],
)
def test_a_configuration_that_nobody_could_read(box: Sick, why: str, verdict: Verdict) -> None:
    box.config = Unknown("it is so", why)
    found, text, remedy = box.one("configuration")
    assert found is verdict
    assert "it is so" in text
    assert remedy


def test_the_daemon(box: Sick) -> None:
    verdict, _, remedy = box.one("daemon")
    assert (verdict, remedy) == (WARN, f"vllm-supervisor run --config {box.folder}/config.toml")
    box.unit = UNIT
    assert box.one("daemon")[2] == "systemctl start vllm-supervisor"
    box.daemon = Unknown("may not be used", "denied")
    assert box.one("daemon")[0] is NOT_CHECKED
    box.daemon = Unknown("no sense", "trouble")
    assert box.one("daemon")[0] is FAIL
    box.daemon = status()
    assert box.one("daemon")[1] == f"vllm-supervisor {__version__} runs, pid 7, launcher systemd"
    box.daemon = status(version="0.0.1", config_error="cannot use engine.q")
    assert [(finding.verdict, finding.message) for finding in box.ask("daemon")] == [
        (WARN, "the configuration on disk is not in force: cannot use engine.q"),
        (WARN, f"the daemon is of version 0.0.1, this command of {__version__}"),
    ]


def test_systemd(box: Sick) -> None:
    assert box.one("systemd")[0] is NOT_CHECKED
    (box.root / "run/systemd/system").mkdir(parents=True)
    assert box.one("systemd")[0] is FAIL
    box.says["systemctl", "--version"] = "systemd 247 (247.3-7+deb11u5)\n+PAM"
    assert box.one("systemd")[:2] == (FAIL, "systemd 247 is older than 249")
    box.says["systemctl", "--version"] = "systemd 255 (255.4-1ubuntu8)\n"
    assert box.one("systemd")[0] is WARN
    box.write("/sys/fs/cgroup/cgroup.controllers", "")
    assert box.one("systemd") == (OK, "systemd 255", "")
    journald = (
        "# /etc/systemd/journald.conf\n[Journal]\n#Storage=auto\nStorage={}\n# /etc/a.conf\n[Journal]\nStorage={}\n"
    )
    box.says["systemd-analyze", "cat-config", "systemd/journald.conf"] = journald.format("volatile", "none")
    verdict, text, _ = box.one("systemd")
    assert (verdict, text[:38]) == (WARN, "journald keeps nothing (Storage=none):")
    box.says["systemd-analyze", "cat-config", "systemd/journald.conf"] = journald.format("none", "volatile")
    assert box.one("systemd")[0] is OK


@pytest.mark.parametrize(
    ("changed", "verdicts"),
    [
        ({}, [OK]),
        ({"LoadState": "not-found"}, [WARN]),
        ({"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "2"}, [FAIL]),
        ({"UnitFileState": "disabled"}, [WARN]),
        ({"NeedDaemonReload": "yes"}, [WARN, OK]),
    ],
)
def test_the_unit(box: Sick, changed: dict[str, str], verdicts: list[Verdict]) -> None:
    box.unit = UNIT | changed
    assert [finding.verdict for finding in box.ask("unit")] == verdicts


def test_the_unit_without_systemd_or_without_an_answer(box: Sick) -> None:
    assert box.ask("unit") == box.ask("stop_time") == []
    box.unit = Unknown("systemctl does not answer")
    assert box.one("unit")[0] is NOT_CHECKED


def test_the_time_to_stop(box: Sick) -> None:
    box.unit = UNIT
    box.text = '[engine.q]\nmodel = "org/model"\nport = 8001\n'
    assert box.one("stop_time")[1].endswith("prolonged while engines end (drain and stop: up to 90 s)")
    box.text = ""
    assert box.one("stop_time")[1].endswith("prolonged while engines end")
    box.unit = UNIT | {"TimeoutStopUSec": "10s"}
    verdict, text, remedy = box.one("stop_time")
    assert verdict is WARN
    assert text.startswith("TimeoutStopSec is 10s: systemd may kill the daemon")
    assert "TimeoutStopSec=120" in remedy
    box.unit = UNIT | {"TimeoutStopUSec": "infinity"}
    assert box.one("stop_time")[0] is OK


@pytest.mark.parametrize(
    ("span", "expected"),
    [("1min 30s", 90), ("500ms", 0.5), ("2h", 7200), ("infinity", None), ("", None), ("1w 2d", 777600)],
)
def test_time_spans(span: str, expected: float | None) -> None:
    assert seconds(span) == expected


def test_needrestart(box: Sick) -> None:
    assert box.one("needrestart") == (OK, "needrestart is not installed", "")
    (box.root / "etc/needrestart").mkdir()
    assert box.one("needrestart")[0] is WARN
    shipped = (ROOT / "units/vllm-supervisor.needrestart").read_text()
    box.write("/etc/needrestart/conf.d/vllm-supervisor.conf", shipped)
    assert box.one("needrestart")[0] is OK


# --- what competes with it --------------------------------------------------------------------------------------------

OLD_UNIT = """[Service]
User=vllmuser
ExecStart=/opt/vllm/bin/vllm serve /srv/models/qwen \\
  --port 8001
Restart=always
"""


def test_an_old_unit_is_a_rival_once_it_is_enabled(box: Sick) -> None:
    box.write("/etc/systemd/system/vllm-engine-q.service", OLD_UNIT)
    box.write("/etc/systemd/system/other.service", "[Service]\nExecStart=/usr/bin/other --about 'vllm'\n")
    assert box.one("rival_units") == (OK, "no other unit starts vLLM at boot", "")
    box.write("/etc/systemd/system/qwen.service", OLD_UNIT)
    assert box.one("rival_units")[:2] == (OK, "no other unit starts vLLM at boot (qwen.service: not enabled)")
    box.write("/etc/systemd/system/multi-user.target.wants/qwen.service", "")
    verdict, text, remedy = box.one("rival_units")
    assert verdict is WARN
    assert text == "/etc/systemd/system/qwen.service starts vLLM at boot, beside the supervisor"
    assert remedy.startswith("systemctl disable --now qwen.service")


def test_an_instance_of_a_template_is_a_rival(box: Sick) -> None:
    box.write("/etc/systemd/system/vllm@.service", OLD_UNIT)
    assert box.one("rival_units")[0] is OK
    box.write("/etc/systemd/system/multi-user.target.wants/vllm@qwen.service", "")
    assert box.one("rival_units")[0] is WARN


def test_a_unit_by_module_is_found_too(box: Sick) -> None:
    text = "[Service]\nExecStart=/opt/v/bin/python -m vllm.entrypoints.openai.api_server --model x\n"
    box.write("/lib/systemd/system/api.service", text)
    box.write("/etc/systemd/system/default.target.wants/api.service", "")
    assert box.one("rival_units")[0] is WARN


def test_cron_jobs_about_vllm(box: Sick) -> None:
    box.uid = 0
    box.write("/etc/cron.d/backup", "0 1 * * * root /usr/bin/backup\n# vllm is restarted elsewhere\n")
    box.write("/etc/cron.d/vllm-supervisor", "0 1 * * * root /usr/bin/vllm-supervisor status\n")
    assert box.one("rival_cron") == (OK, "no cron job is about vLLM", "")
    box.write("/var/spool/cron/crontabs/root", "# jobs\n*/5 * * * * curl -s :8001/health || systemctl restart vllm\n")
    verdict, text, remedy = box.one("rival_cron")
    assert (verdict, text) == (WARN, "line 2 of /var/spool/cron/crontabs/root does something to vLLM by itself")
    assert "has to go" in remedy
    box.uid = 1000
    assert [finding.verdict for finding in box.ask("rival_cron")] == [NOT_CHECKED, WARN]


def test_programs_of_supervisord(box: Sick) -> None:
    box.write("/etc/supervisor/conf.d/qwen.conf", "[program:qwen]\ncommand=/opt/vllm/bin/vllm serve x\n")
    verdict, text, _ = box.one("rival_supervisor")
    assert (verdict, text) == (WARN, "/etc/supervisor/conf.d/qwen.conf has supervisord start vLLM")


def test_processes_that_serve_beside_the_engines(box: Sick) -> None:
    box.process(10, "vllm", ("/opt/vllm/bin/python", "/opt/vllm/bin/vllm", "serve", "x", "--api-key", "sesame"))
    box.process(11, "vllm", ("vllm", "serve", "y"), "/vllm.slice/vllm-engine-y.service")
    box.process(12, "grep", ("grep", "vllm serve"))
    box.process(13, "python3", ("python3", "-m", "vllm.entrypoints.openai.api_server"))
    verdict, text, remedy = box.one("rival_processes")
    assert (verdict, text) == (WARN, "pid 10, 13: serving with vLLM, and no engine of the supervisor")
    assert remedy.startswith("ps -o pid,ppid,unit,lstart,args -p 10,13 ")
    assert "sesame" not in text + remedy
    box.write("/proc/13/stat", "13 (a) b) S 1 10 10 0 -1")  # of the session of 10
    box.daemon = {**status(), "engines": [{"pid": 10}]}
    assert box.one("rival_processes")[0] is OK
    box.daemon = Unknown("may not be used", "denied")
    assert box.one("rival_processes")[0] is NOT_CHECKED


@pytest.mark.parametrize("config", [Unknown("it may not be read", "denied"), None])
def test_nothing_is_said_of_what_a_configuration_that_cannot_be_read_says(box: Sick, config: Unknown | None) -> None:
    """The default state directory is well; whether it is the one that is used, nobody knows."""
    box.without_driver(cards=False)
    assert box.one("driver")[1] == "no NVIDIA GPU here, and no engine of the configuration needs one"
    box.config, box.text = config, "[supervisor\n"
    assert box.one("driver")[1] == "no NVIDIA GPU here"
    assert box.one("state_dir")[0] is NOT_CHECKED


def test_engines_that_outlive_their_daemon_are_no_strangers(box: Sick) -> None:
    """The next daemon adopts them: whoever ends them at night ends what still serves."""
    state = box.folder / "state"
    box.text = f'[supervisor]\nstate_dir = "{state}"\n'
    folder = state / DIRECTORY
    folder.mkdir(parents=True)
    for name, pid in {"a": 10, "gone": 20}.items():
        Records(folder).put(Record(name, 1, "plan", 0, Process(pid, 777, "boot"), "/tmp/x", 0))
        box.process(pid, "vllm", ("vllm", "serve", "x"))
    (folder / "broken.jsonl").write_text("{")
    box.write("/proc/10/stat", f"10 (vllm) S 1 10 10 {'0 ' * 15}777 0")
    box.write("/proc/20/stat", f"20 (sleep) S 1 20 20 {'0 ' * 15}888 0")
    assert box.one("rival_processes")[1] == "pid 20: serving with vLLM, and no engine of the supervisor"
    assert (folder / "broken.jsonl").exists()
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"ended": true}\n')
    assert box.one("rival_processes")[1].startswith("pid 10, 20: ")
    box.daemon = Unknown("it did not come in time", "trouble")
    assert box.one("rival_processes")[0] is WARN, "what a daemon wrote is known while it hangs"
    folder.rename(state / "elsewhere")
    folder.touch()
    assert box.one("rival_processes")[0] is NOT_CHECKED, "whoever cannot read it does not know"


# --- what may go wrong while checking ---------------------------------------------------------------------------------


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_check_that_hangs_or_breaks_costs_its_own_answer(box: Sick, gate: threading.Event) -> None:
    def hangs(_: Facts) -> list[Finding]:
        gate.wait()
        return []

    def breaks(_: Facts) -> list[Finding]:
        raise ValueError("odd\x1b[31m")

    checks = [Check("a", "g", hangs), Check("b", "g", breaks), Check("c", "g", lambda _: [ok("fine")])]
    began = time.monotonic()
    results = examine(box.facts(), checks, within_s=0.2)
    assert time.monotonic() - began < 5
    assert [result.finding.verdict for result in results] == [FAIL, NOT_CHECKED, OK]
    assert "no answer in time" in results[0].finding.message
    assert results[1].finding.message == "internal error: ValueError: odd\\x1b[31m"
    assert failed(results)


def test_commands_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_box, "COMMAND_S", 0.2)
    began = time.monotonic()
    assert doctor_box.run(("sleep", "60")) is None
    assert time.monotonic() - began < 10
    assert doctor_box.run(("/nowhere/at/all",)) is None
    assert doctor_box.run(("false",)) is None
    monkeypatch.undo()
    assert doctor_box.run(("echo", "x")) == "x\n"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    import os  # noqa: PLC0415 - a pipe that nobody writes to

    os.mkfifo(tmp_path / "pipe")
    box = Box(tmp_path)
    assert box.text("/pipe") is None
    assert box.text("/") is None
    assert box.text("/nothing") is None


def test_every_check_is_documented_and_named_once() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    groups = list(dict.fromkeys(check.group for check in CHECKS))
    assert groups == [
        group
        for place, group in enumerate(check.group for check in CHECKS)
        if place == 0 or group != CHECKS[place - 1].group
    ]
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").partition("## Checks")[2]
    told = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert told == names


def test_lists_are_cut() -> None:
    assert listed(["a", "b", "a"]) == "a, b"
    assert listed("abcdef") == "a, b, c, d and 2 more"
