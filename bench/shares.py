"""A sweep over the GPUs of one machine: ``torchrun --nproc-per-node N -m bench``.

Each rank measures on a GPU of its own, always the next case that no rank has taken, into a file of its own beside the
output. At the end rank 0 joins them. Files that an interrupted sweep has left are joined first, by whatever comes next.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from bench import ranks, sweep
from bench.measure import environment
from bench.measure.selection import Selection
from bench.rows import merge, resume, store
from bench.rows.store import Row
from bench.usage import UsageError

#: Seconds in which all ranks must have started, and for which one that is done waits for the others.
START_S = 120.0
PATIENCE_S = 24 * 3600.0


def part_file(output: Path, rank: int, size: int) -> Path:
    """Where a rank's rows go until they are joined."""
    return output.with_name(f"{output.stem}.part-{rank + 1}-of-{size}.jsonl")


def parts_of(output: Path) -> list[Path]:
    """The files of rows beside an output that wait to be joined."""
    name = re.compile(re.escape(output.stem) + r"\.part-\d+-of-\d+\.jsonl")
    return sorted(path for path in output.parent.glob("*.jsonl") if name.fullmatch(path.name))


def join(output: Path) -> list[Row]:
    """Join the parts beside an output into it, and remove them. Returns the output's rows."""
    with store.writing(output):
        parts = parts_of(output)
        for path in (output, *parts):
            store.drop_unfinished(path)
        whole = store.read(output)
        store.check_writable(output)
        if parts:
            whole = merge.merged([*whole, *(row for path in parts for row in store.read(path))])
            store.write(output, whole)
            for path in parts:
                path.unlink()
    return whole


def run(
    selection: Selection,
    output: Path,
    console: Console,
    resumed: bool,
    announce: Callable[[Selection, Console], None],
) -> tuple[list[Row] | None, bool]:
    """Measure what this rank takes. Returns the run's rows on rank 0, None elsewhere, and whether it was interrupted.

    Raises:
        UsageError: a share is named, or ranks are on GPUs of different models. RanksError: a rank is gone.
    """
    if selection.share != (1, 1):
        raise UsageError("--share is for a process alone: under torchrun the ranks share the cases among them")
    group = ranks.Group(torch.device("cpu"), START_S, PATIENCE_S)
    machines = group.gather(environment.machine_name())
    if len(set(machines)) > 1:
        raise UsageError(
            f"every rank needs a GPU of its own, all of one model; by rank: {', '.join(machines)}. "
            "--nproc-per-node is the number of GPUs"
        )
    main = group.rank == 0
    console = console if main else Console(quiet=True)
    before, reason = group.agree(lambda: join(output) if main else [])
    if before is None:
        raise store.ResultsError(str(reason))
    before = store.read(output)
    standing = resume.standing(before, environment.facts()) if resumed else {}
    announce(selection, console)
    if resumed:
        console.print(resume.report(standing, environment.facts(), output), soft_wrap=True)
    own = part_file(output, group.rank, group.size)
    selection = dataclasses.replace(selection, ceilings=selection.ceilings and main)
    with store.writing(own):
        measured, interrupted = sweep.run(selection, own, console, standing, ranks.Board(shared=True))
    if interrupted:
        return None, True
    names = {(row.key, row.when) for row in standing.values() if row.op in (*selection.ops, store.CEILING)}
    for rows in group.gather([(row.key, row.when) for row in measured]):
        names.update(rows)
    joined, reason = group.agree(lambda: join(output) if main else [])
    if joined is None:
        raise store.ResultsError(str(reason))
    group.close()
    return [row for row in joined if (row.key, row.when) in names] if main else None, False
