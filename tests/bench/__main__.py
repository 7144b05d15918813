"""`python -m tests.bench PART…`: measures, and writes each part of docs/benchmarks.md the moment it is measured."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.attempts import FAILED
from tests.bench.report import PAGE, Part, Table, write

PARTS = ("peers", "ours", "real", "soak")
"""Each is a module here with `tables(options)`, imported when it is asked for: what one needs, others may lack."""
BY_DEFAULT = ("peers", "ours", "real")
SOAK_MIN = 60

Measure = Callable[[argparse.Namespace], "list[Table]"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parts and options; what scripts/bench has installed is found in the environment."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join((*PARTS, "all")))
    parser.add_argument("--quick", action="store_true", help="few repetitions; prints, and writes nothing to the page")
    parser.add_argument("--gpu", action="store_true", help="real: with vLLM's CUDA build on GPU 0, a part of its own")
    parser.add_argument("--minutes", type=float, help=f"how long the soak takes ({SOAK_MIN})")
    options = parser.parse_intermixed_args(argv)
    unknown = sorted({*options.parts} - {*PARTS, "all"})
    if unknown:
        parser.error(f"cannot measure {unknown[0]}: the parts are {', '.join((*PARTS, 'all'))}")
    named = PARTS if "all" in options.parts else options.parts or BY_DEFAULT
    options.parts = [part for part in PARTS if part in named]
    if problem := _contradiction(options):
        parser.error(problem)
    options.minutes = options.minutes or SOAK_MIN
    options.vllm = _path("VLLM_SUPERVISOR_TEST_VLLM")
    options.model = _path("VLLM_SUPERVISOR_TEST_MODEL")
    return options


def _contradiction(options: argparse.Namespace) -> str:
    """What these options cannot do with these parts, and the remedy; scripts/bench says the same earlier."""
    if options.minutes is not None and options.minutes <= 0:
        return f"cannot soak for {options.minutes:g} minutes: give more than 0"
    if options.minutes is not None and "soak" not in options.parts:
        return "cannot use --minutes without the part soak: name it, or leave the option out"
    if options.quick and "soak" in options.parts:
        return "cannot soak with --quick: give --minutes N, in a run of its own"
    if options.gpu and options.parts != ["real"]:
        return "cannot use --gpu with other parts than real: run scripts/bench real --gpu"
    return ""


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


def measure(name: str) -> Measure:
    """The function that measures a part."""
    found: Measure = importlib.import_module(f"tests.bench.{name}").tables
    return found


def one(
    name: str, options: argparse.Namespace, page: Path = PAGE, measured_by: Callable[[str], Measure] = measure
) -> bool:
    """Measure a part, print it, and put it into the page; False when it or something in it failed."""
    on_gpu = options.gpu and name == "real"
    part = Part(f"{name} --gpu" if on_gpu else name)
    print(f"==== {part.name}", flush=True)
    try:
        tables = measured_by(name)(options)
        text = part.text(tables)
    except Exception as error:  # noqa: BLE001 (one part that fails must not take the others along)
        traceback.print_exc()
        print(f"{FAILED} measure the part {part.name}: {error}", flush=True)
        return False
    print(f"\n{text}", flush=True)
    if not options.quick:
        write(part.name, text, page)
    return not any(note.startswith(FAILED) for table in tables for note in table.notes)


def main(argv: Sequence[str]) -> int:
    """Measure all parts that were asked for; 1 when one of them failed."""
    options = parse(argv)
    # What a measurement has started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    done = [one(name, options) for name in options.parts]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
