"""Every configuration that the README and docs/ show is one that the daemon would take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supervisord.config import load
from tests.docs.pages import PAGES, ROOT, blocks, read

OURS = re.compile(r"^\[(engine\.|engine_defaults|supervisor\]|gpu\])", re.MULTILINE)
SHOWN = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (language, block) in enumerate(blocks(read(page)))
    if language == "toml" and OURS.search(block)
]


@pytest.mark.parametrize("text", SHOWN)
def test_it_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    # The account of an example need not be on this machine.
    path.write_text(re.sub(r"^user\s.*$", "", text, flags=re.MULTILINE), encoding="utf-8")
    loaded = load(path, trust=False, check_files=False)
    assert set(re.findall(r"^\[engine\.(\w+)\]", text, re.MULTILINE)) == set(loaded.spec.engines)


def test_there_are_some() -> None:
    assert len(SHOWN) >= 4
