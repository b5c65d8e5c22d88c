"""The compile level: ``torch.compile`` fuses the formulas of ``torch_ref``."""

from __future__ import annotations

import functools
import shutil
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder.semantics.strides import near_gradients
from kernel_ladder.spec import Inputs, Output, each
from kernel_ladder.tracing import in_graph

#: Inductor keeps fused values in float32, also where the formula rounds. The backward pass would then recompute scores
#: in float32 and subtract their rounded maximum: wrong by factors beside large masks. This option rounds both alike.
ROUNDED = {"emulate_precision_casts": True}

#: While one thread traces, Dynamo refuses the compiled functions that other threads call.
_ONE_AT_A_TIME = threading.RLock()


@functools.cache
def unavailable() -> str | None:
    """Why torch.compile cannot be used here, or None."""
    if not torch.cuda.is_available() and not any(shutil.which(cxx) for cxx in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler where there is no GPU; put g++ or clang++ on the PATH"
    return None


def compiled(formula: Callable[..., Output], **settings: Any) -> Callable[..., tuple[Output, tuple]]:
    """Return `formula` under torch.compile, as a rung's forward. PyTorch differentiates through it.

    A ladder compares each shape at its best. So shapes, strides and options are compile-time constants, and each
    combination of them compiles once. Dynamo limits the compilations per code object, so each gets a copy of it.
    """

    def signature(inputs: Inputs, options: dict[str, Any]) -> tuple:
        tensors = each(lambda x: (x.shape, x.stride(), x.dtype, x.device, x.requires_grad), inputs)
        return tensors, tuple(options.items()), torch.is_grad_enabled()

    runs: dict[tuple, Callable[..., Output]] = {}

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Output, tuple]:
        if in_graph():  # inside a caller's torch.compile, which compiles the formula itself
            return formula(*inputs, **options), ()
        key = signature(inputs, options)
        if key not in runs:
            copy = types.FunctionType(
                formula.__code__.replace(), formula.__globals__, formula.__name__, formula.__defaults__
            )
            copy.__kwdefaults__ = formula.__kwdefaults__
            runs[key] = torch.compile(copy, fullgraph=True, dynamic=False, **settings)
        with _ONE_AT_A_TIME:
            output = runs[key](*inputs, **options)
        return near_gradients(output), ()

    return forward
