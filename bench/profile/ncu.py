"""Hardware counters of the kernels of one call, read by Nsight Compute (``ncu``) in a process that it starts.

Metric names are those of Nsight Compute's Kernel Profiling Guide for compute capability 9.0; where versions or GPUs
differ, the next name is tried, and a counter without any is left out with a note.
"""

from __future__ import annotations

import csv
import glob
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import environment
from bench.profile.kernels import short_name
from kernel_ladder.inspection.cubin import demangle

#: Counter -> the metrics that give it, in the order in which they are tried.
COUNTERS: dict[str, tuple[str, ...]] = {
    "us": ("gpu__time_duration.sum",),
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "l2_bytes": ("lts__t_bytes.sum",),
    "tensor_pipe_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "theoretical_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    "registers": ("launch__registers_per_thread",),
    "shared_static_bytes": ("launch__shared_mem_per_block_static",),
    "shared_dynamic_bytes": ("launch__shared_mem_per_block_dynamic",),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "local_read_bytes": ("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",),
    "local_write_bytes": ("l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",),
}
#: Counters that are the sum of two.
SUMS = {
    "dram_bytes": ("dram_read_bytes", "dram_write_bytes"),
    "shared_bytes": ("shared_static_bytes", "shared_dynamic_bytes"),
    "local_bytes": ("local_read_bytes", "local_write_bytes"),
}
#: How long a warp waits, for each reason, between two instructions that it issues. ``selected`` is the issue itself.
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
STALL_METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

TOP_STALLS = 3
#: By counter, the names of metrics to try, in order.
Metrics = dict[str, tuple[str, ...]]

