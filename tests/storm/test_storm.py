"""A storm of faults over the real daemon. See README.md; STORM_S is how long, STORM_SEED replays one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.storm.stage import Stage
from tests.storm.storm import CONVERGED_S, OVERTIME_S, Storm
from tests.storm.witness import Witness

LASTS_S = float(os.environ.get("STORM_S", "30"))
SEED = int(os.environ.get("STORM_SEED") or random.randrange(10**9))
MINIMUM = 1 + int(LASTS_S / 300)
"""Of each kind."""


@pytest.mark.timeout(LASTS_S * 3 + 2 * CONVERGED_S + OVERTIME_S + 120)
def test_a_storm_of_faults(tmp_path: Path) -> None:
    print(f"STORM_SEED={SEED} STORM_S={LASTS_S:g}")
    with Stage(tmp_path) as stage, Witness(stage) as witness:
        storm = Storm(stage, witness, SEED, LASTS_S, MINIMUM)
        storm.run()
        print(storm.report())
