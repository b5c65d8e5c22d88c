"""``python -m kernel_ladder doctor``: the machine, versions, the available levels, and why the others are not."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_ladder import selection, table
from kernel_ladder._version import __version__
from kernel_ladder.cli import ceilings, device, survey
from kernel_ladder.cli.columns import Column, LeftOut, Line, fit, say
from kernel_ladder.cli.listing import status
from kernel_ladder.errors import BackendError, UnavailableError

ENVIRONMENT = (
    "KERNEL_LADDER_BACKEND",
    "KERNEL_LADDER_REQUIRE",
    "KERNEL_LADDER_AUTOTUNE",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)


def kernels() -> list[dict[str, Any]]:
    """Registers and memory of each CUDA kernel, as the extension reports them; empty if it was not built."""
    if importlib.util.find_spec("kernel_ladder._C") is None:
        return []
    from kernel_ladder import _C  # type: ignore[attr-defined]

    names = ("name", "registers", "static_shared", "dynamic_shared", "local", "threads", "blocks_per_sm")
    return [{name: getattr(kernel, name) for name in names} for kernel in _C.kernels()]


def facts() -> dict[str, Any]:
    """Everything that ``doctor`` shows."""
    return {
        "kernel_ladder": __version__,
        "gpus": gpus(),
        "cpu": device.cpu(),
        "versions": device.versions(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "levels": {op: {level: table.unavailable(op, level) for level in table.LEVELS} for op in table.OPS},
        "kernels": kernels(),
    }


def gpus() -> list[dict[str, Any]]:
    """The survey of each GPU, with its measured ceilings where they are known."""
    return [{**gpu, "ceilings": ceilings.known(gpu["index"])} for gpu in survey.gpus()]


def print_facts(console: Console, found: dict[str, Any]) -> None:
    def section(title: str) -> Table:
        console.print(f"\n[bold]{title}[/]")
        return Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))

    machine = section("machine")
    for gpu in found["gpus"]:
        machine.add_row(f"GPU {gpu['index']}", f"{escape(gpu['name'])}, compute capability {gpu['capability']}")
        for name, text in survey.in_words(gpu):
            machine.add_row("", f"[dim]{name}[/] {escape(text)}")
        machine.add_row("", f"[dim]measured[/] {escape(ceilings.in_words(gpu['ceilings']))}")
    if not found["gpus"]:
        machine.add_row("GPU", "none is visible")
    machine.add_row("CPU", f"{escape(found['cpu']['name'])}, {found['cpu']['cores']} cores")
    console.print(machine)

    versions = section("versions")
    versions.add_row("kernel_ladder", found["kernel_ladder"])
    missing = dict.fromkeys(("nvcc", "driver", "ptxas"), "not found")
    missing["cuda"] = "none: torch is built for the CPU only"
    labels = {"cuda": "torch's CUDA", "ptxas": "Triton's ptxas"}
    for name, value in found["versions"].items():
        versions.add_row(labels.get(name, name), escape(value or missing.get(name, "not installed")))
    for name, value in found["environment"].items():
        versions.add_row(name, escape(value))
        if name == table.ENV_BACKEND and (reason := _refused_backend()) is not None:
            versions.add_row("", f"[yellow]{escape(reason)}[/]")
    console.print(versions)

    levels = section("levels")
    for level in table.LEVELS:
        # A reason usually holds for every operation, so print it once.
        reasons: dict[str | None, list[str]] = {}
        for op, by_level in found["levels"].items():
            reasons.setdefault(by_level[level], []).append(op)
        for reason, ops in reasons.items():
            which = "every operation" if len(reasons) == 1 else ", ".join(ops)
            levels.add_row(level, which, status(level, reason))
    console.print(levels)

    _print_kernels(console, found)
    _print_summary(console, found)


def _refused_backend() -> str | None:
    """Why no operation takes the environment's backend, as the first of them says it, or None."""
    reasons = []
    for op in table.OPS:
        try:
            selection.check(op, None)
            return None
        except (BackendError, UnavailableError) as error:
            reasons.append(str(error))
    return reasons[0]


#: Heading, field, and priority for being left out where there is no room.
KERNEL_COLUMNS = (
    ("registers", "registers", 1),
    ("static shared", "static_shared", 6),
    ("dynamic shared", "dynamic_shared", 4),
    ("local", "local", 2),
    ("threads", "threads", 5),
    ("blocks per SM", "blocks_per_sm", 3),
)


def _print_kernels(console: Console, found: dict[str, Any]) -> None:
    """The driver's facts about each CUDA kernel. Without a GPU's driver there is nothing to list."""
    kernels = found["kernels"]
    if not kernels:
        return
    if all(kernel["registers"] < 0 for kernel in kernels):
        console.print("\n[bold]CUDA kernels[/]")
        say(
            console,
            f"{len(kernels)} are built in; a GPU's driver tells their registers, memory and occupancy. Without a GPU, "
            "`python -m kernel_ladder inspect OP --backend cuda` reads those of one variant from the code.",
        )
        return
    console.print("\n[bold]CUDA kernels[/] (bfloat16 where there is a choice; memory in bytes)")
    columns = [Column("kernel"), *(Column(heading, right=True, spare=n) for heading, _, n in KERNEL_COLUMNS)]
    lines = [
        Line([kernel["name"], *("?" if kernel[name] < 0 else str(kernel[name]) for _, name, _ in KERNEL_COLUMNS)])
        for kernel in kernels
    ]
    left_out = LeftOut()
    console.print(fit(console, columns, lines, left_out))
    left_out.show(console, "; so does --json")


def _print_summary(console: Console, found: dict[str, Any]) -> None:
    """The levels that run here, in one line."""
    runs = {level: sum(by_level[level] is None for by_level in found["levels"].values()) for level in table.LEVELS}
    count = len(found["levels"])
    usable = [level if n == count else f"{level} ({n} of {count} operations)" for level, n in runs.items() if n]
    missing = [level for level, n in runs.items() if not n]
    console.print("\n[bold]summary[/]")
    say(console, f"usable here: {', '.join(usable)}" + (f"; unavailable: {', '.join(missing)}" if missing else ""))
