"""``python -m bench counters``: hardware counters of every CUDA and Triton rung, at the call that its card shows.

One process an operation makes all of its calls under Nsight Compute. A small kernel (`MARK`) before each call tells
where its kernels begin in what ncu writes, and a line of JSON on the process's output what the call was.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console

import kernel_ladder
from bench.measure import environment, timing
from bench.measure.correctness import one_line
from bench.measure.selection import with_kernels
from bench.profile import counters, ncu, targets
from bench.profile.targets import Target
from bench.rows import store
from bench.show import predictions
from bench.usage import UsageError, dtype_of, known, passes_of, split
from kernel_ladder import table
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.table import Variant
from kernel_ladder.testing.samples import empty_inputs

#: The levels whose rungs are kernels that somebody wrote.
LEVELS = ("triton", "cuda")
#: What ``torch.cuda._sleep`` launches.
MARK = "spin_kernel"
#: The names of a target's fields in a line of a process's output.
FIELDS = ("op", "backend", "pass_", "dtype", "shape", "least_bytes")


def call_of(variant: Variant, pass_: str, device: torch.device) -> tuple[Case, torch.dtype] | None:
    """The first call with a pass that the rung takes: its card's, the quick cases from the last on, the sweep's.

    16 bits come first. None where no call of the sweep has that pass, or launches kernels in it.
    """
    spec = kernel_ladder.spec(variant.op)
    note = predictions.notes().get(variant.op, {}).get(variant.name, {})
    quick = [case for case in spec.sweep if case.quick]
    cases = sorted([*reversed(quick), *spec.sweep], key=lambda case: case.id != note.get("shape"))
    dtypes = [dtype_of(note["dtype"])] if "dtype" in note else [torch.bfloat16, torch.float32]
    for dtype, case in itertools.product(dtypes, cases):
        if not with_kernels([pass_], variant.op, case):
            continue
        inputs = targets.tensors(empty_inputs, case, dtype, device)
        given = as_leaves(inputs) if pass_ == "backward" else inputs
        if variant.unsupported(*given, **case.options) is None:
            return case, dtype
    return None


def calls(op: str, backends: Sequence[str], passes: Sequence[str], device: torch.device) -> Iterator[Target]:
    """Each pass of each rung that `backends` (levels and variants) name, or why it cannot be called.

    Rungs of other levels than `LEVELS` only if they themselves are named: a library or a compiler made their kernels.
    """
    for variant in targets.variants_of(op, backends):
        if variant.level not in LEVELS and variant.name not in backends:
            continue
        reason = table.unavailable(op, variant.level)
        for pass_ in passes:
            found = call_of(variant, pass_, device) if reason is None else None
            if found is None:
                yield Target(op, variant.name, pass_, "", "", reason=reason or "takes no call of the sweep")
            else:
                case, dtype = found
                yield from targets.of_operation([variant], case, [pass_], dtype, device)


def make_calls(given: Iterator[Target], device: torch.device) -> None:
    """Make each call once, warm, in a profiler's range, and write a line of JSON for each."""
    for target in given:
        line = {name: getattr(target, name) for name in FIELDS}
        reason, marked = target.reason, False
        if target.make is not None and reason is None:
            try:
                call = target.make()
                for _ in range(2):
                    call()
                timing.synchronize(device)
                torch.cuda.profiler.start()
                marked = True
                torch.cuda._sleep(1)
                call()
                timing.synchronize(device)
            except Exception as error:  # one broken kernel must not cost the counters of the others
                reason = one_line(error)
            finally:
                torch.cuda.profiler.stop()
        print("\n" + json.dumps({**line, "reason": reason, "marked": marked}), flush=True)


def read(
    op: str, backends: Sequence[str], passes: str, metrics: ncu.Metrics
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Rows of counters of an operation's calls; what was refused, and what went wrong.

    Raises:
        NcuError: ncu is missing or may not read counters.
    """
    backend = ["--backend", ",".join(backends)] if backends else []
    counted, text, error = ncu.read(["counters", "--op", op, *backend, "--pass", passes, "--calls"], metrics)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"op"')]
    parts = by_call(counted.kernels)
    marked = [line for line in lines if line["marked"]]
    rows, wrong = [], []
    for line, part in zip(marked, parts, strict=False):
        target = Target(**{name: line[name] for name in FIELDS})
        if line["reason"] is not None or not part:
            wrong.append(f"{target}: {line['reason'] or 'the call launches no kernel'}")
        else:
            rows.append(counters.make(target, dataclasses.replace(counted, kernels=part)))
    refused = [f"{line['backend']} {line['pass_']}: {line['reason']}" for line in lines if not line["marked"]]
    if len(parts) != len(marked) or not lines:
        last = [each for each in error.splitlines() if each.strip()][-1:]
        wrong.append(
            f"{op}: ncu counted {len(parts)} calls of {len(marked)}; {'; '.join(last) or 'and gave no reason'}"
        )
    return rows, refused, wrong


def by_call(kernels: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The kernels of each call: those between one mark and the next."""
    parts: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if MARK in kernel["name"]:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    return parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench counters",
        description="Hardware counters of every CUDA and Triton rung, at the call that its card in docs/climb shows, "
        "read by Nsight Compute and kept in bench-results/<gpu>.profile.jsonl.",
    )
    parser.add_argument("--op", action="append", metavar="NAME[,NAME]", help="operations (default: all)")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME[,NAME]",
        help="levels or rungs (default: all of CUDA and Triton); rungs of other levels by name, such as torch.naive",
    )
    parser.add_argument(
        "--pass", dest="pass_", default="both", metavar="PASS", help="forward, backward or both (default)"
    )
    parser.add_argument("--calls", action="store_true", help="only make the calls, for a profiler that started this")
    return parser


def main(argv: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0; 1 where a call failed; 2 for a bad command line, or where nothing can be counted."""
    args = _parser().parse_args(argv)
    device = environment.device()
    torch._functorch.config.donated_buffer = False
    try:
        ops = [known("operation", op, kernel_ladder.OPS) for op in split("--op", args.op, kernel_ladder.OPS)]
        ops = ops or list(kernel_ladder.OPS)
        passes = passes_of(args.pass_)
        named = list(dict.fromkeys([*LEVELS, *(v.name for op in ops for v in table.variants(op))]))
        backends = [known("backend", each, named) for each in split("--backend", args.backend, named)]
        if device.type != "cuda":
            raise UsageError("counters are a GPU's, and no GPU is visible")
        if args.calls:
            for op in ops:
                make_calls(calls(op, backends, passes, device), device)
            return 0
        return _count(ops, backends, args.pass_, console)
    except (UsageError, ncu.NcuError, store.ResultsError) as error:
        print(f"python -m bench counters: {error}", file=sys.stderr)
        return 2


def _count(ops: Sequence[str], backends: Sequence[str], passes: str, console: Console) -> int:
    failed, metrics = False, ncu.every_metric()
    for op in ops:
        mine = [each for each in backends if each in targets.backends_of(op)]
        if backends and not mine:
            continue
        rows, refused, wrong = read(op, mine, passes, metrics)
        for row in rows:
            counters.save(counters.results_file(), row)
        console.print(f"{op}: {len(rows)} calls counted, {len(refused)} refused", soft_wrap=True, highlight=False)
        for reason in refused:
            console.print(f"  {reason}", soft_wrap=True, highlight=False, markup=False)
        for reason in wrong:
            print(reason, file=sys.stderr)
        failed = failed or bool(wrong)
    console.print(f"the rows are in {counters.results_file()}", soft_wrap=True, highlight=False)
    return 1 if failed else 0
