"""Which GPU a name means, what an engine may claim there, the gates before a launch, memory that has to come back."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from supervisord.core import gpu_inventory, telemetry
from supervisord.core.ending import MEMORY_BLIND_S
from supervisord.core.gpu_inventory import (
    capacity_bytes,
    counts_lost_gpus,
    find,
    held,
    label,
    named_twice,
    normal_pci_id,
    places,
    strange_bytes,
)
from supervisord.core.gpu_samples import GpuProcess, GpuReading, GpuSweep
from supervisord.core.lifecycle import MEMORY_BACK_S
from supervisord.core.messages import (
    Booted,
    Due,
    Exited,
    GpuHelperEnded,
    GpusSwept,
    Launch,
    Op,
    Reconfigured,
    Severity,
    Swept,
    What,
)
from supervisord.core.model import After, Backoff, Engine, Gpu, Reason, State, Stopped, Stopping, Waiting
from supervisord.core.spec import EngineSpec
from tests.core.play import (
    GIB,
    Play,
    card,
    engine_spec,
    foreign,
    holds,
    launching,
    mine,
    new_node,
    node_spec,
    plan_ids,
    stopped,
)

A, B, C = (
    Gpu(f"GPU-{letter}", pci_id=f"0000:{bus}:00.0", index=index, reading=card(f"GPU-{letter}", index))
    for index, (letter, bus) in enumerate((("a", "0a"), ("b", "1b"), ("c", "ff")))
)
GPUS = {gpu.uuid: gpu for gpu in (A, B, C)}


def lost(*uuids: str) -> dict[str, Gpu]:
    """The same three, without some: the others have moved up."""
    gpus, index = {}, 0
    for uuid, gpu in GPUS.items():
        if uuid in uuids:
            gpus[uuid] = replace(gpu, absent_since=1.0)
        else:
            gpus[uuid] = replace(gpu, index=index)
            index += 1
    return gpus


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("1b:00.0", "0000:1b:00.0"),
        ("1B:00", "0000:1b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("NONSENSE:x", "nonsense:x"),
    ],
)
def test_pci_ids_of_every_form(text: str, normal: str) -> None:
    assert normal_pci_id(text) == normal


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        ("GPU-b", "GPU-b"),
        ("1b:00.0", "GPU-b"),
        ("00000000:1B:00.0", "GPU-b"),
        ("1", "GPU-b"),
        ("7", None),
        ("GPU-x", None),
        ("1c:00.0", None),
        ("MIG-b", None),
        ("", None),
    ],
)
def test_what_a_name_means(name: str, uuid: str | None) -> None:
    found = find(GPUS, name)
    assert (found.uuid if found else None) == uuid


@pytest.mark.parametrize("gone", ["GPU-a", "GPU-b", "GPU-c"])
def test_an_index_means_the_same_gpu_when_another_is_lost(gone: str) -> None:
    """A41: NVML counts on over a lost GPU, so that 1 is suddenly the one that was 2."""
    for index, uuid in enumerate(GPUS):
        found = find(lost(gone), str(index))
        assert found is not None
        assert found.uuid == uuid
    assert find(lost(gone), "3") is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("0", "GPU-a"), "gpus names GPU 0 (GPU-a) twice, as 0 and as GPU-a: correct gpus"),
        (("GPU-b", "0", "1b:00.0"), "gpus names GPU 1 (GPU-b) twice, as GPU-b and as 1b:00.0: correct gpus"),
        (("1", "1"), "gpus names GPU 1 (GPU-b) twice, as 1 and as 1: correct gpus"),
    ],
)
def test_two_names_of_one_gpu(names: tuple[str, ...], message: str) -> None:
    assert named_twice(GPUS, names) == Reason("gpu_missing", message)


@pytest.mark.parametrize("names", [(), ("0",), ("0", "GPU-b", "ff:00.0"), ("GPU-x", "GPU-x"), ("MIG-1", "MIG-1")])
def test_different_and_unknown_names(names: tuple[str, ...]) -> None:
    assert named_twice(GPUS, names) is None


def test_labels() -> None:
    assert label(B) == "GPU 1 (GPU-b)"
    assert label(Gpu("GPU-b")) == "GPU GPU-b"


def test_cuda_counts_those_that_answer_by_pci_id() -> None:
    assert places(GPUS, [C, A]) == (2, 0)
    shifted = lost("GPU-a")
    assert places(shifted, [shifted["GPU-c"], shifted["GPU-b"]]) == (1, 0)


def test_or_all_that_nvml_lists() -> None:
    gpus = {**GPUS, "GPU-a": replace(A, absent_since=1.0)}
    assert places(gpus, [C, B], counts_lost=True) == (2, 1)
    nameless = replace(C, index=None)
    assert places(gpus, [nameless, B], counts_lost=True) == (1, 1)


@pytest.mark.parametrize(
    ("given", "landed", "counted"),
    [
        ((1,), [B], True),
        ((1,), [C], False),
        ((0,), [B], False),
        ((0, 1), [B], None),  # either would explain it
        ((0, 1), [B, C], False),
        ((7,), [B, C], None),
        ((), [B], None),
        ((1,), [], None),
    ],
)
def test_what_an_engine_that_is_astray_shows(given: tuple[int, ...], landed: list[Gpu], counted: bool | None) -> None:
    """GPU a is lost: b and c are CUDA's 0 and 1, or 1 and 2."""
    gpus = {**GPUS, "GPU-a": replace(A, absent_since=1.0)}
    engine = replace(stopped().engine(), places=given)
    assert counts_lost_gpus(gpus, engine, landed) is counted


