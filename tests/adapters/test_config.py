"""Reading configurations: every refusal, merging, trust, and that nothing but ConfigError ever comes out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import stat
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from supervisord import config, config_world
from supervisord.cli import check_config
from supervisord.config import ConfigError, Loaded, load, parse
from supervisord.config_checks import host_and_port
from supervisord.config_problems import HIDDEN, Finding, locate, looks_secret, shown
from supervisord.config_trust import Seen, distrust, distrust_of, way_to
from supervisord.config_users import Account, account, may, own_account
from supervisord.config_world import user_finding
from supervisord.core import spec as core_spec
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.engine import launch

REPO = Path(__file__).parents[2]
BROKEN = sorted((REPO / "tests/data/config/broken").glob("*.toml"))
SECRET = "sk-very-secret-1"
SERVICE = Account("vllm", 1234, 1234, "/var/lib/vllm", "/usr/sbin/nologin", frozenset({1234}))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners of files")

MINIMAL = '[engine.qwen]\nmodel = "org/model"\nport = 8001\n'


@pytest.fixture(autouse=True)
def _service_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the user vllm, whatever the real one has."""
    for module in (config_world, launch):
        monkeypatch.setattr(module, "account", lambda name: SERVICE if name == "vllm" else account(name))


def write(folder: Path, text: str, **conf_d: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    path.chmod(0o600)
    for name, content in conf_d.items():
        (folder / "conf.d").mkdir(exist_ok=True, mode=0o700)
        (folder / "conf.d" / f"{name}.toml").write_text(content)
        (folder / "conf.d" / f"{name}.toml").chmod(0o600)
    return path


def read(folder: Path, text: str, **conf_d: str) -> Loaded:
    return load(write(folder, text, **conf_d), trust=False)


def problems(folder: Path, text: str, **conf_d: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, **conf_d)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called vllm, so that what is wrong is the configuration alone."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(launch, "may", lambda *_: True)
    return program


def check(path: Path) -> int:
    parser = argparse.ArgumentParser()
    check_config.add_parser(parser.add_subparsers())
    return check_config.main(parser.parse_args(["check-config", str(path)]))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", BROKEN, ids=lambda path: path.stem)
@pytest.mark.usefixtures("stub")
def test_broken_configuration_is_refused_with_every_reason(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copyfile(broken, tmp_path / "config.toml"))
    expected = re.findall(r"^# expect: (.+)$", broken.read_text(), re.MULTILINE)

    assert check(copy) == 2

    out, err = capsys.readouterr()
    *lines, count = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert out == ""
    assert len(lines) == len(expected) >= 1
    for fragment in expected:
        assert any(fragment in line for line in lines), (fragment, lines)
    assert all(line.startswith("cannot ") and str(copy) in line and line.isprintable() for line in lines)
    assert f"{len(expected)} problem" in count
    assert "Traceback" not in err
    assert SECRET not in err
    assert "4242" not in err


def test_there_are_many_broken_configurations() -> None:
    assert len(BROKEN) >= 90


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "none.toml") == 2
    assert "No such file or directory; name an existing file" in capsys.readouterr().err


def test_whoever_may_not_read_it_is_not_told_to_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    (path := tmp_path / "config.toml").write_text("")
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ConfigError, match=r"Permission denied; be root, or in the group .*vllm-admin") as told:
        load(path, trust=False)
    assert "mode" not in str(told.value)


@pytest.mark.parametrize("make", ["directory", "fifo", "latin-1", "large"])
def test_files_that_are_no_configuration(make: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    if make == "directory":
        path.mkdir()
    elif make == "fifo":
        os.mkfifo(path)
    elif make == "latin-1":
        path.write_bytes(b'[engine.qwen]\nmodel = "\xe4"\n')
    else:
        path.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(
        ConfigError, match=r"^cannot read .*config.toml: .*(no regular file|not UTF-8|more than 1048576)"
    ):
        load(path, trust=False)


def test_all_files_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "[engine.qwen]\nport = 0\n",
        a="[supervisor\n",
        b='[engine.qwen]\nautostart = "x"\n',
        c='[engine.coder]\nmodel = 1\nport = 8002\n[gpu]\npersistence = "maybe"\n',
    )
    assert len(found) == 5  # the model that is missing may be in the file that cannot be read
    for name, fragment in {
        "a.toml": "(at line 1, column 12)",
        "b.toml": "engine.qwen.autostart",
        "c.toml": "engine.coder.model",
        "config.toml": "engine.qwen.port",
    }.items():
        assert any(name in line and fragment in line for line in found), (name, found)


