"""Why a process ended: captured failures of real releases, the wordings of public reports, and healthy logs."""

from __future__ import annotations

from pathlib import Path
from time import thread_time
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisord.core.classify import classify
from supervisord.core.model import ExitClass

DATA: Final = Path(__file__).parents[1] / "data"
TAIL: Final = 200


def captured(stem: str) -> list[str]:
    """The last lines of a captured start, stdout before stderr."""
    files = [DATA / f"{stem}.{stream}" for stream in ("stdout", "stderr")]
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()][-TAIL:]


def cuda(name: str) -> list[str]:
    """The last lines of a captured start on a GPU."""
    return (DATA / "cuda-0.24" / f"{name}.log").read_text(encoding="utf-8").splitlines()[-TAIL:]


@pytest.mark.parametrize(
    ("name", "code", "kind", "advice"),
    [
        ("badchoice", 2, "config", "refuses: --kv-cache-dtype: invalid choice: 'fp17'"),
        ("badflag", 2, "config", "does not know --no-such-flag; remove or rename it"),
        ("badvalue", 2, "config", "refuses: --max-model-len: invalid human_readable_int_or_auto value: 'abc'"),
        ("config_unknown_key", 2, "config", "does not know --no-such-key 3"),
        ("spec_old_flag", 2, "config", "does not know --speculative-model x --num-speculative-tokens 3"),
        ("empty_dir", 1, "config", "Invalid repository ID or local directory specified: '/srv/lab/emptydir'"),
        ("gpu_mem_util_bad", 1, "config", "(CacheConfig)"),
        ("hub_name_offline", 1, "config", "not in the local cache and downloads are off"),
        ("maxlen_gt_kv", 1, "config", "set max-model-len to at most 2432"),
        ("maxlen_gt_model", 1, "config", "max_model_len (999999) is greater"),
        ("missing_dir", 1, "config", "there is no model directory /srv/lab/nope"),
        ("no_preload", 1, "config", "without libtcmalloc in LD_PRELOAD; `install-vllm --print-env`"),
        ("port_in_use", 1, "resource", "the port is taken"),
    ],
)
def test_captured_failing_starts(name: str, code: int, kind: str, advice: str) -> None:
    found, said = classify(code, None, captured(f"startfail/{name}"))
    assert found.value == kind
    assert advice in said


def test_every_capture_is_expected_above() -> None:
    mark = test_captured_failing_starts.pytestmark[0]  # type: ignore[attr-defined]  # pytest puts it there
    assert {case[0] for case in mark.args[1]} == {file.stem for file in (DATA / "startfail").iterdir()}


def test_gpu_memory_held_by_somebody_else() -> None:
    """The log also warns of an optional module that is missing; that is not the cause."""
    lines = cuda("start-memory-held")
    assert any("ModuleNotFoundError" in line for line in lines)
    assert classify(1, None, lines)[0] is ExitClass.RESOURCE


# --- wordings from public reports (docs/failures.md, A12 to A35) ---


