"""Checks of a configuration against this machine: its users and the files that it names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from supervisord.config_notify import headers_of
from supervisord.config_problems import Finding, Parts, printable, shown
from supervisord.config_users import ENGINE_USER, Account, account, own_account
from supervisord.core.spec import EngineSpec, NodeSpec, NotifySpec

KEY_FILE_MAX_BYTES: Final = 4096


def user_findings(spec: NodeSpec, *, as_root: bool) -> Iterator[Finding]:
    """Users of engines that do not exist, or that the daemon may not or cannot become."""
    own = own_account()
    for engine in spec.engines.values():
        at = ("engine", engine.name, "user")
        yield from user_finding(engine.user, at, as_root=as_root, own=own, lookup=account)


def user_finding(
    user: str | None, at: Parts, *, as_root: bool, own: Account, lookup: Callable[[str], Account | None]
) -> Iterator[Finding]:
    """Judge one engine's user. `lookup` finds an account by its name."""
    if not as_root:
        if user not in {None, own.name}:
            message = f'only root can start engines as somebody else, and the daemon runs as "{own.name}"'
            yield Finding(at, message, "remove it, or run the daemon as root", shown(user))
        return
    name = user or ENGINE_USER
    found = lookup(name)
    if found is None:
        remedy = f"useradd --system --create-home --home-dir /var/lib/{ENGINE_USER} {name}"
        if user is None:
            yield Finding(at, f'it is "{name}" when it is not set, and this machine has no such user', remedy)
        else:
            yield Finding(at, "this machine has no such user", remedy, shown(user))
    elif found.uid == 0 and user != "root":
        message = "it is root under another name, and engines get root only where it is written out"
        yield Finding(at, message, 'name another user, or write user = "root"', shown(name))


def user_warnings(spec: NodeSpec, *, as_root: bool) -> Iterator[Finding]:
    """Engines that run as root because somebody wrote it."""
    for engine in spec.engines.values():
        if as_root and engine.user == "root":
            message = "the engine, and all code that its model brings, owns the machine"
            yield Finding(("engine", engine.name, "user"), message, "give it a user of its own", shown("root"))


class SecretError(Exception):
    """A file that should hold a secret cannot be used. The message quotes nothing of it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def file_findings(spec: NodeSpec, *, as_root: bool) -> Iterator[Finding]:
    """Files that the configuration names and that are not there, or not as they have to be."""
    yield from _key_file(spec.supervisor.metrics_token_file, ("supervisor", "metrics_token_file"), as_root=as_root)
    for engine in spec.engines.values():
        at = ("engine", engine.name)
        yield from _model(engine, at)
        yield from _key_file(engine.api_key_file, (*at, "api_key_file"), as_root=as_root)
        for file in engine.warmup.prime:
            # Not Path.is_file: it raises for a path that is too long or that we may not look at.
            if file.startswith("/") and not (os.path.isfile(file) and os.access(file, os.R_OK)):  # noqa: PTH113
                message = "it is no readable file"
                yield Finding((*at, "warmup", "prime"), message, "correct or remove it", shown(file))
    for receiver in spec.notify.values():
        yield from _receiver(receiver, as_root=as_root)


def _key_file(path: str | None, at: Parts, *, as_root: bool) -> Iterator[Finding]:
    if path and path.startswith("/") and (wrong := key_file_problem(path, as_root=as_root)) is not None:
        yield Finding(at, *wrong, value=f'"{printable(path)}"')


def model_problem(model: str) -> str | None:
    """What is wrong with a model's path; None for names of a hub, and when we may not look."""
    if not model.startswith("/"):
        return None
    try:
        mode = os.stat(model).st_mode  # noqa: PTH116 (text from the configuration)
    except PermissionError:
        return None
    except OSError as error:
        return f"it is not there ({error.strerror})"
    return None if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else "it is neither a directory nor a file"


def key_file_problem(path: str, *, as_root: bool) -> tuple[str, str] | None:
    """Message and remedy when the file of a secret is not one, or not safe; None when we may not look.

    The secret itself is not read: that happens when it is used.
    """
    try:
        status = os.lstat(path)
    except PermissionError:
        return None
    except OSError as error:
        return f"it is not there ({error.strerror})", "create it with mode 0600, or correct the path"
    return key_status_problem(status, as_root=as_root)


def key_status_problem(status: os.stat_result, *, as_root: bool) -> tuple[str, str] | None:
    """Message and remedy for the status of a key file."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link, which is not followed", "name the file that it points to"
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file", "name a file that holds the secret"
    if not 0 < status.st_size <= KEY_FILE_MAX_BYTES:
        return f"it has {status.st_size} bytes, and may have 1 to {KEY_FILE_MAX_BYTES}", "put the secret alone into it"
    if as_root and status.st_mode & 0o007:
        mode = stat.S_IMODE(status.st_mode)
        return f"it is open to every user of the machine (mode {mode:04o})", "chmod 0600 it, and replace the secret"
    return None


def read_secret(path: str, *, as_root: bool) -> str:
    """The text of a file that holds secrets. Links are not followed, devices and pipes not waited for. SecretError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            wrong = key_status_problem(os.fstat(descriptor), as_root=as_root)
            content = b"" if wrong else os.read(descriptor, KEY_FILE_MAX_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        raise SecretError(reason, "correct the path, its owner or mode") from None
    if wrong is not None:
        raise SecretError(*wrong)
    return content.decode(errors="replace")


def read_key(path: str, *, as_root: bool) -> str:
    """The one key, or token, that a file holds. Raises SecretError."""
    key = read_secret(path, as_root=as_root).strip()
    if not (key.isascii() and key.isprintable() and key) or " " in key:
        raise SecretError("it does not hold one key of printable ASCII characters", "put the key alone into it")
    return key


def _receiver(receiver: NotifySpec, *, as_root: bool) -> Iterator[Finding]:
    at, file = ("notify", receiver.name), receiver.headers_file or ""
    if file.startswith("/") and (wrong := _headers_problem(file, as_root=as_root)) is not None:
        yield Finding((*at, "headers_file"), *wrong, value=f'"{printable(file)}"')
    file = receiver.ca_file or ""
    if file.startswith("/") and not (os.path.isfile(file) and os.access(file, os.R_OK)):  # noqa: PTH113 (as above)
        yield Finding((*at, "ca_file"), "it is no readable file", "correct or remove it", shown(file))


def _headers_problem(path: str, *, as_root: bool) -> tuple[str, str] | None:
    wrong = key_file_problem(path, as_root=as_root)
    if wrong is not None or not os.access(path, os.R_OK):
        return wrong
    try:
        headers_of(read_secret(path, as_root=as_root))
    except SecretError as error:
        return str(error), error.remedy
    except ValueError as error:
        return str(error), "correct that line"
    return None


def _model(engine: EngineSpec, at: Parts) -> Iterator[Finding]:
    if (wrong := model_problem(engine.model)) is not None:
        remedy = "correct the path, or mount what holds it"
        yield Finding((*at, "model"), wrong, remedy, shown(engine.model))
