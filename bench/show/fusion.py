"""Fusion by chain: the formula call by call, what compilers make of it, and the best kernels by hand.

A chain is an operation whose formula is several of PyTorch's. Its table shows, from measured rows, what each level
takes at the operation's headline shape, the kernels of a call, and the bytes that these moved over the least. A
sentence says where a compiler helps and where it hurts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.rows.store import Row, picture_file
from bench.show import climb_counters, markdown
from bench.show.climb import OTHER
from bench.show.climb_counters import Counters, over_least
from bench.show.headline import headline
from bench.show.headlines import OURS
from bench.show.table import mark, microseconds, with_legend
from kernel_ladder.spec import PASSES

CHAINS = (
    "gelu",
    "bias_gelu",
    "swiglu",
    "rope",
    "dropout",
    "softmax",
    "layer_norm",
    "rms_norm",
    "add_rms_norm",
    "bias_dropout_add_layer_norm",
    "cross_entropy",
    "linear_cross_entropy",
    "linear",
    "matmul",
    "attention",
)
#: The picture's name.
PICTURE = "fusion"
NAIVE = "torch.naive"
#: What a compiler is called, and its rung; of torch.compile both the formula and what a user writes.
COMPILERS = {
    "compile.formula": "torch.compile of the formula",
    "compile.default": "torch.compile",
    "xla.jit": "XLA",
    "xla.fused": "XLA by JAX's fused function",
}
COLUMNS = ("× naive", "kernels", "DRAM bytes / least")
#: A compiler within this factor of the best kernel by hand equals it.
EQUAL = 1.05
#: Instead of kernels, and beside kernels that another GPU than the rows' counted.
NOT_COUNTED = "–"

Calls = Mapping[tuple[str, ...], Counters]


def chosen(op: str, found: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """The timed rows of a chain at its headline shape, by pass and rung: naive, compilers, the best of each level."""
    standing = headline(op, [row for row in found if row.pass_ == PASSES[0]])
    mine = [row for row in found if row.us is not None and (row.op, row.shape, row.dtype) == (op, *(standing or ()))]
    of_passes = {}
    for pass_ in PASSES:
        rows = {row.backend: row for row in mine if row.pass_ == pass_}
        shown = {name: rows[name] for name in (NAIVE, *COMPILERS) if name in rows}
        for level in OURS:
            if of_level := [row for row in rows.values() if row.level == level]:
                best = min(of_level, key=lambda row: row.us or 0.0)
                shown[best.backend] = best
        of_passes[pass_] = shown
    return of_passes


def counted(path: Path) -> Calls:
    """The counted calls of all chains, those of another GPU with its name: see :mod:`bench.show.climb_counters`."""
    return {call: mine for op in CHAINS for call, mine in climb_counters.of_operation(op, path).items()}


def call_of(row: Row, profiled: Calls) -> tuple[int, float | None] | None:
    """The kernels of a row's call, and the bytes that these moved over the least; None where it was not counted."""
    mine = climb_counters.of(row, profiled)
    return (mine["kernels"], over_least(mine)) if mine else None


def picture_of(op: str) -> str:
    """The name of a chain's picture."""
    return f"{PICTURE}-{op}"


def write(path: Path, found: Sequence[Row], folder: Path | None = None) -> str:
    """A section for each chain that has rows: a sentence for each pass, a picture and a table.

    Links start from `folder`, by default that of the rows.
    """
    profiled = counted(path)
    parts = []
    for op in CHAINS:
        rows = chosen(op, found)
        if rows[PASSES[0]]:
            first = next(iter(rows[PASSES[0]].values()))
            parts.append(f"### {op}\n\n{first.shape}, {first.dtype}, {first.gpu}. {sentences(rows)}".rstrip())
            if any(row.least_us for of_pass in rows.values() for row in of_pass.values()):
                link = os.path.relpath(picture_file(path, picture_of(op)), folder or path.parent)
                parts.append(f"![{op} on {first.gpu}: time over the least possible, a bar a rung and pass]({link})")
            parts.append(_table(rows, profiled))
    return "\n\n".join(parts)


def _table(rows: Mapping[str, Mapping[str, Row]], profiled: Calls) -> str:
    lines, gpus = [], {}
    for backend in dict.fromkeys(name for of_pass in rows.values() for name in of_pass):
        cells = [f"`{backend}`"]
        for of_pass in rows.values():
            row, naive = of_pass.get(backend), of_pass.get(NAIVE)
            if row is None or row.us is None:
                cells += [""] * (1 + len(COLUMNS))
                continue
            kernels, moved = call_of(row, profiled) or (NOT_COUNTED, None)
            if gpu := climb_counters.of(row, profiled).get(climb_counters.GPU):
                gpus[gpu] = OTHER
            cells += [
                f"{microseconds(row.us)}{mark(row)}",
                f"{naive.us / row.us:.3g}" if naive and naive.us else "",
                f"{kernels}{gpus.get(gpu, '')}",
                "" if moved is None else f"{moved:.2f}",
            ]
        lines.append(cells)
    header = ["rung", *(name for pass_ in rows for name in (pass_, *COLUMNS))]
    written = with_legend(markdown.grid(header, lines, [False, *[True] * (len(header) - 1)]))
    notes = [f"{mark} counted on {gpu}" for gpu, mark in gpus.items()]
    if any(NOT_COUNTED in line for line in lines):
        notes.append(f"{NOT_COUNTED} not counted yet")
    return f"{written}\n\n{'; '.join(notes)}." if notes else written


def sentences(rows: Mapping[str, Mapping[str, Row]]) -> str:
    """When each compiler helps and when it hurts: one sentence a pass."""
    said = []
    for pass_, of_pass in rows.items():
        by_hand = [row.us for row in of_pass.values() if row.level in OURS and row.us]
        naive = of_pass.get(NAIVE)
        if not by_hand:
            continue
        told = [
            f"{name} {_judged(naive.us / us if naive and naive.us else None, us / min(by_hand))}"
            for backend, name in COMPILERS.items()
            if backend in of_pass and (us := of_pass[backend].us)
        ]
        if told:
            said.append(f"{pass_.capitalize()}: {'; '.join(told)}.")
    return " ".join(said)


def _judged(gain: float | None, over_hand: float) -> str:
    """What a compiler does: `gain` over the naive formula, where that was timed, and its time over the best by hand."""
    if gain is not None and gain < 1:
        return f"hurts, at {1 / gain:.3g} × the naive time"
    faster = "" if gain is None else f", {gain:.3g} × faster than naive"
    if over_hand < 1 / EQUAL:
        return f"is ahead of the kernels by hand, at {over_hand:.2f} of their time{faster}"
    if over_hand <= EQUAL:
        return f"equals the kernels by hand{faster}"
    return f"takes {over_hand:.3g} × the best by hand{faster}"
