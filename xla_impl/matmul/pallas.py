"""matmul, rung 2 of 2: pallas

Idea      Tiles of our own: one program per tile of the output, sums in float32 registers, a loop over K.
Predicts  Each operand is read once per tile of the other's dimension: M·N·K · (1/BLOCK_M + 1/BLOCK_N) elements.
Limit now One fixed tile size, no order of programs for L2, no TMA, no warp specialization. Those need Mosaic GPU, which
          does not lower this kernel: it has no rule for `dot_general` (JAX 0.10.2).
Next      triton `tiled` and the rungs after it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_impl import pallas
from xla_impl.formulas import product
from xla_impl.lazy import jax, jnp, lax, pl

BLOCK_M = BLOCK_N = 128
BLOCK_K = 64


def _kernel(a_ref: Any, b_ref: Any, c_ref: Any, *, blocks: tuple[int, int, int], trans_a: bool, trans_b: bool) -> None:
    """``c = a · b`` for one tile; an operand that is transposed is stored so, and its blocks are turned in registers.

    Grid: (batch, tiles of M, tiles of N).
    """
    block_m, block_n, block_k = blocks
    batch, m, n = pl.program_id(0), pl.program_id(1) * block_m, pl.program_id(2) * block_n
    inner = a_ref.shape[1 if trans_a else 2]

    def step(i: Any, total: Any) -> Any:
        k = i * block_k
        a_at, a_block = ((k, m), (block_k, block_m)) if trans_a else ((m, k), (block_m, block_k))
        b_at, b_block = ((n, k), (block_n, block_k)) if trans_b else ((k, n), (block_k, block_n))
        a, b = pallas.load(a_ref, (batch,), a_at, a_block), pallas.load(b_ref, (batch,), b_at, b_block)
        return total + pallas.dot(a, b, trans_a, trans_b)

    total = lax.fori_loop(0, pl.cdiv(inner, block_k), step, jnp.zeros((block_m, block_n), jnp.float32))
    pallas.store(c_ref, total, (batch,), (m, n), (block_m, block_n))


def _launch(a: Any, b: Any, trans_a: bool = False, trans_b: bool = False) -> Any:
    """A batch of products of matrices, each operand transposed or not."""
    m, inner = a.shape[1:][::-1] if trans_a else a.shape[1:]
    n = b.shape[1 if trans_b else 2]
    blocks = pallas.block(m, BLOCK_M), pallas.block(n, BLOCK_N), pallas.block(inner, BLOCK_K)
    kernel = functools.partial(_kernel, blocks=blocks, trans_a=trans_a, trans_b=trans_b)
    grid = a.shape[0], pl.cdiv(m, blocks[0]), pl.cdiv(n, blocks[1])
    return pallas.launch(kernel, grid, [((a.shape[0], m, n), a.dtype)], a, b, warps=8, stages=3)[0]


@functools.cache
def _batched() -> Any:
    matmul = jax.custom_vjp(lambda a, b: _launch(a, b))

    def backward(saved: tuple[Any, Any], grad: Any) -> tuple[Any, Any]:
        a, b = saved
        return _launch(grad, b, trans_b=True), _launch(a, grad, trans_a=True)

    matmul.defvjp(lambda a, b: (_launch(a, b), (a, b)), backward)
    return matmul


def formula(_: Any, input: Any, other: Any) -> Any:
    """A tile per program, by a Pallas kernel."""
    if input.size == 0 or other.size == 0:
        return product(jax, input, other)
    a = input[None] if input.ndim == 1 else input
    b = other[:, None] if other.ndim == 1 else other
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b))
    c = _batched()(a, b).reshape(*batch, a.shape[1], b.shape[2])
    c = c[..., 0, :] if input.ndim == 1 else c
    return c[..., 0] if other.ndim == 1 else c


def unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    return pallas.unsupported(input)