NO_GPU = "RuntimeError: No CUDA GPUs are available"


@pytest.mark.parametrize(
    ("words", "flips"),
    [
        (NO_GPU, True),
        ("ValueError: Free memory on device cuda:0 (0.9/23.6 GiB) on startup is less than desired", True),
        ("OSError: address already in use", False),
    ],
)
def test_an_engine_that_finds_no_gpu_while_one_is_lost_is_given_another_number(words: str, flips: bool) -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-1",)))))
    play.cards = (GpuReading("", "", 0, error=15), card("GPU-1"), card("GPU-2"))
    play.see(Booted())
    assert play.engine().places == (0,)
    play.spawn().see(Exited("a", 1, 1, None, tail=(words,)))
    assert play.node.telemetry.cuda_counts_lost is flips
    assert ("counted the other way" in play.record("exited").message) is flips
    play.see(Swept("a", 1))
    while play.engine().launching != 2:
        play.wake()
    assert play.engine().places == ((1,) if flips else (0,))


def test_which_cannot_be_why_where_none_is_lost_or_it_was_seen_on_its_own() -> None:
    for cards, seen in (
        ((card("GPU-0"), card("GPU-1")), ()),
        ((GpuReading("", "", 0, error=15), card("GPU-1")), (mine(),)),
    ):
        play = Play(new_node(node_spec(engine_spec(gpus=("GPU-1",)))))
        play.cards = cards
        play.see(Booted()).spawn()
        play.sweep(cards[0], holds(cards[1], *seen), after=1.0)
        play.see(Exited("a", 1, 1, None, tail=(NO_GPU,)))
        assert not play.node.telemetry.cuda_counts_lost


