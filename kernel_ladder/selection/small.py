"""Calls whose launch outlasts their work: what ``backend="auto"`` leaves to others then.

A model that generates computes one token a step. Each of its rows and elements takes less time to move than a kernel
takes to launch. In a graph Inductor computes several such operations in one kernel, which no rung of one operation can.
In eager code the host decides, and PyTorch's own functions take the least of it.
"""

from __future__ import annotations

import torch

from kernel_ladder import table
from kernel_ladder.selection import measured
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.table import Variant
from kernel_ladder.tracing import concrete, wants_gradient

#: Operations that Inductor fuses with their neighbours. Those with dropout keep the mask of their own seed.
FUSED = frozenset(
    ("gelu", "softmax", "add", "sum", "layer_norm", "rms_norm", "bias_gelu", "swiglu", "add_rms_norm", "rope")
)
#: Elements of the first tensor. To read and write them at 16 bits takes 1.4 µs on an H100. A launch takes 7 µs, in a
#: CUDA graph 1 µs.
FEW = 2**20


def left_to_compiler(op: str, backend: str, inputs: Inputs, options: Options) -> Variant | None:
    """The formula that a graph gets in place of a kernel, or None. Where a gradient is wanted, a rung saves memory."""
    x = inputs[0]
    if backend != "auto" or op not in FUSED or x is None or not x.is_cuda or wants_gradient(*inputs):
        return None
    if concrete(x.numel()) > FEW:
        return None
    reason, found = table.at_level(op, "compile")
    formula = found.get("compile.default")
    return formula if reason is None and formula and formula.unsupported(*inputs, **options) is None else None


def left_to_module(backend: str | None, x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether a patched module keeps a call of few elements, without a gradient.

    It has one PyTorch function in place of an operation, or few. In a model that decodes, the checks and the choice
    before a rung take 20 µs of the host more than a function; the rotations of queries and keys, in ten functions, take
    40 µs less than two calls of ``rope`` (H200). The module keeps no call whose parameters have another dtype.
    """
    if backend != "auto" or type(x) is not torch.Tensor or concrete(x.numel()) > FEW or wants_gradient(x, *parameters):
        return False
    for p in parameters:  # no generator: a module's call is as short as that
        if p is not None and p.dtype is not x.dtype:
            return False
    return not measured.enabled()
