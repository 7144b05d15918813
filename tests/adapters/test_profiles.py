"""Launch profiles: the flags by kind of GPU and size of model, who overrides them, and an operator's own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from supervisord.config_problems import ConfigError
from supervisord.core.gpu_kinds import GpuKind
from supervisord.core.spec import EngineSpec
from supervisord.engine import profiles as profiles_module
from supervisord.engine.flag_checks import Target, machine_problems, machine_warnings, name_and_value
from supervisord.engine.flags import FlagSet, parse_help
from supervisord.engine.launch import build_plan, explain
from supervisord.engine.launch_flags import Knowledge, settle
from supervisord.engine.profiles import Choice, Profiles, load, shipped, size_of
from tests.sim.engine import DATA_PATH

FLAGS = parse_help((DATA_PATH / "help-all-0.32.0.txt").read_text(encoding="utf-8"), "0.32.0")
SHIPPED = Profiles(shipped())
RTX3090, RTX4090 = GpuKind("ampere", "geforce"), GpuKind("ada", "geforce")
A100, H100 = GpuKind("ampere", "datacenter"), GpuKind("hopper", "datacenter")
RTX5090, GB10 = GpuKind("blackwell", "geforce"), GpuKind("blackwell", "integrated")
ALWAYS = {"enable-prefix-caching": True, "enable-chunked-prefill": True}
ON_3090 = {**ALWAYS, "max-num-batched-tokens": 8192, "gpu-memory-utilization": 0.92, "max-num-seqs": 256}
ON_4090 = {**ALWAYS, "max-num-batched-tokens": 8192, "gpu-memory-utilization": 0.92, "kv-cache-dtype": "fp8"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners of files")


def engine(model: str = "org/model", *, args: dict[str, Any] | None = None, **keys: Any) -> EngineSpec:
    return EngineSpec(**{"name": "qwen", "model": model, "port": 1, "gpus": ("0",), "args": args or {}, **keys})


def choose(
    spec: EngineSpec,
    *gpus: GpuKind,
    version: str | None = "0.32.0",
    flags: FlagSet | None = FLAGS,
    profiles: Profiles = SHIPPED,
) -> Choice:
    return profiles.choose(spec, Target(version, flags, gpus or None))


def flags_of(choice: Choice) -> dict[str, Any]:
    assert choice.finding is None
    assert choice.problems == ()
    return {name: value for name, (value, _) in choice.args.items()}


# --- the shipped ones -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "model", "flags"),
    [
        ((RTX3090,), "org/model", ON_3090),
        ((RTX3090,), "srv/chat-9b-awq", ON_3090),
        ((RTX3090,), "org/model-14B", {**ON_3090, "max-num-seqs": 16}),
        ((RTX3090, RTX3090), "org/model-70B-AWQ", {**ON_3090, "max-num-seqs": 8}),
        ((RTX4090,), "org/model", ON_4090),
        ((RTX4090,), "org/model-7B", {**ON_4090, "max-num-seqs": 32}),
        ((RTX4090,), "org/model-14B", {**ON_4090, "max-num-seqs": 16}),
        ((RTX4090, RTX4090), "org/model-70B-FP8", {**ON_4090, "max-num-seqs": 8}),
        ((RTX3090, RTX4090), "org/model-7B", {**ALWAYS, "max-num-batched-tokens": 8192}),
        ((A100,), "org/model-7B", ALWAYS),
        ((H100,) * 8, "org/model-70B", ALWAYS),
        ((RTX5090,), "org/model-7B", ALWAYS),
        ((GB10,), "org/model-7B", ALWAYS),
        ((GpuKind(),), "org/model-7B", ALWAYS),
        ((RTX4090, GpuKind()), "org/model-7B", ALWAYS),
    ],
)
def test_flags_by_gpu_and_model(gpus: tuple[GpuKind, ...], model: str, flags: dict[str, Any]) -> None:
    found = choose(engine(model), *gpus)
    assert flags_of(found) == flags
    assert found.notes == ()


def test_unknown_gpus_get_what_holds_for_all_and_it_is_said() -> None:
    found = choose(engine("org/model-7B"))
    assert flags_of(found) == ALWAYS
    assert found.used == ("common",)
    assert found.notes == ("the kind of the GPUs is not known here: only what holds for all GPUs",)


def test_cpu_engines_and_none_get_nothing() -> None:
    for spec in (engine(gpus=()), engine(profile="none")):
        assert choose(spec, RTX4090) == Choice({}) == choose(spec)


@pytest.mark.parametrize(
    ("args", "left_out"),
    [
        ({"max-num-seqs": 4}, {"max-num-seqs"}),
        ({"device-memory-utilization": 0.5}, {"gpu-memory-utilization"}),
        ({"kv-cache-memory-bytes": "8G"}, {"gpu-memory-utilization"}),
        ({"kv-cache-dtype": "auto"}, {"kv-cache-dtype"}),
        ({"attention-backend": "FLASH_ATTN"}, {"kv-cache-dtype"}),
        ({"attention-config.backend": "FLASH_ATTN"}, {"kv-cache-dtype"}),
        ({"enable-prefix-caching": False}, {"enable-prefix-caching"}),
        ({"no-enable-prefix-caching": True}, {"enable-prefix-caching"}),
        ({"enable-chunked-prefill": False}, {"enable-chunked-prefill", "max-num-batched-tokens"}),
        ({"no-enable-chunked-prefill": True}, {"enable-chunked-prefill", "max-num-batched-tokens"}),
        ({"enable-chunked-prefill": True}, {"enable-chunked-prefill"}),
        ({"performance-mode": "throughput"}, {"max-num-batched-tokens"}),
        ({"runner": "pooling"}, {*ALWAYS, "max-num-batched-tokens", "kv-cache-dtype"}),
        ({"dtype": "half"}, set()),
    ],
)
def test_the_operator_has_the_last_word(args: dict[str, Any], left_out: set[str]) -> None:
    whole = {**ON_4090, "max-num-seqs": 32}
    found = choose(engine("org/model-7B", args=args), RTX4090)
    assert flags_of(found) == {name: value for name, value in whole.items() if name not in left_out}
    command = ("vllm", "serve", *(f"--{name}={value}" for name, value in args.items() if value is not False))
    if False not in args.values():
        assert flags_of(choose(engine("org/model-7B", command=command), RTX4090)) == flags_of(found)


def test_a_file_of_flags_is_not_overridden() -> None:
    for spec in (engine(args={"config": "/etc/vllm.yaml"}), engine(command=("vllm", "serve", "--config", "/x.yaml"))):
        found = choose(spec, RTX4090)
        assert found.args == {}
        assert "--config" in found.notes[0]
    assert choose(engine(args={"config": "/x"}, profile="none"), RTX4090) == Choice({})


def test_long_reasoning_is_over_what_auto_gives() -> None:
    found = choose(engine(profile="long-reasoning"), RTX3090)
    assert flags_of(found) == {**ON_3090, "max-num-batched-tokens": 16384}
    assert flags_of(choose(engine(profile="long-reasoning"), H100)) == {**ALWAYS, "max-num-batched-tokens": 16384}
    assert flags_of(choose(engine(profile="long-reasoning", gpus=()))) == {"max-num-batched-tokens": 16384}


def test_a_named_profile_stands_alone() -> None:
    found = choose(engine(profile="ampere-geforce"), H100)
    assert flags_of(found) == {"gpu-memory-utilization": 0.92, "max-num-seqs": 256}
    assert found.used == ("ampere-geforce",)
    assert choose(engine(profile="ampere-geforce")).notes == ()


@pytest.mark.parametrize(("version", "given"), [("0.10.2", False), (None, False), ("0.11.0", True), ("1.0", True)])
def test_fp8_cache_only_where_it_works(version: str | None, given: bool) -> None:
    assert ("kv-cache-dtype" in flags_of(choose(engine(), RTX4090, version=version, flags=None))) is given


def test_a_name_that_is_no_profile() -> None:
    found = choose(engine(profile="ampere-gforce"), RTX3090)
    assert found.args == {}
    assert found.finding is not None
    assert found.finding.at == ("engine", "qwen", "profile")
    assert found.finding.remedy == "did you mean ampere-geforce?"
    other = choose(engine(profile="qqqqqqqq"), RTX3090).finding
    assert other is not None
    assert other.remedy.startswith("known here: common, ")


def test_a_shipped_flag_that_the_installed_vllm_lacks_is_left_out() -> None:
    assert FLAGS is not None
    names = {name: flag for name, flag in FLAGS.names.items() if name != "enable-chunked-prefill"}
    found = choose(engine(), H100, flags=FlagSet("0.40.0", names), version="0.40.0")
    assert flags_of(found) == {"enable-prefix-caching": True}
    assert found.notes == ("enable-chunked-prefill of common is left out: vLLM 0.40.0 has no --enable-chunked-prefill",)


def test_every_shipped_flag_is_one_of_the_captured_release() -> None:
    target = Target("0.32.0", FLAGS, None)
    for profile in shipped():
        assert profile.args, profile.name
        for name, value in profile.args.items():
            assert name_and_value(name, value, target, ("x",)) is None, (profile.name, name)
        for name in profile.unless:
            old = name in {"task", "override-pooler-config"}  # of releases before 0.32
            known = name_and_value(name, True, Target("0.32.0", FLAGS, None), ("x",))
            assert old or known is None or "needs a value" in known.message, (profile.name, name)


def test_no_shipped_profile_gives_what_the_machine_refuses() -> None:
    for gpu in (RTX3090, RTX4090, A100, H100, RTX5090, GB10, GpuKind("turing", "geforce"), GpuKind("volta", "geforce")):
        for model in ("org/model-7B", "org/model-14B", "org/model-70B"):
            args = flags_of(choose(engine(model), gpu))
            target = Target("0.32.0", FLAGS, (gpu,))
            assert [*machine_problems(engine(), args, target), *machine_warnings(engine(), args, target)] == []


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("Qwen/Qwen3.5-9B", "small"),
        ("/srv/models/fast-7b/", "small"),
        ("org/LFM2-1.2B", "small"),
        ("org/tiny-0.5b-chat", "small"),
        ("Qwen/Qwen3-30B-A3B", "medium"),
        ("org/code-14b-fp8", "medium"),
        ("org/model_32B_awq", "medium"),
        ("mistralai/Mixtral-8x7B-v0.1", "large"),
        ("meta-llama/Llama-3.1-405B", "large"),
        ("openai/gpt-oss-120b", "large"),
        ("org/draft-1B-for-70B", "large"),
        ("org/phi-4", None),
        ("org/gpt2", None),
        ("org/4bit-model", None),
        ("org/v2.5", None),
        ("/srv/70B/adapter", None),
        ("/cache/snapshots/1f7b9c07b", None),
    ],
)
def test_sizes(model: str, size: str | None) -> None:
    assert size_of(model) == size


# --- an operator's file -----------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "profiles.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def refused(folder: Path, *, trust: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, trust=trust)
    return [str(problem) for problem in caught.value.problems]


def test_without_a_file_there_are_the_shipped_ones(tmp_path: Path) -> None:
    assert load(tmp_path, trust=False) == SHIPPED == load(tmp_path / "nowhere", trust=True)


def test_profiles_are_added_and_replaced(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
[common.args]
enable_prefix_caching = true
[ampere-geforce]
[night]
base = "auto"
auto = false
[night.args]
max-num-seqs = 7
[h100]
generations = ["hopper"]
classes = ["datacenter"]
sizes = ["large"]
args.max-num-seqs = 128
""",
    )
    found = load(tmp_path, trust=False)
    assert [profile.name for profile in found.tables][-2:] == ["night", "h100"]
    given = flags_of(choose(engine(), RTX3090, profiles=found))
    assert given == {"enable-prefix-caching": True, "max-num-batched-tokens": 8192}
    night = choose(engine(profile="night"), RTX3090, profiles=found)
    assert flags_of(night) == {**given, "max-num-seqs": 7}
    assert night.used == ("common", "geforce-prefill", "night")
    for model, seqs in (("org/model-70B", 128), ("org/model-7B", None)):
        assert flags_of(choose(engine(model), H100, profiles=found)).get("max-num-seqs") == seqs


