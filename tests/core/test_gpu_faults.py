"""Xids that come again and again, and of GPUs that nobody has seen yet."""

from __future__ import annotations

import pytest

from supervisord.core import gpu_faults
from supervisord.core.messages import Booted, GpuHelperEnded, GpuOp, GpuRequested, Record, Severity, Sweep, XidSeen
from supervisord.core.model import State, Waiting
from tests.core.play import Play, card, engine_spec, launching, new_node, node_spec

PCI, STRANGER = "0000:10:00.0", "0000:77:00.0"


def serving() -> Play:
    """Engine "a" is ready on GPU-0; only the test answers sweeps."""
    play = launching(engine_spec(gpus=("GPU-0",))).up()
    play.cards = None
    return play


def dark() -> Play:
    """A daemon that has seen no GPU yet."""
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-0",)))))
    play.cards = None
    return play.see(Booted())


def xid(play: Play, number: int | None, gpu: str = PCI, *, after: float = 0.0) -> Play:
    return play.see(XidSeen(play.now + after, gpu, number, "kmsg"), after=after)


def told(play: Play) -> list[Record]:
    return [record for record in play.told if record.kind == "xid"]


# --- repeats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [PCI, "GPU-0", STRANGER])
def test_repeats_are_told_once_a_minute_with_their_number(gpu: str) -> None:
    play = serving()
    for _ in range(100):
        xid(play, 31, gpu, after=2.1)
    assert len(told(play)) == 4
    assert [record.numbers["times"] for record in told(play)] == [1, 29, 29, 29]
    assert told(play)[1].message.endswith("Xid 31 (GPU memory page fault); 29 times since it was told last")
    assert [record.message.count("times since") for record in told(play)] == [0, 1, 1, 1]


def test_a_flood_of_one_that_nobody_knows_is_one() -> None:
    play = serving()
    for _ in range(300):
        xid(play, 13, STRANGER, after=0.01)
    assert len(told(play)) == 1


def test_each_number_of_each_gpu_is_told_by_itself() -> None:
    play = serving()
    for number in (13, 31):
        for gpu in (PCI, STRANGER):
            xid(play, number, gpu, after=0.01).says("xid")


def test_memory_for_numbers_and_for_names_is_bounded() -> None:
    play = serving()
    for number in range(1000, 1100):
        xid(play, number, after=0.1)
    assert len(play.gpu().xids) == gpu_faults.NUMBERS_MAX + 1
    assert play.gpu().xids[gpu_faults.OTHER] > 1
    xid(play, 79, "0000:70:00.0")
    for place in range(100):
        xid(play, 31, f"0001:{place:02x}:00.0", after=0.1)
    assert len(play.node.unseen_gpus) == gpu_faults.UNSEEN_MAX
    assert "0000:70:00.0" in play.node.unseen_gpus, "a fault is the last to be forgotten"
    for place in range(gpu_faults.UNSEEN_MAX):
        xid(play, 79, f"0002:{place:02x}:00.0", after=0.1)
    assert len(play.node.unseen_gpus) == gpu_faults.UNSEEN_MAX
    assert "0000:70:00.0" not in play.node.unseen_gpus


def test_the_evidence_against_an_engine_is_bounded() -> None:
    play = serving()
    for place in range(50):
        play.see(XidSeen(play.now, f"0001:{place:02x}:00.0", 31, "kmsg", 4711, "a", 1), after=0.1)
    assert len(play.engine().app_xids) == gpu_faults.EVIDENCE_MAX


# --- faults of GPUs that nobody has seen ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [PCI, "00000000:10:00.0", "GPU-0"])
@pytest.mark.parametrize("number", [79, 119, None])
def test_a_fault_before_the_first_look_is_held_against_it_then(gpu: str, number: int | None) -> None:
    play = xid(dark(), number, gpu).says("xid")
    assert play.record("xid").severity is Severity.WARNING
    xid(play, number, gpu, after=45.0).says()
    play.sweep(card()).is_(State.WAITING)
    assert play.phase(Waiting).reason.code == "gpu_quarantined"
    quarantine = play.gpu().quarantine
    assert quarantine is not None
    assert quarantine.code == "gpu_fault"
    assert PCI not in quarantine.message, "the remedy names it by its UUID"
    assert play.node.unseen_gpus == {}
    assert list(play.gpu().xids.values()) == [2]
    play.sweep(card(), after=1.0).says()


def test_it_ends_whoever_runs_there() -> None:
    play = xid(serving(), 79, "0000:11:00.0")
    play.change(devices=("GPU-1",))
    play.sweep(card("GPU-0"), card("GPU-1")).is_(State.STOPPING)
    assert any(isinstance(action, Sweep) for action in play.actions)


def test_gates_know_of_it_before() -> None:
    play = xid(dark(), 79, "GPU-0")
    while not play.node.telemetry.unresponsive:
        play.see(GpuHelperEnded(play.node.telemetry.helper, "it broke")).clock(60.0)
    assert play.is_(State.WAITING).phase(Waiting).reason.code == "gpu_quarantined"
    play.see(GpuRequested(1, GpuOp.CLEAR, "GPU-0", "uid 0")).is_(State.STARTING)


def test_what_was_no_fault_is_only_counted() -> None:
    play = xid(dark(), 31).sweep(card()).is_(State.STARTING)
    assert play.gpu().xids == {"31": 1}
    xid(play, 31, after=10.0).says()


def test_one_that_is_quarantined_already_stays_so_for_what_it_was() -> None:
    play = xid(dark(), 79).sweep(card()).sweep(card(), after=1.0)
    before = play.gpu().quarantine
    xid(play, 62, after=5.0)
    assert play.gpu().quarantine == before


def test_a_dead_gsp_is_news_also_of_a_gpu_that_is_quarantined() -> None:
    """From then on no call may touch it."""
    play = xid(serving(), 109)
    xid(play, 119, after=1.0).says("gpu_quarantined")
    quarantine = play.gpu().quarantine
    assert quarantine is not None
    assert quarantine.message.startswith("Xid 119")
    xid(play, 120, after=1.0).says()
