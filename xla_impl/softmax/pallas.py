"""softmax, rung 2 of 2: pallas

Idea      A kernel of our own inside XLA's program: one program per block of rows, whole rows in registers.
Predicts  2·N·sizeof(T) bytes per row: the row is read once, which XLA's separate reductions do not promise.
Limit now The backward pass computes the forward again, and other dimensions than the last are transposed in memory.
Next      triton `fused`: the same kernel with strides, tuned configurations and a saved output.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_impl import pallas
from xla_impl.lazy import jax, jnp, pl

#: Elements of a block: 32 a thread with 8 warps.
BLOCK_ELEMENTS = 8192
#: The longest row that the registers of a program hold.
LONGEST_ROW = 32768


def _blocks(rows: int, columns: int) -> tuple[int, int]:
    block_n = pallas.block(columns, LONGEST_ROW, 1)
    return pallas.block(rows, max(1, BLOCK_ELEMENTS // block_n), 1), block_n


def _forward_kernel(x_ref: Any, y_ref: Any, *, blocks: tuple[int, int]) -> None:
    """``y = exp(x − max x) / Σ exp(x − max x)`` for a block of rows."""
    at = pl.program_id(0) * blocks[0], 0
    x = pallas.load(x_ref, (), at, blocks, -jnp.inf).astype(jnp.float32)
    exp = jnp.exp(x - jnp.max(x, 1, keepdims=True))
    pallas.store(y_ref, exp / jnp.sum(exp, 1, keepdims=True), (), at, blocks)


def _backward_kernel(y_ref: Any, grad_ref: Any, out_ref: Any, *, blocks: tuple[int, int]) -> None:
    """``y · (g − Σ y · g)`` for a block of rows."""
    at = pl.program_id(0) * blocks[0], 0
    y = pallas.load(y_ref, (), at, blocks).astype(jnp.float32)
    grad = pallas.load(grad_ref, (), at, blocks).astype(jnp.float32)
    pallas.store(out_ref, y * (grad - jnp.sum(y * grad, 1, keepdims=True)), (), at, blocks)


def _launch(kernel: Any, *arrays: Any) -> Any:
    rows, columns = arrays[0].shape
    blocks = _blocks(rows, columns)
    outputs = [(arrays[0].shape, arrays[0].dtype)]
    grid = (-(-rows // blocks[0]),)
    return pallas.launch(functools.partial(kernel, blocks=blocks), grid, outputs, *arrays, warps=8, stages=1)[0]


@functools.cache
def _rows() -> Any:
    """Softmax of the rows of a matrix, with its gradient."""
    softmax = jax.custom_vjp(lambda x: _launch(_forward_kernel, x))

    def forward(x: Any) -> tuple[Any, Any]:
        y = _launch(_forward_kernel, x)
        return y, y

    softmax.defvjp(forward, lambda y, grad: (_launch(_backward_kernel, y, grad),))
    return softmax


def formula(_: Any, input: Any, *, dim: int) -> Any:
    """Rows in registers, by a Pallas kernel."""
    if input.ndim == 0 or input.size == 0:
        return jnp.ones_like(input) + 0 * input  # NaN stays NaN
    x = jnp.moveaxis(input, dim, -1)
    return jnp.moveaxis(_rows()(x.reshape(-1, x.shape[-1])).reshape(x.shape), -1, dim)


def unsupported(input: torch.Tensor, *, dim: int) -> str | None:
    length = input.shape[dim] if input.dim() else 1
    if length > LONGEST_ROW:
        return f"rows of up to {LONGEST_ROW} elements fit in registers, got {length}"
    return pallas.unsupported(input)
