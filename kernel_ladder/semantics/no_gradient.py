"""Rungs without a gradient: they refuse a call that wants one, and their backward pass is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kernel_ladder.tracing import wants_gradient


def wanted(*inputs: torch.Tensor | None) -> str | None:
    """Why a rung without a gradient does not take these inputs, or None."""
    if wants_gradient(*inputs):
        return "it is for inference and has no gradient; call it under torch.no_grad(), or use backend='torch'"
    return None


def refuse(op: str, name: str) -> Callable[..., NoReturn]:
    """The backward pass of a rung that has none, for callers who went past :func:`wanted`."""

    def backward(saved: tuple[Any, ...], grad: Any, needs: tuple[bool, ...]) -> NoReturn:
        raise RuntimeError(f"{op}: {name} is for inference and has no gradient; use backend='torch'")

    return backward
