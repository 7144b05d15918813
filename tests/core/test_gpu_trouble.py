"""What NVML cannot say is no fault of a GPU: nobody is ended for it, and what was known of the gates stays known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from supervisord.core import gpus, status, telemetry
from supervisord.core.gpu_samples import GpuReading
from supervisord.core.messages import Booted, Due, GpuHelperEnded, GpuOp, GpuRequested, KillGpuHelper, Op, What
from supervisord.core.model import Gpu, Reason, State, Waiting
from supervisord.core.rules import service
from tests.core.play import Play, card, engine_spec, foreign, holds, launching, new_node, node_spec

ON0, ON1 = ("GPU-0",), ("GPU-1",)
GOOD0, GOOD1 = card("GPU-0"), card("GPU-1")
NAMELESS = GpuReading("", "", 0, error=999)


def serving() -> Play:
    """Engines "a" on GPU-0 and "b" on GPU-1 are ready, "c" wants GPU-0; only the test answers sweeps."""
    play = launching(engine_spec(gpus=ON0), engine_spec("b", gpus=ON1), engine_spec("c", gpus=ON0, autostart=False))
    play.up("a").up("b")
    play.cards = None
    return play.sweep(GOOD0, GOOD1)


def fails(uuid: str, code: int) -> GpuReading:
    return GpuReading(uuid, card(uuid).pci_id, card(uuid).index, error=code)


def states(play: Play) -> list[str]:
    return [play.engine(name).state.value for name in "ab"]


def waiting(play: Play, name: str = "c") -> Reason:
    return play.phase(Waiting, name).reason


# --- codes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [4, 18, 999, 77])
def test_calls_for_one_gpu_that_fail_are_no_loss(code: int) -> None:
    play = serving()
    why = telemetry.no_driver(code)
    play.sweep(fails("GPU-0", code), GOOD1, after=1.0).says("gpu_degraded")
    for _ in range(20):
        play.sweep(fails("GPU-0", code), GOOD1, after=5.0).says()
    assert states(play) == ["ready", "ready"]
    assert (play.gpu().quarantine, play.gpu().absent_since) == (None, None)
    assert play.gpu().reasons == (why,)
    found = service.of_gpus([play.gpu()], None)
    assert [one.reason.code for one in found] == [why.code], "its engine is degraded"
    play.ask(Op.START, "c").is_(State.WAITING, "c")
    assert waiting(play) == Reason("driver_not_ready", f"GPU 0 (GPU-0): {why.message}")
    shown = status.of(play.node, play.now, 0.0, str)["gpus"][0]
    assert (shown["health"], shown["quarantined"], shown["memory_used_mib"]) == ("degraded", False, None)
    play.sweep(GOOD0, GOOD1, after=5.0).is_(State.STARTING, "c")
    assert "gpu_recovered" in [told.kind for told in play.told]


def test_a_gpu_that_fails_from_the_first_look_on() -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=ON0))))
    play.cards = None
    play.see(Booted()).sweep(fails("GPU-0", 999), GOOD1)
    assert waiting(play, "a").code == "driver_not_ready"
    assert (play.gpu().index, play.gpu().name) == (0, "")
    play.sweep(GOOD0, GOOD1, after=1.0).is_(State.STARTING)


def test_what_slow_looks_saw_of_it_is_kept() -> None:
    play = serving()
    play.sweep(replace(GOOD0, remap_pending=True), GOOD1, after=40.0)
    play.sweep(fails("GPU-0", 999), GOOD1, after=1.0)
    assert [reason.code for reason in play.gpu().reasons] == ["driver_unknown", "gpu_remap_pending"]
    play.sweep(GOOD0, GOOD1, after=1.0)
    assert [reason.code for reason in play.gpu().reasons] == ["gpu_remap_pending"]


@pytest.mark.parametrize("code", [4, 18, 999])
def test_where_no_gpu_answers_it_is_nvml(code: int) -> None:
    play = serving()
    for _ in range(20):
        play.sweep(fails("GPU-0", code), fails("GPU-1", code), after=5.0)
    assert states(play) == ["ready", "ready"]
    assert telemetry.trouble(play.node) == telemetry.no_driver(code)
    assert [told.reason for told in play.told if told.kind == "gpu_driver_trouble"] == [telemetry.no_driver(code).code]
    play.ask(Op.START, "c")
    assert waiting(play) == Reason("driver_not_ready", telemetry.no_driver(code).message)
    play.sweep(GOOD0, GOOD1, after=5.0).is_(State.STARTING, "c")


def test_an_empty_list_is_no_loss_of_all() -> None:
    play = serving()
    for _ in range(20):
        play.sweep(after=5.0)
    assert states(play) == ["ready", "ready"]
    trouble = telemetry.trouble(play.node)
    assert trouble is not None
    assert trouble.code == "driver_no_gpu"


def test_what_is_not_listed_while_no_other_answers_is_unknown() -> None:
    play = serving()
    for _ in range(20):
        play.sweep(fails("GPU-1", 15), after=5.0)
    assert states(play) == ["ready", "stopping"], "15 is said of GPU-1 alone"
    assert [reason.code for reason in play.gpu().reasons] == ["driver_no_gpu"]


@pytest.mark.parametrize(("nameless", "lost"), [(999, False), (15, True), (16, True)])
def test_what_is_listed_without_a_name_may_be_the_one_that_is_missed(*, nameless: int, lost: bool) -> None:
    play = serving()
    for _ in range(3):
        play.sweep(replace(NAMELESS, error=nameless), GOOD1, after=1.0)
    assert (play.gpu().quarantine is not None) is lost
    assert states(play) == ["stopping" if lost else "ready", "ready"]
    if not lost:
        play.ask(Op.START, "c")
        assert waiting(play).code == "driver_not_ready"


def test_a_loss_has_to_last_without_doubt() -> None:
    play = serving().sweep(fails("GPU-0", 15), GOOD1, after=1.0)
    play.sweep(fails("GPU-0", 999), GOOD1, after=1.9)
    play.sweep(fails("GPU-0", 15), GOOD1, after=1.0)
    assert play.gpu().quarantine is None
    play.sweep(fails("GPU-0", 15), GOOD1, after=gpus.ABSENT_FOR_S)
    assert play.gpu().quarantine is not None


# --- hiccups ----------------------------------------------------------------------------------------------------------


def late(play: Play) -> Play:
    """One look is not answered in time."""
    if play.node.telemetry.asked_at is None:
        play.see(Due(What.POLL))
    for _ in range(2):
        at = telemetry.deadline(play.node.telemetry)
        assert at is not None
        play.see(Due(What.CLOCK), at=at)
    assert any(isinstance(action, KillGpuHelper) for action in play.actions)
    return play


def broken(play: Play) -> Play:
    """The probe ends by itself."""
    return play.see(GpuHelperEnded(play.node.telemetry.helper, "it broke"), after=1.0)


def give_up(play: Play) -> Play:
    """Probes fail until nobody believes in them any more."""
    while not play.node.telemetry.unresponsive:
        at = play.node.telemetry.next_at
        play.see(Due(What.CLOCK), at=max(play.now, at or 0.0))
        broken(play)
    return play


def shut(*cards: GpuReading, problem: int | None = None) -> Play:
    """Engine "a" waits for GPU-0 after a look that saw this."""
    play = Play(new_node(node_spec(engine_spec(gpus=ON0))))
    play.cards = None
    return play.see(Booted()).sweep(*cards, problem=problem).is_(State.WAITING)


CLOSED = [
    ((GOOD1,), None, "gpu_missing", True),
    ((holds(GOOD0, foreign(70)),), None, "gpu_memory_held", True),
    ((fails("GPU-0", 999), GOOD1), None, "driver_not_ready", True),
    ((fails("GPU-0", 4), GOOD1), None, "driver_not_ready", False),
    ((fails("GPU-0", 15), GOOD1), None, "gpu_missing", False),
    ((), 999, "driver_not_ready", True),
    ((), 4, "driver_not_ready", False),
    ((), 9, "driver_not_ready", False),
    ((), 12, "driver_not_ready", False),
    ((), 18, "driver_not_ready", False),
]


@pytest.mark.parametrize("hiccup", [late, broken])
@pytest.mark.parametrize(("cards", "problem", "code", "opens"), CLOSED)
def test_a_hiccup_opens_no_gate(
    *, cards: tuple[GpuReading, ...], problem: int | None, code: str, opens: bool, hiccup: object
) -> None:
    play = shut(*cards, problem=problem)
    assert waiting(play, "a").code == code
    assert callable(hiccup)
    hiccup(play)
    assert telemetry.blind(play.node)
    assert play.is_(State.WAITING).engine().launching is None
    assert waiting(play, "a").code == code
    if hiccup is broken:
        give_up(play).is_(State.STARTING if opens else State.WAITING)


def test_before_the_first_look_it_opens_when_probes_are_given_up() -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=ON0))))
    play.cards = None
    broken(play.see(Booted())).is_(State.WAITING)
    assert waiting(play, "a").code == "driver_not_ready"
    give_up(play).is_(State.STARTING)


def test_after_a_hiccup_an_engine_that_dies_is_started_by_what_was_known() -> None:
    play = broken(serving()).ask(Op.START, "c").is_(State.STARTING, "c")
    play = launching(engine_spec(gpus=ON0, autostart=False))
    play.cards = None
    broken(play.sweep(GOOD0)).ask(Op.START).is_(State.STARTING)


def test_a_quarantine_holds_whatever_the_probe_does() -> None:
    bad = Gpu("GPU-0", pci_id="0000:10:00.0", index=0, quarantine=Reason("gpu_fault", "Xid 79: gone"))
    play = Play(replace(new_node(node_spec(engine_spec(gpus=ON0))), gpus={"GPU-0": bad}))
    play.cards = None
    give_up(play.see(Booted())).is_(State.WAITING)
    assert waiting(play, "a").code == "gpu_quarantined"


# --- a dead GSP -------------------------------------------------------------------------------------------------------


def avoided(play: Play) -> list[str]:
    return [place.uuid for place in telemetry.avoided(play.node)]


def test_a_gpu_whose_gsp_is_dead_is_not_looked_at_any_more() -> None:
    dead = Gpu("GPU-0", "0000:10:00.0", 0, quarantine=Reason("gpu_fault", "Xid 120 (GSP error): reset it"))
    gone = Gpu("GPU-1", "0000:11:00.0", 1, quarantine=Reason("gpu_fault", "Xid 79 (fallen off the bus): reboot"))
    play = Play(replace(new_node(node_spec(engine_spec(gpus=ON1))), gpus={"GPU-0": dead, "GPU-1": gone}))
    play.cards = None
    play.see(Booted())
    assert avoided(play) == ["GPU-0"], "a daemon that starts knows it by its index"
    play.sweep(fails("GPU-0", 16), GOOD1).see(GpuRequested(1, GpuOp.CLEAR, "GPU-0", "uid 0"))
    assert avoided(play) == []
