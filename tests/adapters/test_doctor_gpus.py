"""`doctor` on the driver and the GPUs, over machines that are made up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from supervisord.doctor.facts import Unknown
from supervisord.doctor.findings import Verdict
from supervisord.gpu.protocol import Depths
from tests.adapters.doctor_box import DRIVER, Sick, gpu
from tests.adapters.fake_installation import open_home

OK, WARN, FAIL, NOT_CHECKED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.NOT_CHECKED
ENGINE = """
[engine.q]
model = "org/model"
port = 8001
gpus = ["0"]
"""
WELL = (
    *("driver", "driver_versions", "nvml", "device_files", "device_groups", "persistenced"),
    *("gpus", "gpu_memory_errors", "persistence_mode"),
)


@pytest.fixture
def box() -> Iterator[Sick]:
    with open_home() as folder:
        sick = Sick(folder, as_root=True, text=ENGINE)
        sick.write("/etc/group", "video:x:44:vllm\nrender:x:105:vllm\n")
        sick.account("vllm", groups=(44, 105))
        yield sick


@pytest.mark.parametrize("name", WELL)
def test_a_machine_that_is_well(box: Sick, name: str) -> None:
    found = box.ask(name)
    assert found
    assert {finding.verdict for finding in found} == {OK}
    assert not any(finding.remedy for finding in found)


def test_a_machine_without_gpu_that_needs_none_is_asked_one_thing(box: Sick) -> None:
    box.text = ""
    box.without_driver(cards=False)
    assert box.one("driver") == (OK, "no NVIDIA GPU here, and no engine of the configuration needs one", "")
    assert [name for name in WELL if box.ask(name)] == ["driver"]
    box.config = Unknown("may not be read", "denied")
    assert box.one("driver") == (OK, "no NVIDIA GPU here", "")


def test_no_driver_for_a_card_that_is_there(box: Sick) -> None:
    box.without_driver()
    verdict, text, remedy = box.one("driver")
    assert (verdict, text) == (
        FAIL,
        "the NVIDIA driver is not loaded, though the PCI bus has 1 NVIDIA GPU; engine q needs it",
    )
    assert remedy.startswith("modprobe nvidia")
    assert box.one("nvml")[:2] == (FAIL, "the NVIDIA driver is not loaded; see nvidia-smi and dmesg")
    (box.root / "sys/module/nouveau").mkdir(parents=True)
    verdict, text, remedy = box.one("driver")
    assert "; nouveau is, and holds them; engine q needs it" in text
    assert remedy.startswith("write `blacklist nouveau`")
    # What follows from it is not told again.
    assert [
        name for name in ("driver_versions", "device_files", "device_groups", "persistenced") if box.ask(name)
    ] == []
    assert box.one("gpus")[0] is NOT_CHECKED


def test_a_mismatch_names_both_versions_and_the_way_out(box: Sick) -> None:
    box.library("590.44.01")
    box.problem = 18
    verdict, text, remedy = box.one("driver_versions")
    assert verdict is FAIL
    assert f"the kernel runs driver {DRIVER}, the library libnvidia-ml.so.1 is of 590.44.01" in text
    assert "reboot" in remedy
    assert "modprobe nvidia" in remedy
    assert box.one("nvml")[0] is FAIL


def test_a_mismatch_that_only_the_files_show(box: Sick) -> None:
    box.library("590.44.01")
    assert box.one("driver_versions")[0] is FAIL


def test_a_mismatch_that_only_nvml_shows(box: Sick) -> None:
    box.library(None)
    box.problem = 18
    verdict, text, _ = box.one("driver_versions")
    assert verdict is FAIL
    assert "is of (version not to be seen from here)" in text


def test_nvml_that_hangs_and_nvml_that_was_closed(box: Sick) -> None:
    box.nvml = Unknown("NVML does not answer within 30 s", "hangs")
    verdict, text, remedy = box.one("nvml")
    assert (verdict, text) == (FAIL, "NVML does not answer within 30 s")
    assert "reboot" in remedy
    assert box.one("gpus")[0] is NOT_CHECKED
    assert box.one("driver")[0] is OK
    box.nvml = Unknown("NVML is closed by an operator", "released")
    assert box.one("nvml") == (NOT_CHECKED, "NVML is closed by an operator", "")


def test_device_files_that_the_user_may_not_open(box: Sick) -> None:
    (box.root / "dev/nvidia0").chmod(0o600)
    verdict, text, remedy = box.one("device_files")
    assert (verdict, text) == (FAIL, "user vllm may not open /dev/nvidia0")
    assert remedy.startswith("chmod 0666 /dev/nvidia* (now 0600)")


def test_device_files_that_are_missing(box: Sick) -> None:
    (box.root / "dev/nvidia-uvm").unlink()
    assert box.one("device_files")[:2] == (FAIL, "/dev/nvidia-uvm cannot be found: CUDA cannot begin")
    box.write("/usr/bin/nvidia-modprobe", "").chmod(0o4755)
    assert box.one("device_files")[0] is WARN
    box.card("0000:2b:00.0", "0x030200")
    assert "/dev/nvidiaN of 1 GPUs" in box.one("device_files")[1]


def test_a_user_outside_of_the_groups(box: Sick) -> None:
    box.account("vllm", groups=(44,))
    verdict, text, remedy = box.one("device_groups")
    assert (verdict, text) == (WARN, "user vllm is not in render: it depends on device files open to everybody")
    assert remedy.startswith("usermod -aG render vllm")


def test_persistenced_is_missed_where_persistence_is_wanted(box: Sick) -> None:
    box.readings = (gpu(name="NVIDIA GeForce RTX 4090", architecture=8, compute=(8, 9), persistence=True),)
    verdict, text, remedy = box.one("persistenced")
    assert verdict is WARN
    assert "wanted on for GPU 0" in text
    assert "systemctl enable --now nvidia-persistenced" in remedy
    box.write("/run/nvidia-persistenced/socket", "")
    assert box.one("persistenced")[0] is OK
    (box.root / "run/nvidia-persistenced/socket").unlink()
    box.process(77, "nvidia-persistenced")
    assert box.one("persistenced") == (OK, "nvidia-persistenced runs", "")


def test_persistence_mode_that_is_not_as_wanted(box: Sick) -> None:
    box.readings = (gpu(persistence=True),)
    verdict, text, remedy = box.one("persistence_mode")
    assert verdict is WARN
    assert "persistence mode is on and wanted off (default for ampere geforce)" in text
    assert "vllm-supervisor gpu persistence" in remedy


def test_the_fabric_of_a_machine_with_switches(box: Sick) -> None:
    assert box.ask("fabric_manager") == []
    box.card("0000:aa:00.0", "0x068000")
    box.card("0000:ab:00.0", "0x068000")
    verdict, text, remedy = box.one("fabric_manager")
    assert (verdict, text) == (
        FAIL,
        "nvidia-fabricmanager does not run, and this machine has 2 NVSwitches: CUDA would fail with error 802",
    )
    assert remedy.startswith("systemctl enable --now nvidia-fabricmanager")
    box.process(78, "nv-fabricmanager")
    assert box.one("fabric_manager")[0] is OK
    box.depths = (Depths(fabric_state=1),)
    assert "the NVLink fabric of GPU 0 has not started" in box.one("fabric_manager")[1]
    box.depths = (Depths(fabric_state=3, fabric_status=999),)
    assert "failed with NVML code 999" in box.one("fabric_manager")[1]
    box.depths = (Depths(fabric_state=3, fabric_status=0),)
    assert box.one("fabric_manager") == (OK, "the NVLink fabric of 1 GPU is up", "")


def test_a_fabric_that_others_manage_is_a_warning(box: Sick) -> None:
    box.depths = (Depths(fabric_state=2),)
    verdict, text, _ = box.one("fabric_manager")
    assert verdict is WARN
    assert "is being set up" in text


@pytest.mark.parametrize(
    ("reading", "depth", "verdict", "words"),
    [
        ({"ecc_uncorrected": 3}, {}, WARN, "3 uncorrectable memory errors"),
        ({"remap_pending": True}, {}, WARN, "a row of memory is to be remapped"),
        ({"remap_failed": True}, {}, FAIL, "could not be remapped"),
        ({}, {"retired_pending": True}, WARN, "a page of memory is to be retired"),
        ({"ecc_uncorrected": 0}, {}, OK, "no memory errors, no rows to be remapped"),
        ({}, {}, OK, "count no memory errors"),
    ],
)
def test_memory_errors(
    box: Sick, reading: dict[str, Any], depth: dict[str, bool], verdict: Verdict, words: str
) -> None:
    box.readings, box.depths = (gpu(**reading),), (Depths(**depth),)
    found, text, _ = box.one("gpu_memory_errors")
    assert found is verdict
    assert words in text


def test_what_the_driver_asks_for(box: Sick) -> None:
    assert box.ask("gpu_recovery") == []
    box.readings = (gpu(recovery_action=0), gpu(1, recovery_action=2))
    assert box.one("gpu_recovery")[:2] == (
        FAIL,
        "GPU 1 (GPU-00000001-aaaa): the driver asks for a reboot of this machine",
    )
    box.readings = (gpu(recovery_action=0),)
    assert box.one("gpu_recovery")[0] is OK


def test_gpus_that_are_lost_left_out_or_not_there(box: Sick) -> None:
    box.readings = (gpu(error=15), gpu(1))
    box.card("0000:2b:00.0", "0x030200")
    box.card("0000:3b:00.0", "0x030200")
    box.text = ENGINE.replace('"0"', '"GPU-9999"')
    assert [(finding.verdict, finding.subject) for finding in box.ask("gpus")] == [
        (FAIL, "GPU 0 (GPU-00000000-aaaa)"),
        (FAIL, ""),
        (FAIL, "engine q"),
    ]
    assert "the PCI bus has 3 NVIDIA GPUs, NVML shows 2" in box.ask("gpus")[1].message


def test_a_card_that_the_driver_leaves_out_is_missed_though_no_engine_needs_it(box: Sick) -> None:
    box.text, box.readings = "", ()
    assert box.one("gpus")[:2] == (FAIL, "the PCI bus has 1 NVIDIA GPU, NVML shows 0")


def test_mig_and_the_engines_that_name_whole_gpus(box: Sick) -> None:
    box.readings = (gpu(mig=True), gpu(1, mig=False))
    verdict, text, _ = box.one("mig")
    assert verdict is FAIL
    assert "MIG is on, and engine q names the whole GPU" in text
    box.text = ENGINE.replace('"0"', '"1"')
    assert box.one("mig")[0] is OK
    box.text = ENGINE.replace('"0"', '"MIG-1111-2222"')
    assert box.one("mig")[0] is OK
    box.readings = (gpu(mig=False),)
    assert box.one("mig")[:2] == (FAIL, "engine q: it names a MIG device, and MIG is on nowhere")


def test_nvlink_where_there_is_any(box: Sick) -> None:
    assert box.ask("nvlink") == []
    box.readings = (gpu(), gpu(1))
    box.text = ENGINE.replace('"0"', '"0", "1"')
    assert "talk over PCIe" in box.one("nvlink")[1]
    box.depths = (Depths(nvlinks_up=4, nvlinks=4), Depths(nvlinks_up=3, nvlinks=4))
    verdict, text, _ = box.one("nvlink")
    assert verdict is WARN
    assert text.startswith("GPU 1 (GPU-00000001-aaaa): 3 of 4 NVLinks are up")
    box.depths = (Depths(nvlinks_up=4, nvlinks=4),) * 2
    assert box.one("nvlink") == (OK, "all NVLinks of 2 GPUs are up", "")
    box.depths = (Depths(nvlinks_up=0, nvlinks=4),) * 2
    assert box.one("nvlink")[0] is OK


def test_a_quarantine_is_the_daemons_knowledge(box: Sick) -> None:
    assert box.one("gpu_quarantine")[0] is NOT_CHECKED
    told = {"uuid": "GPU-1", "quarantined": True, "reasons": [{"code": "gpu_fault", "message": "Xid 79"}]}
    box.daemon = {"supervisor": {}, "engines": [], "gpus": [told]}
    assert box.one("gpu_quarantine") == (
        FAIL,
        "GPU GPU-1: quarantined: Xid 79",
        "when that is mended: vllm-supervisor gpu clear GPU-1",
    )
    box.daemon = {"supervisor": {}, "engines": [], "gpus": [{**told, "quarantined": False}]}
    assert box.one("gpu_quarantine")[0] is OK


@pytest.mark.parametrize("name", ["0", "GPU-00000000-aaaa", "0000:1b:00.0"])
def test_a_gpu_in_quarantine_is_not_asked_and_so_not_called_silent(box: Sick, name: str) -> None:
    """Its engine's configuration is right, and what is to be done about it stands in its quarantine."""
    box.text = ENGINE.replace('gpus = ["0"]', f'gpus = ["{name}"]')
    box.readings = (gpu(0, error=16), gpu(1))
    box.card("0000:1c:00.0", "0x030000")
    told = {"uuid": "GPU-00000000-aaaa", "pci_id": "0000:1b:00.0", "index": 0, "quarantined": True, "reasons": []}
    box.daemon = {"supervisor": {}, "engines": [], "gpus": [told]}
    assert [(finding.verdict, finding.subject, finding.message) for finding in box.ask("gpus")] == [
        (NOT_CHECKED, "GPU 0 (GPU-00000000-aaaa)", "in quarantine, so it is not asked (check gpu_quarantine)"),
        (OK, "", "NVIDIA GeForce RTX 3090"),
    ]
    box.daemon = {"supervisor": {}, "engines": [], "gpus": [{**told, "quarantined": False}]}
    assert FAIL in {finding.verdict for finding in box.ask("gpus")}


def test_wsl_has_no_device_files(box: Sick) -> None:
    shutil.rmtree(box.root / "dev")
    box.write("/dev/dxg", "")
    shutil.rmtree(box.root / "sys/module")
    assert box.one("driver") == (OK, f"NVIDIA driver {DRIVER} answers; its module cannot be seen from here", "")
    assert box.ask("device_files") == []
