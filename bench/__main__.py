"""``python -m bench``: the sweep, its tables and pictures."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import ranks

ranks.take_own_gpu()  # before any import below asks CUDA for its GPUs

# ruff: noqa: E402
from rich.console import Console

import kernel_ladder
from bench import peers, shares, sweep
from bench.measure import drawn, environment, sets
from bench.measure.selection import AT_QUICK_CASES, LONG_TUNING, Selection
from bench.rows import resume, store
from bench.rows.store import Row
from bench.show import table
from bench.usage import DTYPES, UsageError, dtype_of, known, passes_of, split
from kernel_ladder import user_rungs
from kernel_ladder.cli.columns import console_for
from kernel_ladder.errors import RungFileError, UnavailableError, VariableError
from kernel_ladder.table import LEVELS, unavailable, variants

ALL_PEERS = "all"
SECONDS = 0.7
QUICK_SECONDS = 0.4

EPILOG = """\
Other commands look into calls:
  python -m bench profile OP           its kernels, their times and bytes; --help says more
  python -m bench counters             hardware counters of every CUDA and Triton rung, by Nsight Compute
  python -m bench dynamic              calls of changing lengths: what each compiler does when one is new
  python -m bench patched              whole models, patched and not: forward pass, training step, decoding
  python -m bench bridge               the xla level beside plain JAX, and what passing tensors costs the host

Other commands, all reading rows that a sweep has written:
  python -m bench table [FILE]         print the tables again
  python -m bench pictures [FILE]      draw the pictures again
  python -m bench report [FILE…]       the rows as one HTML page to explore
  python -m bench readme [--check]     renew the tables in README.md from the committed rows in bench/results/
  python -m bench readme --folders     write the README.md of every folder of rungs, from its files' heads and the rows
  python -m bench merge FILE…          join the rows of several files, such as the shares of one sweep
  python -m bench distribution FILE…   speedups and regret of each set of calls: mean, 5th percentile, worst
  python -m bench select [FILE…]       make the tables by which a level's name and "auto" choose
  python -m bench compare A B          what got faster, slower or broken between two files; a gate with an exit code
and
  python -m bench peers                list the peers, their versions or how to get them
