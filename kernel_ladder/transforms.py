"""Whether a call is inside a transform of torch.func. PyTorch has no public way to ask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.compiler import is_compiling

#: Whether any transform is active; PyTorch's own torch.autograd.Function asks it.
transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
#: Whether a transform follows a tensor.
is_wrapped: Callable[[torch.Tensor], bool] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: True)


def under_vmap(*inputs: torch.Tensor) -> bool:
    """Whether vmap maps over an input; inside torch.compile, which does not tell, whether any transform is active."""
    if not transforms_active():
        return False
    return is_compiling() or any(_is_mapped(x) for x in inputs)


def _is_mapped(x: torch.Tensor) -> bool:
    while is_wrapped(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False