def test_nor_where_the_numbers_are_counted_otherwise_by_now_or_its_gpu_is_lost_too() -> None:
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-1",)))))
    play.cards = (GpuReading("", "", 0, error=15), card("GPU-1"), card("GPU-2"))
    play.see(Booted()).spawn()
    play.node = replace(play.node, telemetry=replace(play.node.telemetry, cuda_counts_lost=True))
    play.see(Exited("a", 1, 1, None, tail=(NO_GPU,)))
    assert play.node.telemetry.cuda_counts_lost
    play = Play(new_node(node_spec(engine_spec(gpus=("GPU-1",)))))
    play.cards = (GpuReading("", "", 0, error=15), card("GPU-1"), card("GPU-2"))
    play.see(Booted()).spawn()
    play.sweep(GpuReading("", "", 0, error=15), GpuReading("", "", 1, error=15), card("GPU-2"), after=1.0)
    play.see(Exited("a", 1, 1, None, tail=(NO_GPU,)))
    assert not play.node.telemetry.cuda_counts_lost


# --- launches ---------------------------------------------------------------------------------------------------------


def test_a_launch_names_the_devices_in_the_order_of_the_configuration() -> None:
    play = launching(engine_spec(gpus=("GPU-2", "GPU-0")), engine_spec("b", gpus=("GPU-1",)))
    assert play.engine().devices == ("GPU-2", "GPU-0")
    assert [action for action in play.actions if isinstance(action, Launch)] == [
        Launch("a", 1, (2, 0)),
        Launch("b", 1, (1,)),
    ]


def test_what_is_not_known_is_left_to_the_names() -> None:
    play = launching(engine_spec(gpus=("MIG-7",)))
    assert [action for action in play.actions if isinstance(action, Launch)] == [Launch("a", 1, None)]
    assert play.engine().devices == ()
    play.up().see(Due(What.POLL))
    assert play.engine().gpu_bytes is None, "unknown is not zero"


def test_a_reload_moves_an_engine_to_its_new_gpu() -> None:
    """Not to the one that it was on, which the engine still remembers while it stops."""
    play = launching(engine_spec(gpus=("GPU-0",)), engine_spec("b", gpus=("GPU-1",), autostart=False)).up()
    spec = node_spec(
        engine_spec(gpus=("GPU-1",), drain_timeout_s=0), engine_spec("b", gpus=("GPU-1",), autostart=False)
    )
    play.see(Reconfigured(spec, plan_ids(spec, a="p2"), "uid 0"))
    while play.engine().state is not State.STOPPING:
        play.sample(running=0, waiting=0)
    play.see(Exited("a", 1, 0, None)).see(Swept("a", 1), after=0.1)
    assert Launch("a", 2, (1,)) in play.actions
    assert play.engine().devices == ("GPU-1",)


def test_whoever_is_on_the_new_gpu_is_waited_for() -> None:
    play = launching(engine_spec(gpus=("GPU-0",)), engine_spec("b", gpus=("1",), autostart=False))
    play.cards = (card("GPU-0"), card("GPU-1"))
    play.see(Due(What.POLL)).up().ask(Op.START, "b").is_(State.STARTING, "b")
    spec = node_spec(engine_spec(gpus=("GPU-1",)), engine_spec("b", gpus=("1",)))
    play.see(Reconfigured(spec, plan_ids(spec, a="p2"), "uid 0"))
    play.sample(running=0, waiting=0).see(Exited("a", 1, 0, None)).see(Swept("a", 1), after=0.1)
    assert play.phase(Waiting).reason.code == "gpu_busy_starting"


# --- gates ------------------------------------------------------------------------------------------------------------


def dark(*engines: EngineSpec) -> Play:
    """A daemon that has seen no GPU yet."""
    play = Play(new_node(node_spec(*engines)))
    play.cards = None
    return play.see(Booted())


def gated(*cards: GpuReading, **keys: Any) -> Reason | None:
    """Why engine "a" waits after a sweep that saw these cards."""
    play = dark(engine_spec(**{"gpus": ("GPU-0",), "autostart": False, **keys})).sweep(*cards).ask(Op.START)
    phase = play.engine().phase
    return phase.reason if isinstance(phase, Waiting) else None


