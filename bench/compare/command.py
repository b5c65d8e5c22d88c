"""``python -m bench compare A.jsonl B.jsonl``: what got faster, slower or broken; a gate by its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from bench.compare import changes, changes_context, changes_text
from bench.compare.changes_text import Report
from bench.rows import store
from bench.rows.store import Row
from bench.usage import UsageError, known, split

EPILOG = """\
Ratios are of B's time over A's: above 1 is slower. `corrected` has the drift divided out: the median ratio of the
controls, which are rows whose code is the same in both files: torch.builtin and the measured ceilings (those of
bandwidth alone where PyTorch or CUDA differ). Its 95 % interval covers the noise within the runs, and the scatter
between them that the controls show. `paired` is the change of the time over torch.builtin's (torch.naive's, for
an operation that has no torch.builtin), paired round by round within each run.

The gate fails (exit code 1) where a variant
- is slower past the threshold, which needs three witnesses: the corrected ratio is above 1 + THRESHOLD; its interval
  lies above 1, so that noise alone does not explain it; and the paired ratio, where there is one, is above
  1 + THRESHOLD / 2 with its interval above 1, so that no passing state of the machine does. A real slowdown shows in
  all three;
- became wrong, or is new and wrong;
- was timed and is now refused, unavailable levels included: a build that lost its kernels must not pass. Where B has
  one row for a whole level that could not be loaded, it stands for every variant of the level that A has.
--complete adds: was in A and is not in B. Without it B may hold fewer calls, as after a quick sweep.
A call that was timed in fewer than 6 rounds in A or B has no interval, and is `undecided`: shown, and not judged, save
where its quartiles are witness enough: B's lower one, with drift and scatter taken off, lies above A's upper one by
more than THRESHOLD (the other way round for what is faster), and by more than 50 % where A or B has one round alone,
which says nothing of its noise. The paired ratio must agree as above.
Controls, peers, ceilings and what Triton's interpreter ran are shown and not judged. A change that slows torch.builtin
as well (in the clock itself, say) reads as drift: a drift past the threshold is pointed out, and --raw judges the
ratios as they are, without correction and pairing. There are fewest false alarms where A and B are measured one after
the other on one machine, with nothing else running there; a CPU, which is never that quiet, wants a larger threshold.

exit code: 0 the gate holds; 1 it fails; 2 it can do neither: nothing in the files could be judged (only controls or
peers are in both, say), or the command line or a file cannot be used
"""


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 up to 1, such as 0.05 for 5 %, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare",
        description="Compare two files of rows: what got faster or slower beyond its interval, what broke.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", type=Path, metavar="A.jsonl", help="rows before")
    parser.add_argument("b", type=Path, metavar="B.jsonl", help="rows after")
    parser.add_argument(
        "--threshold", type=_threshold, default=0.05, metavar="SHARE", help="slower by more fails (default: 0.05, 5 %%)"
    )
    many = {"action": "append", "metavar": "NAME[,NAME]"}
    parser.add_argument("--op", **many, help="only these operations; the drift is that of all rows")
    parser.add_argument("--backend", **many, help="only these levels or variants")
    parser.add_argument("--pass", dest="pass_", **many, help="only this pass")
    parser.add_argument("--dtype", **many, help="only these dtypes")
    parser.add_argument("--gpu", metavar="NAME", help="the machine, where the files share several")
    parser.add_argument(
        "--across-gpus", action="store_true", help="compare two machines; nothing is corrected for drift"
    )
    parser.add_argument(
        "--raw", action="store_true", help="judge ratios as they are: no correction for drift, no pairing"
    )
    parser.add_argument("--complete", action="store_true", help="fail for what is in A and not in B")
    parser.add_argument("--all", action="store_true", help="list the unchanged too")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="write Markdown, for a pull request's comment")
    output.add_argument("--json", action="store_true", help="write one JSON object")
    return parser


def _read(path: Path) -> list[Row]:
    found = store.latest(store.read_given(path))
    if not found:
        raise UsageError(f"{path} holds no rows")
    return found


def _one_machine(before: list[Row], after: list[Row], args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """The rows to compare: of the one machine that both files share, or of each file's own."""
    machines = [list(dict.fromkeys(row.gpu for row in found)) for found in (before, after)]
    shown = "; ".join(
        f"{path} has {', '.join(map(str, m))}" for path, m in zip((args.a, args.b), machines, strict=True)
    )
    if args.across_gpus:
        if any(len(m) > 1 for m in machines):
            raise UsageError(f"--across-gpus takes files of one machine each: {shown}")
        return before, after
    shared = [m for m in machines[0] if m in machines[1] and args.gpu in (None, m)]
    if not shared and args.gpu is not None:
        raise UsageError(f"--gpu {args.gpu!r} is not in both files: {shown}")
    if not shared:
        raise UsageError(f"measured on different machines: {shown}; --across-gpus compares them all the same")
    if len(shared) > 1:
        raise UsageError(f"the files share several machines; choose one with --gpu: {', '.join(map(str, shared))}")
    return [row for row in before if row.gpu == shared[0]], [row for row in after if row.gpu == shared[0]]


