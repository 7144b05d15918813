"""Every relative link of the README and docs/ leads to a file of the repository, and every anchor to a heading."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links, read
from tests.e2e_matrix import page as matrix


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(read(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        assert ROOT in target.parents, f"{link}: leads out of the repository"
        assert not anchor or anchor in anchors(read(target)), f"{link}: no such heading"


def test_the_readme_names_every_page() -> None:
    readme = ROOT / "README.md"
    named = {(ROOT / link.partition("#")[0]).resolve() for link in links(read(readme))}
    pages = {page for page in PAGES if page.parent == ROOT / "docs"}
    assert pages - named == set()


def test_generated_pages_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts/make-reference"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_matrix_is_what_was_seen() -> None:
    page = read(matrix.PAGE)
    assert matrix.releases().markdown() in page
    assert matrix.pythons().markdown() in page


def test_a_row_tells_when_and_of_which_commit_it_is(tmp_path: Path) -> None:
    seen = {"python": "3.12.1", "date": "2026-11-30", "machine": "m", "failed": [], "tests": "5 passed"}
    (tmp_path / "python-3.12.json").write_text(json.dumps(seen))
    (tmp_path / "python-3.13.json").write_text(json.dumps(seen | {"python": "3.13.0", "commit": "1234abc+"}))
    rows = matrix.pythons(tmp_path).rows
    assert [row[-1] for row in rows] == ["2026-11-30, -", "2026-11-30, 1234abc+"]


def test_the_commit_that_is_tested() -> None:
    assert re.fullmatch(r"([0-9a-f]{7,40}|no commit)\+?", matrix.commit())
