"""Bugs are told and written, each so often that neither disk nor log fills, and without what engines are given."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from supervisord import bugs
from supervisord.bugs import AGAIN_S, KEPT_FILES, Bugs
from supervisord.core.model import Node
from supervisord.history import History
from supervisord.log import Journal
from supervisord.voice import Voice
from supervisord.webhook.notifier import Webhooks
from tests.core.play import engine_spec, new_node, node_spec

TOKEN = "hf_QmFzZTY0IGlzIG5vdCBlbmNyeXB0aW9u"
ENV = {"HF_TOKEN": TOKEN, "SWITCH": "1", "PLACE": "/srv/somewhere/private"}


class Desk:
    """Where bugs are reported, at a time that the test owns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self._log = io.StringIO()
        journal = Journal(self._log)
        self._voice = Voice(journal, History(folder, lambda _: None), Webhooks())
        self.bugs = Bugs(folder, self._voice, lambda: self.now)

    def report(self, error: Exception, *, env: dict[str, str] = ENV) -> None:
        self.bugs.report(("probe", "a"), raised(error), node(env))

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("bug-*.txt"))

    def told(self) -> list[str]:
        self._voice.close()
        return [json.loads(line)["event"] for line in self._log.getvalue().splitlines()]


def node(env: dict[str, str]) -> Node:
    # "b" has a variable of the same name with another value.
    return new_node(node_spec(engine_spec("a", env=env), engine_spec("b", env={"HF_TOKEN": "hf_another_one"})))


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_bug_is_told_with_its_file(desk: Desk) -> None:
    desk.report(ZeroDivisionError("one by none"))
    (path,) = desk.files()
    assert desk.told() == [
        f"internal error in ('probe', 'a'): ZeroDivisionError: one by none; please report it with {path}"
    ]
    text = path.read_text(encoding="utf-8")
    assert "Traceback" in text
    assert "test_bugs.py" in text
    assert "generation=0" in text
    assert path.stat().st_mode & 0o077 == 0


def test_nothing_that_engines_are_given_is_in_it(desk: Desk) -> None:
    desk.report(KeyError(f"{TOKEN} of hf_another_one, 1 of 10"))
    told, text = desk.told()[0], desk.files()[0].read_text(encoding="utf-8")
    for value in (TOKEN, "hf_another_one"):
        assert value not in told
        assert value not in text
    assert ENV["PLACE"] not in text, "of environments only names are written"
    assert "SWITCH" in text
    assert "1 of 10" in text, "a value that is a digit blanks no digits"


def test_the_same_bug_is_written_once_an_hour_and_told_twice(desk: Desk) -> None:
    for _ in range(50):
        desk.report(ValueError("the same"))
        desk.now += 60.0
    assert len(desk.files()) == 1
    desk.report(ValueError("another"))
    assert len(desk.files()) == 2
    desk.now = 100.0 + AGAIN_S
    desk.report(ValueError("the same"))
    assert len(desk.files()) == 3
    told = desk.told()
    assert ["please report" in line for line in told] == [True, False, True, True]
    assert told[1].endswith("the same; again, and more of it is not told within the hour")


def test_the_same_words_from_another_place_are_another_bug(desk: Desk) -> None:
    desk.report(ValueError("x"))
    desk.bugs.report("elsewhere", ValueError("x"), node(ENV))
    assert len(desk.files()) == 2


def test_the_newest_twenty_files_are_kept(desk: Desk) -> None:
    (desk.folder / "bug-20200101T000000.000000.txt").write_text("old", encoding="utf-8")
    (desk.folder / "node.json").write_text("{}", encoding="utf-8")
    for number in range(KEPT_FILES + 5):
        desk.report(ValueError(str(number)))
    kept = desk.files()
    assert len(kept) == KEPT_FILES
    assert f"ValueError: {KEPT_FILES + 4}" in kept[-1].read_text(encoding="utf-8")
    assert "ValueError: 5" in kept[0].read_text(encoding="utf-8")
    assert (desk.folder / "node.json").exists()
    assert len(desk.told()) == KEPT_FILES + 5


def test_what_is_remembered_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bugs, "_REMEMBERED", 3)
    for number in range(10):
        desk.report(ValueError(str(number)))
    assert len(desk.bugs._seen) == 3


def test_where_no_file_can_be_written_the_log_has_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.bugs._state_dir = tmp_path / "missing"
    desk.report(ValueError(f"about {TOKEN}"))
    (told,) = desk.told()
    assert "Traceback" in told
    assert TOKEN not in told
