"""Xids by number: NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors), as far as it decides something."""

from __future__ import annotations

import pytest

from supervisord.core.xids import NAMES, RECOVERY, REMEDIES, XidClass, class_of, name_of


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (XidClass.APPLICATION, [13, 31, 32, 43, 45, 68, 69, 94]),
        (XidClass.RESET, [46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143]),
        (XidClass.REBOOT, [79, None]),
        (XidClass.WORKFLOW, [48, 74]),
        (XidClass.NOTICE, [38, 63, 92, 121, 137, 141, 154, 0, 7777]),
    ],
)
def test_what_a_number_asks_for(kind: XidClass, numbers: list[int | None]) -> None:
    assert {class_of(number) for number in numbers} == {kind}


def test_only_faults_of_hardware_have_a_remedy() -> None:
    assert set(REMEDIES) == {XidClass.RESET, XidClass.REBOOT, XidClass.WORKFLOW}
    texts = [*REMEDIES.values(), *RECOVERY.values()]
    assert all("{" not in text.format(gpu="GPU-0") for text in texts)
    assert sorted(RECOVERY) == [1, 2, 3, 4]


def test_names() -> None:
    assert name_of(79) == "Xid 79 (fallen off the bus)"
    assert name_of(7777) == "Xid 7777"
    assert name_of(None) == "fallen off the bus"
    assert all((name and name[0].islower()) or name.startswith(("GPU", "GSP", "NV")) for name in NAMES.values())
