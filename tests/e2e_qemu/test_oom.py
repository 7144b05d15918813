"""The memory controller ends an engine: on a kernel of its own, with the package as it is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, cast

import pytest

from tests.e2e_qemu import machine
from tests.e2e_systemd.machine import REPOSITORY
from tests.packaging.conftest import build

SUITES: Final = os.environ.get("VLLM_SUPERVISOR_TEST_SUITES", "trixie").split()
ADVICE: Final = "the kernel ended it because memory ran out; give the machine or the engine more"
REMEDY: Final = "give the machine or the engine more memory; or fewer engines, a smaller cpu-offload-gb"

pytestmark = pytest.mark.timeout(machine.MAKE_S + machine.RUN_S + 300)

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    problem = machine.check()
    assert problem is None, problem
    return build(tmp_path_factory.mktemp("deb"))


@pytest.fixture(scope="module", params=SUITES)
def seen(request: pytest.FixtureRequest, package: Path) -> Seen:
    """What the script inside saw, in one boot for all that is asserted here."""
    files = {
        "/srv/package.deb": package,
        "/srv/inside.py": Path(__file__).with_name("inside.py"),
        # As in the repository: the simulated vLLM finds its data by that.
        "/opt/under-test/tests/sim": REPOSITORY / "tests/sim",
        "/opt/under-test/tests/data": REPOSITORY / "tests/data",
    }
    command = "/usr/bin/python3 /srv/inside.py /srv/package.deb /opt/under-test/tests/sim/vllm /dev/ttyS1"
    found: Seen = machine.run_in_machine(machine.make_root(request.param), files, command)
    assert "error" not in found, f"{found['error']}\n{found['journal']}"
    print(request.param, found["machine"], *(f"{name}: {found[name]['took_s']} s" for name in ("slice", "unit")))
    assert "memory" in found["machine"]["controllers"]
    return found


@pytest.fixture(params=["slice", "unit"])
def case(request: pytest.FixtureRequest, seen: Seen) -> Seen:
    """An engine that grew beyond the limit of the slice, and one that grew beyond its unit's."""
    return cast("Seen", seen[request.param])


def test_the_limit_holds_for_the_next_generation_too(case: Seen) -> None:
    first, second = case["limits"]
    assert first == second != "max"


def test_the_kernel_killed_a_child_of_the_engine(case: Seen) -> None:
    assert [line for line in case["kernel"] if "Memory cgroup" in line and "(VLLM::EngineCor" in line]


def test_its_exit_has_the_class_and_the_advice(case: Seen) -> None:
    seen = case["ended"]["last_exit"]
    assert (seen["class"], seen["code"], seen["signal"], seen["generation"]) == ("oom_host", None, 9, 1)
    assert seen["advice"] == ADVICE
    assert case["after"]["last_exit"] == seen


def test_events_and_why_say_so(case: Seen) -> None:
    name = case["before"]["name"]
    (exited,) = [event for event in case["events"] if event["kind"] == "exited"]
    assert exited["message"] == f"{name} ended by itself while ready: killed by SIGKILL (oom_host): {ADVICE}"
    told = {line["section"]: line["text"] for line in reversed(case["why"]["lines"])}
    assert f"killed by SIGKILL (oom_host): {ADVICE}" in told["SEEN"]
    assert REMEDY in told["DO"]


def test_the_next_generation_is_ready_and_nothing_of_the_first_is_left(case: Seen) -> None:
    assert len(case["family"]) > 2
    assert (case["before"]["generation"], case["after"]["generation"]) == (1, 2)
    assert case["after"]["restarts"] == 1
    assert case["left"] == []
    assert case["group"] == "1"


def test_the_other_engine_lived_on(case: Seen) -> None:
    before, after = case["neighbour"]
    assert (after["pid"], after["generation"], after["state"]) == (before["pid"], before["generation"], "ready")


def test_the_daemon_lived_on(seen: Seen) -> None:
    first, *later = seen["daemon"]
    assert (first["ActiveState"], first["NRestarts"]) == ("active", "0")
    assert later == [first, first]
