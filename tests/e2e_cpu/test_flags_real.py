"""The flags of a real vLLM, read as the daemon reads them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from supervisord.core.spec import EngineSpec, FlagValue
from supervisord.engine.flags import FlagBook, FlagSet
from supervisord.engine.launch_flags import Knowledge, settle
from supervisord.engine.version import Version, installed_version
from tests.e2e_cpu.conftest import RealVllm


def test_its_flags_are_read_once_and_checked_against(vllm: RealVllm, tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin"}
    spec = EngineSpec(
        name="tiny",
        model=str(vllm.model),
        port=8001,
        command=(str(vllm.command), "serve"),
        args={"max-model-len": 1024, "enable-prefix-caching": False},
    )
    version = installed_version(spec.command, env["PATH"])
    assert version is not None
    flags = FlagBook(tmp_path, as_root=False, base_env=env).read(spec, timeout_s=300)
    assert isinstance(flags, FlagSet), flags
    assert flags.version == version
    assert len(flags.names) > 150

    began = time.monotonic()
    assert FlagBook(tmp_path, as_root=False, base_env=env).known(spec) == flags
    assert time.monotonic() - began < 1

    assert settle(spec, version, Knowledge(flags)).problems == ()
    wrong: dict[str, FlagValue] = {
        "max-modal-len": 1,
        "speculative-model": "x",
        "awq-wbits": 4,
        "disable-log-stats": False,
        "max-model-len": True,
    }
    refused = settle(dataclasses.replace(spec, args=wrong), version, Knowledge(flags)).problems
    assert [problem.path.rpartition(".")[2] for problem in refused] == list(wrong)
    known = Version.parse(version)
    assert known is not None
    assert (flags.get("swap-space") is None) is (known >= Version(0, 18, 0, 1))
    assert (flags.get("shutdown-timeout") is not None) is (known >= Version(0, 18, 0, 1))