def test_a_problem_says_value_place_and_remedy(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, '[supervisor]\nlauncher = "sytemd"\n')
    assert line == (
        f'cannot use supervisor.launcher = "sytemd" in {tmp_path}/config.toml: '
        'must be one of "auto", "systemd", "plain"; did you mean "systemd"?'
    )


def test_a_wrong_default_is_reported_where_it_was_written(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "[engine_defaults.restart]\nbackoff_initial_s = 50\n" + MINIMAL,
        b="[engine.qwen.restart]\nbackoff_max_s = 5\n",
    )
    assert len(found) == 1
    assert found[0] == (
        f"cannot use engine_defaults.restart.backoff_initial_s = 50.0 in {tmp_path}/config.toml: "
        "must not be more than backoff_max_s (5); raise backoff_max_s or lower this"
    )


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_the_least_configuration_has_the_defaults_of_the_design(tmp_path: Path) -> None:
    loaded = read(tmp_path, MINIMAL)
    assert loaded.spec == NodeSpec(engines={"qwen": EngineSpec(name="qwen", model="org/model", port=8001)})
    assert loaded.warnings == ()
    assert read(tmp_path, "").spec == NodeSpec()


@pytest.mark.usefixtures("stub")
def test_check_config_accepts_and_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MINIMAL + 'gpus = [0, "1"]\n')
    assert check(path) == 0
    out, err = capsys.readouterr()
    assert out == f"{path} is valid; engines: qwen\n"
    first, second = err.splitlines()
    assert first.startswith(f'warning: engine.qwen.gpus = "0" in {path}: an index can mean another GPU after a reboot')
    assert 'gpus = "1"' in second


