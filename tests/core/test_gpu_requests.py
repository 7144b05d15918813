"""What operators ask of GPUs: clear and release."""

from __future__ import annotations

import pytest

from supervisord.core.messages import (
    Answer,
    Booted,
    Due,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    KillGpuHelper,
    Op,
    What,
    XidSeen,
)
from supervisord.core.model import State
from tests.core.play import Play, card, engine_spec, launching, new_node, node_spec, ready


def ask(play: Play, op: GpuOp, gpu: str | None = None) -> Play:
    return play.see(GpuRequested(5, op, gpu, "uid 1000"))


@pytest.mark.parametrize("op", list(GpuOp))
def test_without_gpus_there_is_nothing_to_ask(op: GpuOp) -> None:
    play = ask(Play(new_node(node_spec(engine_spec()))).see(Booted()), op, "0")
    play.replies(Answer.REFUSED, f"cannot {op.value} GPUs", "no NVIDIA driver")


@pytest.mark.parametrize("name", ["GPU-0", "0", "0000:10:00.0", "10:00.0"])
def test_clear_by_any_name(name: str) -> None:
    play = ready(gpus=("GPU-0",)).see(XidSeen(1000.0, "GPU-0", 79, "nvml"))
    assert play.gpu().quarantine is not None
    ask(play, GpuOp.CLEAR, name).replies(Answer.ACCEPTED, "GPU 0 (GPU-0) is trusted again: cleared by uid 1000")
    assert play.gpu().quarantine is None
    assert play.record("gpu_cleared").numbers["gpu"] == "GPU-0"


@pytest.mark.parametrize("name", ["GPU-9", "9", "", None])
def test_clear_of_one_that_is_not_there(name: str | None) -> None:
    play = ask(ready(gpus=("GPU-0",)), GpuOp.CLEAR, name)
    play.replies(Answer.UNKNOWN_ENGINE, f"cannot clear GPU {name}", "(known: GPU 0 (GPU-0))")
    dark = Play(new_node(node_spec(engine_spec(gpus=("GPU-0",)))))
    dark.cards = None
    ask(dark.see(Booted()), GpuOp.CLEAR, name).replies(Answer.UNKNOWN_ENGINE, "(known: none)")


def test_clear_looks_again_at_once() -> None:
    play = ready(gpus=("GPU-0",))
    play.cards = None
    ask(play, GpuOp.CLEAR, "0")
    telemetry = play.node.telemetry
    assert telemetry.asked_at is not None or telemetry.next_at == play.now


def test_release_names_who_has_gpus_open() -> None:
    play = launching(engine_spec(gpus=("GPU-0",)), engine_spec("b"), engine_spec("c", gpus=("GPU-1",), autostart=False))
    ask(play.up(), GpuOp.RELEASE).replies(Answer.ACCEPTED, "closed for 10 min", "keep their GPUs open: a")
    assert KillGpuHelper(1) in play.actions
    assert "(by uid 1000)" in play.record("gpu_released").message
    play.is_(State.READY)


def test_release_of_idle_gpus() -> None:
    play = launching(engine_spec(gpus=("GPU-0",), autostart=False))
    ask(play, GpuOp.RELEASE)
    assert "keep" not in play.record("gpu_released").message


def test_an_engine_that_is_started_meanwhile_waits() -> None:
    play = launching(engine_spec(gpus=("GPU-0",), autostart=False))
    ask(play, GpuOp.RELEASE).see(GpuHelperEnded(1, "killed"), after=0.1).ask(Op.START).is_(State.WAITING)
    play.see(Due(What.CLOCK), after=599.0).is_(State.WAITING)
    play.see(Due(What.CLOCK), after=1.0).is_(State.STARTING)
    assert play.cards == (card(),)
