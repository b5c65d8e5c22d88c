"""``python -m bench readme``: renew the tables in a Markdown file from rows, so that no number is typed by hand.

A block stands between ``<!-- results:begin NAME -->`` and ``<!-- results:end NAME -->``, where NAME is

- ``summary``: every operation and variant at the operation's headline shape (the last of its quick sweep)
- ``machine``: what the rows were measured with
- an operation: its rates at every shape
- ``climb OP``: the operation's steps at its headline shape, each beside the one before it, with the counters that moved
- ``cards OP``: a card for every rung of the operation
- ``picture OP``: the operation's picture
- ``roofline OP``, ``roofline``: the roofline of an operation, or of all
- ``headlines``: PyTorch, the best rungs and the best peer of every operation, a line each
- ``regret``: the time of what names chose over that of the best rung, by operation
- ``table regret``: the same of each GPU's table of choices, with the calls that were held out of it
- ``matmul model``: the error of the cost model by which matmul's CUDA rungs are chosen
- ``claims``: the levels' best rungs against other libraries, over all calls
- ``index``: every rung, what it brought, and the page about it
- ``ladder OP``: the picture of an operation's ladder
- ``fusion``, ``fusion picture``: of each chain what compilers and kernels by hand make, with its
  picture, and the picture of all
- ``compiler claims``: what is said of compilers, and whether the rows agree
- ``when compilers help``: each compiler beside the formula and kernels by hand, at every call of a chain
- ``memory``: attention's memory and time against the length
- ``dynamic``: what a new length costs, by every way to compile a function
- ``patched``: what a patch makes of whole models
- ``others``: operations that were measured later on another GPU
- ``scaling``, ``scaling model``, ``scaling steps``: what several GPUs measured, what the paper model predicts of more,
  and what a training step's time consists of

With ``--folders`` it writes the README.md of every folder of rungs instead, whole: see :mod:`bench.show.folders`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import kernel_ladder
from bench.measure import environment, lengths
from bench.rows import store
from bench.rows.published import of_gpus, still_said
from bench.rows.store import Row, picture_file
from bench.show import (
    bridge,
    cards,
    claims,
    climb,
    dynamic,
    folders,
    fusion,
    headlines,
    helps,
    log_index,
    markdown,
    matmul_model,
    others,
    patched,
    predictions,
    rates,
    regret,
    scaling,
    table_regret,
    verdicts,
)
from bench.show.headline import headline
from bench.show.roofline import intensity
from bench.show.table import fastest, mark, microseconds, rate, with_legend
from kernel_ladder.spec import PASSES

_BEGIN = re.compile(r"^<!-- results:begin (?P<name>[^>]+?) -->[ \t]*$", re.MULTILINE)
_EMPTY = "*No rows yet"

PAGES = [
    *(environment.ROOT / name for name in ("README.md", "RESULTS.md", "KERNEL_LOG.md")),
    *sorted((environment.ROOT / "docs" / "climb").glob("*.md")),
    environment.ROOT / "docs" / "index.md",
    environment.ROOT / "docs" / "compilers.md",
    environment.ROOT / "docs" / "models.md",
    environment.ROOT / "docs" / "scaling.md",
    environment.ROOT / "docs" / "selection.md",
]

Machines = dict[Path, list[Row]]


class ReadmeError(ValueError):
    """The file's markers cannot be understood."""


def renew(text: str, machines: Machines, folder: Path) -> str:
    """`text` with every block written anew. `folder` is the file's own, from which links start."""
    parts, at = [], 0
    while begin := _BEGIN.search(text, at):
        name = begin["name"]
        line = text.count("\n", 0, begin.start()) + 1
        end = text.find(f"<!-- results:end {name} -->", begin.end())
        following = _BEGIN.search(text, begin.end())
        if end < 0 or (following and following.start() < end):
            raise ReadmeError(f"line {line}: `results:begin {name}` has no `<!-- results:end {name} -->` of its own")
        held = text[begin.end() : end].strip()
        if held and not held.startswith(_EMPTY) and not any(machines.values()):
            where = " or ".join(map(str, machines)) or "bench/results"
            raise ReadmeError(f"line {line}: there are no rows in {where} to replace what {name!r} holds")
        try:
            block = _block(name, machines, folder)
        except ReadmeError as error:
            raise ReadmeError(f"line {line}: {error}") from None
        parts += [text[at : begin.end()], "\n\n", block, "\n\n"]
        at = end
    return "".join([*parts, text[at:]])


