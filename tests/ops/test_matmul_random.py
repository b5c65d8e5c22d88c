"""Random products: shapes, layouts, offsets, batches and dtypes, against float64.

On a GPU there are three thousand, or N by ``--random-calls N``.
"""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.testing.agreement import agreement

from ..conftest import DEVICE

ON_GPU = DEVICE.type == "cuda"
CHUNKS, EXAMPLES = (10, 3000) if ON_GPU else (1, 20)  # without a GPU Triton is interpreted
LEVEL, LARGEST = ("cuda", 640) if ON_GPU else ("triton", 64)

sizes = st.one_of(st.integers(1, 40), st.integers(1, LARGEST), st.integers(1, LARGEST // 8).map(lambda n: 8 * n))


@st.composite
def operands(draw) -> tuple[tuple, tuple]:
    """Two operands as (shape, whether rows are dense, elements between rows, elements before the first)."""
    m, n, k = (draw(sizes) for _ in range(3))
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    # Half of them as TMA and 16-byte loads ask for: every stride and start a multiple of 8.
    apart = st.integers(0, 1).map(lambda i: 8 * i) if draw(st.booleans()) else st.integers(0, 9)

    def operand(rows: int, columns: int) -> tuple:
        kept = [draw(st.sampled_from([size, size, 1])) for size in batch][draw(st.integers(0, len(batch))) :]
        return (*kept, rows, columns), draw(st.booleans()), draw(apart), draw(apart)

    return operand(m, k), operand(k, n)


def laid_out(operand: tuple, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    (*batch, rows, columns), dense_rows, between, before = operand
    outer, inner = (rows, columns) if dense_rows else (columns, rows)
    padded = torch.Size((*batch, outer, inner + between))
    values = torch.randn(before + padded.numel(), generator=generator, device=DEVICE)
    x = values.to(dtype)[before:].view(padded)[..., :inner]
    return x if dense_rows else x.mT


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_products(chunk, request):
    asked_for = (ON_GPU and request.config.getoption("--random-calls")) or EXAMPLES
    spec = kernel_ladder.spec("matmul")
    if (reason := table.unavailable("matmul", LEVEL)) is not None:
        pytest.skip(reason)
    dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])

    @hypothesis.seed(chunk)
    @hypothesis.settings(max_examples=-(-asked_for // CHUNKS), deadline=None, database=None)
    @hypothesis.given(pair=operands(), dtype=dtypes, data=st.data())
    def check(pair, dtype, data):
        generator = torch.Generator(device=DEVICE).manual_seed(chunk)
        inputs = tuple(laid_out(operand, dtype, generator) for operand in pair)
        climb = table.variants("matmul", LEVEL)
        variant = data.draw(st.sampled_from([v for v in climb if v.unsupported(*inputs) is None]))
        result = agreement(spec, lambda *x: autograd.run(variant, x, {}), inputs, {})
        assert result.agrees, f"{variant.name}: {result}"

    check()
