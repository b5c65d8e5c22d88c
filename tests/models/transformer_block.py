"""A pre-norm transformer block of this package's calls, and its error against float64, for tests of compositions.

Run as a program it is the first thing that a process does with the package:
``python -m tests.models.transformer_block LEVEL`` compiles the block at a level, cold, for five sequence lengths.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

import kernel_ladder as kl

Tensors = tuple[torch.Tensor, ...]


class Size(NamedTuple):
    """Batch, heads and width of a block."""

    batch: int
    heads: int
    width: int
    lengths: tuple[int, ...]
    dtype: torch.dtype


#: The block of models on a GPU; what an interpreter does in seconds elsewhere. No length is a few queries, which other
#: attention kernels take.
SIZE = (
    Size(2, 8, 1024, (1024, 512, 1000, 777, 1536), torch.bfloat16)
    if torch.cuda.is_available()
    else Size(2, 2, 32, (40, 48, 37, 33, 56), torch.float32)
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parameters(size: Size, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Two norm weights, then those of qkv, output, gate, up and down."""
    generator = torch.Generator().manual_seed(seed)
    c = size.width
    shapes = [(c,), (c,), (3 * c, c), (c, c), (2 * c, c), (2 * c, c), (c, 2 * c)]
    made = [torch.randn(s, generator=generator) * (s[-1] ** -0.5 if len(s) > 1 else 1) for s in shapes]
    return tuple(x.to(DEVICE, dtype).requires_grad_() for x in made)


def hidden(size: Size, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(size.batch, length, size.width, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_()


def block(x: torch.Tensor, weights: Sequence[torch.Tensor], heads: int, backend: str | None) -> torch.Tensor:
    norm1, norm2, qkv, out, gate, up, down = weights
    batch, length, width = x.shape
    h = kl.rms_norm(x, (width,), norm1, backend=backend)
    q, k, v = kl.linear(h, qkv, backend=backend).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    a = kl.attention(q, k, v, is_causal=True, backend=backend).transpose(1, 2).reshape(batch, length, width)
    x = x + kl.linear(a, out, backend=backend)
    h = kl.rms_norm(x, (width,), norm2, backend=backend)
    h = kl.swiglu(kl.linear(h, gate, backend=backend), kl.linear(h, up, backend=backend), backend=backend)
    return x + kl.linear(h, down, backend=backend)


def results(function, x: torch.Tensor, weights: Tensors) -> Tensors:
    """Output, and the gradients of input and weights for a fixed gradient of the output."""
    y = function(x, weights)
    grad = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view(y.shape).sin()
    return (y.detach(), *torch.autograd.grad(y, (x, *weights), grad.to(y.dtype)))


def errors(found: Tensors, expected: Tensors) -> list[float]:
    """Relative errors in the norm."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def check(size: Size, length: int, found: Tensors, weights: Tensors, dtype: torch.dtype) -> None:
    """Hold output and gradients to twice the error that the plain formula has in the same dtype, plus 2 ulp."""

    def plain(x: torch.Tensor, weights: Tensors) -> torch.Tensor:
        return block(x, weights, size.heads, "torch.naive")

    x = hidden(size, length, dtype)
    wide = tuple(w.detach().double().requires_grad_() for w in weights)
    exact = results(plain, x.detach().double().requires_grad_(), wide)
    allowed = errors(results(plain, x, weights), exact)
    slack = 2 * torch.finfo(dtype).eps
    for name, error, bound in zip(
        ("output", "x", "norm1", "norm2", "qkv", "out", "gate", "up", "down"),
        errors(found, exact),
        allowed,
        strict=True,
    ):
        assert error <= 2 * bound + slack, f"length {length}, {name}: error {error:.2e}, the formula's {bound:.2e}"


def compiled(size: Size, backend: str, count: list[int], **settings):
    """The block under torch.compile, and in `count` how often it was compiled."""
    inner = torch._dynamo.lookup_backend("inductor" if DEVICE.type == "cuda" else "aot_eager")

    def counting(graph, examples):
        count[0] += 1
        return inner(graph, examples)

    return torch.compile(
        lambda x, weights: block(x, weights, size.heads, backend), backend=counting, fullgraph=True, **settings
    )


def main(level: str) -> None:
    size, count = SIZE, [0]
    weights = parameters(size, size.dtype)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        function = compiled(size, level, count)
        found = {length: results(function, hidden(size, length, size.dtype), weights) for length in size.lengths}
    for length, tensors in found.items():
        check(size, length, tensors, weights, size.dtype)
    print("compilations", count[0])
    for warning in said:
        if issubclass(warning.category, DeprecationWarning):  # which users do not see; PyTorch's own
            continue
        print("warning", warning.category.__name__, str(warning.message).replace("\n", " "), warning.filename)


if __name__ == "__main__":
    main(sys.argv[1])
