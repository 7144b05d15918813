"""Flags against the installed vLLM and the GPUs: what is refused, what is warned of, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from supervisord.config_problems import Finding
from supervisord.core.gpu_kinds import GpuKind
from supervisord.core.spec import EngineSpec, FlagValue
from supervisord.engine.flag_checks import (
    Target,
    command_flags,
    machine_problems,
    machine_warnings,
    name_and_value,
    size_problems,
)
from supervisord.engine.flag_table import MOVED
from supervisord.engine.flags import Flag, FlagSet, parse_help
from supervisord.engine.version import Version
from tests.sim.engine import DATA_PATH

FLAGS = parse_help((DATA_PATH / "help-all-0.32.0.txt").read_text(encoding="utf-8"), "0.32.0")
REAL = Target("0.32.0", FLAGS, None)
AT = ("engine", "qwen", "args", "x")


def kinds(*generations: str) -> list[GpuKind]:
    return [GpuKind(generation, "geforce") for generation in generations]


def engine(gpus: tuple[str, ...] = ("0",), **args: Any) -> EngineSpec:
    named = {name.replace("_", "-"): value for name, value in args.items()}
    return EngineSpec(name="qwen", model="m/m", port=1, gpus=gpus, args=named)


def said(name: str, value: FlagValue = "v", target: Target = REAL) -> str | None:
    found = name_and_value(name, value, target, AT)
    return None if found is None else f"{found.message}; {found.remedy}"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max-model-len", 8192),
        ("max-model-len", "auto"),
        ("enable-prefix-caching", True),
        ("enable-prefix-caching", False),
        ("no-enable-prefix-caching", True),
        ("device-memory-utilization", 0.5),
        ("hf-token", True),
        ("kv-cache-dtype", "fp8"),
        ("log-level", "debug"),
        ("max-lora-rank", 64),
        ("max-logprobs", -1),
        ("served-model-name", ("a", "b")),
        ("collect-detailed-traces", ("all",)),
        ("speculative-config", {"method": "ngram"}),
        ("speculative-config.method", "ngram"),
        ("compilation-config.cudagraph_capture_sizes+", "1,2"),
        ("max-model-len", (512,)),
    ],
)
def test_what_vllm_takes(name: str, value: FlagValue) -> None:
    assert said(name, value) is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("speculative-model", "write it into the table speculative-config: "),
        ("num-speculative-tokens", "write it into the table speculative-config: "),
        ("awq-ckpt", "remove it: vLLM reads the quantisation"),
        ("awq-wbits", "remove it: vLLM reads the quantisation"),
        ("awq-group-size", "remove it: vLLM reads the quantisation"),
        ("enable-moe-optimization", "remove it: vLLM picks the kernels"),
        ("cuda-version", "remove it: the CUDA that vLLM was built for"),
        ("disable-log-requests", "remove it: requests are logged only with enable-log-requests"),
        ("swap-space", "remove it: preempted requests are computed again; kv-offloading-size"),
        ("num-scheduler-steps", "remove it: it belonged to the engine V0"),
        ("preemption-mode", "remove it: it belonged to the engine V0"),
        ("task", 'write runner = "pooling"'),
        ("guided-decoding-backend", "write structured-outputs-config"),
        ("watchdog-config", "remove it, or install a newer vLLM"),
        ("max-modal-len", "did you mean max-model-len?"),
        ("no-enable-prefix-cashing", "did you mean no-enable-prefix-caching?"),
        ("tp", "-tp is --tensor-parallel-size: write that"),
        ("max-num-seq", "it is an abbreviation: write max-num-seqs"),
        ("disable-log-stat", "it is an abbreviation: write disable-log-stats"),
        ("qqqqqqqqqqqqq", "remove it"),
        ("no-disable-log-stats", "did you mean disable-log-stats?"),
        ("no-max-model-len", "did you mean max-model-len?"),
        ("max-modal-len.key", "did you mean max-model-len?"),
    ],
)
def test_what_the_installed_vllm_lacks(name: str, remedy: str) -> None:
    found = said(name)
    assert found is not None
    assert found.startswith(f"vLLM 0.32.0 has no --{name.partition('.')[0]}; {remedy}")


def test_every_replacement_is_a_flag_of_the_captured_release() -> None:
    assert FLAGS is not None
    for name, moved in MOVED.items():
        assert FLAGS.get(name) is None or moved.since is not None, name
        for flag in moved.instead:
            assert FLAGS.get(flag) is not None, flag


def test_a_replacement_that_the_installed_release_lacks_is_not_named() -> None:
    old = Target("0.9.2", FlagSet("0.9.2", {"pooler-config": Flag("pooler-config", "one")}), None)
    assert said("guided-decoding-backend", "x", old) == "vLLM 0.9.2 has no --guided-decoding-backend; remove it"
    assert said("override-pooler-config", "x", old) == "vLLM 0.9.2 has no --override-pooler-config; use pooler-config"
    assert said("x", "x", Target(None, old.flags, None)) == "this vLLM has no --x; remove it"


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [
        ("speculative-model", None, True),
        ("awq-ckpt", "0.9.2", True),
        ("disable-log-requests", None, False),
        ("disable-log-requests", "0.16.0", False),
        ("disable-log-requests", "0.17.0", True),
        ("swap-space", "0.17.1", False),
        ("swap-space", "0.18.0+cu130", True),
        ("shutdown-timeout", "0.17.0", True),
        ("shutdown-timeout", "0.18.0", False),
        ("enable-reasoning", "0.32.0", False),
        ("never-heard-of", "0.32.0", False),
        ("max-model-len", "0.32.0", False),
    ],
)
def test_by_the_release_alone_when_its_flags_are_not_known(name: str, version: str | None, refused: bool) -> None:
    found = said(name, "v", Target(version, None, None))
    assert (found is not None) is refused
    assert said("kv-cache-dtype", "nonsense", Target(version, None, None)) is None


def test_a_version_that_makes_no_sense_lacks_nothing() -> None:
    assert not MOVED["swap-space"].lacking(Version.parse("dev"))


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("trust-remote-code", "yes", "the flag takes no value; write true or false"),
        ("aggregate-engine-logging", 1, "the flag takes no value; write true, or remove it"),
        ("aggregate-engine-logging", False, "this vLLM has no --no-aggregate-engine-logging; remove it"),
        ("max-model-len", False, "this vLLM has no --no-max-model-len; remove it"),
        ("max-model-len", True, "the flag needs a value; write one instead of true"),
        ("served-model-name", True, "the flag needs a value; write one instead of true"),
        ("max-model-len", (1, 2), "the flag takes one value; write one, without brackets"),
        ("no-enable-prefix-caching", False, "the flag takes no value; write true"),
        ("enable-prefix-caching.x", 1, "the flag takes no value; remove it"),
        ("runner", "generation", "this vLLM takes only auto, draft, generate, pooling; did you mean generate?"),
        ("max-lora-rank", 65, "this vLLM takes only 1, 8, 16, 32, 64, 128, 256, 320 and 1 more; "),
        ("max-lora-rank", {"a": 1}, "this vLLM takes only 1, 8, 16, 32, 64, 128, 256, 320 and 1 more; see vllm serve"),
    ],
)
def test_values(name: str, value: FlagValue, words: str) -> None:
    found = said(name, value)
    assert found is not None
    assert found.startswith(words)


def test_flags_in_the_command() -> None:
    words = (
        "vllm",
        "serve",
        "--swap-space=4",
        "--trust_remote_code",
        "-tp",
        "2",
        "--compilation-config.level",
        "3",
        "x",
    )
    spec = EngineSpec(name="qwen", model="m/m", port=1, command=(*words, "--nonsense"))
    found = list(command_flags(spec, REAL))
    assert [finding.message for finding in found] == [
        "vLLM 0.32.0 has no --swap-space",
        "vLLM 0.32.0 has no --nonsense",
    ]
    assert {finding.at for finding in found} == {("engine", "qwen", "command")}
    assert list(command_flags(EngineSpec(name="qwen", model="m/m", port=1), REAL)) == []


# --- the machine ------------------------------------------------------------------------------------------------------


def problems(spec: EngineSpec, target: Target) -> list[Finding]:
    return list(machine_problems(spec, spec.args, target))


def warnings(spec: EngineSpec, target: Target) -> list[Finding]:
    return list(machine_warnings(spec, spec.args, target))


@pytest.mark.parametrize(
    ("generations", "refused", "warned"),
    [
        (("pascal",), True, False),
        (("volta",), True, False),
        (("turing",), False, True),
        (("ampere",), False, True),
        (("ada", "ampere"), False, True),
        (("ampere", "volta"), True, False),
        (("ada",), False, False),
        (("hopper",), False, False),
        (("blackwell",), False, False),
        (("unknown",), False, False),
        ((), False, False),
        (None, False, False),
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [("quantization", "fp8"), ("quantization", "fp8_per_block"), ("kv-cache-dtype", "fp8_e4m3")],
)
def test_fp8(name: str, value: str, generations: tuple[str, ...] | None, refused: bool, warned: bool) -> None:
    spec = engine(("0",), **{name: value})
    target = Target("0.32.0", None, None if generations is None else kinds(*generations))
    assert [finding.at[-1] for finding in problems(spec, target)] == [name] * refused
    assert [finding.at[-1] for finding in warnings(spec, target)] == [name] * warned


@pytest.mark.parametrize("value", ["auto", "bfloat16", 8, True])
def test_what_is_no_fp8(value: FlagValue) -> None:
    spec = engine(kv_cache_dtype=value, quantization=value)
    target = Target("0.32.0", None, kinds("pascal", "ampere"))
    assert problems(spec, target) == warnings(spec, target) == []


@pytest.mark.parametrize(
    ("gpus", "version", "size", "refused", "warned"),
    [
        ((), "0.32.0", 16, True, False),
        ((), "0.32.0+cpu", 48, True, False),
        ((), "0.32.0", 32, False, False),
        ((), "0.32.0", 128, False, False),
        ((), "0.24.0", 16, False, True),
        ((), None, 16, False, True),
        (("0",), "0.32.0", 16, False, False),
        (("0",), "0.32.0", 8, False, True),
        (("0",), None, 8, False, True),
        (("0",), "0.32.0", True, False, False),
        ((), "0.32.0", "16", False, False),
    ],
)
def test_block_sizes(gpus: tuple[str, ...], version: str | None, size: Any, refused: bool, warned: bool) -> None:
    spec = engine(gpus, block_size=size)
    target = Target(version, None, None)
    assert len(problems(spec, target)) == refused
    assert len(warnings(spec, target)) == warned


@pytest.mark.parametrize(("value", "warned"), [("awq", True), ("gptq", True), ("awq_marlin", False), (None, False)])
def test_slow_kernels(value: str | None, warned: bool) -> None:
    spec = engine() if value is None else engine(quantization=value)
    assert len(warnings(spec, REAL)) == warned


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        *[(value, True) for value in (0, 0.0, -0.5, 1.01, 90, "1.5", "nan")],
        *[(value, False) for value in (0.9, 1, 1.0, "0.9", 0.01, True, "x", (0.5,), None)],
    ],
)
def test_parts_of_memory(value: Any, refused: bool) -> None:
    spec = engine(**{} if value is None else {"gpu_memory_utilization": value})
    found = list(size_problems(spec, spec.args))
    assert bool(found) is refused
    if found:
        assert found[0].at == ("engine", "qwen", "args", "gpu-memory-utilization")
        assert found[0].message == "it is a part of the memory of each GPU: more than 0, and 1 at most"


ONE = ("GPU-1a2b3c4d",)


@pytest.mark.parametrize(
    ("gpus", "args", "words", "told"),
    [
        (ONE, {"tensor_parallel_size": 2}, (), "tensor-parallel-size 2 needs 2 GPUs, and gpus names 1"),
        (ONE, {"pipeline_parallel_size": "2"}, (), "pipeline-parallel-size 2 needs 2 GPUs, and gpus names 1"),
        (
            ("0", "1", "2"),
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            (),
            "tensor-parallel-size 2 x pipeline-parallel-size 2 needs 4 GPUs, and gpus names 3",
        ),
        (("0", "1"), {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}, (), None),
        (("0", "1"), {"tensor_parallel_size": 1}, (), None),
        ((), {"tensor_parallel_size": 2}, (), None),
        (ONE, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, (), None),
        (ONE, {"tensor_parallel_size": 2, "data_parallel_size": 2}, (), None),
        (ONE, {"tensor_parallel_size": 2, "nnodes": 2}, (), None),
        (ONE, {"tensor_parallel_size": 2, "config": "vllm.yaml"}, (), None),
        (ONE, {"tensor_parallel_size": 2}, ("-dp", "2"), None),
        (ONE, {"tensor_parallel_size": 2}, ("--data_parallel_size=2",), None),
        (ONE, {"tensor_parallel_size": 2}, ("--distributed-executor-backend", "ray"), None),
        (ONE, {"tensor_parallel_size": 2}, ("--seed=1",), "tensor-parallel-size 2 needs 2 GPUs, and gpus names 1"),
    ],
)
def test_ranks(gpus: tuple[str, ...], args: dict[str, Any], words: tuple[str, ...], told: str | None) -> None:
    spec = replace(engine(gpus, **args), command=("vllm", "serve", *words))
    assert [found.message for found in size_problems(spec, spec.args)] == ([] if told is None else [told])
