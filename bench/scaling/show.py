"""Rows of several GPUs as a table to read in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.console import Console

from bench.scaling.rows import OURS, ROLES, ScalingRow
from bench.show.table import microseconds
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line, fit

COLUMNS = (
    Column("problem"),
    Column("what"),
    Column("backend", spare=1),
    Column("GPUs", right=True, spare=2),
    Column("time", right=True),
    Column("host", right=True, spare=4),
    Column("TFLOP/s a GPU", right=True),
    Column("GB/s sent", right=True, spare=3),
    Column("efficiency", right=True),
    Column("of product", right=True),
    Column("hidden", right=True),
    Column("paper model", right=True),
)


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)


def cells(row: ScalingRow) -> list[str]:
    """A row's figures, from its time on."""
    predicted = ""
    if row.predicted_us is not None and row.us is not None:
        predicted = f"{microseconds(row.predicted_us)} ({row.us / row.predicted_us:.2f}×)"
    return [
        "" if row.us is None else microseconds(row.us),
        "" if row.host_us is None else microseconds(row.host_us),
        _number(row.tflops_per_gpu, "{:.3g}"),
        _number(row.gbs, "{:.3g}"),
        _number(row.efficiency),
        _number(row.of_product),
        _number(row.hidden),
        predicted,
    ]


def show(rows: Iterable[ScalingRow], console: Console) -> None:
    """Print a table for each operation."""
    rows = list(rows)
    left_out = LeftOut()
    for op, members in groupby(rows, lambda row: row.op):
        lines, notes = [], Footnotes()
        mine = list(members)
        for (shape, pass_), of_call in groupby(mine, lambda row: (row.shape, row.pass_)):
            ordered = sorted(of_call, key=lambda row: ROLES.index(row.role))
            for i, row in enumerate(ordered):
                style = "bold" if row.role == OURS else "red" if row.wrong else "dim" if row.us is None else ""
                of_row = cells(row)
                if row.us is None:
                    of_row[0] = f"{'wrong' if row.wrong else '—'} {notes.mark(row.wrong or str(row.unsupported))}"
                name = f"{shape} {pass_}" if i == 0 else ""
                head = [name, row.role, row.backend, str(row.gpus)]
                lines.append(Line([*head, *of_row], style, i == len(ordered) - 1))
        title = f"{op}, {mine[0].dtype}, on {mine[0].gpu}"
        console.print(fit(console, COLUMNS, lines, left_out, title=title, box=box.HEAVY_HEAD))
        notes.show(console)
    left_out.show(console)
    console.print(
        "host: what the host takes to launch a call, while the GPU works. efficiency: one GPU's time for the whole "
        "problem / (GPUs × time). of product: time of the product alone / time. hidden: (collective and product, one "
        "after the other − time) / communication alone. paper model: what the rates measured in this run predict, and "
        "measured over predicted.",
        soft_wrap=True,
    )
