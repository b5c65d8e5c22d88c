"""``torchrun --nproc-per-node N -m bench.scaling``: ring attention, products and training steps on several GPUs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.ranks import Group, RanksError, launched, leave
from bench.rows import store
from bench.scaling import block, fsdp, link, products, ring, ring_varlen, show
from bench.scaling.rows import read, results_file, tidy
from bench.scaling.run import Run
from bench.usage import UsageError, known, split
from kernel_ladder.cli.columns import console_for
from kernel_ladder.errors import BackendError
from kernel_ladder.table import asked_for

BENCHMARKS = {
    "ring": ring.measure,
    "ring_varlen": ring_varlen.measure,
    "products": products.measure,
    "block": block.measure,
    "fsdp": fsdp.measure,
}
HOW = "torchrun --nproc-per-node N -m bench.scaling"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=HOW, description="Check what runs on N GPUs against one, then time it beside one GPU."
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME[,NAME]",
        help=f"{', '.join(BENCHMARKS)} (default: all)",
    )
    parser.add_argument(
        "--lengths",
        metavar="N[,N]",
        help="total tokens of `ring`, multiples of twice the GPUs, such as 32k,128k (default: by the number of GPUs)",
    )
    parser.add_argument("--backend", default="auto", help="a level, a rung or auto (default), of every call of ours")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes, few rounds: every path and check, and no measure of speed"
    )
    parser.add_argument(
        "--time", type=float, metavar="SECONDS", help="of rounds for each way (default: 0.6; quick 0.2)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="after which a rank that is gone ends the run"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="rows (default: bench-results/scaling/<machine>.jsonl)"
    )
    return parser


def _lengths(text: str | None, ranks: int) -> tuple[int, ...]:
    """The numbers of `--lengths`, where k means 1024 and M its square."""
    found = []
    for each in (text or "").split(",") if text is not None else ():
        number, unit = (each[:-1], each[-1:]) if each[-1:] in ("k", "M") else (each, "")
        length = int(number) * {"": 1, "k": 2**10, "M": 2**20}[unit] if number.isdecimal() else 0
        if length == 0 or length % (2 * ranks):
            raise UsageError(f"--lengths must be positive multiples of {2 * ranks}, such as 32k,128k; got {each!r}")
        found.append(length)
    return tuple(found)


def _device(local: int) -> torch.device:
    """This process's GPU; the CPU where there is none at all."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    if local >= count:
        raise UsageError(f"--nproc-per-node must be at most the {count} visible GPUs, got a process for GPU {local}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _run(args: argparse.Namespace) -> int:
    place = launched()
    if place is None:
        raise UsageError(f"start it with torchrun, a process for each GPU: {HOW}")
    named = split("--only", args.only, BENCHMARKS)
    chosen = [known("benchmark", name, list(BENCHMARKS)) for name in named] or list(BENCHMARKS)
    seconds = args.time if args.time is not None else 0.01 if args.dry_run else 0.2 if args.quick else 0.6
    for option, value in (("--time", seconds), ("--timeout", args.timeout)):
        if not 0 < value < math.inf:
            raise UsageError(f"{option} must be a positive number of seconds, got {value}")
    asked_for("attention", args.backend)
    lengths = _lengths(args.lengths, place.size)
    device = _device(place.local)
    if device.type == "cpu" and not args.dry_run:
        raise UsageError("no GPU is visible; --dry-run checks every path on the CPU with tiny sizes")
    if device.type == "cpu":
        torch.set_num_threads(1)
    console = console_for(180)
    output = args.out or results_file()
    group = Group(device, args.timeout)
    run = Run(group, console, output, args.backend, args.quick, args.dry_run, args.timeout, seconds, lengths)
    machines = group.gather(torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU")
    if len(set(machines)) > 1:
        raise UsageError(f"all ranks must have the same GPU, got {', '.join(machines)}")
    _, reason = group.agree(lambda: _prepare(run))
    if reason is not None:
        raise UsageError(reason)
    link.measure(run)
    for name in chosen:
        BENCHMARKS[name](run)
    if group.rank == 0:
        tidy(output)
        show.show(run.rows, console)
        run.say(f"{len(run.rows)} rows are in {output}")
    wrong = [f"{row.op} {row.shape} {row.pass_}: {row.wrong}" for row in run.rows if row.wrong]
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    failed = group.gather(bool(wrong))[0]
    group.close()
    return int(failed)


def _prepare(run: Run) -> None:
    """Find out on rank 0 that the rows can be read and written, before anything is measured."""
    if run.group.rank == 0:
        read(run.output)
        store.check_writable(run.output)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 where a result is wrong or a rank is gone; 2 for a bad command line or file."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except (UsageError, BackendError, store.ResultsError) as error:
        print(f"bench.scaling: {error}", file=sys.stderr)
        return 2
    except RanksError as error:
        print(f"bench.scaling: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # without destructors that wait for the ranks that are gone


if __name__ == "__main__":
    leave(main())
