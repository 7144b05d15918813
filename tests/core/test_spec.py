"""What the configuration's records say beyond their keys."""

from __future__ import annotations

import pytest

from supervisord.core.spec import EngineSpec, FlagValue


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({}, "org/model"),
        ({"served-model-name": "chat"}, "chat"),
        ({"served-model-name": ("chat", "alias")}, "chat"),
        ({"served-model-name": ()}, "org/model"),
    ],
)
def test_the_name_that_requests_give(args: dict[str, FlagValue], name: str) -> None:
    assert EngineSpec(name="a", model="org/model", port=8000, args=args).served_name == name
