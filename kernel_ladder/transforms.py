"""Whether a call runs inside a transform of torch.func. PyTorch has no public function for this."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.compiler import is_compiling

#: Whether any transform is active. PyTorch's own torch.autograd.Function calls it.
transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
#: Whether a transform wraps a tensor.
is_wrapped: Callable[[torch.Tensor], bool] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: True)


def under_vmap(*inputs: torch.Tensor) -> bool:
    """Whether vmap maps over an input. Inside torch.compile, which hides this, whether any transform is active."""
    if not transforms_active():
        return False
    return is_compiling() or any(_is_mapped(x) for x in inputs)


def _is_mapped(x: torch.Tensor) -> bool:
    while is_wrapped(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False
