"""``python -m kernel_ladder list``: what there is. ``python -m kernel_ladder doctor``: what this machine can run."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_ladder import device, table
from kernel_ladder._version import __version__

ENVIRONMENT = (
    "KERNEL_LADDER_BACKEND",
    "KERNEL_LADDER_REQUIRE",
    "KERNEL_LADDER_AUTOTUNE",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)


def note(level: str) -> str | None:
    """What a level's package says of itself here though it is available, or None."""
    try:
        package = importlib.import_module(table.LEVELS[level])
    except ImportError:
        return None
    return getattr(package, "note", lambda: None)()


def status(level: str, reason: str | None) -> str:
    """A level's state, marked up: available or not, and what there is to say about it."""
    if reason is not None:
        return f"[yellow]unavailable:[/] {escape(reason)}"
    return "[green]available[/]" + (f", {escape(more)}" if (more := note(level)) else "")


def summary(variant: table.Variant) -> str:
    """The first line of what a variant's function says of itself, or nothing."""
    text = inspect.getdoc(variant.forward) or ""
    return text.partition("\n")[0]


def rows_of_list(ops: list[str]) -> list[dict[str, Any]]:
    """One row per operation and variant, and one for a level that has none to show."""
    rows = []
    for op in ops:
        for level in table.LEVELS:
            reason = table.unavailable(op, level)
            for variant in table.variants(op, level):
                rows.append({"op": op, "variant": variant.name, "reason": reason, "summary": summary(variant)})
            if not table.variants(op, level):
                rows.append({"op": op, "variant": level, "reason": reason or "no variant yet", "summary": ""})
    return rows


def print_list(console: Console, rows: list[dict[str, Any]]) -> None:
    with_summaries = any(row["summary"] for row in rows)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("op", no_wrap=True)
    grid.add_column("variant", no_wrap=True)
    grid.add_column("status", overflow="fold")
    if with_summaries:
        grid.add_column("idea", overflow="fold")
    shown = None
    for row in rows:
        if shown is not None and row["op"] != shown:
            grid.add_row()
        level = row["variant"].partition(".")[0]
        cells = [row["op"] if row["op"] != shown else "", row["variant"], status(level, row["reason"])]
        grid.add_row(*cells, *([escape(row["summary"])] if with_summaries else []))
        shown = row["op"]
    console.print(grid)


def kernels() -> list[dict[str, Any]]:
    """What the compiler made of each CUDA kernel, as the extension tells; empty where it was not built."""
    if importlib.util.find_spec("kernel_ladder._C") is None:
        return []
    from kernel_ladder import _C  # type: ignore[attr-defined]

    names = ("name", "registers", "static_shared", "dynamic_shared", "local", "threads", "blocks_per_sm")
    return [{name: getattr(kernel, name) for name in names} for kernel in _C.kernels()]


def facts() -> dict[str, Any]:
    """Everything that ``doctor`` shows."""
    return {
        "kernel_ladder": __version__,
        "gpus": device.gpus(),
        "cpu": device.cpu(),
        "versions": device.versions(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "levels": {op: {level: table.unavailable(op, level) for level in table.LEVELS} for op in table.OPS},
        "kernels": kernels(),
    }


def print_facts(console: Console, found: dict[str, Any]) -> None:
    def section(title: str) -> Table:
        console.print(f"\n[bold]{title}[/]")
        return Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))

    machine = section("machine")
    for gpu in found["gpus"]:
        l2 = f", {gpu['l2'] / 2**20:.0f} MiB L2" if gpu["l2"] else ""
        text = f"{gpu['name']}, capability {gpu['capability']}, {gpu['multiprocessors']} SMs"
        machine.add_row(f"GPU {gpu['index']}", f"{text}, {gpu['memory'] / 2**30:.1f} GiB{l2}")
    if not found["gpus"]:
        machine.add_row("GPU", "none is visible")
    machine.add_row("CPU", f"{escape(found['cpu']['name'])}, {found['cpu']['cores']} cores")
    console.print(machine)

    versions = section("versions")
    versions.add_row("kernel_ladder", found["kernel_ladder"])
    missing = {"cuda": "none: torch is built for the CPU only", "nvcc": "not found", "driver": "not found"}
    for name, value in found["versions"].items():
        label = "torch's CUDA" if name == "cuda" else name
        versions.add_row(label, escape(value or missing.get(name, "not installed")))
    for name, value in found["environment"].items():
        versions.add_row(name, escape(value))
    console.print(versions)

    levels = section("levels")
    for level in table.LEVELS:
        # Most often a reason holds for every operation: say it once.
        reasons: dict[str | None, list[str]] = {}
        for op, by_level in found["levels"].items():
            reasons.setdefault(by_level[level], []).append(op)
        for reason, ops in reasons.items():
            which = "every operation" if len(reasons) == 1 else ", ".join(ops)
            levels.add_row(level, which, status(level, reason))
    console.print(levels)

    if found["kernels"]:
        console.print("\n[bold]CUDA kernels[/] (bfloat16 where there is a choice; memory in bytes)")
        grid = Table(box=None, pad_edge=False, header_style="dim")
        grid.add_column("kernel", no_wrap=True)
        for name in ("registers", "static shared", "dynamic shared", "local", "threads", "blocks per SM"):
            grid.add_column(name, justify="right")
        for kernel in found["kernels"]:
            name, *numbers = kernel.values()
            # The driver alone knows; without a GPU the extension answers −1.
            grid.add_row(name, *("?" if n < 0 else str(n) for n in numbers))
        console.print(grid)
        if not found["gpus"]:
            console.print("What stands as ? can be asked on a machine with a GPU only.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernel_ladder", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    lister = commands.add_parser("list", help="every operation and variant, with its status and the reason")
    lister.add_argument("op", nargs="*", metavar="op", help=f"operations (default: all of {', '.join(table.OPS)})")
    doctor = commands.add_parser("doctor", help="the machine, versions, what is available and why the rest is not")
    for each in (lister, doctor):
        each.add_argument("--json", action="store_true", help="one JSON value instead of a table")
    chosen = parser.parse_args(arguments)

    # When piped, rich takes 80 columns and folds what a script or a log would rather have whole.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if chosen.command == "list":
        for op in chosen.op:
            if op not in table.OPS:
                parser.error(f"unknown operation {op!r}; operations are {', '.join(table.OPS)}")
        rows = rows_of_list(chosen.op or list(table.OPS))
        print(json.dumps(rows, indent=1)) if chosen.json else print_list(console, rows)
    else:
        found = facts()
        print(json.dumps(found, indent=1)) if chosen.json else print_facts(console, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
