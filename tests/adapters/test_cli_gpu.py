"""`gpu`: what is shown of GPUs, what can be asked of them, and what the exit codes say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisord.cli import main, render, render_gpus
from supervisord.core import status
from supervisord.core.gpu_samples import GpuProcess
from supervisord.core.messages import Answer, GpuOp
from supervisord.core.model import Gpu, Node, Persistence, Ready, Telemetry, Waiting
from supervisord.core.model import Reason as Why
from supervisord.core.spec import NodeSpec
from tests.adapters.fake_daemon import FakeDaemon, engine, stamp
from tests.adapters.fake_gpus import GIB, HOT, IDLE, LOST, MIXED, SOUND, UNIFIED, gpu, of_engine

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
SEEN = Telemetry(helper=1, running=True, answered=True, swept_at=1.0, next_at=2.0, driver="580.159.04")
HUNG = Telemetry(helper=3, running=True, hangs=3, unresponsive=True, next_at=2.0, driver="580.159.04")
ON_0 = engine("qwen", gpus=("0",))
ON_2 = engine("llama", gpus=("GPU-5135c0de-0002-4000-8000-000000000002",))
SCENES: dict[str, tuple[tuple[Gpu, ...], Telemetry]] = {
    "well": ((SOUND, IDLE), SEEN),
    "mixed": (MIXED, SEEN),
    "hung": ((SOUND, HOT, LOST), HUNG),
    "no-driver": ((), Telemetry(helper=1, next_at=2.0, problem=9)),
    "no-gpus": ((), Telemetry()),
}


def shown(scene: str) -> dict[str, Any]:
    gpus, telemetry = SCENES[scene]
    node = Node(
        spec=NodeSpec(),
        engines={e.spec.name: e for e in (ON_0, ON_2)},
        gpus={gpu.uuid: gpu for gpu in gpus},
        telemetry=telemetry,
    )
    return status.of(node, 100.0, 1_800_000_000.0, stamp)


def view(document: dict[str, Any], width: int, *, colour: bool = False) -> str:
    daemon = document["supervisor"]
    gpus = document["gpus"]
    return render_gpus.view(gpus, daemon["driver"], daemon["gpu_trouble"], width=width, colour=colour)


def details(one: Gpu, width: int = 200) -> str:
    node = Node(spec=NodeSpec(), gpus={one.uuid: one}, telemetry=SEEN)
    return view(status.of(node, 100.0, 1_800_000_000.0, stamp), width)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, ON_0, gpus=(SOUND, IDLE)) as running:
        running.node = Node(**{**_fields(running.node), "telemetry": SEEN})
        monkeypatch.setenv("VLLM_SUPERVISOR_SOCKET", running.socket)
        yield running


def _fields(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in ("spec", "version", "pid", "since", "engines", "gpus")}


# --- the view ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scene", "width"), [*((scene, 80) for scene in SCENES), ("mixed", 40), ("mixed", 200)])
def test_the_view_is_as_it_was_agreed(scene: str, width: int) -> None:
    """To change it on purpose: remove the file, run this, read what was written."""
    text = view(shown(scene), width)
    path = GOLDEN / f"gpu-{scene}-{width}.txt"
    if not path.exists():
        path.write_text(text)
    assert text == path.read_text()
    assert all(line.isprintable() for line in text.splitlines())
    assert width < 80 or all(len(line) <= width for line in text.splitlines())


def test_colours_are_beside_the_text() -> None:
    plain, painted = (view(shown("mixed"), 100, colour=colour) for colour in (False, True))
    assert "\x1b[32mGPU 0  ok" in painted
    assert "\x1b[33mGPU 2  degraded" in painted
    assert "\x1b[31mGPU 3  quarantined" in painted
    assert painted.startswith("\x1b[31mdriver 580.159.04, 6 GPUs: 3 ok, 1 degraded, 2 quarantined\x1b[0m\n")
    assert [render.clean(line).rstrip() for line in painted.splitlines()] == plain.splitlines()
    assert "\x1b" not in plain


def test_names_of_foreign_processes_cannot_drive_a_terminal() -> None:
    text = details(gpu(0, 1.0, GpuProcess(7, GIB, "\x1b[2Jevil\u202e")))
    assert "held by      evil 1.0 GiB (pid 7, not ours)" in text


def test_only_the_largest_foreign_processes_are_named() -> None:
    crowd = [GpuProcess(pid, pid * GIB, f"p{pid}") for pid in range(1, 9)]
    text = details(gpu(0, 36.0, *crowd))
    assert "p8 8.0 GiB (pid 8, not ours); p7 " in text
    assert "p4 4.0 GiB (pid 4, not ours); 3 more, not ours" in text


def test_the_largest_holder_comes_first() -> None:
    text = details(
        gpu(0, 36.0, of_engine("small", 5, 2.0), GpuProcess(7, 20 * GIB, "sleep"), of_engine("qwen", 6, 9.0))
    )
    assert "sleep 20.0 GiB (pid 7, not ours); qwen 9.0 GiB (pid 6); small 2.0 GiB (pid 5)" in text


def test_memory_of_no_process_is_told_apart() -> None:
    assert "qwen 2.0 GiB (pid 5); no process 7.0 GiB" in details(gpu(0, 9.0, of_engine("qwen", 5, 2.0)))
    assert "no process" not in details(gpu(0, 2.2, of_engine("qwen", 5, 2.0)))


def test_what_is_unknown_is_a_dash() -> None:
    bare = gpu(
        0,
        None,
        reading={
            **dict.fromkeys(("total_bytes", "temperature_c", "power_w", "utilization_percent", "persistence")),
            "processes": None,
        },
    )
    lines = dict(line.strip().split("  ", 1) for line in details(bare).splitlines()[3:])
    assert {name: text.strip() for name, text in lines.items()} == {
        "memory": "-",
        "held by": "-",
        "load": "utilisation -, temperature -, power -",
        "persistence": "-, wanted on (default for hopper datacenter)",
        "engines": "none",
        "known as": f"{bare.uuid}, {bare.pci_id}",
    }
    known = details(gpu(0, 1.0, of_engine("qwen", 5, None), reading={"total_bytes": None}))
    assert "memory       1.0 of - GiB, - free\n" in known
    assert "held by      qwen - GiB (pid 5)\n" in known


@pytest.mark.parametrize(
    ("mode", "actual", "text"),
    [
        (Persistence(True, "default for ada geforce"), True, "on, as wanted (default for ada geforce)"),
        (Persistence(True, "x", told="refused (it needs root)"), False, "off, wanted on (refused (it needs root))"),
        (Persistence(None, "default: left as it is"), False, "off (default: left as it is)"),
        (Persistence(None, "default: left as it is"), None, "- (default: left as it is)"),
    ],
)
def test_persistence_in_words(mode: Persistence, actual: bool | None, text: str) -> None:
    assert f"  persistence  {text}\n" in details(gpu(0, 1.0, persistence=mode, reading={"persistence": actual}))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_view_is_printed(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("driver 580.159.04, 2 GPUs: 2 ok\n\nGPU 0  ok  NVIDIA H200 (hopper, datacenter)\n")
    assert "\x1b" not in out
    assert daemon.errors == []


def test_json_is_the_gpu_part_of_the_status(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"version", "driver", "gpu_trouble", "gpus"}
    assert (found["version"], found["driver"], found["gpu_trouble"]) == (1, "580.159.04", None)
    assert [one["uuid"] for one in found["gpus"]] == [SOUND.uuid, IDLE.uuid]


@pytest.mark.parametrize(
    ("gpus", "telemetry", "engines", "code"),
    [
        ((SOUND,), SEEN, (), 0),
        ((SOUND, HOT), SEEN, (), 1),
        ((SOUND, LOST), SEEN, (), 1),
        ((SOUND,), HUNG, (), 0),
        ((SOUND,), HUNG, (engine("qwen", gpus=("0",)),), 1),
        ((), Telemetry(helper=1, problem=9), (engine("cpu"),), 0),
        ((), Telemetry(helper=1, problem=9), (engine("qwen", gpus=("0",)),), 1),
        ((), Telemetry(), (engine("cpu"),), 0),
    ],
)
def test_the_exit_code_says_whether_all_is_well(
    daemon: FakeDaemon,
    gpus: tuple[Gpu, ...],
    telemetry: Telemetry,
    engines: tuple[Any, ...],
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = {"gpus": {one.uuid: one for one in gpus}, "engines": {e.spec.name: e for e in engines}}
    daemon.node = Node(**{**_fields(daemon.node), **fields, "telemetry": telemetry})
    assert main(["gpu"]) == code
    assert main(["gpu", "--json"]) == code
    assert capsys.readouterr().err == ""


def test_status_tells_why_nothing_is_known_where_engines_need_gpus(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    trouble = "the GPUs cannot be seen now: gpu_telemetry_unresponsive: NVML does not answer"
    daemon.node = Node(**{**_fields(daemon.node), "telemetry": HUNG})
    main(["status"])
    out = capsys.readouterr().out
    assert trouble in out
    assert "97%" not in out, "what was seen before is not the present"
    daemon.node = Node(**{**_fields(daemon.node), "telemetry": HUNG, "engines": {"cpu": engine("cpu")}, "gpus": {}})
    main(["status"])
    assert "GPU" not in capsys.readouterr().out


def test_gpu_memory_of_engines_is_in_the_table_or_on_a_second_line(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.put(engine("qwen", Ready(), gpus=("0",), gpu_bytes=58 * GIB))
    main(["status"])
    _, _, header, row, *_ = capsys.readouterr().out.splitlines()
    assert "GPU MEM" in header
    assert "58.0G" in row
    monkeypatch.setenv("COLUMNS", "60")
    main(["status"])
    _, _, header, _, second, *_ = capsys.readouterr().out.splitlines()
    assert "GPU MEM" not in header
    assert second == "    pid 4711, generation 1, restarts 0, GPU 58.0G"


def test_an_engine_that_waits_for_a_gpu_says_so_in_both(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    why = Why("gpu_quarantined", "GPU 3 is quarantined: Xid 79")
    daemon.put(engine("qwen", Waiting(why, time.monotonic() + 9), gpus=(LOST.uuid,)))
    daemon.node = Node(**{**_fields(daemon.node), "gpus": {LOST.uuid: LOST}, "telemetry": SEEN})
    assert main(["status"]) == 1
    out = capsys.readouterr().out
    assert "qwen: waiting for 1m15s, looked at again in 8s: gpu_quarantined: GPU 3 is quarantined: Xid 79" in out
    assert f"then: vllm-supervisor gpu clear {LOST.uuid}" in out
    assert main(["gpu"]) == 1
    out = capsys.readouterr().out
    assert "engines      qwen\n" in out
    assert "Xids         Xid 79 (fallen off the bus): 1, fallen off the bus: 1\n" in out


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SOUND.uuid, "0000:1b:00.0", "1B:00.0", "00000000:1B:00", "0", "15"])
def test_clear_asks_for_one_gpu(daemon: FakeDaemon, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = (Answer.ACCEPTED, "GPU 0 is trusted \x1b[31magain")
    assert main(["gpu", "clear", name]) == 0
    assert [request[:2] for request in daemon.gpu_requests] == [(GpuOp.CLEAR, name)]
    assert capsys.readouterr() == ("GPU 0 is trusted again\n", "")


def test_release_asks_for_all(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = (Answer.ACCEPTED, "NVML is closed for 10 min")
    assert main(["gpu", "release", "--socket", daemon.socket]) == 0
    assert [request[:2] for request in daemon.gpu_requests] == [(GpuOp.RELEASE, None)]
    out = capsys.readouterr().out
    assert out.startswith("NVML is closed for 10 min\n")
    assert "vllm-supervisor gpu clear GPU" in out


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((Answer.REFUSED, "cannot clear GPUs: no driver"), 5),
        ((Answer.UNKNOWN_ENGINE, "cannot clear GPU 7: it is not known"), 5),
        (TimeoutError(), 6),
    ],
)
def test_a_no_is_an_exit_code(
    daemon: FakeDaemon, answer: tuple[Answer, str] | Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = answer
    for argv in (["gpu", "clear", "7"], ["gpu", "release"]):
        assert main(argv) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        expected = "cannot say whether" if isinstance(answer, Exception) else answer[1]
        assert captured.err.startswith(f"vllm-supervisor: {expected}")


@pytest.mark.parametrize("name", ["", "../status", "é", "0\r\nX: y", "\udcff", "9" * 5000])
def test_what_is_no_name_of_a_gpu_is_5_and_reaches_nobody(
    daemon: FakeDaemon, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", "clear", name]) == 5
    assert daemon.gpu_requests == []
    assert capsys.readouterr().err.startswith("vllm-supervisor: cannot find this GPU: ")


def test_without_a_daemon_it_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["gpu"], ["gpu", "--json"], ["gpu", "clear", "0"], ["gpu", "release"]):
        assert main(["--socket", f"{tmp_path}/none", *argv]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("cannot reach the daemon") == 4


@pytest.mark.parametrize("argv", [["gpu", "clear"], ["gpu", "reset"], ["gpu", "release", "0"], ["gpu", "--yes"]])
def test_usage_errors_are_64(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 64
    assert "cannot understand the command line" in capsys.readouterr().err


def test_the_unified_memory_of_a_gpu_is_unknown_and_no_fault() -> None:
    text = details(UNIFIED)
    assert "GPU 4  ok  NVIDIA GB10 (blackwell, integrated)" in text
    assert "memory       -\n" in text
