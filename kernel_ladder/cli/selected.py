"""``python -m kernel_ladder list OP --for SHAPE``: the rung that each backend's name stands for, and why."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from kernel_ladder import selection, table
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line, fit
from kernel_ladder.inspection.inspect import run_device, tensors
from kernel_ladder.spec import as_leaves
from kernel_ladder.testing.cases import case_named
from kernel_ladder.testing.samples import empty_inputs


def rows_selected(op: str, shape: str, dtype: torch.dtype, gradients: bool) -> list[dict[str, Any]]:
    """For "auto" and every level: the rung that takes the call, why, and the rungs tried before it with their reasons.

    Raises:
        InspectError: no such shape, or its tensors cannot be made.
    """
    case = case_named(table.spec(op), shape)
    inputs = tensors(empty_inputs, case, dtype, run_device())
    inputs = as_leaves(inputs) if gradients else inputs
    rows = []
    for backend in ("auto", *table.LEVELS):
        unavailable = None if backend == "auto" else table.unavailable(op, backend)
        tried = [] if unavailable else selection.explain(op, backend, inputs, case.options)
        chosen = tried[-1][0] if tried and tried[-1][1] is None else None
        passed = [{"variant": name, "reason": reason} for name, reason in tried if reason is not None]
        why = None if chosen is None else selection.why(op, backend, inputs, case.options)
        row = {"backend": backend, "variant": chosen, "why": why, "passed_over": passed, "unavailable": unavailable}
        rows.append(row)
    return rows


def print_selected(console: Console, rows: list[dict[str, Any]]) -> None:
    lines, reasons, left_out = [], Footnotes(), LeftOut()
    for row in rows:
        passed = ", ".join(f"{each['variant']} {reasons.mark(each['reason'])}" for each in row["passed_over"])
        if row["unavailable"] is not None:
            taken = Text(f"unavailable {reasons.mark(row['unavailable'])}", style="yellow")
        else:
            taken = Text(row["variant"], style="green") if row["variant"] else Text("none", style="yellow")
        lines.append(Line([row["backend"], taken, row["why"] or "", passed]))
    columns = [
        Column("backend"),
        Column("stands for"),
        Column("by", spare=1, folds=True),
        Column("passed over", spare=2, folds=True),
    ]
    console.print(fit(console, columns, lines, left_out))
    reasons.show(console)
    left_out.show(console, "; so does --json")