def _block(name: str, machines: Machines, folder: Path) -> str:
    if name in scaling.BLOCKS:
        return scaling.write(name, machines) or f"{_EMPTY}: `{scaling.COMMAND}` writes them.*"
    for page in (dynamic, patched, bridge, table_regret, others):
        if name == page.BLOCK:
            return page.write(machines) or f"{_EMPTY}: `{page.COMMAND}` writes them.*"
    make, op = _maker(name, folder)
    blocks = [make(path, found) for path, found in machines.items()]
    written = "\n\n".join(filter(None, blocks))
    return written or f"{_EMPTY}: `python -m bench{f' --op {op}' if op else ''}` writes them.*"


def _maker(name: str, folder: Path) -> tuple[Callable[[Path, list[Row]], str], str]:
    """What writes a block of one machine's rows, and the operation that it is about, if it is about one."""
    word, _, op = name.partition(" ")
    of_all: dict[str, Callable[[Path, list[Row]], str]] = {
        "summary": _summary,
        "machine": rates.machine,
        "headlines": headlines.write,
        "claims": claims.write,
        "regret": regret.write,
        "matmul model": matmul_model.write,
        "index": log_index.write,
        "fusion": lambda path, found: fusion.write(path, found, folder),
        verdicts.BLOCK: verdicts.write,
        helps.BLOCK: helps.write,
        "fusion picture": lambda path, found: _fusion(path, found, folder),
        "memory": lambda path, found: _memory(path, found, folder),
        "roofline": lambda path, found: _roofline("", path, found, folder),
    }
    of_one: dict[str, Callable[[Path, list[Row]], str]] = {
        "cards": lambda path, found: cards.write(op, path, found),
        "climb": lambda path, found: climb.write(op, path, found),
        "picture": lambda path, found: _picture(op, path, found, folder),
        "ladder": lambda path, found: _ladder(op, path, found, folder),
        "roofline": lambda path, found: _roofline(op, path, found, folder),
    }
    if name in of_all:
        return of_all[name], ""
    if name in kernel_ladder.OPS:
        return lambda path, found: rates.of_op(name, found), name
    if word in of_one and op in kernel_ladder.OPS:
        return of_one[word], op
    known = [
        *of_all,
        dynamic.BLOCK,
        patched.BLOCK,
        bridge.BLOCK,
        table_regret.BLOCK,
        others.BLOCK,
        *scaling.BLOCKS,
        *(f"'{word} OP'" for word in of_one),
        "OP",
    ]
    raise ReadmeError(f"unknown block {name!r}; known are {', '.join(known)}, of {', '.join(kernel_ladder.OPS)}")


def _summary(path: Path, found: list[Row]) -> str:
    lines, notes = [], markdown.Notes()
    for op in kernel_ladder.OPS:
        standing = headline(op, found)
        if standing is None:
            continue
        shape, dtype = standing
        mine = [row for row in found if (row.op, row.shape, row.dtype) == (op, shape, dtype)]
        best = {p: fastest(row for row in mine if row.pass_ == p) for p in PASSES}
        for backend in dict.fromkeys(row.backend for row in mine):
            cells = [f"**{op}** {shape}, {dtype}" if not lines or lines[-1][-1] != op else "", f"`{backend}`"]
            for pass_ in PASSES:
                row = next((r for r in mine if r.backend == backend and r.pass_ == pass_), None)
                cells += _cells(row, notes, marked=backend in best[pass_])
            lines.append([*cells, op])
    if not lines:
        return ""
    measured = ["time (quartiles)", "rate", "of ceiling", "× baseline"]
    header = ["operation", "backend", *(f"{p} {m}" for p in PASSES for m in measured)]
    table = markdown.grid(header, [line[:-1] for line in lines], [False, False] + [True] * 8)
    return notes.below(with_legend(table))


def _cells(row: Row | None, notes: markdown.Notes, marked: bool) -> list[str]:
    if row is None:
        return ["", "", "", ""]
    if row.us is None:
        return [f"wrong: {row.wrong}" if row.wrong else notes.mark(str(row.unsupported)), "", "", ""]
    bold, time = "**" if marked else "", microseconds(row.us)
    return [
        f"{bold}{time}{bold}"
        + _quartiles(time, microseconds(row.us_q1), microseconds(row.us_q3))
        + (" *interpreted*" if row.interpreted else "")
        + mark(row),
        rate(row),
        f"{row.of_ceiling:.2f}" if row.of_ceiling is not None else "",
        f"{row.speedup:.2f}" if row.speedup is not None else "",
    ]


def _quartiles(time: str, low: str, high: str) -> str:
    """In brackets, without a unit that all have; empty where both are the time."""
    if low == high == time:
        return ""
    parts = [each.split() for each in (time, low, high)]
    if len({unit for _, unit in parts}) == 1:
        low, high = parts[1][0], parts[2][0]
    return f" ({low} – {high})"


