"""Measured calls as the selection sees them: the times of rungs and levels, and what rules choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

import cuda_impl
from bench.measure import sets
from bench.rows import store
from bench.rows.store import Row
from bench.select.split import is_of_other_kernels, older_than_rung
from bench.usage import DTYPES
from kernel_ladder import gpu, selection, table
from kernel_ladder.selection import tables
from kernel_ladder.selection.features import FEATURES, Features
from kernel_ladder.spec import Case
from kernel_ladder.testing.samples import on_absent_gpu

AUTO_LEVELS = selection.MEASURED_LEVELS
#: Words in a GPU's name, and the known GPU for which rules answer alike.
KIN = {**{name: name for name in gpu.KNOWN}, "H200": "H100"}


@dataclass
class Point:
    """One call in one pass: features, microseconds of each rung, and the rung that each name stands for by rules."""

    op: str
    pass_: str
    call: str
    dtype: str
    features: Features
    times: dict[str, float] = field(default_factory=dict)  # of rungs
    levels: dict[str, float] = field(default_factory=dict)  # of what a level's name stands for
    chosen: dict[str, str] = field(default_factory=dict)  # name of a backend -> rung

    def candidates(self, backend: str) -> dict[str, float]:
        """What a backend's name may choose among: rungs of the level, or levels for "auto"."""
        if backend == "auto":
            return self.levels
        return {name: us for name, us in self.times.items() if name.partition(".")[0] == backend}

    def usual(self, backend: str) -> str | None:
        """What rules choose: a rung, or for "auto" a level. None where it has no time."""
        rung = self.chosen.get(backend)
        name = rung.partition(".")[0] if rung and backend == "auto" else rung
        return name if name in self.candidates(backend) else None


def case_of(row: Row) -> Case:
    """The call of a row: a set's case, or one made from the row's shapes, layouts and options."""
    shapes = tuple(None if shape is None else tuple(shape) for shape in row.shapes)
    known = [member for name in sets.SETS for member in sets.members(name, row.op)]
    for case, _ in known:  # which say what kinds of integers their arguments are, and whether a mask is boolean
        if case.id == row.shape and tuple(case.shapes) == shapes:
            return case
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in row.options.items()}
    return Case(row.shape, shapes, options, tuple(row.layouts) or "contiguous")


def points(rows: Iterable[Row], machine: gpu.Gpu) -> Iterator[Point]:
    """The measured calls of a GPU; it need not be there.

    Raises:
        ResultsError: a level of the rows is unavailable here, so that its rules can't be asked.
    """
    calls: dict[tuple[str, str, str], dict[str, dict[str, Row]]] = {}
    for row in store.latest(rows):
        if row.us is None or row.wrong or row.interpreted or row.op not in FEATURES or row.level not in AUTO_LEVELS:
            continue
        if is_of_other_kernels(row):
            continue
        calls.setdefault((row.op, row.dtype, row.shape), {}).setdefault(row.pass_, {})[row.backend] = row
    with _as_on(machine):
        asked = {
            (op, row.level) for (op, *_), of in calls.items() for by_rung in of.values() for row in by_rung.values()
        }
        for op, level in sorted(asked):
            if (reason := table.unavailable(op, level)) is not None:
                raise store.ResultsError(f"rules of the {level} level cannot be asked here: {op}: {reason}")
        for (op, dtype, shape), passes in calls.items():
            forward, backward = passes.get("forward", {}), passes.get("backward", {})
            yield from _points(op, dtype, shape, tables.FORWARD, {name: (row,) for name, row in forward.items()})
            both = {name: (row, backward[name]) for name, row in forward.items() if name in backward}
            yield from _points(op, dtype, shape, tables.TRAINING, both)


@contextmanager
def _as_on(machine: gpu.Gpu) -> Iterator[None]:
    """In the block rules answer as on a GPU, without its table, and as if the extension were built for it."""
    major, minor = machine.capability
    code = f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"
    built = mock.patch.object(cuda_impl, "architectures", return_value=[code])
    with built, tables.without(), gpu.pretend(machine):
        yield


@contextmanager
def _pytorch_takes(rungs: Mapping[str, object]) -> Iterator[None]:
    """In the block PyTorch says that its attention kernels take a call where they have been timed, on any machine."""
    cudnn = mock.patch("torch.backends.cuda.can_use_cudnn_attention", return_value="torch.cudnn" in rungs)
    flash = mock.patch("torch.backends.cuda.can_use_flash_attention", return_value="torch.flash" in rungs)
    with cudnn, flash:
        yield


def _points(op: str, dtype: str, shape: str, pass_: str, rows: Mapping[str, tuple[Row, ...]]) -> Iterator[Point]:
    """The point of a pass, where any rung has its times."""
    if not rows:
        return
    case = case_of(next(iter(rows.values()))[0])
    gradients = pass_ == tables.TRAINING
    with _pytorch_takes(rows), on_absent_gpu(case, DTYPES[dtype], gradients=gradients) as inputs:
        point = Point(op, pass_, shape, dtype, FEATURES[op](inputs, case.options))
        for backend in ("auto", *AUTO_LEVELS):
            if backend == "auto" or table.unavailable(op, backend) is None:
                rung, reason = selection.explain(op, backend, inputs, case.options)[-1]
                if reason is None:
                    point.chosen[backend] = rung
    old: dict[str, float] = {}  # by level, the fastest rung that has since been split
    for name, own in rows.items():
        us = sum(row.us for row in own if row.us is not None)
        if any(older_than_rung(row) for row in own):
            level = name.partition(".")[0]
            old[level] = min(us, old.get(level, us))
        else:
            point.times[name] = us
    for level in AUTO_LEVELS:
        choice = point.chosen.get(level)
        # A rung that has been split ran the kernel that its level's rule names today.
        us = point.times.get(choice) if choice in point.times else old.get(level)
        if us is not None:
            point.levels[level] = us
    yield point


def machine_of(rows: Iterable[Row]) -> gpu.Gpu:
    """What rules ask of the GPU that made the rows.

    Raises:
        ResultsError: rules know nothing of it.
    """
    names = {row.gpu for row in rows if row.gpu}
    if len(names) != 1:
        raise store.ResultsError(f"a table is of one GPU's rows, got those of {', '.join(sorted(names)) or 'none'}")
    (name,) = names
    if torch.cuda.is_available() and gpu.current().name == name:
        return gpu.current()
    for word, known in KIN.items():
        if word in name:
            return dataclasses.replace(gpu.KNOWN[known], name=name)
    raise store.ResultsError(
        f"the rows are of {name}, which is not here; without it rules are known of {', '.join(KIN)}: run the command "
        "on that GPU"
    )