def test_a_gpu_that_is_not_there() -> None:
    reason = gated(card("GPU-1"))
    assert reason is not None
    assert reason == Reason("gpu_missing", "there is no GPU GPU-0 on this machine (known: GPU 1 (GPU-1))")
    nothing = gated()
    assert nothing is not None
    assert nothing.message.endswith("(known: none)")
    assert gated(card("GPU-0")) is None


def test_a_gpu_that_does_not_answer_and_one_that_is_quarantined() -> None:
    play = launching(engine_spec(gpus=("GPU-0",), autostart=False))
    play.sweep(card("GPU-1")).ask(Op.START)
    assert play.phase(Waiting).reason == Reason("gpu_missing", "GPU 0 (GPU-0) does not answer")
    play.sweep(card("GPU-1"), after=2.0)
    reason = play.phase(Waiting).reason
    assert reason.code == "gpu_quarantined"
    assert reason.message.endswith("then: vllm-supervisor gpu clear GPU-0")


@pytest.mark.parametrize(
    ("name", "starts"), [("GPU-9", True), ("9", True), ("1b:00.0", False), ("GPU-0", True), ("0", True)]
)
def test_without_telemetry_names_that_cuda_understands_are_enough(*, name: str, starts: bool) -> None:
    play = dark(engine_spec("b", gpus=("GPU-0",), autostart=False), engine_spec(gpus=(name,), autostart=False))
    play.sweep(card())
    for _ in range(telemetry.STUCK_MAX):
        play.see(GpuHelperEnded(play.node.telemetry.helper, "it broke")).see(Due(What.CLOCK), after=30.0)
    play.ask(Op.START)
    play.is_(State.STARTING if starts else State.WAITING)
    if not starts:
        assert play.phase(Waiting).reason.code == "driver_not_ready"
        assert "nobody can tell the index of 1b:00.0" in play.phase(Waiting).reason.message
    known = name in ("GPU-0", "0")
    launches = [action.devices for action in play.actions if isinstance(action, Launch)]
    assert launches == ([(0,) if known else None] if starts else [])


def test_an_engine_without_gpus_has_no_gates_of_gpus() -> None:
    play = launching(engine_spec(gpus=("GPU-0",)), engine_spec("b"))
    play.sweep(problem=18).is_(State.STARTING, "b")


# --- memory -----------------------------------------------------------------------------------------------------------


def free(gib: float, *processes: GpuProcess) -> GpuReading:
    return replace(card(), free_bytes=ceil(gib * GIB), processes=processes)


ENOUGH_GIB = (0.9 - 0.01) * 80


def test_as_much_has_to_be_free_as_it_claims_less_one_percent() -> None:
    assert gated(free(ENOUGH_GIB)) is None
    reason = gated(free(ENOUGH_GIB - 0.001))
    assert reason is not None
    assert reason.code == "gpu_memory_held"
    assert reason.message == ("GPU 0 (GPU-0) has 71.2 GiB free, a will claim 72.0 GiB (gpu-memory-utilization 0.9)"), (
        "nobody is named where nobody is listed"
    )


@pytest.mark.parametrize(
    ("processes", "named"),
    [
        ((foreign(40),), "pid 77 (python) holds 40.0 GiB"),
        ((foreign(4), foreign(40, 78)), "pid 78 (python) holds 40.0 GiB"),
        ((mine(40, "b"),), "pid 4711 (engine b) holds 40.0 GiB"),
        ((GpuProcess(9, None),), "pid 9 (unknown) holds memory"),
    ],
)
def test_the_holder_is_named(processes: tuple[GpuProcess, ...], named: str) -> None:
    reason = gated(free(1, *processes))
    assert reason is not None
    assert reason.message.endswith(f"; {named}")


@pytest.mark.parametrize(
    "reading",
    [
        replace(free(1), free_bytes=None),
        replace(free(1), total_bytes=None),
    ],
)
def test_unknown_memory_closes_nothing(reading: GpuReading) -> None:
    assert gated(reading) is None


