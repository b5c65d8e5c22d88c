"""Profiles as tables to read in a terminal: the kernels of one call in order, and several backends side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import ncu
from bench.kernels import Kernel, Profile
from bench.table import microseconds
from bench.targets import Target


def byte_count(n: float | None) -> str:
    """Three digits, with a unit that suits; powers of ten, as rates have."""
    if n is None:
        return ""
    for limit, unit in ((1e3, "B"), (1e6, "kB"), (1e9, "MB"), (1e12, "GB")):
        if n < limit:
            return f"{n / limit * 1e3:.3g} {unit}"
    return f"{n / 1e12:.3g} TB"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", padding=(0, 1))
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


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
    device = ["grid", "block"] if on_gpu else []
    names = ["kernel", "operator"] if on_gpu else ["operator"]
    table = _table(str(target), ["#", *names], ["count", "time", "share", *device, "operands", "rate"])
    first = 1
    for group in _grouped(found.kernels):
        kernel, us = group[0], sum(k.us for k in group)
        moved = None if kernel.bytes is None else kernel.bytes * len(group)
        name = kernel.name if full_names else kernel.short if on_gpu else kernel.name
        cells = [str(first), name, *([kernel.operator or ""] if on_gpu else []), str(len(group)), microseconds(us)]
        cells.append(f"{us / found.device_us:.1%}" if found.device_us else "")
        cells += [_dims(kernel.grid), _dims(kernel.block)] if on_gpu else []
        cells += [byte_count(moved), _rate(moved, us)]
        table.add_row(*map(Text, cells))
        first += len(group)
    console.print(table)
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
        lines = [f"{count}: {microseconds(found.span_us)} on the CPU; no GPU is visible"]
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


def compare(results: Sequence[tuple[Target, Profile | None]], console: Console) -> None:
    """Print several backends side by side, those that could not run with their reason."""
    by_call: dict[tuple[str, ...], list[tuple[Target, Profile | None]]] = {}
    for target, found in results:
        by_call.setdefault((target.op, target.pass_, target.dtype, target.shape), []).append((target, found))
    for key, members in by_call.items():
        if len(members) < 2:
            continue
        what = "operators" if any(found is not None and found.device == "cpu" for _, found in members) else "kernels"
        right = [what, "time", "between", "host", "operands", "× least"]
        table = _table(f"{key[0]} {key[1]}, {key[2]}, {key[3]}", ["backend"], right)
        table.add_column("note", overflow="fold")
        for target, found in members:
            table.add_row(*map(Text, _row(target, found)), style="dim" if found is None else "")
        console.print(table)


def _row(target: Target, found: Profile | None) -> list[str]:
    if found is None:
        return [target.backend, *[""] * 6, target.reason or ""]
    moved, least = found.operand_bytes, target.least_bytes
    return [
        target.backend,
        str(len(found.kernels)),
        microseconds(found.us),
        microseconds(found.gap_us) if found.device == "cuda" else "",
        microseconds(found.host_us) if found.host_us is not None else "",
        byte_count(moved),
        f"{moved / least:.3g}" if moved is not None and least else "",
        "" if found.device == "cuda" else "interpreted" if target.backend.startswith("triton") else "on the CPU",
    ]


#: Heading, counter and how it is written.
COUNTERS = (
    ("time", "us", microseconds),
    ("DRAM read", "dram_read_bytes", byte_count),
    ("DRAM written", "dram_write_bytes", byte_count),
    ("L2", "l2_bytes", byte_count),
    ("tensor pipe", "tensor_pipe_pct", "{:.1f} %".format),
    ("issue slots", "issue_pct", "{:.1f} %".format),
    ("occupancy", "occupancy_pct", "{:.1f} %".format),
    ("possible", "theoretical_occupancy_pct", "{:.1f} %".format),
    ("registers", "registers", "{:.0f}".format),
    ("shared", "shared_bytes", byte_count),
    ("bank conflicts", "bank_conflicts", "{:,.0f}".format),
    ("spills", "local_bytes", byte_count),
)


def show_counters(row: Mapping[str, Any], notes: Sequence[str], console: Console, full_names: bool) -> None:
    """Print the counters of each kernel of a call, and of the whole call."""
    kernels, whole = row["kernels"], row["counters"]
    title = f"{row['op']} {row['backend']} {row['pass']}, {row['dtype']}, {row['shape']}"
    table = _table(title, ["#", "kernel"], [heading for heading, _, _ in COUNTERS])
    table.add_column("warps wait for", overflow="fold")
    for i, kernel in enumerate(kernels, 1):
        name = kernel["name"] if full_names else kernel["short"]
        cells = [str(i), name, *_counters(kernel), _stalls(ncu.top_stalls(kernel["stalls"]))]
        table.add_row(*map(Text, cells), end_section=i == len(kernels))
    if len(kernels) > 1:
        table.add_row(*map(Text, ["", "all", *_counters(whole), _stalls(whole["top_stalls"])]), style="bold")
    console.print(table)
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
    return [write(values[name]) if values.get(name) is not None else "—" for _, name, write in COUNTERS]


def _stalls(stalls: Mapping[str, float]) -> str:
    return ", ".join(f"{reason} {pct:.0f} %" for reason, pct in stalls.items())
