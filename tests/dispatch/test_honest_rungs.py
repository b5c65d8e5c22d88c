"""A rung launches its own kernels: no two rungs of an operation share one in their forward pass.

What rungs share openly stands in the tables here, each with its reason. They are helpers of no rung's idea, and
backward passes that serve several rungs.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.inspection.launches import launched
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, needs_gpu

ROOT = Path(__file__).resolve().parents[2]

#: (level, operation) -> kernels that several rungs' forward passes launch, and why.
SHARED: dict[tuple[str, str], dict[str, str]] = {
    ("cuda", "matmul"): {
        "matmul_persistent_kernel": "stream_k is persistent's kernel with another schedule; the instance with plain"
        " loads serves every rung on Hopper where TMA cannot read an operand and a padded copy does not pay",
        "matmul_persistent_pad_kernel": "pads operands that TMA cannot read",
    },
    ("triton", "cross_entropy"): {
        "triton_impl.cross_entropy.rows:_cross_entropy_sum_kernel": "adds up rows' losses, no rung's idea"
    },
    **{
        ("cuda", op): {"attention_naive_fill_kernel": "writes the results of a call without keys"}
        for op in ("attention", "attention_varlen")
    },
    ("cuda", "sum"): dict.fromkeys(
        ("sum_coalesced_columns_kernel", "sum_coalesced_rows_kernel", "sum_coalesced_strided_rows_kernel"),
        "two_stage is coalesced's kernels, over parts of a long sum and then over the parts' sums",
    ),
    ("cuda", "linear"): {
        "linear_naive_kernel": "with an inner dimension of 0 persistent has no tile: naive's kernel writes the bias",
        "matmul_persistent_pad_kernel": "pads operands that TMA cannot read",
    },
}


def shared_by(kernels: dict[str, set[str]], openly: dict[str, str]) -> dict[str, list[str]]:
    """Kernels that more than one rung launches, with the rungs, but for those that are shared openly."""
    users: dict[str, list[str]] = {}
    for rung, names in kernels.items():
        for name in names - openly.keys():
            users.setdefault(name, []).append(rung)
    return {name: rungs for name, rungs in users.items() if len(rungs) > 1}


@functools.cache
def of_triton() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Operation -> rung -> pass -> kernels, from a process whose Triton compiles for a GPU that is pretended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.dispatch.triton_launches"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_triton_rungs_launch_their_own_kernels(op):
    found = {rung: set(passes["forward"]) for rung, passes in of_triton()[op].items()}
    assert all(found.values()), f"no kernel was launched: {found}"
    assert not shared_by(found, SHARED.get(("triton", op), {}))


@needs_gpu
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_cuda_rungs_launch_their_own_kernels(op):
    if (reason := table.unavailable(op, "cuda")) is not None:
        pytest.skip(reason)
    found = {variant.name: of_cuda(variant) for variant in table.variants(op, "cuda") if variant.here() is None}
    assert all(found.values()), f"no kernel was launched: {found}"
    assert not shared_by(found, SHARED.get(("cuda", op), {}))


def of_cuda(variant: table.Variant) -> set[str]:
    """The names of the kernels of this package that a rung's forward pass launches, over the cases that it takes."""
    spec = kernel_ladder.spec(variant.op)
    calls = []
    for case, dtype in itertools.product([*spec.samples, *_small(spec.sweep)], (torch.bfloat16, torch.float32)):
        inputs = make_inputs(case, dtype, DEVICE)
        if variant.unsupported(*inputs, **case.options) is None:
            calls.append((inputs, case.options))

    def all_of_them() -> None:
        for inputs, options in calls:
            variant.forward(*inputs, **options)

    all_of_them()
    names = {kernel.name for kernel in launched(all_of_them)}
    return {match[1] for name in names if (match := re.search(r"kl::(?:\(anonymous namespace\)::)?(\w+)", name))}


def _small(cases):
    """Cases of the sweep that fit beside other tests."""
    return [c for c in cases if sum(torch.Size(s).numel() for s in c.shapes if s is not None) <= 2**26]


def test_a_shared_kernel_is_found():
    assert shared_by({"a": {"x", "y"}, "b": {"y"}}, {}) == {"y": ["a", "b"]}
    assert shared_by({"a": {"x", "y"}, "b": {"y"}}, {"y": "a helper"}) == {}