def test_memory_that_goes_by_bytes_is_left_to_vllm() -> None:
    assert gated(free(1), args={"kv-cache-memory-bytes": 5}) is None


def test_every_gpu_of_it_is_asked() -> None:
    reason = gated(
        card("GPU-0"), replace(free(1), uuid="GPU-1", index=1, pci_id="0000:77:00.0"), gpus=("GPU-0", "GPU-1")
    )
    assert reason is not None
    assert reason.message.startswith("GPU 1 (GPU-1)")


def test_a_wait_for_memory_is_told_once_whatever_the_figure_does() -> None:
    play = launching(engine_spec(gpus=("GPU-0",), autostart=False)).sweep(free(10, foreign(70))).ask(Op.START)
    assert play.record("waiting").severity is Severity.WARNING
    since = play.now
    for gib in (11, 9, 12):
        play.sweep(free(gib, foreign(80 - gib)), after=1.0).says()
        assert f"has {gib}.0 GiB free" in play.phase(Waiting).reason.message
    assert play.engine().since == since
    play.sweep(card(), after=1.0).is_(State.STARTING)


def test_where_its_memory_ends() -> None:
    engine = Engine(spec=engine_spec(gpus=("GPU-a", "GPU-b")), plan_id="p", phase=Stopped())
    gpus = {"GPU-a": replace(A, reading=free(10)), "GPU-b": replace(B, reading=free(6))}
    assert capacity_bytes(gpus, engine) is None
    engine = replace(engine, gpu_bytes=100 * GIB)
    assert capacity_bytes(gpus, engine) == (100 + 2 * 6) * GIB, "the fullest of them is the end"
    assert capacity_bytes({}, engine) is None
    unknown = replace(free(1), free_bytes=None)
    assert capacity_bytes({**gpus, "GPU-b": replace(B, reading=unknown)}, engine) is None
    assert capacity_bytes({**gpus, "GPU-b": replace(B, reading=None)}, engine) is None


# --- memory that has to come back -------------------------------------------------------------------------------------


def stopping(*cards: GpuReading, after: After = After.CRASH) -> Play:
    """Engine "a" has served on GPU-0, where the last look saw these cards, and nothing of it lives any more."""
    play = launching(engine_spec(gpus=("GPU-0",), drain_timeout_s=0)).up()
    play.cards = None
    play.sweep(*(cards or (card(),)), after=1.0)
    if after is After.STOP:
        play.ask(Op.STOP)
    play.see(Exited("a", 1, 1, None)).see(Swept("a", 1), after=0.1)
    assert play.phase(Stopping).gone_at == play.now
    return play


def test_a_sweep_that_began_before_the_end_says_nothing() -> None:
    play = stopping()
    play.see(Due(What.CLOCK))
    telemetry = play.node.telemetry
    play.see(GpusSwept(telemetry.helper, telemetry.number, GpuSweep(play.now - 0.01, (card(),))))
    play.is_(State.STOPPING)
    play.sweep(card()).is_(State.BACKOFF)


def test_memory_that_comes_back_a_moment_later() -> None:
    play = stopping()
    for _ in range(3):
        play.sweep(holds(card(), mine(70)), after=0.1).is_(State.STOPPING)
        assert play.node.telemetry.next_at == pytest.approx(play.now + 0.1)
    play.sweep(card(), after=0.1).is_(State.BACKOFF)
    assert "gpu_memory_stays" not in [record.kind for record in play.told]


@pytest.mark.parametrize("reading", [holds(card(), mine(3)), replace(card(), used_bytes=513 << 20)])
def test_memory_that_stays_is_told_and_waited_for_no_longer(reading: GpuReading) -> None:
    play = stopping(holds(card(), mine(70)))
    gone_at = play.now
    play.sweep(reading, after=0.1)
    play.see(Due(What.CLOCK), at=gone_at + MEMORY_BACK_S - 0.001).is_(State.STOPPING)
    if play.node.telemetry.asked_at is not None:
        play.sweep(reading)
    play.see(Due(What.CLOCK), at=gone_at + MEMORY_BACK_S).is_(State.BACKOFF)
    record = play.record("gpu_memory_stays")
    assert record.severity is Severity.ERROR
    assert "MiB of" in record.message