def test_a_mistake_in_an_operators_profile_is_told_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "[mine.args]\nswap-space = 4\nmax-num-seqs = true\ntrust-remote-code = true\n")
    found = choose(engine(), H100, profiles=load(tmp_path, trust=False))
    assert list(found.args) == [*ALWAYS, "trust-remote-code"]
    first, second = map(str, found.problems)
    assert first.startswith(
        f"cannot use mine.args.swap-space = 4 in {path}: vLLM 0.32.0 has no --swap-space; remove it"
    )
    assert second == (
        f"cannot use mine.args.max-num-seqs = true in {path}: the flag needs a value; write one instead of true"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[x", "cannot read {path}: "),
        ("x = 1", "cannot use x = 1 in {path}: must be a table; write [x] above its keys"),
        ("[auto]", "cannot use auto in {path}: the name of a profile"),
        ('["A b"]', 'cannot use "A b" in {path}: the name of a profile'),
        (
            "[x]\ngeneration = []",
            "cannot use x.generation = [] in {path}: there is no such key; did you mean generations?",
        ),
        ('[x]\ngenerations = ["amper"]', 'cannot use x.generations = "amper" in {path}: there is no such word'),
        ('[x]\nclasses = ["gaming"]', 'cannot use x.classes = "gaming" in {path}: there is no such word'),
        ('[x]\nsizes = ["7B"]', 'cannot use x.sizes = "7B" in {path}: there is no such word'),
        ('[x]\nsince = "soon"', 'cannot use x.since = "soon" in {path}: it is no release'),
        ('[x]\nbase = "common"', 'cannot use x.base = "common" in {path}: must be one of'),
        ("[x.args]\nport = 1", "cannot use x.args.port = 1 in {path}: the supervisor passes it"),
        ("[x.args]\ndisable-log-stats = true", "cannot use x.args.disable-log-stats = true in {path}: it removes"),
        ("[x.args]\na = []", "cannot use x.args.a = [] in {path}: an empty array"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    (problem,) = refused(tmp_path)
    assert problem.startswith(words.format(path=path))


def test_every_problem_at_once(tmp_path: Path) -> None:
    write(tmp_path, '[x]\nsizes = ["a", "b"]\n[y]\nauto = 1\n[none]')
    assert len(refused(tmp_path)) == 4


def test_what_is_no_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profiles.toml"
    path.mkdir()
    assert refused(tmp_path)[0].startswith(f"cannot read {path}: ")
    path.rmdir()
    os.mkfifo(path)
    assert "it is no regular file" in refused(tmp_path)[0]
    path.unlink()
    path.write_bytes(b"\xff")
    assert refused(tmp_path)[0].startswith(f"cannot read {path}: ")
    monkeypatch.setattr(profiles_module, "_MAX_BYTES", 3)
    path.write_text("[x]\n")
    assert "more than 3 bytes" in refused(tmp_path)[0]


@needs_root
def test_root_does_not_believe_what_others_can_write(tmp_path: Path) -> None:
    path = write(tmp_path, "[x.args]\nseed = 1\n")
    assert load(tmp_path, trust=True).tables[-1].name == "x"
    path.chmod(0o666)
    (problem,) = refused(tmp_path, trust=True)
    assert problem == (
        f"cannot trust {path}: the daemon is root, and {path} is not root's alone: every user can write to it "
        f"(mode 0666); chmod go-w {path}"
    )


# --- in a launch ------------------------------------------------------------------------------------------------------


def test_the_flags_of_a_profile_stand_before_the_operators(tmp_path: Path) -> None:
    write(tmp_path, "[mine]\n[mine.args]\nseed = 1\nenable-sleep-mode = false\n")
    spec = engine("org/model-7B", args={"max-num-seqs": 3})
    known = Knowledge(FLAGS or Knowledge().flags, (RTX3090,), load(tmp_path, trust=False))
    found = explain(spec, as_root=False, base_env={}, origins={"engine.qwen.args.max-num-seqs": "/c"}, known=known)
    facts = [(fact.value, fact.origin) for fact in found.command[4:]]
    assert facts == [
        ("--enable-prefix-caching", "profile common (shipped)"),
        ("--enable-chunked-prefill", "profile common (shipped)"),
        ("--max-num-batched-tokens 8192", "profile geforce-prefill (shipped)"),
        ("--gpu-memory-utilization 0.92", "profile ampere-geforce (shipped)"),
        ("--seed 1", f"profile mine ({tmp_path / 'profiles.toml'})"),
        ("--no-enable-sleep-mode", f"profile mine ({tmp_path / 'profiles.toml'})"),
        ("--max-num-seqs 3", "config: /c: engine.qwen.args.max-num-seqs"),
        ("--shutdown-timeout 30", "supervisor: requests in flight may finish when it stops"),
        (
            "--disable-access-log-for-endpoints /health,/metrics,/ping,/load",
            "supervisor: its own probes would fill the log",
        ),
    ]
    plan = build_plan(spec, as_root=False, base_env={}, known=known)
    assert plan == found.plan
    assert all("vllm" in error for error in plan.errors)  # it is not installed here


def test_wrong_flags_stand_in_the_way(tmp_path: Path) -> None:
    write(tmp_path, '[mine.args]\nkv-cache-dtype = "fp8"\n')
    spec = engine(args={"quantization": "fp8", "swap-space": 4, "block-size": 8}, profile="mine")
    known = Knowledge(FLAGS or Knowledge().flags, (GpuKind("volta", "datacenter"),), load(tmp_path, trust=False))
    found = settle(spec, None, known)
    assert [problem.where for problem in found.problems] == [
        "engine.qwen.args.swap-space = 4",
        'engine.qwen.args.quantization = "fp8"',
        f'mine.args.kv-cache-dtype = "fp8" in {tmp_path / "profiles.toml"}',
    ]
    (warning,) = found.warnings
    assert warning.startswith("engine.qwen.args.block-size = 8: the attention backends for NVIDIA take multiples of 16")
    errors = build_plan(spec, as_root=False, base_env={}, known=known).errors
    assert {str(problem) for problem in found.problems} < set(errors)


def test_the_plan_changes_with_an_operators_profiles_alone(tmp_path: Path) -> None:
    def ids(*kinds: GpuKind, text: str | None = None, **keys: Any) -> str:
        if text is not None:
            write(tmp_path, text)
        known = Knowledge(gpus=kinds or None, profiles=load(tmp_path, trust=False))
        return build_plan(engine(**keys), as_root=False, base_env={}, known=known).plan_id

    plain = build_plan(engine(), as_root=False, base_env={}).plan_id
    assert plain == ids() == ids(RTX3090) == ids(RTX4090)
    mine = ids(text="[mine.args]\nseed = 1\n")
    assert mine != plain
    assert mine == ids(RTX3090)
    assert mine != ids(text="[mine.args]\nseed = 2\n")
    without = build_plan(engine(profile="none"), as_root=False, base_env={}).plan_id
    assert without == ids(profile="none")
    cpu = build_plan(engine(gpus=()), as_root=False, base_env={}).plan_id
    assert cpu == ids(gpus=())
    named = ids(text="[mine]\nauto = false\n[mine.args]\nseed = 1\n", profile="mine")
    assert named == ids(text="[other.args]\nx = 1\n[mine]\nauto = false\n[mine.args]\nseed = 1\n", profile="mine")
    assert named != ids(text="[mine]\nauto = false\n[mine.args]\nseed = 2\n", profile="mine")


def test_the_documentation_lists_the_shipped_profiles() -> None:
    text = (Path(__file__).parents[2] / "docs/profiles.md").read_text(encoding="utf-8")
    for profile in shipped():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{profile.name}` |")]
        assert all(f"`{name}" in row for name in profile.args), profile.name