def _chosen(args: argparse.Namespace, found: Sequence[Row]) -> Callable[[Row], bool]:
    """Whether the filters let a row through.

    Raises:
        UsageError: a filter names what neither file holds.
    """
    facets: dict[str, Callable[[Row], tuple[str, ...]]] = {
        "op": lambda row: (row.op,),
        "backend": lambda row: (row.backend, row.level),
        "pass": lambda row: (row.pass_,),
        "dtype": lambda row: (row.dtype,),
    }
    given = {"op": args.op, "backend": args.backend, "pass": args.pass_, "dtype": args.dtype}
    wanted = {}
    for facet, texts in given.items():
        held = sorted({name for row in found for name in facets[facet](row)})
        wanted[facet] = {known(facet, name, held) for name in split(f"--{facet}", texts, held)}
    return lambda row: all(not names or names & set(facets[facet](row)) for facet, names in wanted.items())


def _failures(comparison: changes.Comparison, threshold: float, complete: bool) -> list[str]:
    slower = [c for c in comparison.changes if c.judged and c.direction == "slower" and c.past]
    lost = [t.kind for t in comparison.transitions if t.judged]
    counts = {f"slower past {100 * threshold:.3g} %": len(slower)}
    counts |= {kind: lost.count(kind) for kind in (*changes.FAILING, *(["vanished"] if complete else []))}
    return [f"{count} {what}" for what, count in counts.items() if count]


def report(args: argparse.Namespace) -> Report:
    """Read, pair and judge.

    Raises:
        UsageError, rows.ResultsError: the files cannot be compared as asked.
    """
    before, after = _one_machine(_read(args.a), _read(args.b), args)
    chosen = _chosen(args, [*before, *after])
    same_machine = not args.across_gpus or before[0].gpu == after[0].gpu
    comparison = changes.compare(
        before, after, chosen=chosen, threshold=args.threshold, correct=not args.raw, same_machine=same_machine
    )
    if not comparison.calls:
        raise UsageError(f"no call is in both {args.a} and {args.b}: nothing to compare")
    return Report(
        (str(args.a), str(args.b)),
        (len(before), len(after)),
        args.threshold,
        comparison,
        changes_context.differences(before, after),
        _failures(comparison, args.threshold, args.complete),
    )


def main(argv: Sequence[str]) -> int:
    """Returns 0 where the gate holds, 1 where it fails, 2 where nothing can be judged, or for unusable arguments."""
    args = _parser().parse_args(argv)
    try:
        found = report(args)
    except (UsageError, store.ResultsError) as error:
        print(f"python -m bench compare: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(changes_text.to_json(found), ensure_ascii=False, indent=1, allow_nan=False))
    elif args.markdown:
        print(changes_text.to_markdown(found, args.all), end="")
    else:
        changes_text.show(found, Console(), args.all)
    return {"PASS": 0, "FAIL": 1, "UNDECIDED": 2}[found.outcome]
