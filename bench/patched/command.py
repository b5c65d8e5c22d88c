"""``python -m bench patched``: every way of every model, each in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import environment
from bench.patched import kernels, measure, rows
from bench.patched.rows import ANEW, DECODE, FORWARD, LIGER, PLAIN, STEP, PatchedRow
from bench.patched.subjects import SUBJECTS
from bench.show.patched import header_of, lines_of
from bench.usage import UsageError, known, split
from kernel_ladder import table

BACKENDS = ("auto", "cuda", "triton")
BY = (PLAIN, LIGER, *BACKENDS)
MODES = ("eager", "compiled")
PASSES = (FORWARD, DECODE, ANEW, STEP)
#: What one process measures. Training has one of its own: its peak holds nothing that decoding has left behind.
TOGETHER = ((FORWARD, DECODE, ANEW), (STEP,))
#: Seconds after which a way counts as failed.
PATIENCE = 600


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench patched",
        description="Forward pass, training step and decoding of Hugging Face's models: plain, patched by Liger and by "
        "this package, eager and compiled. Rows go to bench-results/patched/<machine>.jsonl.",
    )
    many = {"action": "append", "metavar": "NAME[,NAME]"}
    parser.add_argument("--model", **many, help=f"of {', '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--by", **many, help=f"of {', '.join(BY)} (default: all)")
    parser.add_argument("--mode", **many, help=f"of {', '.join(MODES)} (default: both)")
    parser.add_argument("--pass", **many, dest="pass_", help=f"of {', '.join(PASSES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds, to try the command")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows (default: see above)")
    parser.add_argument("--kernels", action="store_true", help="no rows: the kernels of a pass, the longest first")
    parser.add_argument("--in-this-process", action="store_true", help="one way alone, as the command starts it")
    return parser


def main(argv: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0, 1 where a way failed, or 2 for a bad command line."""
    args = _parser().parse_args(argv)
    try:
        models = _named("--model", "model", args.model, list(SUBJECTS))
        by = _named("--by", "patch", args.by, BY)
        modes = _named("--mode", "mode", args.mode, MODES)
        passes = _named("--pass", "pass", args.pass_, PASSES)
        if args.kernels and not (passes := [pass_ for pass_ in passes if pass_ in kernels.PASSES]):
            raise UsageError(f"--kernels knows {' and '.join(kernels.PASSES)}; each token of {DECODE} has its own")
    except UsageError as error:
        print(f"python -m bench patched: {error}", file=sys.stderr)
        return 2
    if util.find_spec("transformers") is None:
        reason = "transformers is not installed; run `pip install kernel_ladder[models]`"
        print(f"python -m bench patched: {reason}", file=sys.stderr)
        return 2
    out = args.out or rows.results_file()
    failed = 0
    parts = [chosen for part in TOGETHER if (chosen := [pass_ for pass_ in part if pass_ in passes])]
    ways = [(model, who, mode) for model in models for mode in modes for who in by if _is_here(who)]
    for (model, who, mode), part in itertools.product(ways, parts):
        if args.in_this_process:
            way = (SUBJECTS[model], who, mode == "compiled", part, args.quick)
            if args.kernels:
                kernels.look(*way, console)
            else:
                rows.save(out, measure.measure(*way))
            continue
        command = [
            sys.executable, "-m", "bench", "patched", "--in-this-process", "--model", model, "--by", who,
            "--mode", mode, "--pass", ",".join(part), "--out", str(out), *(["--quick"] if args.quick else []),
            *(["--kernels"] if args.kernels else []),
        ]  # fmt: skip
        console.print(f"{model}, {mode}, {who}: {', '.join(part)}", highlight=False)
        try:
            failed += bool(subprocess.run(command, cwd=environment.ROOT, timeout=PATIENCE, check=False).returncode)
        except subprocess.TimeoutExpired:
            failed += 1
            console.print(f"{model}, {mode}, {who}: no end after {PATIENCE} s", highlight=False)
    if not (args.in_this_process or args.kernels):
        show([row for row in rows.read(out) if row.model in models], console)
        console.print(f"the rows are in {out}", soft_wrap=True, highlight=False)
    return int(failed > 0)


def _named(option: str, kind: str, given: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """The names that an option gives, or all."""
    return [known(kind, name, names) for name in split(option, given, names)] or [*names]


def _is_here(who: str) -> bool:
    """Whether a backend runs here; Liger's absence is a row of its own."""
    return who not in BACKENDS or who == "auto" or table.unavailable("linear", who) is None


def show(made: Sequence[PatchedRow], console: Console) -> None:
    """Print a table for each model."""
    for model in dict.fromkeys(row.model for row in made):
        mine = [row for row in made if row.model == model]
        shown = Table(title=f"{model} ({mine[0].like})", title_justify="left")
        for place, name in enumerate(header_of(mine)):
            shown.add_column(name, justify="right" if place else "left")
        for line in lines_of(mine):
            shown.add_row(*line)
        console.print(shown)