WORDINGS: Final = [
    [cell.strip() for cell in line.split("|", 2)]
    for line in Path(__file__).with_name("wordings.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize(("kind", "seen_in", "line"), WORDINGS, ids=[f"{w[1]}-{w[2][:40]}" for w in WORDINGS])
def test_wordings_of_a_failed_start(kind: str, seen_in: str, line: str) -> None:
    noise = ["INFO 11-30 08:57:39 [parallel_state.py:1588] world_size=1", line, "RuntimeError: Engine core failed."]
    assert classify(1, None, noise)[0].value == kind, seen_in


def test_what_the_fabric_manager_is_for_is_said() -> None:
    assert "nvidia-fabricmanager" in classify(1, None, ["Error 802: system not yet initialized"])[1]


def test_the_cause_is_not_taken_for_its_consequence() -> None:
    lines = ["NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.", "CUDA error: an illegal memory access"]
    assert classify(1, None, lines)[0] is ExitClass.HARDWARE


# --- healthy logs, and an engine that had come up ---


HEALTHY: Final = {"cpu": captured("logs/start-to-ready"), "cuda": cuda("start-warm-caches")}


@pytest.mark.parametrize("log", HEALTHY)
@pytest.mark.parametrize("answered", [True, False])
def test_exit_code_0_after_a_healthy_log_is_a_crash(log: str, answered: bool) -> None:
    assert classify(0, None, HEALTHY[log], answered=answered)[0] is ExitClass.CRASH


@pytest.mark.parametrize("log", HEALTHY)
def test_a_warning_of_a_missing_module_is_no_cause(log: str) -> None:
    """CUDA builds warn of `ModuleNotFoundError("No module named 'vllm._moe_C_stable_libtorch'")` and serve."""
    assert classify(1, None, [*HEALTHY[log], "RuntimeError: NCCL error"])[0] is ExitClass.CRASH


def test_the_healthy_cuda_log_has_that_warning() -> None:
    assert any("No module named" in line for line in HEALTHY["cuda"])


@pytest.mark.parametrize(
    "line",
    [
        "vllm: error: unrecognized arguments: --x",
        "1 validation error for ChatCompletionRequest",
        "ModuleNotFoundError: No module named 'x'",
        "aiohttp.ClientError: 504 Gateway Time-out: Max retries exceeded",
        "ConnectionError: cannot fetch the image of a request",
    ],
)
@pytest.mark.parametrize("code", [0, 1, 2, None])
def test_what_is_logged_once_it_serves_is_about_requests(line: str, code: int | None) -> None:
    assert classify(code, None, [line], answered=True)[0] is ExitClass.CRASH


@pytest.mark.parametrize("code", [0, 3, None])
def test_only_a_start_that_failed_by_itself_failed_for_its_configuration(code: int | None) -> None:
    line = "1 validation error for ModelConfig"
    assert classify(1, None, [line])[0] is ExitClass.CONFIG
    assert classify(code, None if code is not None else 15, [line])[0] is ExitClass.CRASH


@pytest.mark.parametrize("line", ["CUDA error: an illegal memory access", "CUDA out of memory"])
def test_what_happens_to_serving_engines_is_believed_of_them(line: str) -> None:
    assert classify(0, None, [line], answered=True)[0] is not ExitClass.CRASH


# --- codes, signals, the kernel ---


def test_the_kernels_word_comes_first() -> None:
    kind, advice = classify(2, None, ["vllm: error: unrecognized arguments: --x"], oom_killed=True)
    assert kind is ExitClass.OOM_HOST
    assert "memory ran out" in advice


def test_exit_code_2_is_always_about_arguments() -> None:
    kind, advice = classify(2, None, ["usage: vllm serve", "vllm serve: something new", ""])
    assert kind is ExitClass.CONFIG
    assert advice == "vLLM refuses its arguments: vllm serve: something new"


def test_sigkill_says_who_may_have_sent_it() -> None:
    kind, advice = classify(None, 9, ["INFO all is well"])
    assert kind is ExitClass.CRASH
    assert "dmesg" in advice
    assert classify(None, 9, ["CUDA out of memory"])[0] is ExitClass.RESOURCE


@pytest.mark.parametrize("signal", [6, 11, 64])
def test_other_signals_show_the_last_line(signal: int) -> None:
    assert classify(None, signal, ["terminate called"]) == (ExitClass.CRASH, "last line: terminate called")


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        ([], "(no output)"),
        (["", "   "], "(no output)"),
        (["RuntimeError: no", "", "  warnings.warn('resource_tracker: There appear to be %d '"], "RuntimeError: no"),
        (["ValueError: x", '  File "/opt/x.py", line 4, in y', "        ^^^^^^", "    ~~~^~~"], "ValueError: x"),
        (
            ["ValueError: x", "nanobind: leaked 64 types!", ' - leaked type "ATOMIC_OP"', " - ... skipped remainder"],
            "ValueError: x",
        ),
        (["x" * 1000], "x" * 240),
    ],
)
def test_the_last_line_that_says_something(tail: list[str], shown: str) -> None:
    assert classify(1, None, tail) == (ExitClass.CRASH, f"last line: {shown}")


def test_what_a_real_engine_prints_on_its_way_out_is_not_shown() -> None:
    kind, advice = classify(0, None, captured("logs/start-to-ready"), answered=True)
    assert kind is ExitClass.CRASH
    assert advice == "last line: INFO:     Application shutdown complete."


@given(
    st.none() | st.integers(0, 255),
    st.none() | st.integers(1, 64),
    st.lists(st.text(), max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_any_output_is_classified(
    code: int | None, signal: int | None, tail: list[str], oom_killed: bool, answered: bool
) -> None:
    kind, advice = classify(code, signal, tail, oom_killed=oom_killed, answered=answered)
    assert kind is not ExitClass.STOPPED
    assert advice


def test_long_output_is_looked_through_quickly() -> None:
    """No pattern may take more than linear time on what an engine prints (a prompt may be in it)."""
    tail = ["validation errors for x " * 40] * TAIL + ["xid (pci:" * 100] * TAIL
    assert classify(1, None, tail)[0] is ExitClass.CONFIG


@pytest.mark.parametrize(
    "piece",
    [
        "xid (pci:1): 154 to ",
        "xid (pci:1): 154, GPU recovery action changed from 0x0 to ",
        "free memory on device cuda:0 (1) ",
        "to serve at least one request with the model's max seq len ",
        "Repo id must be in the form ",
    ],
)
def test_one_long_line_is_looked_through_quickly(piece: str) -> None:
    """As long as a tail may be: the loop waits for it. Two open gaps in a pattern took 54 s for 16 KiB of the first."""
    begun = thread_time()
    assert classify(1, None, [piece * (65_536 // len(piece))])[1]
    assert thread_time() - begun < 2.0


def test_an_access_log_is_nobodys_last_words() -> None:
    tail = ["ERROR the reason", 'INFO:     127.0.0.1:54170 - "POST /v1/completions HTTP/1.1" 200 OK']
    assert classify(None, 11, tail)[1] == "last line: ERROR the reason"
    assert classify(None, 11, tail[1:])[1] == "last line: (nothing that says why)"
