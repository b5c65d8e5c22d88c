"""The selection rules of the xla level, beside the committed rows that they come from."""

from __future__ import annotations

import pytest
import torch

from bench.measure import environment
from bench.rows import store
from bench.select.points import case_of
from bench.usage import DTYPES
from kernel_ladder import gpu
from kernel_ladder.selection import xla
from kernel_ladder.spec import PASSES, Case
from kernel_ladder.testing.samples import on_absent_gpu

#: A choice that takes at most this much longer than the fastest rung is right.
MOST_REGRET = 1.10


@pytest.fixture(scope="module")
def calls():
    """The timed rows of the level's softmax and attention on a GPU: by operation, dtype and shape, by rung and pass."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], store.Row]] = {}
    for path in environment.PUBLISHED.glob("nvidia-h100*.jsonl"):
        if not path.name.endswith(".profile.jsonl"):
            for row in store.latest(store.read(path)):
                if row.level == "xla" and row.op in ("softmax", "attention") and row.us is not None:
                    found.setdefault((row.op, row.dtype, row.shape), {})[row.backend, row.pass_] = row
    return found


@pytest.mark.parametrize("gradients", [False, True])
def test_the_rule_names_a_rung_within_a_tenth_of_the_fastest(calls, gradients):
    several = 0
    for (op, dtype, shape), rows in calls.items():
        passes = PASSES if gradients else PASSES[:1]
        rungs = {name for name, _ in rows if all((name, pass_) in rows for pass_ in passes)}
        if len(rungs) < 2:
            continue
        several += 1
        case = case_of(next(iter(rows.values())))
        with on_absent_gpu(case, DTYPES[dtype], gradients=gradients) as inputs:
            named = next(name for name in xla.RULES[op, "xla"](inputs, case.options) if name in rungs)
        times = {name: sum(rows[name, pass_].us for pass_ in passes) for name in rungs}
        assert times[named] <= MOST_REGRET * min(times.values()), (op, dtype, shape, times)
    assert several > 20


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "first"),
    [
        ((8, 8192), -1, torch.bfloat16, "xla.jit"),
        ((8, 8200), 1, torch.bfloat16, "xla.pallas"),
        ((8200, 8), 0, torch.bfloat16, "xla.jit"),
        ((8, 16384), -1, torch.float32, "xla.jit"),
        ((), -1, torch.bfloat16, "xla.jit"),
    ],
)
def test_softmax_of_long_rows_is_for_pallas(shape, dim, dtype, first):
    options = {"dim": dim}
    with gpu.pretend("H100"), on_absent_gpu(Case("", (shape,), options), dtype, gradients=False) as inputs:
        assert xla.softmax(inputs, options)[0] == first
    assert xla.softmax((torch.empty(shape, dtype=dtype),), options) == ("xla.jit",)  # interpreted on a CPU
