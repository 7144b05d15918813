"""What operators ask of GPUs: clear and release."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord.core import telemetry
from supervisord.core.messages import (
    Answer,
    Booted,
    Due,
    Exited,
    GpuHelperEnded,
    GpuOp,
    GpuRequested,
    KillGpuHelper,
    Op,
    Requested,
    Swept,
    What,
    XidSeen,
)
from supervisord.core.model import ExitClass, Gpu, Reason, State, Waiting
from tests.core.play import Play, card, engine_spec, launching, new_node, node_spec, ready


def ask(play: Play, op: GpuOp, gpu: str | None = None) -> Play:
    return play.see(GpuRequested(5, op, gpu, "uid 1000"))


def test_without_a_driver_there_is_nothing_to_release() -> None:
    play = ask(Play(new_node(node_spec(engine_spec()))).see(Booted()), GpuOp.RELEASE)
    play.replies(Answer.REFUSED, "cannot release GPUs", "no NVIDIA driver")


@pytest.mark.parametrize("name", ["GPU-9", "3", "0000:99:00.0"])
def test_a_quarantine_outlives_the_driver_and_can_be_cleared(name: str) -> None:
    """The driver was removed from the machine, and no engine needs it: nobody looks at GPUs any more."""
    old = Gpu("GPU-9", pci_id="0000:99:00.0", index=3, quarantine=Reason("gpu_lost", "gone"))
    other = Gpu("GPU-8", pci_id="0000:88:00.0", index=2, quarantine=Reason("gpu_lost", "gone"))
    node = replace(new_node(node_spec(engine_spec())), gpus={"GPU-8": other, "GPU-9": old})
    play = ask(Play(node).see(Booted()), GpuOp.CLEAR, name)
    assert telemetry.off(play.node)
    play.replies(Answer.ACCEPTED, "GPU-9) is trusted again")
    assert set(play.node.gpus) == {"GPU-8"}
    ask(play, GpuOp.CLEAR, name).replies(Answer.UNKNOWN_ENGINE, "(known: GPU 2 (GPU-8))")


@pytest.mark.parametrize("saved", [False, True])
def test_a_release_before_any_gpu_was_seen_can_be_ended(saved: bool) -> None:
    """The daemon has just begun, and knows at most what an earlier one had quarantined."""
    old = Gpu("GPU-9", pci_id="0000:99:00.0", index=3, quarantine=Reason("gpu_lost", "gone"))
    node = replace(new_node(node_spec(engine_spec(gpus=("GPU-0",)))), gpus={"GPU-9": old} if saved else {})
    play = Play(node)
    play.cards = None
    ask(play.see(Booted()), GpuOp.CLEAR, "GPU-0").replies(Answer.UNKNOWN_ENGINE, "it is not known")
    ask(play, GpuOp.RELEASE).replies(Answer.ACCEPTED, "NVML is closed for 10 min")
    ask(play, GpuOp.CLEAR, "GPU-0").replies(Answer.ACCEPTED, "NVML is open again (by uid 1000); 'GPU-0' was not seen")
    assert play.node.telemetry.released_until is None
    assert play.record("gpu_cleared").numbers["gpu"] == "GPU-0"
    play.see(GpuHelperEnded(play.node.telemetry.helper, "killed")).see(Due(What.CLOCK), after=6.0)
    play.sweep(card("GPU-0"), card("GPU-9"))
    assert play.gpu("GPU-0").reading is not None
    ask(play, GpuOp.RELEASE)
    ask(play, GpuOp.CLEAR, "GPU-7").replies(Answer.UNKNOWN_ENGINE, "it is not known")


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


@pytest.mark.parametrize("name", ["0000:10:00.0", "10:00.0"])
def test_clear_of_one_that_only_the_driver_has_named(name: str) -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-0",)))))
    play.cards = None
    play.see(Booted()).see(XidSeen(1000.0, "0000:10:00.0", 79, "kmsg"))
    ask(play, GpuOp.CLEAR, name).replies(Answer.ACCEPTED, "0000:10:00.0 is trusted again")
    assert play.sweep(card()).gpu().quarantine is None


def test_clear_looks_again_at_once() -> None:
    play = ready(gpus=("GPU-0",))
    play.cards = None
    ask(play, GpuOp.CLEAR, "0")
    seen = play.node.telemetry
    assert seen.asked_at is not None or seen.next_at == play.now


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


def test_a_restart_that_could_not_start_again_is_refused() -> None:
    """The driver was upgraded underneath: what runs goes on, and nothing new can start."""
    play = ready(gpus=("GPU-0",)).sweep(problem=18)
    play.ask(Op.RESTART).is_(State.READY)
    play.replies(Answer.REFUSED, "cannot restart a: it could not be started again: the NVIDIA driver was upgraded")
    play.see(Requested(9, Op.RESTART, "a", "uid 0", at_once=True)).is_(State.STOPPING)


def test_clear_of_what_was_not_quarantined_says_so() -> None:
    play = ask(ready(gpus=("GPU-0",)), GpuOp.CLEAR, "0")
    play.replies(Answer.ACCEPTED, "GPU 0 (GPU-0) was not quarantined; it is looked at once more")
    ask(play, GpuOp.RELEASE)
    ask(play, GpuOp.CLEAR, "0")
    play.replies(Answer.ACCEPTED, "GPU 0 (GPU-0) was not quarantined; NVML is open again (by uid 1000)")


def test_a_gpu_that_is_named_twice_closes_the_gate() -> None:
    play = launching(engine_spec(gpus=("GPU-0", "0"))).is_(State.WAITING)
    assert play.phase(Waiting).reason.code == "gpu_missing"


@pytest.mark.parametrize("exits_first", [False, True])
def test_an_engine_that_was_ended_for_its_gpu_was_not_asked_for(*, exits_first: bool) -> None:
    play = ready(gpus=("GPU-0",))
    play.see(XidSeen(play.now, "GPU-0", 79, "nvml"))
    if exits_first:
        play.see(Exited("a", 1, None, 9))
    play.see(Swept("a", 1))
    last = play.engine().last_exit
    assert last is not None
    assert (last.kind, last.signal) == (ExitClass.HARDWARE, 9)
    assert "Xid 79" in last.advice
