"""What the Pallas rungs share: launches, whole blocks of arrays whose sizes no block divides, and what is refused.

On a GPU kernels are lowered by Pallas' Triton backend, whose blocks have powers of two as sizes. On a CPU Pallas'
interpreter runs the same kernels, one program after the other.

Why not Mosaic GPU, Pallas' backend for Hopper: it lowers none of these kernels (JAX 0.10.2). It has no rule for masked
loads or ``dot_general``, and copies multiples of 128 bytes alone. There a product is a ``wgmma`` on swizzled shared
memory, as in ``csrc/sm90``. That would be other kernels, which no GPU before Hopper could run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_impl.lazy import jax, jnp, lax, pl, plgpu

Shape = tuple[int, ...]


def launch(
    kernel: Callable[..., None],
    grid: Shape,
    outputs: Sequence[tuple[Shape, Any]],
    *arrays: Any,
    warps: int,
    stages: int,
) -> tuple[Any, ...]:
    """Run ``kernel(*array_refs, *output_refs)`` once for each point of `grid`; refs are of whole arrays.

    Args:
        grid: programs along each dimension.
        outputs: shape and dtype of each output.
        warps: warps of a program, on a GPU. stages: stages of the software pipeline that Triton makes of a loop.
    """

    def call(interpret: bool) -> Callable[..., Any]:
        return pl.pallas_call(
            kernel,
            out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs),
            grid=grid,
            interpret=interpret,
            compiler_params=None if interpret else plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        )

    # The platform is known when the program is lowered, and only then.
    found: tuple[Any, ...] = lax.platform_dependent(*arrays, cpu=call(True), default=call(False))
    return found


def block(size: int, most: int, least: int = 16) -> int:
    """The power of two that covers `size`, between bounds: Triton's products need 16 at least."""
    return max(least, min(most, 1 << max(size - 1, 0).bit_length()))


def inside(starts: Sequence[Any], blocks: Sequence[int], sizes: Sequence[int]) -> Any:
    """Which elements of a block lie inside the array, as a mask of the block's shape."""
    mask = None
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        index = start + lax.broadcasted_iota(jnp.int32, tuple(blocks), axis)
        mask = index < size if mask is None else mask & (index < size)
    return mask


def load(ref: Any, leading: Sequence[Any], starts: Sequence[Any], blocks: Sequence[int], other: float = 0.0) -> Any:
    """A block of the last dimensions of an array, at one index of each dimension before; `other` outside of it."""
    mask = inside(starts, blocks, ref.shape[len(leading) :])
    slices = [pl.ds(start, count) for start, count in zip(starts, blocks, strict=True)]
    return plgpu.load(ref.at[(*leading, *slices)], mask=mask, other=other)


def store(ref: Any, value: Any, leading: Sequence[Any], starts: Sequence[Any], blocks: Sequence[int]) -> None:
    """The inverse of :func:`load`: what lies outside of the array is not written. Rounds to the array's dtype."""
    mask = inside(starts, blocks, ref.shape[len(leading) :])
    slices = [pl.ds(start, count) for start, count in zip(starts, blocks, strict=True)]
    plgpu.store(ref.at[(*leading, *slices)], value.astype(ref.dtype), mask=mask)


def dot(a: Any, b: Any, trans_a: bool = False, trans_b: bool = False) -> Any:
    """A product of two blocks with float32 sums, without TF32."""
    inner = (0 if trans_a else 1,), (1 if trans_b else 0,)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (inner, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def unsupported(input: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> str | None:
    if input.dtype is torch.float64:
        return "Pallas kernels compute in float32: takes float16, bfloat16 and float32, got float64"
    return None