#: To microseconds, or to bytes. Base units are asked for; older and newer versions spell them differently.
UNITS = {
    **{"s": 1e6, "second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "usecond": 1.0, "ns": 1e-3, "nsecond": 1e-3},
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
}

PERMISSION = (
    "the driver lets only the administrator read the GPU's counters (ERR_NVGPUCTRPERM): run as root, in a container "
    "with --cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)


class NcuError(Exception):
    """Nsight Compute is missing, or may not read counters."""


class CallError(Exception):
    """Nsight Compute read no counters of one call."""


@dataclass
class Counted:
    """The counters of each kernel of a call, and what this version of ``ncu`` could not tell."""

    kernels: list[dict[str, Any]]
    notes: list[str]
    version: str


def find() -> str:
    """The path of ``ncu``: on the PATH, in the toolkit, or where its own installer puts it."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [str(Path(home, "bin", "ncu")) for home in [*homes, "/usr/local/cuda"]]
    places += sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)
    for place in [shutil.which("ncu"), *places]:
        if place and os.access(place, os.X_OK):
            return place
    raise NcuError(
        "--ncu needs Nsight Compute, and no `ncu` is on the PATH, in CUDA_HOME or in /opt/nvidia/nsight-compute; "
        "it comes with the CUDA toolkit"
    )


def count(arguments: Sequence[str]) -> Counted:
    """The counters of the call that ``python -m bench`` with `arguments` makes in a profiler's range.

    The caches are flushed before each kernel and the clock is left alone. A kernel runs several times over, its
    memory restored in between, because the GPU counts only a few things at a time.

    Raises:
        NcuError: ncu is missing or may not read counters. CallError: no counters of this call, with ncu's reason.
    """
    counted, text, error = read(arguments, every_metric())
    if not counted.kernels:
        raise CallError(_why(text, error))
    return counted


def every_metric() -> Metrics:
    """By counter, the metrics that give it."""
    return {**COUNTERS, **{f"stall {reason}": (STALL_METRIC.format(reason),) for reason in STALLS}}


def read(arguments: Sequence[str], wanted: Metrics) -> tuple[Counted, str, str]:
    """The counters of every kernel in a range of ``python -m bench`` with `arguments`; its output, and its stderr.

    Names that ncu does not know are taken out of `wanted`.

    Raises:
        NcuError: ncu is missing or may not read counters.
    """
    ncu = find()
    notes: list[str] = []
    while True:
        text, error = _run(ncu, [names[0] for names in wanted.values()], arguments)
        unknown = _unknown_metrics(text)
        dropped = [counter for counter, names in wanted.items() if names[0] in unknown]
        if not dropped:
            break
        for counter in dropped:
            wanted[counter] = wanted[counter][1:]
            if not wanted[counter]:
                notes.append(f"this ncu does not know {counter}")
                del wanted[counter]
    kernels = [_counters(row, wanted) for row in parse(text)]
    if not kernels and "ERR_NVGPUCTRPERM" in text + error:
        raise NcuError(PERMISSION)
    for counter in wanted:
        name = counter.removeprefix("stall ")
        if kernels and not any(name in kernel or name in kernel["stalls"] for kernel in kernels):
            notes.append(f"{counter} is not to be had on this GPU")
    return Counted(kernels, notes, _version(ncu)), text, error


def _run(ncu: str, metrics: Sequence[str], arguments: Sequence[str]) -> tuple[str, str]:
    """What ncu wrote, and what the program under it wrote to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        command = [
            *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
            *("--profile-from-start", "off", "--target-processes", "application-only", "--replay-mode", "kernel"),
            # Names as the linker has them: ncu's own demangler loses those in an unnamed namespace.
            *("--print-kernel-base", "mangled", "--cache-control", "all", "--clock-control", "none"),
            *("--metrics", ",".join(metrics)),
            *(sys.executable, "-m", "bench", *arguments),
        ]
        # Elsewhere a comma may be a decimal point.
        neutral = {**os.environ, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(command, cwd=environment.ROOT, env=neutral, capture_output=True, text=True)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        # ncu says on stdout what goes wrong before it opens its log.
        return text + "\n" + done.stdout, done.stderr


def _unknown_metrics(text: str) -> set[str]:
    """Metrics that ncu says it cannot find. It names each by its base, by its whole name or by a regular expression."""
    lines = [line for line in text.splitlines() if "Failed to find metric" in line]
    bases = {base for line in lines for base in re.findall(r"\w+__\w+", line)}
    asked = [name for names in COUNTERS.values() for name in names] + [STALL_METRIC.format(r) for r in STALLS]
    return {name for name in asked if name.partition(".")[0] in bases}


def _why(text: str, error: str) -> str:
    lines = [line for line in (text + "\n" + error).splitlines() if "==ERROR==" in line]
    last = [line for line in error.splitlines() if line.strip()][-1:]
    if not lines and "No kernels were profiled" in text and not last:
        return "the call launches no kernel"
    return "ncu gave no counters: " + "; ".join([*(line.strip() for line in lines), *last] or ["and no reason"])


def _version(ncu: str) -> str:
    done = subprocess.run([ncu, "--version"], capture_output=True, text=True)
    found = re.search(r"Version ([\w.]+)", done.stdout)
    return found[1] if found else "unknown"


def parse(text: str) -> list[dict[str, tuple[str, str]]]:
    """Rows of ``ncu --csv --page raw``: column -> (value, unit), a row a kernel.

    Lines of ncu's own (``==PROF==``) are passed over. The line of units under the heading may be missing.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = [row for row in csv.reader(lines) if row]
    start = next((i for i, row in enumerate(table) if "ID" in row and "Kernel Name" in row), None)
    if start is None:
        return []
    heading, body = table[start], table[start + 1 :]
    place = heading.index("ID")
    units = [""] * len(heading)
    if body and not body[0][place]:
        units, body = body[0], body[1:]
    return [
        {name: (value, unit) for name, value, unit in zip(heading, row, units, strict=True)}
        for row in body
        if len(row) == len(heading) and row[place].isdigit()
    ]


def _number(value: str, unit: str) -> float | None:
    try:
        number = float(value.replace(",", ""))
    except ValueError:  # "n/a", or nothing
        return None
    return number * UNITS.get(unit.partition("/")[0], 1.0)


def _size(text: str) -> list[int] | None:
    found = [int(n) for n in re.findall(r"\d+", text)]
    return found or None


def _counters(row: Mapping[str, tuple[str, str]], wanted: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """One kernel's counters in microseconds, bytes and percent; those that were not read are left out."""
    name = row["Kernel Name"][0]
    if name.startswith("_Z"):
        name = demangle(name)
    kernel: dict[str, Any] = {"name": name, "short": short_name(name)}
    kernel["grid"], kernel["block"] = (_size(row.get(key, ("", ""))[0]) for key in ("Grid Size", "Block Size"))
    read = {counter: _number(*row.get(names[0], ("", ""))) for counter, names in wanted.items()}
    found = {counter: value for counter, value in read.items() if value is not None}
    waits = {c.removeprefix("stall "): value for c, value in found.items() if c.startswith("stall ")}
    whole = sum(waits.values())
    kernel.update({c: value for c, value in found.items() if not c.startswith("stall ")})
    for both, parts in SUMS.items():
        if all(part in kernel for part in parts):
            kernel[both] = sum(kernel[part] for part in parts)
    kernel["stalls"] = {reason: 100 * wait / whole for reason, wait in waits.items()} if whole else {}
    return kernel


def top_stalls(stalls: Mapping[str, float]) -> dict[str, float]:
    """The reasons for which warps wait longest, in percent of their time; issuing is no stall."""
    waits = sorted(((pct, reason) for reason, pct in stalls.items() if reason != "selected"), reverse=True)
    return {reason: pct for pct, reason in waits[:TOP_STALLS] if pct > 0}


def totals(kernels: Sequence[Mapping[str, Any]], least_bytes: int | None) -> dict[str, Any]:
    """A call's counters: sums of bytes and conflicts, the most of registers and memory, means of percents by time.

    None where a kernel lacks the counter, so that no sum is short of a part.
    """
    weights = [kernel.get("us") or 0.0 for kernel in kernels]

    def over(counter: str, combine: Callable[[Iterable[float]], float]) -> float | None:
        values = [kernel.get(counter) for kernel in kernels]
        return None if None in values else combine(values)

    def weighted(values: Iterable[float]) -> float:
        values = list(values)
        return statistics.fmean(values, weights) if sum(weights) else statistics.fmean(values)

    found: dict[str, Any] = {"us": over("us", sum), "least_bytes": least_bytes}
    found |= {name: over(name, sum) for name in ("dram_bytes", "dram_read_bytes", "dram_write_bytes", "l2_bytes")}
    for name in ("tensor_pipe_pct", "issue_pct", "occupancy_pct", "theoretical_occupancy_pct"):
        found[name] = over(name, weighted)
    found |= {name: over(name, max) for name in ("registers", "shared_bytes")}
    found |= {name: over(name, sum) for name in ("bank_conflicts", "local_bytes")}
    reasons = sorted({reason for kernel in kernels for reason in kernel["stalls"]})
    stalls = {reason: weighted(kernel["stalls"].get(reason, 0.0) for kernel in kernels) for reason in reasons}
    found["top_stalls"] = top_stalls(stalls)
    return found
