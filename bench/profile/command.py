"""``python -m bench profile``: which kernels a call runs, what they cost, and what they move."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from rich.console import Console

import kernel_ladder
from bench.measure import environment, timing
from bench.profile import counters, functions, kernels, ncu, tables, targets
from bench.profile.targets import Target
from bench.rows import store
from bench.usage import UsageError, dtype_of, nearest, passes_of, split

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
        "--save", action="store_true", help="with --ncu: keep the counters in bench-results/<gpu>.profile.jsonl"
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


def _targets(args: argparse.Namespace, device: torch.device) -> Iterator[Target]:
    """What the command line names, one at a time, so that only one's memory is held."""
    dtype = (
        dtype_of(args.dtype) if args.dtype is not None else torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    passes, options = passes_of(args.pass_), targets.parse_options(args.option)
    if "." in args.op:
        if args.backend:
            raise UsageError(f"--backend names variants of {', '.join(kernel_ladder.OPS)}; {args.op} has none")
        return functions.of_function(args.op, args.shape, options, passes, dtype, device)
    if args.op not in kernel_ladder.OPS:
        raise UsageError(
            f"unknown operation {args.op!r}; {nearest(args.op, kernel_ladder.OPS)}Known are "
            f"{', '.join(kernel_ladder.OPS)}, and functions by their dotted name, such as torch.cdist"
        )
    backends = split("--backend", args.backend, targets.backends_of(args.op))
    variants = targets.variants_of(args.op, backends)
    case = targets.case_of(args.op, args.shape, options, dtype, device)
    missing = targets.absent(args.op, backends, case, passes, dtype)
    return itertools.chain(targets.of_operation(variants, case, passes, dtype, device), missing)


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
    except Exception as error:  # one broken kernel must not cost the profiles of the others
        line = str(error).strip().partition("\n")[0]
        return dataclasses.replace(target, reason=f"raised {type(error).__name__}: {line}", broken=True), None


def _look(args: argparse.Namespace, device: torch.device, console: Console) -> int:
    """Profile with PyTorch's profiler, and print tables or JSON."""
    results = []
    for target in _targets(args, device):
        result = _profile(target, device)
        results.append(result)
        if result[1] is not None and not args.json:
            tables.show(*result, console, args.full_names)
    done = [(target, found) for target, found in results if found is not None]
    if not done:
        raise UsageError(_nothing(target for target, _ in results))
    for target, found in done if args.trace else []:
        file = args.trace if len(done) == 1 else _trace_file(args.trace, target)
        store.replace(file, json.dumps(found.trace))
        if not args.json:
            console.print(f"wrote {file}", soft_wrap=True)
    if args.json:
        print(json.dumps([_as_json(*result) for result in results], indent=1))
    else:
        tables.compare(results, console)
    return 1 if any(target.broken for target, _ in results) else 0


def _nothing(given: Iterable[Target]) -> str:
    reasons = dict.fromkeys(f"{target.backend}: {target.reason}" for target in given)
    return f"nothing to profile; {'; '.join(reasons)}"


def _trace_file(file: Path, target: Target) -> Path:
    return file.with_name(f"{file.stem}.{target.backend}.{target.pass_}{file.suffix}")


def _as_json(target: Target, found: kernels.Profile | None) -> dict[str, Any]:
    names = ("op", "backend", "dtype", "shape", "least_bytes", "reason")
    value: dict[str, Any] = {**{name: getattr(target, name) for name in names}, "pass": target.pass_}
    value |= environment.facts()
    if found is not None:
        more = ("device", "device_us", "gap_us", "span_us", "plain_us", "host_us", "operands", "operand_bytes")
        value |= {name: getattr(found, name) for name in more}
        value["kernels"] = [{**dataclasses.asdict(kernel), "short": kernel.short} for kernel in found.kernels]
        value["operators"] = None if found.steps is None else [dataclasses.asdict(step) for step in found.steps]
    return value


def _count(args: argparse.Namespace, device: torch.device, console: Console) -> int:
    """Profile under Nsight Compute, and print tables or JSON; with --save, keep the counters."""
    if device.type != "cuda":
        raise UsageError("--ncu reads a GPU's counters, and no GPU is visible")
    ncu.find()
    # The calls are made in processes of their own, which need the memory.
    given = [dataclasses.replace(target, make=None) for target in _targets(args, device)]
    torch.cuda.empty_cache()
    todo = [target for target in given if target.reason is None]
    if not todo:
        raise UsageError(_nothing(given))
    found, failed = [], False
    for target in todo:
        try:
            counted = ncu.count(_again(args, target))
        except ncu.CallError as error:  # one broken kernel must not cost the counters of the others
            print(f"{target}: {error}", file=sys.stderr)
            failed = True
            continue
        row = counters.make(target, counted)
        found.append(row)
        if args.save:
            counters.save(counters.results_file(), row)
        if not args.json:
            tables.show_counters(row, counted.notes, console, args.full_names)
    if args.json:
        print(json.dumps(found, indent=1))
    elif args.save and found:
        console.print(f"{len(found)} rows are in {counters.results_file()}", soft_wrap=True)
    return 1 if failed else 0


def _again(args: argparse.Namespace, target: Target) -> list[str]:
    """The command that makes this one call."""
    shape = ["--shape", args.shape] if args.shape is not None else []
    options = [part for option in args.option for part in ("--option", option)]
    backend = [] if "." in args.op else ["--backend", target.backend]
    return [
        *("profile", args.op, *backend, *shape, *options),
        *("--dtype", target.dtype, "--pass", target.pass_, "--one-call"),
    ]


def main(argv: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0; 1 where a call failed; 2 for a bad command line, or where nothing can be profiled."""
    args = _parser().parse_args(argv)
    device = environment.device()
    # Gradients are taken again and again on one graph, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    try:
        if args.save and not args.ncu:
            raise UsageError("--save keeps what --ncu reads; give both")
        if args.trace is not None and not args.trace.resolve().parent.is_dir():
            raise UsageError(f"--trace {args.trace}: there is no folder {args.trace.resolve().parent}")
        if args.trace is not None:
            store.check_writable(args.trace)
        if args.one_call:
            if device.type != "cuda":
                raise UsageError("--one-call is for a profiler of the GPU, and no GPU is visible")
            return _one_call(_targets(args, device), device)
        if args.ncu:
            return _count(args, device, console)
        return _look(args, device, console)
    except (UsageError, ncu.NcuError, store.ResultsError) as error:
        print(f"python -m bench profile: {error}", file=sys.stderr)
        return 2
