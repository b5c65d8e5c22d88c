"""``python -m kernel_ladder``: ``list`` names operations and rungs, ``doctor`` what this machine can run, ``inspect``
shows a rung's kernels and code, ``exercise`` lets you write one.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from kernel_ladder import table
from kernel_ladder.cli import ceilings, doctor, exercise, inspect_command, listing, selected
from kernel_ladder.cli.columns import console_for
from kernel_ladder.errors import (
    BackendError,
    ExerciseError,
    InspectError,
    RungFileError,
    UnavailableError,
    VariableError,
)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a wrong exercise, or 2 for a bad command line or environment variable."""
    try:
        return _run(arguments)
    except (BackendError, ExerciseError, RungFileError, UnavailableError, VariableError) as error:
        print(f"python -m kernel_ladder: {error}", file=sys.stderr)
        return 2


def _run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_ladder", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    lister = commands.add_parser("list", help="every operation and variant, with its status and the reason")
    lister.add_argument("op", nargs="*", metavar="op", help=f"operations (default: all of {', '.join(table.OPS)})")
    lister.add_argument(
        "--for", dest="shape", metavar="SHAPE", help="which variant each backend stands for at a shape of one operation"
    )
    lister.add_argument("--dtype", default="bfloat16", metavar="NAME", help="with --for (default: bfloat16)")
    lister.add_argument("--gradients", action="store_true", help="with --for: inputs that require gradients")
    examiner = commands.add_parser("doctor", help="the machine, versions, what is available and why the rest is not")
    examiner.add_argument(
        "--measure", action="store_true", help="measure each GPU's memory and matrix rates again, and store them"
    )
    inspector = commands.add_parser("inspect", help="a variant's source, kernels, registers, occupancy, PTX and SASS")
    inspect_command.add_arguments(inspector)
    trainer = commands.add_parser("exercise", help="exercises: list, start, check, hint, solution")
    exercise.add_arguments(trainer)
    for each in (lister, examiner, inspector):
        each.add_argument("--json", action="store_true", help="one JSON value instead of a table")
    chosen = parser.parse_args(arguments)

    # In a pipe, rich assumes 80 columns and folds lines. A script or a log wants them whole.
    console = console_for(160)
    if chosen.command == "list":
        for op in chosen.op:
            if op not in table.OPS:
                parser.error(f"unknown operation {op!r}; operations are {', '.join(table.OPS)}")
        if chosen.shape is not None:
            return _selected(parser, chosen, console)
        rows = listing.rows_of_list(chosen.op or list(table.OPS))
        print(json.dumps(rows, indent=1)) if chosen.json else listing.print_list(console, rows)
    elif chosen.command == "inspect":
        return inspect_command.run(chosen, console)
    elif chosen.command == "exercise":
        return exercise.run(chosen, console)
    else:
        try:
            if chosen.measure:
                ceilings.measure_all()
        except UnavailableError as error:
            print(f"python -m kernel_ladder doctor: {error}", file=sys.stderr)
            return 2
        found = doctor.facts()
        print(json.dumps(found, indent=1)) if chosen.json else doctor.print_facts(console, found)
    return 0


def _selected(parser: argparse.ArgumentParser, chosen: argparse.Namespace, console: Console) -> int:
    if len(chosen.op) != 1:
        parser.error("--for takes the shape of one operation; name one")
    if chosen.dtype not in inspect_command.DTYPES:
        parser.error(f"unknown `dtype` {chosen.dtype!r}; known are {', '.join(inspect_command.DTYPES)}")
    try:
        dtype = inspect_command.DTYPES[chosen.dtype]
        rows = selected.rows_selected(chosen.op[0], chosen.shape, dtype, chosen.gradients)
    except InspectError as error:
        print(f"python -m kernel_ladder list: {error}", file=sys.stderr)
        return 2
    print(json.dumps(rows, indent=1)) if chosen.json else selected.print_selected(console, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
