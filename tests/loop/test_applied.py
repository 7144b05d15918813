"""Which configuration a starting daemon uses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from supervisord import applied
from supervisord.config import ConfigError, load
from supervisord.core.spec import NodeSpec
from supervisord.launcher import plain
from supervisord.launcher.statedir import lock_state_dir

CONFIG = """[supervisor]
state_dir = "/var/lib/vs"
poll_interval_s = 2.5
[engine.a]
command = ["/bin/true"]
model = "m"
port = 8001
[engine.a.env]
HF_TOKEN = "hf_abc"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def live(monkeypatch: pytest.MonkeyPatch, *state_dirs: Path) -> None:
    """Engines of these live."""
    monkeypatch.setattr(applied, "_living", lambda **_: [(path, ["a", "b"]) for path in state_dirs])


def kept(config: Path) -> NodeSpec:
    loaded = load(config, trust=False, check_files=False)
    applied.save(config.parent, loaded.tables, config)
    return loaded.spec


def test_what_was_applied_is_read_back_whole_and_private(config: Path) -> None:
    spec = kept(config)
    assert applied.read(config.parent, config) == spec
    assert (config.parent / "applied.json").stat().st_mode & 0o777 == 0o600


def test_good_files_are_what_counts(config: Path) -> None:
    kept(config)
    config.write_text(CONFIG.replace("2.5", "3"), encoding="utf-8")
    chosen = applied.choose(config, trust=False)
    assert chosen.spec.supervisor.poll_interval_s == 3
    assert chosen.error is None
    assert chosen.tables is not None


def test_refused_files_while_engines_live(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kept(config)
    live(monkeypatch, config.parent / "absent", config.parent)
    config.write_text("[supervisor\n", encoding="utf-8")
    (config.parent / "profiles.toml").write_text("[broken", encoding="utf-8")
    chosen = applied.choose(config, trust=False)
    assert chosen.spec == spec
    assert chosen.tables is None
    assert chosen.error is not None
    assert "config.toml" in chosen.error
    assert chosen.profiles.tables


def test_what_another_daemon_applied_is_not_ours(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(config)
    live(monkeypatch, config.parent)
    other = config.parent / "other.toml"
    other.write_text("[supervisor\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        applied.choose(other, trust=False)
    assert len(caught.value.problems) == 1, "they are watched by theirs"


def test_root_believes_only_a_directory_that_nobody_else_could_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user's process may name one."""
    monkeypatch.setattr(plain, "state_dirs", lambda: ["relative", str(tmp_path / "absent"), str(tmp_path)])
    monkeypatch.setattr(plain, "living", lambda _: ["a"])
    tmp_path.chmod(0o777)
    assert list(applied._living(trust=True)) == []
    assert list(applied._living(trust=False)) == [(tmp_path, ["a"])]
    if os.geteuid() == 0:
        tmp_path.chmod(0o711)
        assert list(applied._living(trust=True)) == [(tmp_path, ["a"])]
    with lock_state_dir(tmp_path):
        assert list(applied._living(trust=False)) == [], "its own daemon watches them"


def test_engines_that_nobody_will_watch_are_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, config.parent)
    config.write_text("[supervisor\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        applied.choose(config, trust=False)
    assert str(caught.value.problems[1]) == (
        f"cannot watch a, b, left running: {config.parent}/applied.json, what was applied last: No such file or "
        "directory; mend the configuration and start the daemon again: it takes them over"
    )


def test_a_rule_that_came_after_it_was_applied_loses_no_daemon(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, config.parent)
    kept(config)
    document = json.loads((config.parent / "applied.json").read_text(encoding="utf-8"))
    document["tables"]["engine"]["a"]["start_timeout_s"] = 4
    del document["config"]  # the first builds did not say
    (config.parent / "applied.json").write_text(json.dumps(document), encoding="utf-8")
    config.write_text(CONFIG.replace('model = "m"', 'model = "m"\nstart_timeout_s = 4'), encoding="utf-8")
    chosen = applied.choose(config, trust=False)
    assert chosen.error is not None
    assert "start_timeout_s" in chosen.error
    assert chosen.spec.engines["a"].start_timeout_s == 4


def test_what_is_wrong_with_what_was_applied_is_said(config: Path) -> None:
    applied.save(config.parent, {"supervisor": {"unknown": 1}}, config)
    with pytest.raises(applied.UnusableError, match="this version refuses it: "):
        applied.read(config.parent, config)


def test_refused_files_and_nothing_lives(config: Path) -> None:
    kept(config)
    config.write_text("[supervisor\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        applied.choose(config, trust=False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 2, "tables": {}}', '{"version": 1, "tables": []}',
                                  '{"version": 1, "tables": {"supervisor": {"unknown": 1}}}'])  # fmt: skip
def test_what_cannot_be_used_is_as_good_as_absent(tmp_path: Path, text: str) -> None:
    (tmp_path / "applied.json").write_text(text, encoding="utf-8")
    with pytest.raises(applied.UnusableError):
        applied.read(tmp_path, tmp_path / "config.toml")