def unlisted(gib: float, *processes: GpuProcess) -> GpuReading:
    """So much of it is in use, and only these processes are told."""
    return replace(card(), used_bytes=int(gib * GIB), free_bytes=int((80 - gib) * GIB), processes=processes)


@pytest.mark.parametrize(
    ("last", "now"),
    [
        (unlisted(70), unlisted(30)),
        (unlisted(70), unlisted(70)),
        (unlisted(40, mine(36)), unlisted(30)),
        (unlisted(70, GpuProcess(4711, None, "", "a", 1)), unlisted(30)),
    ],
    ids=["nobody is listed", "nobody is listed, and nothing came back", "a tenant hides", "no figures"],
)
def test_what_may_be_somebody_elses_is_never_waited_for(last: GpuReading, now: GpuReading) -> None:
    """A40: in a container a neighbour is not listed; what it took since the launch is no rest of ours."""
    play = stopping(last).sweep(now, after=0.1).is_(State.BACKOFF)
    assert "gpu_memory_stays" not in [record.kind for record in play.told]


def test_what_a_listed_neighbour_took_meanwhile_is_no_rest() -> None:
    stopping(holds(card(), mine(36))).sweep(holds(card(), foreign(40)), after=0.1).is_(State.BACKOFF)


def test_what_it_left_is_told_from_what_was_there_at_the_last_look() -> None:
    """Not before the launch: the driver and small contexts take more by and by."""
    play = stopping(unlisted(40.4, mine(40)))
    play.sweep(unlisted(0.8), after=0.1).is_(State.BACKOFF)
    play = stopping(unlisted(40.4, mine(40)))
    play.sweep(unlisted(1.0), after=0.1).is_(State.STOPPING)


def test_a_process_that_went_before_the_others_leaves_its_last_look() -> None:
    """A worker dies, the engine notices seconds later: meanwhile its memory is nobody's, and has to come back."""
    play = launching(engine_spec(gpus=("GPU-0",), drain_timeout_s=0)).up().sweep(holds(card(), mine(70)), after=1.0)
    play.sweep(unlisted(70), after=1.0)
    play.see(Exited("a", 1, 1, None)).see(Swept("a", 1), after=0.1)
    play.sweep(unlisted(70), after=0.1).is_(State.STOPPING)
    play.sweep(card(), after=0.1).is_(State.BACKOFF)


def test_a_gpu_whose_memory_nobody_can_read_keeps_nobody() -> None:
    play = stopping()
    play.sweep(replace(card(), used_bytes=None, processes=None), after=0.1).is_(State.BACKOFF)
    play = stopping()
    play.sweep(replace(card(), error=15), after=0.1).is_(State.BACKOFF)


def test_memory_that_nobody_sees_is_waited_for_two_seconds() -> None:
    play = stopping()
    play.see(Due(What.CLOCK)).see(Due(What.CLOCK), after=5.0).see(Due(What.CLOCK), after=1.0).is_(State.STOPPING)
    assert telemetry.blind(play.node)
    play.see(Due(What.CLOCK), after=MEMORY_BLIND_S - 0.001).is_(State.STOPPING)
    play.see(Due(What.CLOCK), after=0.001).is_(State.BACKOFF)
    assert "gpu_memory_stays" not in [record.kind for record in play.told]


