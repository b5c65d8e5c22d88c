"""``python -m bench select``: make each GPU's table of measured choices, and say what it is worth."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import kernel_ladder
from bench.measure import environment, sets
from bench.profile import counters
from bench.rows import store
from bench.rows.store import CEILING, Row
from bench.select import build, points
from bench.select.build import Part, Regret
from kernel_ladder.selection import tables


def default_files() -> list[Path]:
    """The committed rows of every set. Other folders have sweeps that others replaced, and rows that are no sweep's."""
    folders = [environment.PUBLISHED, *(environment.PUBLISHED / name for name in sets.SETS)]
    found = sorted(path for folder in folders for path in folder.glob("*.jsonl"))
    return [path for path in found if not path.name.endswith(counters.SUFFIX)]


def by_gpu(files: Sequence[Path]) -> dict[str, list[Row]]:
    """The rows of each GPU, those of a CPU left out."""
    found: dict[str, list[Row]] = {}
    for path in files:
        for row in store.read_given(path):
            if row.gpu and row.op != CEILING and row.driver:
                found.setdefault(row.gpu, []).append(row)
    return found


def text_of(gpu_name: str, parts: Sequence[Part]) -> str:
    """A table's file. Parts that are not kept stand there with their regret alone."""
    kept = {(part.op, part.backend, part.pass_): part.entries for part in parts if part.kept}
    lines = [
        json.dumps({"gpu": gpu_name, "made by": "python -m bench select", "tables": []})[:-2],
        *_lines(_entry_lines(kept)),
        '], "regret": [',
        *_lines([json.dumps(_regret(part)) for part in parts]),
        "]}",
    ]
    return "\n".join(lines) + "\n"


def _lines(items: Sequence[str]) -> list[str]:
    return [f"{item}{',' if i + 1 < len(items) else ''}" for i, item in enumerate(items)]


def _entry_lines(kept: dict[tuple[str, str, str], tuple[tables.Entry, ...]]) -> list[str]:
    found = []
    for part in tables.to_json(kept):
        entries = part.pop("entries")
        head = json.dumps(part)[:-1] + ', "entries": ['
        found.append("\n".join([head, *_lines([" " + json.dumps(entry) for entry in entries]), "]}"]))
    return found


def _regret(part: Part) -> dict[str, Any]:
    def shown(regret: Regret | None) -> dict[str, Any] | None:
        if regret is None:
            return None
        mean, p95, worst, call, count, near = regret
        return {
            "mean": round(mean, build.DIGITS), "p95": round(p95, build.DIGITS), "worst": round(worst, build.DIGITS),
            "at": call, "points": count, "within 3 %": near,
        }  # fmt: skip

    return {
        "op": part.op,
        "backend": part.backend,
        "pass": part.pass_,
        "kept": part.kept,
        "rules": shown(part.rules),
        "table": shown(part.table),
        "held out, rules": shown(part.held_out_rules),
        "held out, table": shown(part.held_out_table),
    }


def show(gpu_name: str, parts: Sequence[Part], console: Console) -> None:
    """Prints the regret of rules and tables: time of the choice over that of the best rung."""
    shown = Table(title=f"Regret on {gpu_name}: time of the choice over the best rung's", title_justify="left")
    for name in ("operation", "backend", "pass", "points", "rules", "table", "worst rules", "worst table"):
        shown.add_column(name, justify="left" if name in ("operation", "backend", "pass") else "right")
    for name in ("held out", "rules", "table", "kept"):
        shown.add_column(name, justify="right")
    for part in parts:
        out_rules, out_table = part.held_out_rules, part.held_out_table
        shown.add_row(
            *(part.op, part.backend, part.pass_, str(part.rules.points)),
            *(f"{part.rules.mean:.3f}", f"{part.table.mean:.3f}", f"{part.rules.worst:.2f}", f"{part.table.worst:.2f}"),
            *("0" if out_table is None else str(out_table.points), _mean(out_rules), _mean(out_table)),
            "yes" if part.kept else "no",
        )
    console.print(shown)
    for backend in dict.fromkeys(part.backend for part in parts):
        own = [part for part in parts if part.backend == backend]
        every, held_out = [part.chosen for part in own], [found for part in own if (found := part.chosen_held_out)]
        console.print(
            f'"{backend}": {_summary(every)}; of those held out {_summary(held_out)}',
            soft_wrap=True, markup=False, highlight=False,
        )  # fmt: skip
    if without := [op for op in kernel_ladder.OPS if op not in {part.op for part in parts}]:
        console.print(f"no call of {', '.join(without)} has times of its choice and of another", soft_wrap=True)
    for part in parts:
        if part.kept:
            line = f"{part.op} {part.backend} {part.pass_}: worst by rules at {part.rules.call}"
            console.print(f"{line}, by the table at {part.table.call}", soft_wrap=True, markup=False, highlight=False)


def _summary(found: Sequence[Regret]) -> str:
    if not found:
        return "none"
    near, worst = sum(regret.near for regret in found), max(found, key=lambda regret: regret.worst)
    count = sum(regret.points for regret in found)
    return f"{near} of {count} calls within 3 % of the best rung, the worst at {worst.worst:.2f} ({worst.call})"


def _mean(regret: Regret | None) -> str:
    return "" if regret is None else f"{regret.mean:.3f}"


def main(argv: Sequence[str], console: Console) -> int:
    """Make the tables of measured choices, one file for each GPU.

    Returns the exit code, 1 where --check finds others.
    """
    parser = argparse.ArgumentParser(prog="python -m bench select", description=main.__doc__.partition(chr(10))[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="rows (default: all of bench/results)")
    folder = Path(os.environ.get(tables.ENV_FOLDER) or tables.FOLDER)
    parser.add_argument(
        "--into", type=Path, default=folder, metavar="FOLDER", help="of the tables (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a table is stale")
    args = parser.parse_args(argv)
    found = by_gpu(args.files or default_files())
    if not found:
        raise store.ResultsError("no row of a GPU is there: `python -m bench` on a GPU writes some")
    stale = False
    for gpu_name, rows in sorted(found.items()):
        parts = build.parts(list(points.points(rows, points.machine_of(rows))))
        file, text = args.into / f"{tables.slug(gpu_name)}.json", text_of(gpu_name, parts)
        before = file.read_text(encoding="utf-8") if file.exists() else None
        stale |= before != text
        if not args.check:
            show(gpu_name, parts, console)
            store.replace(file, text)
            kept = sum(part.kept for part in parts)
            console.print(f"{kept} of {len(parts)} tables are kept in {file}; elsewhere rules choose", soft_wrap=True)
        elif before != text:
            console.print(f"{file} is stale; `python -m bench select` renews it", soft_wrap=True)
    return 1 if args.check and stale else 0
