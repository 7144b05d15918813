"""Configuration: TOML in config.toml, conf.d and profiles.toml, and the files of secrets and headers that it names."""

from __future__ import annotations

import contextlib
import random
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final

import pytest

from supervisord import config, config_checks
from supervisord.config import ConfigError, survey
from supervisord.config_notify import headers_of
from supervisord.config_problems import bare_urls, shown, without_password
from supervisord.config_world import SecretError, read_key, read_secret
from supervisord.engine import profiles
from supervisord.schedule import last_fired, window
from tests.fuzz.test_files import TABLES
from tests.fuzz.trying import bounded, costs, fuzz, mutated, mutated_json, pumped, texts

ROOT: Final = Path(__file__).parents[2]
WRITTEN: Final = [
    block
    for file in sorted((*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"))
    for block in re.findall(r"```toml\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL)
] + [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs" / "examples").rglob("*.toml"))]
SHIPPED: Final = Path(profiles.__file__).with_name(profiles.FILE).read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER  # noqa: PLW0603 (what is tried is no fixture of a function)
    FOLDER = tmp_path_factory.mktemp("configuration")
    (FOLDER / "conf.d").mkdir()


FOLDER: Path


def test_there_is_something_to_change() -> None:
    assert len(WRITTEN) > 10


@fuzz(250)
def test_files(rng: random.Random) -> None:
    seeds = [text.encode() for text in WRITTEN]
    first, second = mutated(seeds, rng), mutated(seeds, rng) if rng.random() < 0.3 else b""
    with bounded("configuration", first + second):
        _surveyed(first, second)


def _surveyed(first: bytes, second: bytes = b"") -> None:
    path = FOLDER / "config.toml"
    path.write_bytes(first)
    (FOLDER / "conf.d" / "b.toml").write_bytes(second)
    found = survey(path, trust=False)
    for text in (*map(str, found.problems), *found.loaded.warnings):
        assert text.isprintable()
        assert len(text) < 30_000
    if not found.problems:
        assert config.parse(found.loaded.tables) == found.loaded.spec


def _toml(value: object) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in value) + '"'
    return "false" if value is None else str(value).lower() if isinstance(value, bool | float) else f"{value:d}"


@fuzz(250)
def test_values(rng: random.Random) -> None:
    """Files that are TOML, with keys and values that nobody expects."""
    changed = mutated_json(TABLES, rng)
    try:
        text = "\n".join(f"{_toml(str(key))} = {_toml(value)}" for key, value in changed.items())
    except (ValueError, AttributeError, TypeError):  # thousands of digits, or no table at all
        return
    with bounded("values of a configuration", text):
        _surveyed(text.encode("utf-8", "surrogatepass"))


PARTS: Final = (
    b"a", b"a.", b"a . ", b'"a".', b"a=1\n", b"[a]\n", b"[[a]]\n", b"[a.b]\n", b"[", b"]", b"{a=", b"x=[", b'x="',
    b'"', b"'", b'"""', b"\\", b"=", b"\n",
    b"#", b"engine.", b"1", b"_", b"-", b"00:", b"e",
)  # fmt: skip


def test_one_thing_over_and_over() -> None:
    """Files of 4 and 16 KB, each of which is read in a moment and in little memory."""
    for text in pumped(PARTS, 4_000):
        with bounded("configuration, pumped", text, 100e-6):
            _surveyed(text)
    for part in PARTS:
        for first in (b"", b"x = "):
            data = first + part * (16_000 // len(part))
            took_s, peak = costs(lambda: _surveyed(data))  # noqa: B023 (called at once)
            assert took_s < 2.0, data[:40]
            assert peak < 64 << 20, data[:40]


def test_a_key_of_many_parts() -> None:
    for key in ("a." * 500_000 + "a", "'a' .\t" * 150_000 + "a", '"." . ' * 150_000 + "a"):
        for text in (f"{key} = 1", f"[{key}]", f"x = {{{key} = 1}}", f"x = [{{b=1}}, {{\n{key} = 1}}]"):
            path = FOLDER / "config.toml"
            path.write_text(text, encoding="utf-8")
            took_s, peak = costs(lambda: survey(path, trust=False))  # noqa: B023 (called at once)
            assert took_s < 3.0
            assert peak < 32 << 20
            with pytest.raises(ConfigError, match="nested more than 32 deep"):
                config.load(path, trust=False)


WINDOWS: Final = (
    ("0", "59", "*/7", "1,2"), ("0", "23", "*/5", "1-6"), ("1", "29", "31", "1-15", "last", "2nd sun", "last fri"),
    ("2", "jan", "feb", "*/3", "11,12"), ("mon", "sun", "mon-fri", "sat,sun"),
)  # fmt: skip


@fuzz(300)
def test_windows(rng: random.Random) -> None:
    """Windows that a configuration may have, at any moment: the loop looks for when one began."""
    fields = [rng.choice(("*", *some)) for some in WINDOWS]
    text = " ".join((*fields, rng.choice(("1s", "59s", "90m", "2h", "300d", "99999d"))))
    if rng.random() < 0.2:
        text = texts([text], rng)
    if config_checks._window(text) is not None:
        return
    now = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=rng.randrange(4 * 366 * 86_400))
    with bounded("window", text, 0.05):  # one that never comes is looked for until the year 9999
        trigger, open_s = window(text)
        began = last_fired(trigger, now, open_s)
        assert began is None or 0 <= (now - began).total_seconds() <= open_s


@fuzz(100)
def test_profiles(rng: random.Random) -> None:
    text = texts([SHIPPED], rng)
    with bounded("profiles", text):
        (FOLDER / profiles.FILE).write_text(text, encoding="utf-8")
        try:
            profiles.load(FOLDER, trust=False)
        except ConfigError as error:
            assert all(str(problem).isprintable() for problem in error.problems)


HEADERS: Final = "Authorization: Bearer abc def\nX-Scope: a\n\n"


@fuzz(300)
def test_headers_and_keys(rng: random.Random) -> None:
    data = mutated([HEADERS.encode(), b"sk-abc\n"], rng)
    with bounded("file of secrets", data):
        path = FOLDER / "secret"
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            found = headers_of(read_secret(str(path), as_root=False))
            assert all(f"{name}: {value}".isascii() and "\n" not in value for name, value in found.items())
        except (ValueError, SecretError) as error:
            assert len(str(error)) < 200
        try:
            assert read_key(str(path), as_root=False).isprintable()
        except SecretError as error:
            assert len(str(error)) < 200


def test_headers_and_urls_of_one_thing_over_and_over() -> None:
    parts = (b"a", b"a: ", b" ", b"\t", b"a://", b"@", b"/", b"://", b":", b"a b", b"A+", b"\n")
    for text in (data.decode() for data in pumped(parts, 100_000)):
        with bounded("headers and URLs, pumped", text, 3e-6):
            with contextlib.suppress(ValueError):
                headers_of(text)
            bare_urls(text)
            without_password(text)
            shown(text)
