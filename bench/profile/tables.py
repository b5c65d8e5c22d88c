"""Profiles as tables to read in a terminal: the kernels of one call in order, and several backends side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.text import Text

from bench.profile import ncu
from bench.profile.kernels import Kernel, Profile
from bench.profile.targets import Target
from bench.show.table import microseconds
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line, fit


def byte_count(n: float | None) -> str:
    """Three digits, with a unit that suits; powers of ten, as rates have."""
    if n is None:
        return ""
    for limit, unit in ((1e3, "B"), (1e6, "kB"), (1e9, "MB"), (1e12, "GB")):
        if n < limit:
            return f"{n / limit * 1e3:.3g} {unit}"
    return f"{n / 1e12:.3g} TB"


#: Where to find the columns that a narrow terminal leaves out.
ELSEWHERE = "; so does --json"


def _grouped(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels that follow one another and differ in their time alone, together."""

    def alike(kernel: Kernel) -> tuple[Any, ...]:
        return kernel.name, kernel.grid, kernel.block, kernel.operator, kernel.bytes

    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if groups and alike(groups[-1][0]) == alike(kernel):
            groups[-1].append(kernel)
        else:
            groups.append([kernel])
    return groups


def _rate(moved: float | None, us: float) -> str:
    if not moved or not us:
        return ""
    gbs = moved / us / 1e3
    return f"{gbs:,.0f} GB/s" if gbs >= 100 else f"{gbs:.3g} GB/s"


def _dims(dims: Sequence[int] | None) -> str:
    return "×".join(map(str, dims)) if dims else ""


def show(target: Target, found: Profile, console: Console, full_names: bool) -> None:
    """Print the kernels of one call, in order, and what they add up to."""
    on_gpu = found.device == "cuda"
    columns = [
        Column("#", spare=5),
        *([Column("kernel", folds=True), Column("operator", spare=3)] if on_gpu else [Column("operator")]),
        Column("count", right=True, spare=4),
        Column("time", right=True),
        Column("share", right=True, spare=1),
        *([Column("grid", right=True, spare=6), Column("block", right=True, spare=7)] if on_gpu else []),
        Column("operands", right=True, spare=2),
        Column("rate", right=True, spare=2),
    ]
    lines, left_out = [], LeftOut()
    first = 1
    for group in _grouped(found.kernels):
        kernel, us = group[0], sum(k.us for k in group)
        moved = None if kernel.bytes is None else kernel.bytes * len(group)
        name = kernel.name if full_names else kernel.short if on_gpu else kernel.name
        cells = [str(first), name, *([kernel.operator or ""] if on_gpu else []), str(len(group)), microseconds(us)]
        cells.append(f"{us / found.whole_us:.1%}" if found.whole_us else "")
        cells += [_dims(kernel.grid), _dims(kernel.block)] if on_gpu else []
        cells += [byte_count(moved), _rate(moved, us)]
        lines.append(Line(cells))
        first += len(group)
    console.print(fit(console, columns, lines, left_out, title=Text(str(target)), box=box.HEAVY_HEAD))
    left_out.show(console, ELSEWHERE)
    for line in summary(target, found):
        console.print(Text(line), soft_wrap=True)
    console.print()


def summary(target: Target, found: Profile) -> list[str]:
    """What a profile says in a few sentences."""
    count = f"{len(found.kernels)} {'kernel' if found.device == 'cuda' else 'operator'}"
    count += "" if len(found.kernels) == 1 else "s"
    if found.device == "cuda":
        lines = [
            f"{count}: {microseconds(found.device_us)} on the GPU and {microseconds(found.gap_us)} between them; "
            f"the host takes {microseconds(found.host_us)} to issue the call"
        ]
        if found.host_us > found.span_us:
            lines.append("The GPU waits for the host, save where calls are captured in a CUDA graph.")
    else:
        lines = [_on_the_cpu(count, found)]
        if target.backend.startswith("triton"):
            lines.append("The kernels are interpreted: these are the interpreter's own operators.")
    least = f"the least is {byte_count(target.least_bytes)}"
    if found.operand_bytes is None:
        lines.append(f"What it moves is not recorded at this level; {least}.")
        return lines
    moved = f"Its operators read and write {found.operands} tensors, {byte_count(found.operand_bytes)}"
    if target.input_bytes:
        size, fewest = (f"{n / target.input_bytes:.3g}" for n in (found.operand_bytes, target.least_bytes))
        moved += f", {size} times the input where {fewest} would do"
    if target.least_bytes:
        least += f" ({found.operand_bytes / target.least_bytes:.3g}×)"
    lines.append(f"{moved}; {least}.")
    return lines


def _on_the_cpu(count: str, found: Profile) -> str:
    """How the times of a call's operators, of the whole call, and of one without the profiler go together."""
    plain = "" if found.plain_us is None else f"; without the profiler a call takes {microseconds(found.plain_us)}"
    if found.apart:
        return (
            f"{count}: {microseconds(found.device_us)} in a run that records them, which takes longer; the call takes "
            f"{microseconds(found.span_us)} under the profiler alone{plain}; no GPU is visible"
        )
    return (
        f"{count}: {microseconds(found.device_us)} in them and {microseconds(found.gap_us)} between them (Python, "
        f"dispatch, the profiler), {microseconds(found.span_us)} on the CPU in all{plain}; no GPU is visible"
    )