def _picture(op: str, path: Path, found: list[Row], folder: Path) -> str:
    mine = [row for row in found if row.op == op and row.us is not None]
    if not mine:
        return ""
    link = os.path.relpath(picture_file(path, op), folder)
    return f"![{op} on {mine[0].gpu}: rate against size, a line per variant, the measured ceiling dashed]({link})"


def _ladder(op: str, path: Path, found: list[Row], folder: Path) -> str:
    mine = [row for row in found if row.op == op and row.us is not None]
    if not mine:
        return ""
    link = os.path.relpath(picture_file(path, f"ladder-{op}"), folder)
    return f"![The ladder of {op} on {mine[0].gpu}: a bar a rung, in per cent of the best other kernel]({link})"


def _roofline(op: str, path: Path, found: list[Row], folder: Path) -> str:
    drawn = [row for row in found if op in ("", row.op) and row.us is not None and intensity(row)]
    if not drawn:
        return ""
    link = os.path.relpath(picture_file(path, f"roofline-{op}" if op else "roofline"), folder)
    what = f"Roofline of {op or 'every operation'} on {drawn[0].gpu}"
    return f"![{what}: rate against arithmetic intensity under the measured ceilings]({link})"


def _fusion(path: Path, found: list[Row], folder: Path) -> str:
    drawn = [row for op in fusion.CHAINS for row in fusion.chosen(op, found)[PASSES[0]].values()]
    if not drawn:
        return ""
    link = os.path.relpath(picture_file(path, fusion.PICTURE), folder)
    return f"![Time of every level over the least possible, a line a chain, on {drawn[0].gpu}]({link})"


def _memory(path: Path, found: list[Row], folder: Path) -> str:
    drawn = lengths.family(found)
    if not drawn:
        return ""
    link = os.path.relpath(picture_file(path, lengths.PICTURE), folder)
    return f"![Memory and time of {lengths.OP} on {drawn[0].gpu} against the length, tokens held]({link})"


def default_results() -> list[Path]:
    """Every GPU's committed file; the CPU's where there is no other."""
    cpu = environment.PUBLISHED / "cpu.jsonl"
    return of_gpus(environment.PUBLISHED) or [path for path in [cpu] if path.exists()]


def main(argv: Sequence[str]) -> int:
    """Returns 0; 1 where --check finds a stale block; 2 for markers or rows that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m bench readme", description="Renew the tables between markers.")
    parser.add_argument(
        "file",
        type=Path,
        nargs="*",
        default=PAGES,
        help="Markdown files (default: README.md, RESULTS.md, KERNEL_LOG.md, and pages of docs/ that have blocks)",
    )
    parser.add_argument("--results", type=Path, action="append", help="rows (default: bench/results/*.jsonl)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a block is stale")
    parser.add_argument("--folders", action="store_true", help="write the README.md of every folder of rungs instead")
    args = parser.parse_args(argv)
    # In the order of the file, which the sweep sorted: the same on machines that do not know every variant.
    machines = {
        path: still_said(store.of_one_machine(store.latest(store.read_given(path))))
        for path in args.results or default_results()
    }
    if args.folders:
        return _renew_folders(next(iter(machines.values()), []), args.check)
    stale = False
    for file in args.file:
        try:
            before = file.read_text(encoding="utf-8")
            after = renew(before, machines, file.resolve().parent)
        except (OSError, UnicodeDecodeError, ReadmeError, predictions.PredictionError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            print(f"python -m bench readme: {file}: {said}", file=sys.stderr)
            return 2
        if after == before:
            continue
        stale = True
        if args.check:
            print(f"{file} is stale; `python -m bench readme` renews it", file=sys.stderr)
        else:
            store.replace(file, after)
            print(f"renewed {file}")
    return 1 if args.check and stale else 0


def _renew_folders(found: list[Row], check: bool) -> int:
    """Writes the pages of `folders`; with `check` only says which are stale, and returns 1 where one is."""
    stale = False
    written = folders.pages(found)
    for file in folders.abandoned(written):
        stale = True
        if check:
            print(f"{file} describes no ladder; `python -m bench readme --folders` removes it", file=sys.stderr)
        else:
            file.unlink()
            print(f"removed {file}")
    for file, text in written.items():
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale = True
        if check:
            print(f"{file} is stale; `python -m bench readme --folders` renews it", file=sys.stderr)
        else:
            store.replace(file, text)
            print(f"renewed {file}")
    for fault in folders.faults():
        print(fault, file=sys.stderr)
    return 1 if check and stale else 0