def test_it_is_waited_for_longer_when_it_is_seen_again() -> None:
    play = launching(engine_spec(gpus=("GPU-0",))).up()
    play.cards = None
    play.see(GpuHelperEnded(1, "it broke")).see(Exited("a", 1, 1, None)).see(Swept("a", 1), after=4.0)
    gone_at = play.now
    assert play.phase(Stopping).give_up_at == gone_at + MEMORY_BLIND_S
    play.see(Due(What.CLOCK), after=1.0).sweep(holds(card(), mine(70)))
    play.see(Due(What.CLOCK), at=gone_at + MEMORY_BLIND_S).is_(State.STOPPING)
    assert play.phase(Stopping).give_up_at == gone_at + MEMORY_BACK_S
    play.sweep(holds(card(), mine(70)))
    play.see(Due(What.CLOCK), at=gone_at + MEMORY_BACK_S).says("gpu_memory_stays", "restart")


def test_an_exit_that_is_heard_of_late_changes_nothing() -> None:
    play = launching(engine_spec(gpus=("GPU-0",), drain_timeout_s=0)).up()
    play.cards = None
    play.ask(Op.STOP, now=True).see(Swept("a", 1)).is_(State.STOPPING)
    gone = play.phase(Stopping)
    play.see(Exited("a", 1, None, 9)).does().is_(State.STOPPING)
    assert play.phase(Stopping) == gone


def test_a_stop_is_over_when_the_memory_is_back() -> None:
    play = stopping(after=After.STOP).sweep(holds(card(), mine(70)), after=0.1).is_(State.STOPPING)
    play.sweep(card(), after=0.1).is_(State.STOPPED)


def test_it_starts_again_only_then() -> None:
    play = stopping().sweep(holds(card(), mine(70)), after=0.1)
    play.sweep(card(), after=0.1)
    play.see(Due(What.CLOCK), at=play.phase(Backoff).until)
    assert play.engine().launching == 2


def test_what_no_process_accounts_for() -> None:
    assert strange_bytes(replace(card(), used_bytes=7, processes=())) == 7
    assert strange_bytes(holds(card(), mine(2), foreign(3))) == 0
    assert strange_bytes(replace(card(), used_bytes=None)) is None
    assert strange_bytes(replace(card(), processes=None)) is None
    assert strange_bytes(holds(card(), GpuProcess(1, None))) is None


@pytest.mark.parametrize(("more", "stays"), [(512 << 20, False), ((512 << 20) + 1, True)])
def test_more_of_no_process_than_at_the_last_look(*, more: int, stays: bool) -> None:
    engine = Engine(
        spec=engine_spec(gpus=("GPU-a",)),
        plan_id="p",
        devices=("GPU-a",),
        placed=True,
        strange_bytes={"GPU-a": 100 << 20},
    )
    gpus = {"GPU-a": replace(A, reading=replace(card("GPU-a"), used_bytes=(100 << 20) + more))}
    assert (held(gpus, engine) is not None) is stays
    assert held(gpus, replace(engine, strange_bytes={})) is None
    assert held(gpus, replace(engine, placed=False)) is None, "its processes were never listed"


def test_what_is_held_in_words() -> None:
    engine = Engine(spec=engine_spec(gpus=("GPU-a",)), plan_id="p")
    gpus = {"GPU-a": replace(A, reading=holds(card("GPU-a"), mine(2)))}
    assert held(gpus, engine) == "2,048 MiB of its pid 4711 on GPU 0 (GPU-a)"
    gpus = {"GPU-a": replace(A, reading=holds(card("GPU-a"), GpuProcess(5, None, "", "a", 1)))}
    assert held(gpus, engine) == "an unknown amount of its pid 5 on GPU 0 (GPU-a)"
    gpus = {"GPU-a": replace(A, reading=holds(card("GPU-a"), foreign(70)))}
    assert held(gpus, engine) is None, "a neighbour's"
    assert held({"GPU-a": replace(A, reading=None)}, engine) is None


def test_the_constants() -> None:
    assert gpu_inventory.STRANGE_MAX == 512 << 20
