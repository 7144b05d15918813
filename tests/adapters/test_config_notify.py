"""`[notify.X]` of the configuration: every refusal with its remedy, and no URL shown whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisord.config import ConfigError, Loaded, load, parse
from supervisord.config_problems import bare_urls
from supervisord.core.kinds import GROUPS
from supervisord.core.spec import NodeSpec, NotifySpec

URL = "https://hooks.example.com/services/T0/precious"


def read(folder: Path, text: str) -> Loaded:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return load(path, trust=False)


def problem(folder: Path, *lines: str, url: str | None = URL) -> str:
    """The only problem of a receiver, in words."""
    head = [] if url is None else [f'url = "{url}"']
    with pytest.raises(ConfigError) as caught:
        read(folder, "\n".join(["[notify.ops]", *head, *lines]))
    (found,) = caught.value.problems
    text = str(found)
    assert text.startswith("cannot use notify.ops")
    assert str(folder / "config.toml") in text
    assert "precious" not in text
    return text


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "headers"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


def test_everything_has_a_default_but_the_url(tmp_path: Path) -> None:
    loaded = read(tmp_path, f'[notify.ops]\nurl = "{URL}"\n')
    assert loaded.spec == NodeSpec(notify={"ops": NotifySpec(name="ops", url=URL)})
    assert loaded.spec.notify["ops"].events == ("important",)
    assert loaded.warnings == ()
    assert parse(loaded.tables) == loaded.spec, "as a daemon with a broken configuration reads its copy"
    assert "precious" not in repr(loaded.spec)
    assert "add url = " in problem(tmp_path, url=None)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hooks.example.com/precious", 'must begin with https:// or http://; write for example "https://'),
        ("ftp://example.com/precious", '= "ftp://example.com/..."'),
        ("https://me:precious@example.com/x", "must not hold a user or password; put"),
        ("https://me@example.com/precious", '= "https://example.com/..."'),
        ("https:///precious", "names no host"),
        ("https://-bad-/precious", "names no host"),
        ("https://example.com:99999/precious", "is no URL"),
        ("https://example.com:0/precious", "port of 0"),
        ("https://[::1/precious", "is no URL"),
        ("https://example.com/pre cious", "characters that a URL must not have; write them as %XX"),
        ("https://example.com/précious", "characters that a URL must not have"),
        ("https://example.com/a#precious", "after #"),
    ],
)
def test_urls_that_are_none(url: str, words: str, tmp_path: Path) -> None:
    assert words in problem(tmp_path, url=url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "https://[::1]:8443/a?b=c", "https://gpu_mon.lan", "http://h/"])
def test_urls_that_are_some(url: str, tmp_path: Path) -> None:
    assert read(tmp_path, f'[notify.ops]\nurl = "{url}"\n').spec.notify["ops"].url == url


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('events = ["exitted"]', 'events = "exitted"'),
        ('events = ["exitted"]', 'did you mean "exited"?'),
        ('events = ["ready", "gpu"]', 'did you mean "gpus"?'),
        ('events = ["xyzzy"]', "groups are important, failures, "),
        ('events = ["log_lost"]', "only told where it happens"),
        ("events = []", f"it names no event; name some, or a group: {', '.join(GROUPS)}"),
        ('events = "ready"', "must be an array of texts"),
        ("timeout_s = 0", "must be a number from 0.1 to 60"),
        ("repeat_s = -1", "must be a number from 0 to 86400"),
        ('repeats = "https://x.example/precious"', "did you mean repeat_s?"),
        ('hook = "https://x.example/precious"', '= "https://x.example/..."'),
        ('hook = "hooks.example.com/precious"', "hook = (hidden)"),
        ('token = "precious"', "token = (hidden)"),
        ('headers_file = "precious"', "must be the absolute path of a file"),
        ('ca_file = "certs/precious"', "must be the absolute path of a file"),
        ('headers_file = "/nonexistent/headers"', '"/nonexistent/headers"'),
        ('ca_file = "/nonexistent/ca.pem"', "is no readable file"),
    ],
)
def test_keys_that_are_wrong(line: str, words: str, tmp_path: Path) -> None:
    assert words in problem(tmp_path, line)


def test_headers_are_read_before_they_are_needed(tmp_path: Path) -> None:
    file = secret_file(tmp_path, "Authorization: Bearer precious\n")
    line = f'headers_file = "{file}"'
    assert read(tmp_path, f'[notify.ops]\nurl = "{URL}"\n{line}\n').spec.notify["ops"].headers_file == str(file)
    secret_file(tmp_path, "precious\n")
    assert 'line 1 is not "NAME: VALUE" in printable ASCII; correct that line' in problem(tmp_path, line)
    secret_file(tmp_path, "Content-Length: 5\n")
    assert "sets Content-Length" in problem(tmp_path, line)


@pytest.mark.skipif(os.geteuid() != 0, reason="a daemon that is root is stricter")
def test_headers_that_everybody_can_read(tmp_path: Path) -> None:
    file = secret_file(tmp_path, "Authorization: Bearer precious\n", 0o644)
    path = tmp_path / "config.toml"
    path.write_text(f'[notify.ops]\nurl = "{URL}"\nheaders_file = "{file}"\n', encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="open to every user of the machine"):
        load(path, trust=True)
    assert load(path, trust=True, check_files=False).spec.notify, "a starting daemon does without, and tells"


def test_secrets_over_plain_http_are_warned_of(tmp_path: Path) -> None:
    file = secret_file(tmp_path, "X-Token: precious\n")
    for url, count in (
        ("http://10.0.0.1/precious", 1),
        ("http://localhost:1/x", 0),
        ("http://127.0.0.9/x", 0),
        (URL, 0),
    ):
        warnings = read(tmp_path, f'[notify.ops]\nurl = "{url}"\nheaders_file = "{file}"\n').warnings
        assert len(warnings) == count
        assert "precious" not in "".join(warnings)


def test_names_of_receivers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the name of a receiver begins with"):
        read(tmp_path, f'[notify.Ops]\nurl = "{URL}"\n')
    with pytest.raises(ConfigError, match=r"write \[notify.url\] above its keys"):
        read(tmp_path, f'[notify]\nurl = "{URL}"\n')
    with pytest.raises(ConfigError, match=r"write \[notify.NAME\]"):
        parse({"notify": 3})
    with pytest.raises(ConfigError, match="did you mean notify"):
        parse({"notifi": {}})
    token = read(tmp_path, f'[notify.token]\nurl = "{URL}"\n')
    assert token.spec.notify.keys() == {"token"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://a.example/b/c?d=e now", "see https://a.example/... now"),
        ("https://u:p@a.example:8443/", "https://a.example:8443"),
        ("http://[::1]:9/x", "http://[::1]:9/..."),
        ("https://a.example?x=y", "https://a.example/..."),
        ("no url", "no url"),
    ],
)
def test_what_is_shown_of_urls(text: str, shown: str) -> None:
    assert bare_urls(text) == shown
