"""A card that was replaced: what its names mean from then on, and what is left of the old one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from supervisord.core import durable
from supervisord.core.gpu_inventory import find
from supervisord.core.gpu_samples import GpuReading
from supervisord.core.messages import Booted, GpuOp, GpuRequested, Launch, Severity
from supervisord.core.model import Gpu, Reason, State, Waiting
from tests.core.play import Play, card, engine_spec, launching, new_node, node_spec

BROKEN = Reason("gpu_remap_failed", "it could not remap a broken row of its memory: have it replaced")
OLD = Gpu("GPU-old", pci_id="0000:10:00.0", index=0, name="NVIDIA H200", quarantine=BROKEN)
NEW, NEXT = card("GPU-new", 0), card("GPU-1")
"""NEW is where OLD was."""


def booted(*names: str, cards: tuple[GpuReading, ...] = (NEW, NEXT), old: Gpu = OLD) -> Play:
    """A daemon that remembers a quarantine, on the machine as it is now."""
    gpus = durable.restore_gpus(json.loads(json.dumps(durable.save_gpus(replace(EMPTY, gpus={old.uuid: old})))))
    play = Play(replace(new_node(node_spec(engine_spec(gpus=names))), gpus=gpus))
    play.cards = cards
    return play.see(Booted())


EMPTY = new_node(node_spec())


@pytest.mark.parametrize(
    ("name", "place"),
    [("0", 0), ("1", 1), ("0000:10:00.0", 0), ("10:00.0", 0), ("0000:11:00.0", 1), ("GPU-new", 0), ("GPU-1", 1)],
)
def test_names_mean_the_cards_that_are_there(name: str, place: int) -> None:
    play = booted(name).is_(State.STARTING)
    assert [action for action in play.actions if isinstance(action, Launch)] == [Launch("a", 1, (place,))]
    assert play.engine().devices == (("GPU-new", "GPU-1")[place],)


def test_the_old_one_is_shown_until_it_is_cleared() -> None:
    play = booted("0")
    record = play.record("gpu_replaced")
    assert record.severity is Severity.NOTICE
    assert record.message == (
        "GPU 0 (GPU-old) was replaced: 0000:10:00.0 is GPU 0 (GPU-new) now; "
        "it is shown until: vllm-supervisor gpu clear GPU-old"
    )
    old = play.gpu("GPU-old")
    assert (old.pci_id, old.index, old.quarantine) == ("", None, BROKEN)
    play.sweep(NEW, NEXT, after=60.0)
    assert [record.kind for record in play.told].count("gpu_replaced") == 1
    again = booted("0", old=play.gpu("GPU-old"))
    assert "gpu_replaced" not in [record.kind for record in again.told], "nor by the next daemon"
    play.see(GpuRequested(9, GpuOp.CLEAR, "GPU-old", "uid 0"))
    assert set(play.node.gpus) == {"GPU-new", "GPU-1"}


def test_whoever_names_the_old_one_waits_for_it() -> None:
    assert booted("GPU-old").phase(Waiting).reason.code == "gpu_quarantined"


def test_one_that_comes_back_is_known_again() -> None:
    play = booted("1").sweep(replace(NEW, uuid="GPU-old"), NEXT, after=5.0)
    old = play.gpu("GPU-old")
    assert (old.pci_id, old.index, old.quarantine) == ("0000:10:00.0", 0, BROKEN)
    assert set(play.node.gpus) == {"GPU-old", "GPU-1"}, "and the other one is forgotten"


def test_one_that_was_seen_and_well_is_forgotten() -> None:
    """A card is replaced while the daemon runs: in a machine that can do that, or a virtual one."""
    play = launching(engine_spec(gpus=("GPU-0",), autostart=False))
    play.sweep(card("GPU-n", 0), after=5.0).says("gpu_replaced")
    assert play.record("gpu_replaced").message == ("GPU 0 (GPU-0) was replaced: 0000:10:00.0 is GPU 0 (GPU-n) now")
    assert set(play.node.gpus) == {"GPU-n"}


def test_one_that_is_only_gone_keeps_its_place() -> None:
    """A41: the index of the others does not shift while nobody has its place."""
    play = booted("1", cards=(replace(NEXT, index=0),)).is_(State.STARTING)
    assert play.engine().devices == ("GPU-1",)
    assert play.gpu("GPU-old").pci_id == "0000:10:00.0"


def test_who_answers_goes_before_who_does_not() -> None:
    """Before a sweep has concluded anything from two at one place."""
    gone, here = replace(OLD, absent_since=1.0), Gpu("GPU-new", pci_id="0000:10:00.0", index=0)
    for gpus in ((gone, here), (here, gone)):
        found = find({gpu.uuid: gpu for gpu in gpus}, "10:00.0")
        assert found is here