def compare(results: Sequence[tuple[Target, Profile | None]], console: Console) -> None:
    """Print several backends side by side, those that could not run with their reason."""
    by_call: dict[tuple[str, ...], list[tuple[Target, Profile | None]]] = {}
    for target, found in results:
        by_call.setdefault((target.op, target.pass_, target.dtype, target.shape), []).append((target, found))
    for key, members in by_call.items():
        if len(members) < 2:
            continue
        what = "operators" if any(found is not None and found.device == "cpu" for _, found in members) else "kernels"
        columns = [
            Column("backend"),
            Column(what, right=True, spare=2),
            Column("time", right=True),
            Column("between", right=True, spare=3),
            Column("host", right=True, spare=4),
            Column("operands", right=True, spare=5),
            Column("× least", right=True, spare=1),
        ]
        notes, left_out = Footnotes(), LeftOut()
        lines = [Line(_row(target, found, notes), "dim" if found is None else "") for target, found in members]
        title = Text(f"{key[0]} {key[1]}, {key[2]}, {key[3]}")
        console.print(fit(console, columns, lines, left_out, title=title, box=box.HEAVY_HEAD))
        notes.show(console)
        left_out.show(console, ELSEWHERE)


def _row(target: Target, found: Profile | None, notes: Footnotes) -> list[str]:
    if found is None:
        return [f"{target.backend} {notes.mark(target.reason or 'not run')}", *[""] * 6]
    moved, least = found.operand_bytes, target.least_bytes
    note = "" if found.device == "cuda" else "interpreted" if target.backend.startswith("triton") else "on the CPU"
    return [
        f"{target.backend} {notes.mark(note)}" if note else target.backend,
        str(len(found.kernels)),
        microseconds(found.us),
        microseconds(found.gap_us) if found.device == "cuda" else "",
        microseconds(found.host_us) if found.host_us is not None else "",
        byte_count(moved),
        f"{moved / least:.3g}" if moved is not None and least else "",
    ]


#: Heading, counter, format, and how soon the column is left out where there is no room.
COUNTERS = (
    ("time", "us", microseconds, 0),
    ("DRAM read", "dram_read_bytes", byte_count, 1),
    ("DRAM written", "dram_write_bytes", byte_count, 1),
    ("L2", "l2_bytes", byte_count, 6),
    ("tensor pipe", "tensor_pipe_pct", "{:.1f} %".format, 2),
    ("issue slots", "issue_pct", "{:.1f} %".format, 5),
    ("occupancy", "occupancy_pct", "{:.1f} %".format, 3),
    ("possible", "theoretical_occupancy_pct", "{:.1f} %".format, 7),
    ("registers", "registers", "{:.0f}".format, 8),
    ("shared", "shared_bytes", byte_count, 9),
    ("bank conflicts", "bank_conflicts", "{:,.0f}".format, 10),
    ("spills", "local_bytes", byte_count, 11),
)


def show_counters(row: Mapping[str, Any], notes: Sequence[str], console: Console, full_names: bool) -> None:
    """Print the counters of each kernel of a call, and of the whole call."""
    kernels, whole = row["kernels"], row["counters"]
    title = f"{row['op']} {row['backend']} {row['pass']}, {row['dtype']}, {row['shape']}"
    columns = [
        Column("#", spare=12),
        Column("kernel", folds=True),
        *(Column(heading, right=True, spare=spare) for heading, _, _, spare in COUNTERS),
        Column("warps wait for", spare=4, folds=True),
    ]
    lines, left_out = [], LeftOut()
    for i, kernel in enumerate(kernels, 1):
        name = kernel["name"] if full_names else kernel["short"]
        cells = [str(i), name, *_counters(kernel), _stalls(ncu.top_stalls(kernel["stalls"]))]
        lines.append(Line(cells, ends_section=i == len(kernels)))
    if len(kernels) > 1:
        lines.append(Line(["", "all", *_counters(whole), _stalls(whole["top_stalls"])], "bold"))
    console.print(fit(console, columns, lines, left_out, title=Text(title), box=box.HEAVY_HEAD))
    left_out.show(console, ELSEWHERE)
    if whole["dram_bytes"] is not None and whole["least_bytes"]:
        console.print(
            f"DRAM moved {byte_count(whole['dram_bytes'])}, {whole['dram_bytes'] / whole['least_bytes']:.3g} times "
            f"the least, {byte_count(whole['least_bytes'])}.",
            soft_wrap=True,
        )
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print()


def _counters(values: Mapping[str, Any]) -> list[str]:
    return [write(values[name]) if values.get(name) is not None else "—" for _, name, write, _ in COUNTERS]


def _stalls(stalls: Mapping[str, float]) -> str:
    return ", ".join(f"{reason} {pct:.0f} %" for reason, pct in stalls.items())
