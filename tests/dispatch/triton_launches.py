"""``python -m tests.dispatch.triton_launches``: the kernels that every Triton rung launches, as JSON, on no GPU at all.

Host code runs on tensors of the device "meta", for a Hopper GPU that is pretended. Nothing is compiled.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

os.environ.update(TRITON_INTERPRET="0", KERNEL_LADDER_AUTOTUNE="0")

import torch
import triton

import kernel_ladder
from kernel_ladder import gpu, table
from kernel_ladder.spec import Case, each, has_gradient
from kernel_ladder.testing.samples import empty_inputs, on_absent_gpu
from triton_impl.runtime.aot import traced

HOPPER = next(name for name, each in gpu.KNOWN.items() if each.capability == (9, 0))


class AsExpected(int):
    """A size that is whatever host code expects it to be."""

    def __ne__(self, other: object) -> bool:
        return False


#: What host code reads of a compiled kernel before it launches it again.
METADATA = SimpleNamespace(name="", shared=AsExpected(), num_warps=4, num_stages=1, num_ctas=1, cluster_dims=(1, 1, 1))


class NotLaunched:
    metadata = METADATA

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


def cases(op: str) -> list[Case]:
    spec = kernel_ladder.spec(op)
    return [*spec.samples, *spec.sweep]


def refused(variant: table.Variant, case: Case, dtype: torch.dtype, gradients: bool) -> bool:
    with on_absent_gpu(case, dtype, gradients=gradients) as inputs:
        return (variant.here() or variant.unsupported(*inputs, **case.options)) is not None


def launched(variant: table.Variant) -> dict[str, list[str]]:
    """The kernels of the forward and of the backward pass, over all cases that the rung takes, as "file:name"."""
    found: dict[str, set[str]] = {"forward": set(), "backward": set()}
    into: set[str] = set()

    def run(kernel, *arguments, grid, warmup, **named):
        assert "enable_fp_fusion" in named, f"{kernel.fn.__name__}: Triton 3.9 warns of a default"
        into.add(f"{kernel.fn.__module__}:{kernel.fn.__name__}")
        return NotLaunched()

    with mock.patch.object(triton.JITFunction, "run", run):
        for case, dtype in itertools.product(cases(variant.op), (torch.bfloat16, torch.float32)):
            if refused(variant, case, dtype, False):
                continue
            inputs = empty_inputs(case, dtype, "meta")
            into = found["forward"]
            output, saved = variant.forward(*inputs, **case.options)
            if variant.backward is None or refused(variant, case, dtype, True):
                continue
            into = found["backward"]
            grad = each(torch.empty_like, output) if isinstance(output, tuple) else torch.empty_like(output)
            variant.backward(saved, grad, tuple(has_gradient(x) for x in inputs))
    return {name: sorted(kernels) for name, kernels in found.items()}


def main() -> None:
    ops = sys.argv[1:] or kernel_ladder.OPS
    with gpu.pretend(HOPPER), traced(capability=90, shared_limit=227 * 1024):
        print(json.dumps({op: {v.name: launched(v) for v in table.variants(op, "triton")} for op in ops}, indent=1))


if __name__ == "__main__":
    main()
