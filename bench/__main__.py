"""``python -m bench``: the sweep, its tables and pictures."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import kernel_ladder
from bench import environment, resume, rows, sweep, table
from kernel_ladder.table import LEVELS, variants

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}
PASSES = ("forward", "backward")
SECONDS, QUICK_SECONDS = 0.7, 0.4

EPILOG = """\
Other commands, all reading the rows that a sweep has written:
  python -m bench table [FILE]         print the tables again
  python -m bench pictures [FILE]      draw the pictures again
  python -m bench readme [--check]     renew the tables in README.md between their markers
"""


class UsageError(Exception):
    """A mistake in the command line."""


def _known(kind: str, given: str, known: Sequence[str]) -> str:
    if given in known:
        return given
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise UsageError(f"unknown {kind} {given!r}; {hint}Known are {', '.join(known)}")


def _split(values: Sequence[str] | None) -> list[str]:
    return [part for value in values or () for part in value.split(",") if part]


def _choice(args: argparse.Namespace) -> sweep.Choice:
    ops = [_known("operation", op, kernel_ladder.OPS) for op in _split(args.op)] or list(kernel_ladder.OPS)
    backends = _split(args.backend)
    if backends:
        known = list(dict.fromkeys([*LEVELS, *(v.name for op in ops for v in variants(op))]))
        backends = [_known("backend", backend, known) for backend in backends]
    dtypes = [DTYPES[_known("dtype", DTYPE_SHORT.get(d, d), list(DTYPES))] for d in _split(args.dtype)]
    passes = PASSES if args.pass_ == "both" else (_known("pass", args.pass_, (*PASSES, "both")),)
    seconds = args.time if args.time is not None else QUICK_SECONDS if args.quick else SECONDS
    if not 0 < seconds < math.inf:
        raise UsageError(f"--time must be a positive number of seconds, got {args.time}")
    return sweep.Choice(
        ops, backends or None, dtypes or None, passes, args.quick, seconds, ceilings=not args.no_ceilings
    )


def _sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Check every variant against float64, then time it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many = {"action": "append", "metavar": "NAME[,NAME]"}
    parser.add_argument("--op", **many, help=f"operations: {', '.join(kernel_ladder.OPS)} (default: all)")
    parser.add_argument(
        "--backend",
        **many,
        help="levels or variants (default: all; torch.builtin is always there to compare with). "
        f"{', '.join(sorted(sweep.LONG_TUNING))}, tuned for up to a minute a shape, is measured at the quick shapes "
        "alone unless it is named here",
    )
    parser.add_argument(
        "--dtype", **many, help="default: bfloat16, and float32 for the quick cases; float32 without a GPU"
    )
    parser.add_argument("--pass", dest="pass_", default="both", metavar="PASS", help="forward, backward or both")
    parser.add_argument("--quick", action="store_true", help="a few shapes only")
    parser.add_argument(
        "--time",
        type=float,
        metavar="SECONDS",
        help=f"measuring, per case, dtype and pass (default: {SECONDS}; {QUICK_SECONDS} with --quick)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="rows (default: bench/results/<gpu>.jsonl)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from an interrupted sweep: skip what has a row of the same GPU, versions and commit in FILE",
    )
    parser.add_argument(
        "--no-ceilings", action="store_true", help="no rows of the machine's own ceilings (they take seconds, on a GPU)"
    )
    parser.add_argument("--no-pictures", action="store_true", help="draw nothing at the end")
    return parser


def _run_sweep(argv: Sequence[str], console: Console) -> int:
    args = _sweep_parser().parse_args(argv)
    choice = _choice(args)
    output = args.output or environment.results_file()
    if args.resume and (repaired := rows.drop_unfinished(output)) is not None:
        console.print(repaired, soft_wrap=True)
    before = rows.read(output)  # a broken file is better found now than after the last kernel
    standing = resume.standing(before, environment.facts()) if args.resume else {}
    if environment.device().type == "cpu":
        console.print("No GPU: shapes are shrunk, and Triton runs in its interpreter. Correctness, not speed.")
    if args.resume:
        console.print(resume.report(standing, environment.facts(), output), soft_wrap=True)
    run, interrupted = sweep.run(choice, output, console, standing)
    table.show(run, console)
    if run:
        console.print(f"{len(run)} rows are in {output}", soft_wrap=True)
    if run and not args.no_pictures:
        _draw(output, console)
    wrong = [row for row in run if row.wrong]
    for row in wrong:
        print(f"WRONG: {row.op} {row.backend} {row.pass_} {row.dtype} {row.shape}: {row.wrong}", file=sys.stderr)
    return 130 if interrupted else 1 if wrong else 0


def _draw(path: Path, console: Console) -> None:
    try:
        from bench import pictures
    except ImportError as error:
        console.print(f"no pictures: {error}; `pip install matplotlib` to have them", soft_wrap=True)
        return
    for picture in pictures.draw(path):
        console.print(f"drew {picture}", soft_wrap=True)


def _read_command(name: str, argv: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}")
    parser.add_argument("file", type=Path, nargs="?", help="rows (default: this machine's)")
    path = parser.parse_args(argv).file or environment.results_file()
    if not path.exists():
        raise UsageError(f"{path} does not exist; `python -m bench` writes it")
    if name == "table":
        table.show(rows.latest(rows.read(path)), console)
    else:
        _draw(path, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 where a variant is wrong or the README stale; 2 for a bad command line or file."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    try:
        if argv[:1] == ["readme"]:
            from bench import readme

            return readme.main(argv[1:])
        if argv[:1] in (["table"], ["pictures"]):
            return _read_command(argv[0], argv[1:], console)
        return _run_sweep(argv, console)
    except (UsageError, rows.ResultsError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
