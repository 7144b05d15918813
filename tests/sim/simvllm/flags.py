"""The command line of `vllm serve`, learnt from the captured `--help=all` text of 0.32.0."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Flag = tuple[str, str, tuple[str, ...]]  # name without dashes, kind, choices

USAGE_SERVE = "usage: vllm serve [model_tag] [options]\nvllm serve: error: "
USAGE_TOP = (
    "usage: vllm [-h] [-v]\n"
    "            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,"
    "run-batch,snapshot}\n"
    "            ...\n"
    "vllm: error: "
)
_INTEGERS = (
    "port", "max-num-seqs", "tensor-parallel-size", "data-parallel-size", "shutdown-timeout",
    "num-gpu-blocks-override", "block-size", "pipeline-parallel-size", "api-server-count",
)  # fmt: skip
_HUMAN_INTEGERS = ("max-model-len", "max-num-batched-tokens")
_FLOATS = ("gpu-memory-utilization",)


class UsageError(Exception):
    """An argument error: the text goes to stderr, the exit code is 2."""


def _flags_of_line(line: str) -> list[tuple[str, Flag]]:
    head = line[2:].partition("  ")[0]
    names: list[str] = []
    value = ""
    for word in head.split():
        if word.startswith("-") and not word.startswith("-,"):
            names.append(word.rstrip(","))
        elif not value:
            value = word
    choices: tuple[str, ...] = ()
    if not value:
        kind = "bool"
    elif "...]" in head:
        kind = "many"
    elif value.startswith("[") and not value.startswith("['"):
        kind = "optional"
    else:
        kind = "one"
        if value.startswith("{"):
            choices = tuple(value.rstrip(",")[1:-1].split(","))
    canonical = next((name for name in names if name.startswith("--")), names[0]).lstrip("-")
    return [(name, (canonical, kind, choices)) for name in names]


def flags_of_help(text: str) -> dict[str, Flag]:
    """Every option of a help text: its canonical name, how many values it takes, its choices."""
    found: dict[str, Flag] = {}
    for line in text.split("\n"):
        if line.startswith("  -"):
            found.update(_flags_of_line(line))
    return found


def human_integer(text: str) -> int:
    """vLLM reads 8k as 8000 and 8K as 8192."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if text[-1:] in scale:
        return int(float(text[:-1]) * scale[text[-1]])
    return int(text)


class Options:
    """The parsed command line."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.values: dict[str, Any] = {}
        self.unknown: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name, default)
        return str(value[0] if isinstance(value, list) else value)

    def integer(self, name: str, default: int) -> int:
        text = self.text(name, str(default))
        number = human_integer(text) if text not in ("auto", "-1") else default
        return number if number >= 0 else default

    def many(self, name: str) -> list[str]:
        value = self.values.get(name, [])
        return list(value) if isinstance(value, list) else [str(value)]

    def on(self, name: str) -> bool:
        return self.values.get(name) is True


def _check(shown: str, flag: Flag, value: str) -> None:
    name, _, choices = flag
    if choices and value not in choices and value.lower() not in choices:
        listed = ", ".join(f"'{choice}'" for choice in choices)
        raise UsageError(f"{USAGE_SERVE}argument {shown}: invalid choice: '{value}' (choose from {listed})")
    kinds: tuple[tuple[tuple[str, ...], Any, str], ...] = (
        (_INTEGERS, int, "int"),
        (_FLOATS, float, "float"),
        (_HUMAN_INTEGERS, human_integer, "human_readable_int_or_auto"),
    )
    for names, read, called in kinds:
        if name in names and not (value == "auto" and read is human_integer):
            try:
                read(value)
            except ValueError:
                raise UsageError(f"{USAGE_SERVE}argument {shown}: invalid {called} value: '{value}'") from None


def _lookup(word: str, known: dict[str, Flag]) -> Flag | None:
    if word in known:
        return known[word]
    name = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
    if name in known:
        return known[name]
    base = name.partition(".")[0]  # --json-arg.key value
    if base != name and base in known:
        return (name[2:], "one", ())
    return None


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:2].isdigit()


def parse(args: list[str], known: dict[str, Flag], rejected: tuple[str, ...] = ()) -> Options:
    """What stands behind `vllm serve`; raises UsageError as argparse would."""
    options = Options()
    words = list(args)
    while words:
        word = words.pop(0)
        if _is_value(word):
            if options.model is None:
                options.model = word
            else:
                options.unknown.append(word)
            continue
        name, equals, inline = word.partition("=")
        flag = None if name in rejected else _lookup(name, known)
        if flag is None:
            options.unknown.append(word)
            if not equals and words and _is_value(words[0]):
                options.unknown.append(words.pop(0))
            continue
        _take(options, name, flag, inline if equals else None, words)
    if options.unknown:
        raise UsageError(f"{USAGE_TOP}unrecognized arguments: {' '.join(options.unknown)}")
    return options


def _take(options: Options, shown: str, flag: Flag, inline: str | None, words: list[str]) -> None:
    name, kind, _ = flag
    if kind == "bool":
        if inline is not None:
            raise UsageError(f"{USAGE_SERVE}argument {shown}: ignored explicit argument '{inline}'")
        options.values[name] = not shown.startswith("--no-") or name.startswith("no-")
        return
    taken = [inline] if inline is not None else []
    wanted = 1000 if kind == "many" else 1
    while inline is None and words and len(taken) < wanted and _is_value(words[0]):
        taken.append(words.pop(0))
    if not taken and kind != "optional":
        few = "at least one argument" if kind == "many" else "one argument"
        raise UsageError(f"{USAGE_SERVE}argument {shown}: expected {few}")
    for value in taken:
        _check(shown, flag, value)
    options.values[name] = taken if kind == "many" else (taken[0] if taken else True)
