"""torch.compile level: the compiler's own fusion of the formulas in ``torch_ref``."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def unavailable() -> str | None:
    """Why torch.compile cannot be used here, or None."""
    if not torch.cuda.is_available() and not any(shutil.which(cxx) for cxx in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler where there is no GPU; put g++ or clang++ on the PATH"
    return None


def compiled(formula: Callable[..., torch.Tensor], **settings: Any) -> Callable[..., tuple[torch.Tensor, tuple]]:
    """`formula` under torch.compile, as a variant's forward. PyTorch differentiates through it.

    Shapes are compiled in as constants: a ladder compares each shape at its best.
    """
    run = torch.compile(formula, fullgraph=True, dynamic=False, **settings)

    def forward(*inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, tuple]:
        return run(*inputs, **options), ()

    return forward