Several GPUs: `torchrun --nproc-per-node N -m bench …` shares the cases among them;
`torchrun --nproc-per-node N -m bench.scaling` measures what they do together;
`python -m bench.jobs FILE` runs the commands of a file, one a GPU at a time.
"""


def _selection(args: argparse.Namespace) -> Selection:
    named = split("--op", args.op, kernel_ladder.OPS)
    ops = [known("operation", op, kernel_ladder.OPS) for op in named] or list(kernel_ladder.OPS)
    backends = []
    if args.backend is not None:
        names = list(dict.fromkeys([*LEVELS, *(v.name for op in ops for v in variants(op))]))
        backends = [known("backend", backend, names) for backend in split("--backend", args.backend, names)]
        reasons = [unavailable(op, backend.partition(".")[0]) for backend in backends for op in ops]
        if all(reasons):
            raise UsageError(f"--backend: none of {', '.join(backends)} is available here: {reasons[0]}")
    dtypes = [dtype_of(name) for name in split("--dtype", args.dtype, DTYPES)]
    passes = passes_of(args.pass_)
    seconds = args.time if args.time is not None else QUICK_SECONDS if args.quick else SECONDS
    if not 0 < seconds < math.inf:
        raise UsageError(f"--time must be a positive number of seconds, got {args.time}")
    names = _peers(args.peers, ops)
    named = [*backends, *(f"{peers.LEVEL}.{name}" for name in names if args.peers != ALL_PEERS)]
    if backends:
        backends += [peers.IN_TABLE[name][op] for name in names for op in ops if op in peers.IN_TABLE.get(name, ())]
    return Selection(
        ops,
        backends or None,
        dtypes or None,
        passes,
        args.quick,
        seconds,
        ceilings=not args.no_ceilings,
        peers=names,
        named=named,
        share=_share(args.share),
        set=known("set", args.set, list(sets.SETS)),
        seed=_seed(args),
    )


def _seed(args: argparse.Namespace) -> int:
    if args.seed is not None and args.set != sets.RANDOM:
        raise UsageError(f"--seed is for --set {sets.RANDOM}, got --set {args.set}")
    return drawn.SEED if args.seed is None else args.seed


def _share(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise UsageError(f"--share must be I/N with 1 <= I <= N, such as 1/2 and 2/2 for two GPUs, got {text!r}")
    return part, parts


def _peers(given: str | None, ops: Sequence[str]) -> list[str]:
    """The peers that ``--peers`` names."""
    if given is None:
        return []
    if given == ALL_PEERS:
        return peers.known()
    asked = split("--peers", [given], peers.known())
    names = [known("peer", name.removeprefix(f"{peers.LEVEL}."), peers.known()) for name in asked]
    for name in names:
        covered = peers.ops_of(name)
        if not any(op in covered for op in ops):
            raise UsageError(f"peer {name!r} covers {', '.join(covered)}, not {', '.join(ops)}")
    return names


def _sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Check every variant against float64, then time it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many = {"action": "append", "metavar": "NAME[,NAME]"}
    parser.add_argument("--op", **many, help=f"operations: {', '.join(kernel_ladder.OPS)} (default: all)")
    parser.add_argument(
        "--backend",
        **many,
        help="levels or variants (default: all; torch.builtin, or torch.naive for an operation without it, is always "
        "there to compare with). "
        f"Of {', '.join(AT_QUICK_CASES)} a sweep measures the quick shapes alone, and a quick sweep nothing of "
        f"{' and '.join(sorted(LONG_TUNING))}, unless they are named here or in --peers",
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const=ALL_PEERS,
        metavar="NAME[,NAME]",
        help=f"other libraries too, all or some of {', '.join(peers.known())}",
    )
    parser.add_argument(
        "--dtype",
        **many,
        help="default: bfloat16, without --quick float32 too for the quick cases, and float16 for those of matmul and "
        "linear; float32 without a GPU",
    )
    parser.add_argument(
        "--set",
        default=sets.SWEEP,
        metavar="SET",
        help="which calls: "
        + "; ".join(f"{name}, {what}" for name, what in sets.SETS.items())
        + f" (default: {sets.SWEEP}). "
        "Sets other than the sweep measure what each level's name stands for, and the last rungs beside it",
    )
    parser.add_argument("--seed", type=int, metavar="N", help=f"of --set {sets.RANDOM} (default: {drawn.SEED})")
    parser.add_argument("--pass", dest="pass_", default="both", metavar="PASS", help="forward, backward or both")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few shapes only, in bfloat16 on a GPU; of the host's cost that of the forward pass",
    )
    parser.add_argument(
        "--time",
        type=float,
        metavar="SECONDS",
        help=f"measuring, per case, dtype and pass (default: {SECONDS}; {QUICK_SECONDS} with --quick)",
    )
    parser.add_argument(
        "--share",
        default="1/1",
        metavar="I/N",
        help="the I-th of N parts, to be joined by `python -m bench merge`. Under `torchrun --nproc-per-node N` the "
        "GPUs share the cases by themselves, and one file holds all rows",
    )
    parser.add_argument(
        "--with", dest="files", action="append", default=[], type=Path, metavar="FILE", help="a file of own rungs too"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="rows (default: bench-results/<machine>.jsonl, of another set <set>/<machine>.jsonl)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from an interrupted sweep: skip what has a row of the same GPU, versions and commit in FILE",
    )
    parser.add_argument(
        "--no-ceilings", action="store_true", help="no rows of the machine's own ceilings (they take seconds, on a GPU)"
    )
    parser.add_argument("--no-pictures", action="store_true", help="draw nothing at the end")
    return parser


def _run_sweep(argv: Sequence[str], console: Console) -> int:
    args = _sweep_parser().parse_args(argv)
    for path in args.files:
        user_rungs.load_file(path)
    selection = _selection(args)
    output = args.output or environment.results_file(args.set)
    place = ranks.launched()
    if place is not None and place.size > 1:
        found, interrupted = shares.run(selection, output, console, args.resume, _announce)
        if found is None:
            return 130 if interrupted else 0
        return _finish(args, found, output, interrupted, console)
    if shares.parts_of(output):  # of a sweep of several ranks that was interrupted
        shares.join(output)
    with store.writing(output):
        if args.resume and (repaired := store.drop_unfinished(output)) is not None:
            console.print(repaired, soft_wrap=True)
        before = store.read(output)  # a broken file is better found now than after the last kernel
        store.check_writable(output)
        standing = resume.standing(before, environment.facts()) if args.resume else {}
        _announce(selection, console)
        if args.resume:
            console.print(resume.report(standing, environment.facts(), output), soft_wrap=True)
        run, interrupted = sweep.run(selection, output, console, standing)
        return _finish(args, run, output, interrupted, console)


def _announce(selection: Selection, console: Console) -> None:
    if environment.device().type == "cpu":
        console.print("No GPU: shapes are shrunk, and Triton runs in its interpreter. Correctness, not speed.")
    for name in selection.peers:
        if name in peers.PEERS and (reason := peers.PEERS[name].absent):
            console.print(f"peer {name}: {reason}", markup=False, soft_wrap=True)


def _finish(args: argparse.Namespace, run: list[Row], output: Path, interrupted: bool, console: Console) -> int:
    """Show the rows of a run, and say which are wrong. Returns the exit code."""
    table.show(run, console)
    if run:
        console.print(f"{len(run)} rows are in {output}", soft_wrap=True)
    if run and not args.no_pictures:
        _draw(output, console, run[-1].gpu)
    wrong = [row for row in run if row.wrong]
    for row in wrong:
        print(f"WRONG: {row.op} {row.backend} {row.pass_} {row.dtype} {row.shape}: {row.wrong}", file=sys.stderr)
    # A peer's failure is shown as ours are, but is not this project's.
    return 130 if interrupted else 1 if any(row.level != peers.LEVEL for row in wrong) else 0


def _draw(path: Path, console: Console, gpu: str | None = None) -> None:
    try:
        from bench.show import chain_chart, fusion_chart, ladders, memory, pictures, roofline_chart
    except ImportError as error:
        console.print(f"no pictures: {error}; `pip install matplotlib` to have them", soft_wrap=True)
        return
    for picture in (
        *ladders.draw(path, gpu),
        *pictures.draw(path, gpu),
        *memory.draw(path, gpu),
        *roofline_chart.draw(path, gpu),
        *fusion_chart.draw(path, gpu),
        *chain_chart.draw(path, gpu),
    ):
        console.print(f"drew {picture}", soft_wrap=True)


def _read_command(name: str, argv: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}")
    parser.add_argument("file", type=Path, nargs="?", help="rows (default: this machine's)")
    given, own = parser.parse_args(argv).file, environment.results_file()
    if given is None and not own.exists():
        raise store.ResultsError(
            f"this machine has no rows yet ({own} does not exist): `python -m bench` writes them; "
            f"`python -m bench {name} FILE` takes others, such as the committed ones in bench/results"
        )
    path = given or own
    found = store.read_given(path)
    if name == "table":
        table.show(store.latest(found), console)
    else:
        _draw(path, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code.

    0; 1 where a variant is wrong, a profiled call fails, the README is stale or the gate of ``compare`` does not hold;
    2 for a bad command line or file; 130 after an interrupt.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    console = console_for(200)
    try:
        if argv[:1] == ["readme"]:
            from bench.show import readme

            return readme.main(argv[1:])
        if argv[:1] == ["peers"]:
            argparse.ArgumentParser(prog="python -m bench peers", description=peers.show.__doc__).parse_args(argv[1:])
            peers.show(console)
            return 0
        if argv[:1] == ["merge"]:
            from bench.rows import merge

            return merge.main(argv[1:], console)
        if argv[:1] == ["select"]:
            from bench.select import command

            return command.main(argv[1:], console)
        if argv[:1] == ["distribution"]:
            from bench.show import distribution

            return distribution.main(argv[1:], console)
        if argv[:1] == ["compare"]:
            from bench.compare import command

            return command.main(argv[1:])
        if argv[:1] == ["profile"]:
            from bench.profile import command

            return command.main(argv[1:], console)
        if argv[:1] == ["counters"]:
            from bench.profile import rungs

            return rungs.main(argv[1:], console)
        if argv[:1] == ["dynamic"]:
            from bench.dynamic import command

            return command.main(argv[1:], console)
        if argv[:1] == ["patched"]:
            from bench.patched import command as of_models

            return of_models.main(argv[1:], console)
        if argv[:1] == ["bridge"]:
            from bench.bridge import command as of_bridge

            return of_bridge.main(argv[1:], console)
        if argv[:1] == ["report"]:
            from bench.show import report

            return report.main(argv[1:])
        if argv[:1] in (["table"], ["pictures"]):
            return _read_command(argv[0], argv[1:], console)
        return _run_sweep(argv, console)
    except (UsageError, RungFileError, store.ResultsError, UnavailableError, VariableError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2
    except ranks.RanksError as error:
        print(f"python -m bench: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # without destructors that wait for the ranks that are gone
    except KeyboardInterrupt:
        print("python -m bench: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, say
        said = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"python -m bench: {said}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    ranks.leave(main())
