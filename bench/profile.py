"""``python -m bench profile``: which kernels a call runs, what they cost, and what they move."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from rich.console import Console

import kernel_ladder
from bench import environment, kernels, ncu, profile_tables, rows, targets, timing
from bench.targets import Target
from bench.usage import UsageError, dtype_of, known, nearest, passes_of, split

EPILOG = """\
examples:
  python -m bench profile gelu --backend torch.naive,cuda --shape 16384x4096
  python -m bench profile matmul --shape 4096x4096x4096 --backend cuda --ncu
  python -m bench profile attention --shape 2x16x2048x128 --option is_causal=True --pass both
  python -m bench profile torch.cdist --shape 4096x64,4096x64
  nsys profile --capture-range cudaProfilerApi python -m bench profile gelu --backend cuda.vectorized --one-call
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench profile",
        description="The kernels of one call: names, times, launch, bytes of the operators' tensors; with --ncu the "
        "GPU's counters. Without a GPU, the operators and their times on the CPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "op", help=f"{', '.join(kernel_ladder.OPS)}, or a function of PyTorch that takes tensors, as torch.cdist"
    )
    parser.add_argument(
        "--backend", action="append", metavar="NAME[,NAME]", help="levels or variants (default: all of the operation)"
    )
    parser.add_argument(
        "--shape",
        metavar="SHAPE",
        help="a case of the sweep or the samples, or sizes: 16384x4096, one part for each input (64x32,32x16); "
        "MxNxK for matmul, BxHxSxD for attention (default: the first case of the quick sweep)",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an argument that is no tensor, repeatable"
    )
    parser.add_argument("--dtype", metavar="NAME", help="default: bfloat16; float32 without a GPU")
    parser.add_argument("--pass", dest="pass_", default="forward", metavar="PASS", help="forward, backward or both")
    parser.add_argument("--ncu", action="store_true", help="counters of the GPU, read by Nsight Compute")
    parser.add_argument(
        "--save", action="store_true", help="with --ncu: keep the counters in bench/results/<gpu>.profile.jsonl"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (one for each backend)")
    parser.add_argument("--full-names", action="store_true", help="kernels' names with all types and parameters")
    parser.add_argument("--json", action="store_true", help="one JSON value instead of tables")
    parser.add_argument(
        "--one-call",
        action="store_true",
        help="only run: one call between cudaProfilerStart and cudaProfilerStop, for a profiler that started this",
    )
    return parser


def results_file() -> Path:
    """Where this machine's counters are kept."""
    return environment.results_file().with_suffix(".profile.jsonl")


def _targets(args: argparse.Namespace, device: torch.device) -> Iterator[Target]:
    """What the command line names, one at a time, so that only one's memory is held."""
    dtype = dtype_of(args.dtype) if args.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    passes, options = passes_of(args.pass_), targets.parse_options(args.option)
    if "." in args.op:
        if args.backend:
            raise UsageError(f"--backend names variants of {', '.join(kernel_ladder.OPS)}; {args.op} has none")
        return targets.of_function(args.op, args.shape, options, passes, dtype, device)
    if args.op not in kernel_ladder.OPS:
        raise UsageError(
            f"unknown operation {args.op!r}; {nearest(args.op, kernel_ladder.OPS)}Known are "
            f"{', '.join(kernel_ladder.OPS)}, and functions by their dotted name, such as torch.cdist"
        )
    variants = targets.variants_of(args.op, split(args.backend))
    case = targets.case_of(args.op, args.shape, options, dtype, device)
    return targets.of_operation(variants, case, passes, dtype, device)


def _one_call(targets_: Iterator[Target], device: torch.device) -> int:
    """Run each call once, warm, inside the range that a profiler around this process looks at."""
    for target in targets_:
        if target.reason is not None:
            raise UsageError(f"{target.backend}: {target.reason}")
        call = target.make()
        for _ in range(2):
            call()
        timing.synchronize(device)
        torch.cuda.profiler.start()
        call()
        timing.synchronize(device)
        torch.cuda.profiler.stop()
    return 0


def _profile(target: Target, device: torch.device) -> tuple[Target, kernels.Profile | None]:
    """A target's profile; without one, the target with its reason."""
    if target.reason is not None:
        return target, None
    try:
        return target, kernels.profile(target.make(), target.operators, device)
    except torch.OutOfMemoryError:
        return dataclasses.replace(target, reason=f"out of memory on {environment.machine_name()}"), None


def _look(args: argparse.Namespace, device: torch.device, console: Console) -> int:
    """Profile with PyTorch's profiler, and print tables or JSON."""
    results = []
    for target in _targets(args, device):
        result = _profile(target, device)
        results.append(result)
        if result[1] is not None and not args.json:
            profile_tables.show(*result, console, args.full_names)
    done = [(target, found) for target, found in results if found is not None]
    for target, found in done if args.trace else []:
        file = args.trace if len(done) == 1 else _trace_file(args.trace, target)
        rows.replace(file, json.dumps(found.trace))
        if not args.json:
            console.print(f"wrote {file}", soft_wrap=True)
    if args.json:
        print(json.dumps([_as_json(*result) for result in results], indent=1))
    else:
        profile_tables.compare(results, console)
    return _exit_code(results)


def _exit_code(results: Sequence[tuple[Target, Any]]) -> int:
    if any(found is not None for _, found in results):
        return 0
    reasons = dict.fromkeys(f"{target.backend}: {target.reason}" for target, _ in results)
    raise UsageError(f"nothing to profile: {'; '.join(reasons)}")


def _trace_file(file: Path, target: Target) -> Path:
    return file.with_name(f"{file.stem}.{target.backend}.{target.pass_}{file.suffix}")


def _as_json(target: Target, found: kernels.Profile | None) -> dict[str, Any]:
    names = ("op", "backend", "dtype", "shape", "least_bytes", "reason")
    value: dict[str, Any] = {**{name: getattr(target, name) for name in names}, "pass": target.pass_}
    value |= environment.facts()
    if found is not None:
        more = ("device", "device_us", "gap_us", "span_us", "host_us", "operands", "operand_bytes")
        value |= {name: getattr(found, name) for name in more}
        value["kernels"] = [{**dataclasses.asdict(kernel), "short": kernel.short} for kernel in found.kernels]
        value["operators"] = None if found.steps is None else [dataclasses.asdict(step) for step in found.steps]
    return value


def _count(args: argparse.Namespace, device: torch.device, console: Console) -> int:
    """Profile under Nsight Compute, and print tables or JSON; with --save, keep the counters."""
    ncu.find()
    if device.type != "cuda":
        raise UsageError("--ncu reads a GPU's counters, and no GPU is visible")
    found = []
    todo = list(_targets(args, device))
    for target in todo:
        if target.reason is not None:
            continue
        counted = ncu.count(_again(args, target))
        row = counters_row(target, counted)
        found.append(row)
        if args.save:
            save(results_file(), row)
        if not args.json:
            profile_tables.show_counters(row, counted.notes, console, args.full_names)
    if args.json:
        print(json.dumps(found, indent=1))
    return _exit_code([(target, None if target.reason else target) for target in todo])


def _again(args: argparse.Namespace, target: Target) -> list[str]:
    """The command that makes this one call."""
    shape = ["--shape", args.shape] if args.shape is not None else []
    options = [part for option in args.option for part in ("--option", option)]
    backend = [] if "." in args.op else ["--backend", target.backend]
    return [
        *("profile", args.op, *backend, *shape, *options),
        *("--dtype", target.dtype, "--pass", target.pass_, "--one-call"),
    ]


def counters_row(target: Target, counted: ncu.Counted) -> dict[str, Any]:
    """One line of the file of counters."""
    facts = environment.facts()
    versions = {name: facts[name] for name in ("driver", "cuda", "torch", "triton")}
    return {
        "op": target.op,
        "backend": target.backend,
        "pass": target.pass_,
        "dtype": target.dtype,
        "shape": target.shape,
        "gpu": facts["gpu"],
        "when": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "commit": facts["commit"],
        "dirty": facts["dirty"],
        "versions": {**versions, "ncu": counted.version},
        "counters": _rounded(ncu.totals(counted.kernels, target.least_bytes)),
        "kernels": _rounded(counted.kernels),
    }


def _rounded(value: Any) -> Any:
    """Six digits, and no fraction where there is none."""
    if isinstance(value, float):
        return None if not math.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


KEY = ("op", "backend", "pass", "dtype", "shape", "gpu")


def read(path: Path) -> list[dict[str, Any]]:
    """Every row of a file of counters; none where there is no file.

    Raises:
        rows.ResultsError: a line is truncated or foreign. The message names it.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise rows.ResultsError(f"{path}:{number}: not a whole JSON object ({error})") from None
        missing = [name for name in (*KEY, "counters", "kernels") if not isinstance(row, dict) or name not in row]
        if missing:
            raise rows.ResultsError(f"{path}:{number}: no row of counters: it lacks {', '.join(missing)}")
        found.append(row)
    return found


def save(path: Path, row: dict[str, Any]) -> None:
    """Add a row of counters; it takes the place of an earlier one of the same call."""
    kept = [each for each in read(path) if any(each[name] != row[name] for name in KEY)]
    rows.replace(path, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in [*kept, row]))


def main(argv: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0; 2 for a bad command line, or where nothing can be profiled."""
    args = _parser().parse_args(argv)
    device = environment.device()
    # Gradients are taken again and again on one graph, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    try:
        if args.save and not args.ncu:
            raise UsageError("--save keeps what --ncu reads; give both")
        if args.trace is not None and not args.trace.resolve().parent.is_dir():
            raise UsageError(f"--trace {args.trace}: there is no folder {args.trace.resolve().parent}")
        if args.one_call:
            if device.type != "cuda":
                raise UsageError("--one-call is for a profiler of the GPU, and no GPU is visible")
            return _one_call(_targets(args, device), device)
        if args.ncu:
            return _count(args, device, console)
        return _look(args, device, console)
    except (UsageError, ncu.NcuError, rows.ResultsError) as error:
        print(f"python -m bench profile: {error}", file=sys.stderr)
        return 2
