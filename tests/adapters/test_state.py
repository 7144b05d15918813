"""The state file: whole or old, never half; trouble is told once and nothing is lost for longer than the trouble."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from supervisord import state
from supervisord.state import StateFile


def _file(path: Path) -> tuple[StateFile, list[str]]:
    told: list[str] = []
    return StateFile(path, told.append), told


def test_round_trip_within_a_boot(tmp_path: Path) -> None:
    first, told = _file(tmp_path)
    assert first.load() == ({}, False)
    first.save({"a": {"generation": 3}, "b": {"generation": 1}})
    first.save({"a": {"generation": 4}}, frozenset({"b"}))
    assert _file(tmp_path)[0].load() == ({"a": {"generation": 4}}, True)
    assert told == []
    assert (tmp_path / "node.json").stat().st_mode & 0o777 == 0o600


def test_another_boot_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file(tmp_path)[0].save({"a": {}})
    monkeypatch.setattr(state, "boot_id", lambda: "another")
    assert _file(tmp_path)[0].load() == ({"a": {}}, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version":1}',
        '{"version":9,"boot_id":"","engines":{}}',
        '{"version":"%s","boot_id":"","engines":{}}' % ("x" * 9999),
        "\xff",
    ],
)
def test_garbage_is_told_and_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.json").write_bytes(text.encode("latin-1"))
    file, told = _file(tmp_path)
    assert file.load() == ({}, False)
    assert len(told) == 1
    assert "cannot use" in told[0]
    assert len(told[0]) < 1000
    file.save({"a": {}})
    assert json.loads((tmp_path / "node.json").read_text())["engines"] == {"a": {}}


def test_a_full_disk_is_told_once_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, told = _file(tmp_path)
    file.save({"a": {"generation": 1}})
    real = os.write

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file.save({"a": {"generation": 2}})
    file.save({"b": {"generation": 1}})
    assert len(told) == 1
    assert "No space left" in told[0]
    assert _file(tmp_path)[0].load()[0] == {"a": {"generation": 1}}, "the old file must stay whole"
    monkeypatch.setattr(os, "write", real)
    file.save({})
    assert _file(tmp_path)[0].load()[0] == {"a": {"generation": 2}, "b": {"generation": 1}}
    assert "again" in told[1]


def test_a_link_in_the_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".node.json.new").symlink_to(victim)
    file, told = _file(tmp_path)
    file.save({"a": {}})
    assert victim.read_text() == "precious"
    assert len(told) == 1
