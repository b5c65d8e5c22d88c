"""What a patch makes of whole models, as Markdown: see :mod:`bench.patched`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from bench.patched.rows import ANEW, DECODE, FOLDER, FORWARD, PLAIN, STEP, PatchedRow, read
from bench.show import markdown
from bench.show.table import microseconds

BLOCK = "patched"
COMMAND = "python -m bench patched"


#: What a column of tokens is called.
TOKENS = {DECODE: "decoding, tokens/s", ANEW: "at new lengths"}


def header_of(rows: Iterable[PatchedRow]) -> list[str]:
    """The columns of a model's table; one more where decoding was timed at new lengths."""
    tokens = [TOKENS[pass_] for pass_ in _decodings(rows)]
    return ["way", "forward", "training step", "peak memory", *tokens, "first step"]


def _decodings(rows: Iterable[PatchedRow]) -> list[str]:
    return [DECODE, ANEW] if any(row.pass_ == ANEW for row in rows) else [DECODE]


def write(machines: Mapping[Path, object]) -> str:
    """A table for each model, from every machine's rows in the folder `patched` beside those of the machines."""
    folders = dict.fromkeys(path.parent / FOLDER for path in machines)
    parts = []
    for file in (file for folder in folders for file in sorted(folder.glob("*.jsonl"))):
        found = sorted(read(file), key=lambda row: row.model)
        for _, members in groupby(found, lambda row: row.model):
            rows = list(members)
            header = header_of(rows)
            parts += [_head(rows), markdown.grid(header, lines_of(rows), [False, *[True] * (len(header) - 1)])]
    return "\n\n".join(parts)


def _head(rows: Sequence[PatchedRow]) -> str:
    first = next((row for row in rows if row.pass_ == STEP), rows[0])
    liger = next((row.liger for row in rows if row.liger), None)
    software = f"PyTorch {first.torch}, transformers {first.transformers}" + (f", Liger {liger}" if liger else "")
    commits = dict.fromkeys((row.commit or "unknown")[:12] for row in rows)
    named = f"commit{'s' if len(commits) > 1 else ''} {', '.join(f'`{commit}`' for commit in commits)}"
    source = f"{first.gpu or 'a CPU'}, {software}, {named}"
    return f"**{first.model}**, as {first.like}: {first.shape}, {first.dtype}; {source}."


def lines_of(rows: Sequence[PatchedRow]) -> list[list[str]]:
    """A line for each way: times, and in brackets how many times as fast as the plain model of its mode."""
    ways = dict.fromkeys((row.compiled, row.by) for row in rows)
    by_pass = {(row.compiled, row.by, row.pass_): row for row in rows}
    header, lines = header_of(rows), []
    for compiled, by in sorted(ways, key=lambda way: (way[0], way[1] != PLAIN)):
        name = f"{'compiled' if compiled else 'eager'}, {by if by == PLAIN else f'patched: {by}'}"
        if reason := _whole_reason(row for row in rows if (row.compiled, row.by) == (compiled, by)):
            lines.append([f"{name} ({reason})", *["–"] * (len(header) - 1)])
            continue
        step = by_pass.get((compiled, by, STEP))
        cells = [_cell(by_pass, compiled, by, pass_) for pass_ in (FORWARD, STEP)]
        cells.append(_memory(step))
        cells += [_cell(by_pass, compiled, by, pass_) for pass_ in _decodings(rows)]
        cells.append(f"{step.first_s:.1f} s" if step and step.first_s else "–")
        lines.append([name, *cells])
    return lines


def _whole_reason(rows: Iterable[PatchedRow]) -> str | None:
    """Why no pass of a way runs, where one reason holds for all of them."""
    reasons = {row.unsupported for row in rows}
    reason = reasons.pop() if len(reasons) == 1 else None
    return None if reason is None else reason.removeprefix("ValueError: ").removeprefix("ImportError: ")


def _memory(step: PatchedRow | None) -> str:
    """The peak of training, and that of the steps after the first where it is less."""
    if step is None or not step.peak_bytes:
        return "–"
    shown = f"{step.peak_bytes / 2**30:.1f} GiB"
    later = step.later_peak_bytes or step.peak_bytes
    return f"{shown}, later {later / 2**30:.1f}" if later < 0.98 * step.peak_bytes else shown


def _cell(by_pass: Mapping[tuple[bool, str, str], PatchedRow], compiled: bool, by: str, pass_: str) -> str:
    row, plain = by_pass.get((compiled, by, pass_)), by_pass.get((compiled, PLAIN, pass_))
    if row is None:
        return "–"
    if row.us is None:
        return f"wrong: {row.wrong}" if row.wrong else f"not here: {row.unsupported}"
    shown = f"{row.tokens_per_s:.0f}" if pass_ in TOKENS and row.tokens_per_s else microseconds(row.us)
    if plain is None or plain is row or plain.us is None:
        return shown
    return f"{shown} ({plain.us / row.us:.2f} ×)"
