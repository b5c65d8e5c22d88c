"""Rates of an operation at every shape, and what they were measured with, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.rows.store import Row
from bench.show import markdown
from bench.show.table import fastest, mark, rate, with_legend
from kernel_ladder.spec import PASSES


def machine(_: Path | None, found: Sequence[Row]) -> str:
    """What rows were measured with; empty without rows."""
    if not found:
        return ""
    in_time = sorted(found, key=lambda row: row.when)
    newest = in_time[-1]
    versions: dict[str, dict[str, None]] = {}
    for row in in_time:
        of_row = {"driver": row.driver, "CUDA": row.cuda, "PyTorch": row.torch, "Triton": row.triton}
        if row.peer_version != row.torch:  # a peer that is PyTorch itself is named already
            of_row[row.backend.partition(".")[2]] = row.peer_version
        for name, version in of_row.items():
            if version:
                versions.setdefault(name, {})[version] = None
    with_ = ", ".join(f"{name} {' and '.join(known)}" for name, known in versions.items())
    commits = [f"`{commit[:12]}`" for commit in dict.fromkeys(row.commit for row in in_time if row.commit)]
    source = f"; source {commits[-1]}" if commits else ""
    if len(commits) > 1:
        source = f"; source of {len(commits)} commits up to {commits[-1]}, each row naming its own"
    if any(row.dirty for row in found):
        source += " (with changes)" if len(commits) < 2 else ", some with changes"
    note = " Triton ran in its interpreter there: its times say nothing." if any(r.interpreted for r in found) else ""
    return f"Measured on {newest.gpu} with {with_}{source}; {newest.when[:10]}.{note}"


def of_op(op: str, found: Sequence[Row]) -> str:
    """Rates of an operation, a line per shape, a column per variant."""
    mine = [row for row in found if row.op == op]
    tables = []
    for dtype in sorted({row.dtype for row in mine}, key=lambda d: (d != "bfloat16", d)):
        for pass_ in PASSES:
            rows_ = [row for row in mine if row.dtype == dtype and row.pass_ == pass_]
            if rows_:
                tables.append(f"{op} {pass_}, {dtype}, {rows_[0].gpu}:\n\n{_grid(rows_)}")
    return with_legend("\n\n".join(tables))


def _grid(found: list[Row]) -> str:
    timed = [row for row in found if row.us is not None]
    bytes_bound = 2 * sum(row.bytes_bound for row in timed) >= len(timed)
    backends = list(dict.fromkeys(row.backend for row in found))
    reasons: list[str] = []  # footnotes: one sentence, however many cells it explains
    lines = []
    for shape in dict.fromkeys(row.shape for row in found):
        members = {row.backend: row for row in found if row.shape == shape}
        best = fastest(members.values())
        cells = [shape, _roof(list(members.values()), bytes_bound)]
        for backend in backends:
            row = members.get(backend)
            if row is None:
                cells.append("")
            elif row.us is None:
                reason = f"wrong: {row.wrong}" if row.wrong else str(row.unsupported)
                if reason not in reasons:
                    reasons.append(reason)
                cells.append(f"— ({reasons.index(reason) + 1})")
            else:
                bold = "**" if backend in best else ""
                cells.append(f"{bold}{rate(row, bytes_bound)}{bold}{mark(row)}")
        lines.append(cells)
    table = markdown.grid(
        ["shape", "ceiling", *(f"`{b}`" for b in backends)], lines, [False, *([True] * (len(backends) + 1))]
    )
    notes = "\\\n".join(f"({i}) {markdown.escape(reason)}" for i, reason in enumerate(reasons, 1))
    return f"{table}\n\n{notes}" if notes else table


def _roof(members: list[Row], bytes_bound: bool) -> str:
    row = next((row for row in members if row.least_us), None)
    if row is None:
        return ""
    at_roof = Row(**{**row.__dict__, "gbs": row.bytes / row.least_us / 1e3, "tflops": row.flops / row.least_us / 1e6})
    return rate(at_roof, bytes_bound)
