"""What each rank of a group checks about ring attention: its part against attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import kernel_ladder
from kernel_ladder.distributed import positions, ring_attention, shard_sequence, unshard_sequence

#: Heads of queries and of keys, D and D_v as shares of the width, mask, layout and window.
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal-contiguous": {"is_causal": True, "layout": "contiguous"},
    "grouped": {"is_causal": True, "enable_gqa": True, "heads": (4, 2)},
    "value-width": {"is_causal": True, "widths": (1.0, 0.5)},
    "window": {"window_size": (5, 3)},
    "window-wide": {"window_size": (37, -1), "layout": "contiguous"},
    "window-causal": {"is_causal": True, "window_size": (9, 0)},
    "window-causal-contiguous": {"is_causal": True, "window_size": (20, -1), "layout": "contiguous"},
    "window-right": {"window_size": (-1, 21)},
    "window-none": {"window_size": (0, 0)},
}


def compare(
    name: str, backend: str, dtype: torch.dtype, tolerance: float, rows: int, width: int = 16, device: str = "cpu"
) -> None:
    """Output, log-sum-exp and gradients against float64; twice, for the same bits."""
    case = dict(CASES[name])
    heads, heads_kv = case.pop("heads", (2, 2))
    d, d_v = (round(width * share) for share in case.pop("widths", (1.0, 1.0)))
    layout = case.pop("layout", "zigzag")
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).to(device)

    inputs = made(2, heads, rows, d), made(2, heads_kv, rows, d), made(2, heads_kv, rows, d_v)
    grads = made(2, heads, rows, d_v), made(2, heads, rows)
    leaves = [x.double().requires_grad_() for x in inputs]
    expected = kernel_ladder.attention(*leaves, **case, return_lse=True, backend="torch.naive")
    # A sequence of equal lengths has one corner: a window is aligned alike on both sides.
    expected += torch.autograd.grad(expected, leaves, [x.double() for x in grads])

    def found() -> list[torch.Tensor]:
        parts = [shard_sequence(x, layout=layout).requires_grad_() for x in inputs]
        outputs = ring_attention(*parts, **case, layout=layout, return_lse=True, backend=backend)
        of_outputs = shard_sequence(grads[0], layout=layout), shard_sequence(grads[1], -1, layout=layout)
        of_outputs = of_outputs[0], of_outputs[1].to(outputs[1].dtype)
        results = [*outputs, *torch.autograd.grad(outputs, parts, of_outputs)]
        return [unshard_sequence(x, -1 if i == 1 else -2, layout=layout) for i, x in enumerate(results)]

    first = found()
    exact = [x.to(y.dtype) for x, y in zip(expected, first, strict=True)]
    torch.testing.assert_close(first, exact, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
    assert all(torch.equal(x, y) for x, y in zip(first, found(), strict=True))


def check_parts() -> None:
    """Parts of a sequence: where their rows stand, and lengths that no layout divides."""
    size = dist.get_world_size()
    for layout in ("zigzag", "contiguous"):
        x = torch.arange(4 * size)
        part = shard_sequence(x, 0, layout=layout)
        assert torch.equal(part, positions(4, layout=layout)), layout
        assert torch.equal(unshard_sequence(part, 0, layout=layout), x), layout
    with pytest.raises(ValueError, match="positions: argument `length` must be even for layout='zigzag', got 3"):
        positions(3)
    with pytest.raises(ValueError, match=rf"shard_sequence: {size} rows of argument `x` do not divide into {2 * size}"):
        shard_sequence(torch.arange(size), 0)
    with pytest.raises(ValueError, match="argument `layout` must be one of 'zigzag', 'contiguous', got 'ring'"):
        positions(4, layout="ring")


def check_before_anything_is_sent() -> None:
    """A wrong backend or wrong heads end in an error on each rank, and the group still works. So does autocast."""
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(kernel_ladder.BackendError, match="rocket"):
        ring_attention(x, x, x, backend="rocket")
    with pytest.raises(kernel_ladder.UnsupportedError, match=r"torch\.builtin"):
        ring_attention(x, x, x, backend="torch.builtin")
    three = torch.cat((x, x[:, :1]), 1)
    with pytest.raises(ValueError, match="`key` must have the 2 heads of `query`, or 1, unless"):
        ring_attention(x, three, three)
    with torch.autocast("cpu", torch.bfloat16):
        found = ring_attention(x, x, x, True, backend="torch")
    assert torch.equal(found, ring_attention(*[x.bfloat16()] * 3, True, backend="torch"))