def test_a_path_that_could_drive_a_terminal_is_told_without_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[2J"
    assert check(path) == 2
    *_, count = capsys.readouterr().err.splitlines()
    assert count == f"cannot use the configuration {tmp_path}/\\x1b[2J: 1 problem"
    path.write_text("")
    assert check(path) == 0
    assert capsys.readouterr().out == f"{tmp_path}/\\x1b[2J is valid; engines: none\n"


def lines_of(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What check-config says of a configuration that it refuses, warnings first, without the count."""
    assert check(path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *lines, count = err.splitlines()
    assert count.startswith(f"cannot use the configuration {path}: ")
    return lines


def test_a_program_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MINIMAL + 'command = ["no-such-vllm", "serve"]\n')
    (line,) = lines_of(path, capsys)
    assert line.startswith('cannot find the program "no-such-vllm" of engine.qwen: it is not in ')
    assert load(path, trust=False).spec.engines  # the daemon starts, for the sake of the other engines


def test_one_error_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said of one key is said once, and whatever does not rest on it is checked all the same."""
    text = """
[supervisor]
poll_interval_s = "often"
[engine.a]
command = ["no-such-vllm", "serve"]
model = "/nonexistent/model"
api_key_file = "/nonexistent/key"
port = 8001
[engine.a.args]
disable-log-stats = true
swap-space = 5
gpu-memory-utilization = 1.5
awq-ckpt = "x"
[engine.b]
command = []
model = "org/model"
port = 8001
gpus = ["GPU-1a2b3c4d"]
[engine.b.args]
block-size = 17
tensor-parallel-size = 2
[engine.c]
model = "org/model"
port = 8003
profile = "mine"
"""
    profiles = tmp_path / "profiles.toml"
    profiles.write_text("[mine]\nflags = 1\n")
    profiles.chmod(0o600)
    lines = lines_of(write(tmp_path, text), capsys)
    fragments = (
        "warning: engine.b.args.block-size = 17",
        "cannot use supervisor.poll_interval_s",
        "cannot use engine.a.args.disable-log-stats = true",
        "cannot use engine.a.model",
        "cannot use engine.a.api_key_file",
        'cannot find the program "no-such-vllm" of engine.a',
        "cannot use engine.a.args.gpu-memory-utilization = 1.5",
        "cannot use engine.a.args.awq-ckpt",
        "cannot use engine.b.port",
        "cannot use engine.b.command",
        "cannot use engine.b.args.tensor-parallel-size = 2",
        "cannot use mine.flags = 1",
        'cannot find the program "vllm" of engine.c',
    )
    for fragment in fragments:
        assert len([line for line in lines if line.startswith(fragment)]) == 1, (fragment, lines)
    assert len(lines) == len(fragments)


def test_of_a_file_that_cannot_be_read_nothing_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the engine may be in there."""
    (line,) = lines_of(write(tmp_path, MINIMAL, a="[engine"), capsys)
    assert line.startswith(f"cannot read {tmp_path}/conf.d/a.toml")


@pytest.mark.parametrize("name", ["a", "0", "a" * 32, "qwen_2-5"])
def test_engine_names(name: str, tmp_path: Path) -> None:
    assert list(read(tmp_path, MINIMAL.replace("qwen", name)).spec.engines) == [name]


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3.5-9B", "gpt2", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "s3://bucket/model", "/usr", "/etc/passwd"]
)
def test_models(model: str, tmp_path: Path) -> None:
    assert read(tmp_path, MINIMAL.replace("org/model", model)).spec.engines["qwen"].model == model


@pytest.mark.parametrize(
    "gpu", ["GPU-1a2b3c4d-0000-1111-2222-333344445555", "MIG-1a2b3c4d-0000-1111-2222-333344445555", "0000:65:00.0", "7"]
)
def test_gpus(gpu: str, tmp_path: Path) -> None:
    assert read(tmp_path, MINIMAL + f'gpus = ["{gpu}"]\n').spec.engines["qwen"].gpus == (gpu,)


def test_equal_ports_on_different_hosts(tmp_path: Path) -> None:
    other = MINIMAL.replace("qwen", "coder") + 'host = "127.0.0.2"\n'
    assert len(read(tmp_path, MINIMAL + other).spec.engines) == 2


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:9401", ("127.0.0.1", 9401)),
        ("[::1]:1", ("::1", 1)),
        ("node-1.lan:65535", ("node-1.lan", 65535)),
        ("", None),
        (":9401", None),
        ("::1:9401", None),
        ("[localhost]:1", None),
        ("a:0", None),
        ("a:65536", None),
        ("a:٣", None),
    ],
)
def test_listen_addresses(address: str, expected: object) -> None:
    assert host_and_port(address) == expected


@pytest.mark.parametrize("window", ["", "0 3 * * * 2h", "*/5 1-3 1,15 * sun 90m", "0 0 * jan-mar mon-fri 1d"])
def test_maintenance_windows(window: str, tmp_path: Path) -> None:
    loaded = read(tmp_path, MINIMAL + f'[engine.qwen.restart]\nmaintenance_window = "{window}"\n')
    assert loaded.spec.engines["qwen"].restart.maintenance_window == window


def test_numbers_are_converted_to_the_type_of_their_key(tmp_path: Path) -> None:
    engine = read(tmp_path, MINIMAL + "stop_timeout_s = 90\n").spec.engines["qwen"]
    assert type(engine.stop_timeout_s) is float
    assert type(engine.port) is int


def test_flags(tmp_path: Path) -> None:
    text = """
[engine.qwen.args]
max_model_len = 4096
enable-prefix-caching = true
served_model_name = ["a", "b"]
hf-token = true
"hf-overrides.max_x" = 1
max-num-batched-tokens = "8k"
[engine.qwen.args.speculative_config]
num_speculative_tokens = 5
"""
    assert read(tmp_path, MINIMAL + text).spec.engines["qwen"].args == {
        "max-model-len": 4096,
        "enable-prefix-caching": True,
        "served-model-name": ("a", "b"),
        "hf-token": True,
        "hf-overrides.max_x": 1,
        "max-num-batched-tokens": "8k",
        "speculative-config": {"num_speculative_tokens": 5},
    }


def test_every_number_in_the_specification_has_bounds() -> None:
    for cls in vars(core_spec).values():
        if not dataclasses.is_dataclass(cls):
            continue
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if {int, float} & {hints[field.name], *typing.get_args(hints[field.name])} and field.name != "args":
                assert field.metadata["low"] is not None, field.name
                assert field.metadata["high"] is not None, field.name


def test_paths_of_sockets_leave_room(tmp_path: Path) -> None:
    long_name = MINIMAL.replace("qwen", "a" * 32)
    (warning,) = read(tmp_path, long_name).warnings
    assert "four digits" in warning
    text = f'[supervisor]\nstate_dir = "/srv/{"d" * 20}"\n'
    (line,) = problems(tmp_path, text + long_name)
    assert line.endswith("shorten it by at least 1")
    assert read(tmp_path, text + MINIMAL).warnings == ()


# --- merging ----------------------------------------------------------------------------------------------------------


def test_files_merge_in_order(tmp_path: Path) -> None:
    main = """
[engine_defaults]
drain_timeout_s = 5
command = ["/opt/a/vllm", "serve"]
[engine_defaults.args]
max_model_len = 1
served-model-name = ["a", "b"]
speculative-config = { method = "ngram", n = 1 }
[engine_defaults.restart]
max_restarts = 9
under_load = "drain"
[engine.qwen]
model = "org/model"
port = 8001
[engine.qwen.restart]
max_restarts = 3
"""
    loaded = read(
        tmp_path,
        main,
        **{
            "20-b": 'engine.qwen.port = 8003\nengine.qwen.args = { max-model-len = 3, served-model-name = ["c"] }\n',
            "10-a": "[engine.qwen]\nport = 8002\nargs.max_model_len = 2\nargs.speculative_config.n = 2\n",
        },
    )
    engine = loaded.spec.engines["qwen"]
    assert engine.port == 8003
    assert engine.drain_timeout_s == 5
    assert engine.command == ("/opt/a/vllm", "serve")
    assert engine.args == {
        "max-model-len": 3,
        "served-model-name": ("c",),
        "speculative-config": {"method": "ngram", "n": 2},
    }
    assert (engine.restart.max_restarts, engine.restart.under_load) == (3, "drain")
    origins = loaded.origins
    folder = tmp_path / "conf.d"
    assert origins["engine.qwen.port"] == f"{folder}/20-b.toml"
    assert origins["engine.qwen.args.speculative-config.n"] == f"{folder}/10-a.toml"
    assert origins["engine.qwen.model"] == f"{tmp_path}/config.toml"
    at = ("engine", "qwen", "restart", "under_load")
    assert locate(origins, at) == (f"{tmp_path}/config.toml", ("engine_defaults", "restart", "under_load"))


def test_only_toml_files_that_are_not_hidden_count(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, **{".hidden": "x ="})
    (tmp_path / "conf.d" / "a.toml.dpkg-old").write_text("x =")
    assert load(tmp_path / "config.toml", trust=False).spec.engines["qwen"].port == 8001


def test_conf_d_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "conf.d").write_text("")
    (line,) = problems(tmp_path, MINIMAL)
    assert line.startswith(f"cannot list {tmp_path}/conf.d: Not a directory")


@pytest.mark.parametrize("example_file", sorted((REPO / "docs/examples").glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_valid(example_file: Path) -> None:
    content = config._content(example_file)
    assert isinstance(content, dict)
    assert parse(content).engines


# --- saving and reading again -----------------------------------------------------------------------------------------


def test_saved_tables_give_the_same_specification(tmp_path: Path) -> None:
    loaded = read(
        tmp_path,
        '[engine_defaults.args]\nmax_model_len = 1\nx = [1, 0.1, { a = [1, "b"] }]\n'
        "[engine_defaults]\ndrain_timeout_s = 0.1\n" + MINIMAL + 'gpus = [0]\n[engine.qwen.env]\nA = "ä\\n"\n',
        b='[gpu.persistence_override]\n"NVIDIA*" = "off"\n',
    )
    saved = json.dumps(loaded.tables)
    assert parse(json.loads(saved)) == loaded.spec
    assert parse(json.loads(saved), loaded.origins) == loaded.spec


def test_the_token_of_the_metrics(tmp_path: Path) -> None:
    token = tmp_path / "token"
    text = f'[supervisor]\nmetrics_token_file = "{token}"\n{MINIMAL}'
    with pytest.raises(ConfigError, match=r"cannot use supervisor\.metrics_token_file = .*: it is not there"):
        read(tmp_path, text)
    token.write_text("secret\n")
    assert read(tmp_path, text).spec.supervisor.metrics_token_file == str(token)
    with pytest.raises(ConfigError, match="must be the absolute path of a file that holds the token") as caught:
        read(tmp_path, text.replace(str(token), "the-token-itself"))
    assert "the-token-itself" not in str(caught.value)


def test_a_drain_ends_after_it_may(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drain_min_s = 31.*must not be more than drain_timeout_s \(30\)"):
        read(tmp_path, MINIMAL + "drain_min_s = 31\n")
    assert read(tmp_path, MINIMAL + "drain_min_s = 30\n").spec.engines["qwen"].drain_min_s == 30


def test_a_start_is_looked_at_twice_before_it_can_be_called_still(tmp_path: Path) -> None:
    slow = "[supervisor]\npoll_interval_s = 60\n"
    with pytest.raises(
        ConfigError, match=r"start_timeout_s = 119.*poll_interval_s \(60\) or more.*lower poll_interval_s"
    ):
        read(tmp_path, slow + MINIMAL + "start_timeout_s = 119\n")
    assert read(tmp_path, slow + MINIMAL + "start_timeout_s = 120\n").spec.engines["qwen"].start_timeout_s == 120


def test_files_may_be_missing_when_they_are_not_checked(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("org/model", "/nonexistent/model") + 'api_key_file = "/nonexistent/key"\n')
    with pytest.raises(ConfigError) as caught:
        load(path, trust=False)
    assert len(caught.value.problems) == 2
    saved = load(path, trust=False, check_files=False)
    assert parse(saved.tables) == saved.spec


# --- fuzz -------------------------------------------------------------------------------------------------------------

_KEYS = sorted(
    {"engine", "engine_defaults", "supervisor", "gpu", "qwen", "HF_TOKEN", "api_key", "password", "max-model-len"}
    | {
        field.name
        for cls in vars(core_spec).values()
        if dataclasses.is_dataclass(cls)
        for field in dataclasses.fields(cls)
    }
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["org/model", "/usr", "127.0.0.1", "auto", "wait", "0", "vllm", "0 3 * * * 2h", "10**400"])
    | st.just(10**4000)
)
_NAMES = st.sampled_from(_KEYS) | st.text(max_size=6)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=25,
)
_ENGINES = st.dictionaries(st.just("qwen") | _NAMES, st.dictionaries(_NAMES, _TREES, max_size=8) | _TREES, max_size=3)
_NODES = st.dictionaries(_NAMES, _TREES, max_size=4) | st.fixed_dictionaries(
    {"engine": _ENGINES},
    optional={"engine_defaults": st.dictionaries(_NAMES, _TREES, max_size=6), "supervisor": _TREES},
)


@settings(max_examples=200, deadline=None)
@given(_NODES)
@example({"engine": {"qwen": {"model": "org/model", "port": 8001}}})
def test_fuzz_nothing_but_config_error_comes_out(tables: dict[str, Any]) -> None:
    found = _problems_of(tables)
    for line in found:
        assert re.match(r"cannot [a-z]+ .", line), line
        assert line.isprintable()
    if not found:
        assert parse(json.loads(json.dumps(tables))) == parse(tables)


def _problems_of(tables: dict[str, Any]) -> list[str]:
    try:
        parse(tables)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_a_number_that_python_does_not_print() -> None:
    (line,) = _problems_of({"supervisor": {"poll_interval_s": 10**5000}})
    assert "a number of thousands of digits" in line


def _with_secret(tree: Any, *, hidden: bool = False) -> Any:
    """The same tree with the secret as every text that stands under a secret-looking name."""
    if isinstance(tree, dict):
        return {key: _with_secret(value, hidden=hidden or looks_secret(str(key))) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_secret(value, hidden=hidden) for value in tree]
    return SECRET if hidden and isinstance(tree, str) else tree


@settings(max_examples=150, deadline=None)
@given(_NODES)
def test_fuzz_secrets_are_never_repeated(tables: dict[str, Any]) -> None:
    engines = tables.get("engine")
    if isinstance(engines, dict):  # the name of an engine is no name of a secret
        tables["engine"] = {f"e{number}": table for number, table in enumerate(engines.values())}
    with_secret = _with_secret(tables)
    assert SECRET not in "".join(_problems_of(with_secret))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80) | st.text(alphabet='[]="\n.{}#\\u0ae1, ', max_size=80).map(str.encode))
def test_fuzz_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    try:
        found = load(path, trust=False).warnings
    except ConfigError as error:
        found = tuple(map(str, error.problems))
    assert all(line.startswith("cannot ") for line in found)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "API_TOKENS", "apiKey"])
def test_names_that_look_secret(name: str) -> None:
    assert looks_secret(name)
    assert shown("x", ("engine", "qwen", "env", name)) == HIDDEN


@pytest.mark.parametrize(
    "name",
    ["max-num-batched-tokens", "prefill_tokens", "tokenizer", "TOKENIZERS_PARALLELISM", "dbo-decode-token-threshold"],
)
def test_names_that_only_count_tokens(name: str) -> None:
    assert not looks_secret(name)


def test_an_engine_may_be_called_token() -> None:
    assert shown("x", ("engine", "token", "host")) == '"x"'


# --- trust ------------------------------------------------------------------------------------------------------------

_DIR, _FILE, _LINK, _STICKY = stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_ISVTX


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ([("/", 0, _DIR | 0o755), ("/etc", 0, _DIR | 0o755), ("/etc/c", 0, _FILE | 0o644)], None),
        ([("/", 0, _DIR | 0o755), ("/etc", 0, _DIR | 0o755), ("/etc/c", 7, _FILE | 0o644)], "chown root /etc/c"),
        ([("/", 0, _DIR | 0o755), ("/etc", 7, _DIR | 0o755), ("/etc/c", 0, _FILE | 0o644)], "chown root /etc"),
        ([("/", 0, _DIR | 0o755), ("/etc", 0, _DIR | 0o775), ("/etc/c", 0, _FILE | 0o644)], "chmod go-w /etc"),
        ([("/", 0, _DIR | 0o755), ("/etc", 0, _DIR | 0o755), ("/etc/c", 0, _FILE | 0o664)], "chmod go-w /etc/c"),
        ([("/", 0, _DIR | 0o757), ("/etc", 0, _DIR | 0o755), ("/etc/c", 0, _FILE | 0o644)], "chmod go-w /"),
        # mktemp -d of root's under /tmp; somebody else's; a name directly in /tmp
        ([("/tmp", 0, _DIR | _STICKY | 0o777), ("/tmp/d", 0, _DIR | 0o700), ("/tmp/d/c", 0, _FILE | 0o600)], None),
        (
            [("/tmp", 0, _DIR | _STICKY | 0o777), ("/tmp/d", 7, _DIR | 0o700)],
            "move it to a directory that only root can write, such as /etc/vllm-supervisor",
        ),
        (
            [("/tmp", 0, _DIR | _STICKY | 0o777)],
            "move it to a directory that only root can write, such as /etc/vllm-supervisor",
        ),
        ([("/tmp", 7, _DIR | _STICKY | 0o777), ("/tmp/d", 0, _DIR | 0o700)], "chown root /tmp"),
        # a link says nothing by its own mode, its directory does
        (
            [("/etc", 0, _DIR | 0o755), ("/etc/l", 0, _LINK | 0o777), ("/", 0, _DIR | 0o755), ("/c", 0, _FILE | 0o644)],
            None,
        ),
        (
            [("/tmp", 0, _DIR | _STICKY | 0o777), ("/tmp/l", 7, _LINK | 0o777), ("/c", 0, _FILE | 0o644)],
            "move it to a directory that only root can write, such as /etc/vllm-supervisor",
        ),
        (
            [("/etc", 0, _DIR | 0o755), ("/etc/l", 0, _LINK | 0o777), ("/h", 7, _DIR | 0o755), ("/h/c", 0, _FILE)],
            "chown root /h",
        ),
    ],
)
def test_who_could_change_a_file(way: list[tuple[str, int, int]], expected: str | None) -> None:
    found = distrust_of([Seen(*seen) for seen in way])
    assert (found.remedy if found else None) == expected


def test_the_way_follows_links(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "c.toml").write_text("")
    (tmp_path / "relative").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative" / ".." / "real")
    names = [seen.path for seen in way_to(f"{tmp_path}/absolute/./c.toml")]
    assert names[0] == "/"
    assert names[-1] == str(real / "c.toml")
    assert f"{tmp_path}/absolute" in names
    assert f"{tmp_path}/relative" in names
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="too many symbolic links"):
        way_to(f"{tmp_path}/loop")


@needs_root
def test_root_trusts_a_private_directory(tmp_path: Path) -> None:
    assert load(write(tmp_path, MINIMAL), trust=True).spec.engines["qwen"].user is None
    assert distrust("/etc/passwd") is None
    assert distrust("/tmp") is not None


@needs_root
@pytest.mark.parametrize("spoil", ["owner", "mode", "folder", "conf.d", "piece", "link"])
def test_root_refuses_what_others_can_change(spoil: str, tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL, a="[gpu]\n")
    if spoil == "owner":
        os.chown(path, 65534, 0)
    elif spoil == "mode":
        path.chmod(0o664)
    elif spoil == "folder":
        tmp_path.chmod(0o1777)
    elif spoil == "conf.d":
        (tmp_path / "conf.d").chmod(0o777)
    elif spoil == "piece":
        os.chown(tmp_path / "conf.d" / "a.toml", 65534, 0)
    else:
        other = tmp_path / "other"
        other.mkdir()
        os.chown(other, 65534, 0)
        (other / "b.toml").write_text("")
        (tmp_path / "conf.d" / "b.toml").symlink_to(other / "b.toml")
    with pytest.raises(ConfigError) as caught:
        load(path, trust=True)
    (problem,) = caught.value.problems
    assert re.match(
        r"cannot trust /.*: the daemon is root, and /.* is not root's alone: .*; (ch(own root|mod go-w) /|move it to)",
        str(problem),
    )
    assert load(path, trust=False).spec.engines


def _users(user: str | None, *, as_root: bool, **accounts: Account) -> list[Finding]:
    own = Account("me", 1000, 1000, "/home/me", "/bin/sh", frozenset({1000}))
    return list(user_finding(user, ("engine", "qwen", "user"), as_root=as_root, own=own, lookup=accounts.get))


def test_users_of_engines() -> None:
    root = dataclasses.replace(SERVICE, name="root", uid=0)
    assert _users(None, as_root=True, vllm=SERVICE) == []
    assert _users("root", as_root=True, root=root) == []
    assert _users(None, as_root=False) == []
    assert _users("me", as_root=False) == []
    (missing,) = _users(None, as_root=True)
    assert "useradd --system" in missing.remedy
    (unknown,) = _users("someone", as_root=True)
    assert unknown.value == '"someone"'
    for user in ("toor", None):
        (disguised,) = _users(user, as_root=True, toor=root, vllm=root)
        assert "root under another name" in disguised.message
    (other,) = _users("vllm", as_root=False, vllm=SERVICE)
    assert "only root can start engines as somebody else" in other.message


@needs_root
def test_root_as_a_user_must_be_written_out_and_is_said(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, '[engine_defaults]\nuser = "root"\n' + MINIMAL), trust=True)
    (warning,) = loaded.warnings
    assert warning.startswith(f'engine_defaults.user = "root" in {tmp_path}/config.toml: ')
    assert warning.endswith(" (engine qwen)")


def test_a_warning_from_the_defaults_is_told_once_with_its_engines(tmp_path: Path) -> None:
    engines = "".join(MINIMAL.replace("qwen", name).replace("8001", f"800{n}") for n, name in enumerate("abc"))
    text = '[engine_defaults]\nuser = "root"\n' + engines + 'user = "root"\n'
    first, second = load(write(tmp_path, text), trust=True).warnings
    assert first.startswith("engine_defaults.user")
    assert first.endswith("give it a user of its own (engines a, b)")
    assert second.startswith("engine.c.user")
    assert second.endswith("give it a user of its own")


def test_a_key_file_that_everybody_can_read(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    for mode, as_root, refused in (
        (0o644, True, True),
        (0o600, True, False),
        (0o640, True, False),
        (0o644, False, False),
    ):
        key.chmod(mode)
        assert (config_world.key_file_problem(str(key), as_root=as_root) is not None) is refused
    (tmp_path / "link").symlink_to(key)
    assert "symbolic link" in (config_world.key_file_problem(f"{tmp_path}/link", as_root=False) or ("",))[0]


def test_whose_daemon_a_file_configures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = write(tmp_path, MINIMAL)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert config.daemon_is_root(Path("/etc/passwd"))
    assert not config.daemon_is_root(Path("/nonexistent"))
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert not config.daemon_is_root(mine)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert config.daemon_is_root(mine)


# --- what a user may reach --------------------------------------------------------------------------------------------


def test_what_another_user_may_reach(tmp_path: Path) -> None:
    stranger = Account("stranger", 54321, 54321, "/", "/bin/sh", frozenset({54321}))
    assert may(stranger, "/usr/bin/env", os.X_OK)
    assert may(stranger, "/usr", os.R_OK | os.X_OK)
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "x").write_text("")
    assert not may(stranger, f"{tmp_path}/closed/x", os.R_OK)
    assert may(own_account(), f"{tmp_path}/closed/x", os.R_OK)
    assert may(stranger, "/nonexistent/x", os.R_OK)
    assert account("nobody-of-this-name") is None
    assert account("nul\0") is None


# --- engines of one GPU -----------------------------------------------------------------------------------------------

ON_ONE_GPU = """
[engine.a]
model = "Org/Model"
port = 8001
gpus = ["GPU-1a2b3c4d"]
[engine.a.args]
gpu-memory-utilization = {a}
[engine.b]
model = "Org/Model"
port = 8002
gpus = ["gpu-1A2B3C4D"]
{b}
"""


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.5, "[engine.b.args]\ngpu-memory-utilization = 0.5"),
        (0.9, "autostart = false"),
        (0.9, "[engine.b.args]\nkv-cache-memory-bytes = 1000000000"),
        (0.1, ""),
        (0.2, ""),
    ],
)
def test_engines_that_fit_on_one_gpu(tmp_path: Path, a: float, b: str) -> None:
    assert len(read(tmp_path, ON_ONE_GPU.format(a=a, b=b)).spec.engines) == 2


@pytest.mark.parametrize(
    ("a", "b", "claims"),
    [
        (0.5, "[engine.b.args]\ngpu-memory-utilization = 0.51", "0.5 + 0.51"),
        (0.7, '[engine.b.args]\ngpu-memory-utilization = "0.4"', "0.7 + 0.4"),
    ],
)
def test_engines_that_do_not_fit_on_one_gpu(tmp_path: Path, a: float, b: str, claims: str) -> None:
    (found,) = problems(tmp_path, ON_ONE_GPU.format(a=a, b=b))
    assert found.startswith("cannot use engine.b.gpus")
    assert f"a and b share a GPU and claim {claims} of its memory, more than there is; set args." in found


@pytest.mark.parametrize(
    ("b", "told"),
    [("", True), ("command = ['/opt/serve.sh']", False), ("[engine.b.args]\nconfig = 'vllm.yaml'", False)],
)
def test_what_an_engine_does_not_say_is_no_error(tmp_path: Path, b: str, *, told: bool) -> None:
    """It may stand in a script or in vLLM's own file; where vLLM's default would not fit, that is told."""
    warnings = read(tmp_path, ON_ONE_GPU.format(a=0.2, b=b)).warnings
    assert any("a and b share a GPU and claim 0.2 + 0.9 of its memory" in text for text in warnings) is told


@pytest.mark.parametrize("key", ["a." * 200_000 + "a", "'a b' . " * 50_000 + "a", '"a"\t.' * 33 + "a"])
def test_a_key_of_very_many_parts_is_refused_before_it_is_read(tmp_path: Path, key: str) -> None:
    """tomllib takes a gigabyte for one of 32 KB."""
    path = tmp_path / "config.toml"
    for text in (f"{key} = 1", f"[{key}]", f"x = [{{ b = 1, {key} = 2 }}]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="nested more than 32 deep"):
            load(path, trust=False)


@pytest.mark.parametrize(
    "text", ["# " + "One. Two words. " * 50, 'X = "' + "." * 99 + '"', 'X = """' + "\na.b.c." * 40 + '"""']
)
def test_dots_elsewhere_are_no_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[engine.a]\nmodel = 'org/m'\nport = 8000\n[engine.a.env]\nA = 'b'\n{text}\n")
    assert load(path, trust=False, check_files=False).spec.engines["a"].port == 8000
