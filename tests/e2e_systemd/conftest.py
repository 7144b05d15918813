"""One machine for each test: a boot takes a third of a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e_systemd.machine import Machine, check
from tests.e2e_systemd.node import SupervisedNode


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with systemd."""
    problem = check()
    assert problem is None, problem
    with Machine() as booted:
        yield booted


@pytest.fixture
def node(machine: Machine) -> SupervisedNode:
    """The daemon's unit in a machine, not started yet."""
    return SupervisedNode(machine)
