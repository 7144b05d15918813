"""What a reload refuses because of the GPUs that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supervisord.config import load
from supervisord.core.model import Engine, Gpu, Node, Telemetry
from supervisord.core.spec import EngineSpec, NodeSpec
from supervisord.engine.profiles import Profiles
from supervisord.planning import Planner
from tests.adapters.fake_gpus import IDLE, SOUND

SEEN = Telemetry(helper=1, running=True, swept_at=1.0, driver="580.1")
MISTYPED = "GPU-5135c0de-0000-4000-8000-00000000000f"
DEAD = Gpu("GPU-5135c0de-0009-4000-8000-000000000009", pci_id="0000:aa:00.0")


def node(*, in_force: dict[str, Any] | None = None, telemetry: Telemetry = SEEN, **fields: Any) -> Node:
    specs = {
        name: EngineSpec(name=name, model="m/m", port=1, **keys)
        for name, keys in (in_force or {"qwen": {"gpus": (SOUND.uuid,)}}).items()
    }
    engines = {name: Engine(spec=spec, plan_id="p") for name, spec in specs.items()}
    gpus = {gpu.uuid: gpu for gpu in (SOUND, IDLE)}
    return Node(spec=NodeSpec(engines=specs), engines=engines, gpus=gpus, telemetry=telemetry, **fields)


def refused(folder: Path, known: Node, **engines: str) -> list[str]:
    """What is said of a configuration with these engines, each with the text of its keys."""
    path = folder / "config.toml"
    path.write_text(
        "".join(
            f'[engine.{name}]\nmodel = "m/m"\nport = {8001 + number}\n{text}\n'
            for number, (name, text) in enumerate(engines.items())
        )
    )
    planner = Planner(folder, Profiles(()), as_root=False, base_env={}, node=lambda: known)
    return [str(problem) for problem in planner.gpu_problems(load(path, trust=False))]


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path, node(), qwen=f'gpus = ["{MISTYPED}"]') == [
        (
            f'cannot use engine.qwen.gpus = "{MISTYPED}" in {tmp_path}/config.toml: there is no such GPU on this '
            f"machine; known: GPU 0 ({SOUND.uuid}), GPU 1 ({IDLE.uuid})"
        )
    ]
    for name in (SOUND.uuid, SOUND.uuid.upper(), SOUND.pci_id, "1", "MIG-5135c0de-0000-4000-8000-00000000000f"):
        assert refused(tmp_path, node(), qwen=f'gpus = ["{name}"]') == []
    for name in ("2", "0000:ff:00.0"):
        assert len(refused(tmp_path, node(), qwen=f'gpus = ["{name}"]')) == 1


@pytest.mark.parametrize(
    "telemetry",
    [
        Telemetry(),
        Telemetry(helper=1, running=True, next_at=1.0),
        Telemetry(helper=1, running=True, swept_at=1.0, hangs=1),
        Telemetry(helper=1, running=True, swept_at=1.0, unresponsive=True),
        Telemetry(helper=1, running=True, swept_at=1.0, problem=18),
        Telemetry(helper=1, swept_at=1.0, released_until=9.0),
    ],
)
def test_while_nobody_sees_the_gpus_nothing_is_refused(tmp_path: Path, telemetry: Telemetry) -> None:
    assert refused(tmp_path, node(telemetry=telemetry), qwen=f'gpus = ["{MISTYPED}"]') == []


def test_a_gpu_that_died_keeps_no_other_change_out(tmp_path: Path) -> None:
    """It is named in the configuration in force, by this engine; for another one it is as wrong as any."""
    known = node(in_force={"qwen": {"gpus": (DEAD.uuid,)}})
    assert refused(tmp_path, known, qwen=f'gpus = ["{DEAD.uuid}"]\ndrain_timeout_s = 7', new="") == []
    assert len(refused(tmp_path, known, qwen="", new=f'gpus = ["{DEAD.uuid}"]')) == 1
    remembered = node(unseen_gpus={DEAD.pci_id: DEAD})
    assert refused(tmp_path, remembered, qwen=f'gpus = ["{DEAD.pci_id}"]') == []


def test_engines_that_share_a_gpu_under_two_names(tmp_path: Path) -> None:
    claim = "args.gpu-memory-utilization = 0.6"
    both = {"qwen": f'gpus = ["{SOUND.uuid}"]\n{claim}', "new": f"gpus = [0]\n{claim}"}
    (problem,) = refused(tmp_path, node(), **both)
    assert "qwen and new share a GPU and claim 0.6 + 0.6 of its memory" in problem
    assert refused(tmp_path, node(), **{**both, "new": f"gpus = [1]\n{claim}"}) == []
    args = {"gpu-memory-utilization": 0.6}
    in_force = {"qwen": {"gpus": (SOUND.uuid,), "args": args}, "new": {"gpus": ("0",), "args": args}}
    assert refused(tmp_path, node(in_force=in_force), **both) == []
