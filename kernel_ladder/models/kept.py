"""Modules that a patch leaves as they are although kernels of their kind exist, and why."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from kernel_ladder.models.kinds import Block, of_class

DROPOUT = "stays PyTorch's: a seed drawn for each call, as kernel_ladder.nn.Dropout's, breaks graphs of torch.compile"
SOFTMAX = "kernel_ladder.nn has no module of it; call kernel_ladder.softmax in its place"
WEIGHTED_LOSS = "weighs its classes, which cross_entropy does not"
SILU = "no operation is SiLU alone; swiglu has it in a feed-forward block"
NORM = "normalises over other dimensions than the last ones, which no operation does"
EXPERTS = "multiplies each token by weights of its own experts, which no operation does"
CALLS_ATTENTION = (
    "its forward pass calls scaled_dot_product_attention; models.register_flash_attention() reaches such calls"
)
CALLS_LOSS = "loss: its forward pass computes it, of logits in memory"

#: Reasons of modules that are parts of others, and of forward passes.
REASONS = frozenset((DROPOUT, SOFTMAX, WEIGHTED_LOSS, SILU, NORM, EXPERTS, CALLS_ATTENTION, CALLS_LOSS))


def why(module: Any, parent: Any) -> str | None:
    """Why a module that no kind replaced is left; None for one that nobody would ask about.

    Args:
        module: of any class.
        parent: the module that holds it, or None. A replaced block calls no activation of its own.
    """
    if isinstance(module, _DropoutNd):
        return DROPOUT if module.p > 0 else None
    if isinstance(module, (torch.nn.Softmax, torch.nn.LogSoftmax)):
        return SOFTMAX
    if isinstance(module, torch.nn.CrossEntropyLoss):
        return WEIGHTED_LOSS if module.weight is not None else None
    if isinstance(module, torch.nn.SiLU) or of_class(module, "SiLUActivation"):
        return None if isinstance(parent, Block) else SILU
    if isinstance(module, (_NormBase, torch.nn.GroupNorm)):
        return NORM
    if of_class(module, "Experts", "NaiveMoe"):
        return EXPERTS
    names = _names_in(type(module).forward)
    if "scaled_dot_product_attention" in names:
        return CALLS_ATTENTION
    return CALLS_LOSS if names & {"CrossEntropyLoss", "cross_entropy", "loss_function"} else None


def _names_in(forward: Any) -> set[str]:
    """The global names and attributes that a function reads, beneath its decorators."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return set(code.co_names) if code is not None else set()
