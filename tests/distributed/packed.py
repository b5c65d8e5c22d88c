"""What each rank of a group checks about ring attention of packed sequences: attention_varlen in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kernel_ladder
from kernel_ladder.distributed import positions_packed, ring_attention_varlen, shard_packed, unshard_packed
from kernel_ladder.distributed.packed import cut_of

#: Lengths of the sequences, options, heads of queries and of keys, D and D_v as shares of the width.
CASES: dict[str, dict[str, Any]] = {
    "full": {"lengths": (8, 16, 24)},
    "causal": {"lengths": (8, 16, 24), "is_causal": True},
    "uneven": {"lengths": (13, 1, 30, 2)},
    "uneven-causal": {"lengths": (13, 1, 30, 2), "is_causal": True},
    "empty-causal": {"lengths": (0, 11, 0, 0, 6, 0), "is_causal": True},
    "short-causal": {"lengths": (1,) * 9, "is_causal": True},
    "one-row": {"lengths": (1,)},
    "one-row-causal": {"lengths": (0, 1), "is_causal": True},
    "no-rows": {"lengths": (0, 0), "is_causal": True},
    "grouped": {"lengths": (21, 3), "heads": (4, 2), "enable_gqa": True, "scale": 1},
    "grouped-causal": {"lengths": (21, 3), "heads": (4, 2), "enable_gqa": True, "is_causal": True},
    "scaled-value-width": {"lengths": (5, 18), "widths": (1.0, 0.5), "scale": 0.1, "is_causal": True},
}


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


def compare(
    name: str, backend: str, dtype: torch.dtype, tolerance: float, width: int = 16, device: str = "cpu"
) -> None:
    """Output, log-sum-exp and gradients against float64; twice, for the same bits."""
    case = dict(CASES[name])
    heads, heads_kv = case.pop("heads", (2, 2))
    d, d_v = (round(width * share) for share in case.pop("widths", (1.0, 1.0)))
    cu_seqlens = _offsets(case.pop("lengths"))
    rows = int(cu_seqlens[-1])
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).to(device)

    inputs = made(rows, heads, d), made(rows, heads_kv, d), made(rows, heads_kv, d_v)
    grads = made(rows, heads, d_v), made(heads, rows)
    leaves = [x.double().requires_grad_() for x in inputs]
    expected = kernel_ladder.attention_varlen(
        *leaves, *[cu_seqlens.to(device)] * 2, **case, return_lse=True, backend="torch.naive"
    )
    expected += torch.autograd.grad(expected, leaves, [x.double() for x in grads])

    def found() -> list[torch.Tensor]:
        parts = [shard_packed(x, cu_seqlens).requires_grad_() for x in inputs]
        outputs = ring_attention_varlen(*parts, cu_seqlens, **case, return_lse=True, backend=backend)
        of_outputs = shard_packed(grads[0], cu_seqlens), shard_packed(grads[1], cu_seqlens, 1)
        of_outputs = of_outputs[0], of_outputs[1].to(outputs[1].dtype)
        results = [*outputs, *torch.autograd.grad(outputs, parts, of_outputs)]
        return [unshard_packed(x, cu_seqlens, int(i == 1)) for i, x in enumerate(results)]

    first = found()
    exact = [x.to(y.dtype) for x, y in zip(expected, first, strict=True)]
    torch.testing.assert_close(first, exact, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
    assert all(torch.equal(x, y) for x, y in zip(first, found(), strict=True))


def check_parts() -> None:
    """Parts of packed sequences: where their rows stand, how many there are, and that causal work is shared equally."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = (4 * size, 0, 3, 1, 2 * size + 1, 57)
    cu_seqlens = _offsets(lengths)
    x = torch.arange(int(cu_seqlens[-1]))
    part = shard_packed(x, cu_seqlens)
    assert torch.equal(unshard_packed(part, cu_seqlens), x)
    assert torch.equal(
        part[:4], torch.tensor([2 * rank, 2 * rank + 1, 4 * size - 2 * rank - 2, 4 * size - 2 * rank - 1])
    )
    begins = cu_seqlens[torch.searchsorted(cu_seqlens, part, right=True) - 1]
    assert torch.equal(positions_packed(cu_seqlens), part - begins)
    wide = torch.arange(6 * len(x)).view(2, len(x), 3)
    assert torch.equal(unshard_packed(shard_packed(wide, cu_seqlens, 1), cu_seqlens, 1), wide)

    rows = cut_of(tuple(cu_seqlens.tolist()), size).rows
    assert sum(rows) == len(x)
    assert max(rows) - min(rows) <= 1
    with torch.device("meta"), torch.inference_mode():  # neither decides where and how offsets are kept
        long = cut_of((0, 1001, 3004, 3004, 7000), size)
    keys = [int((long.positions(r) + 1).sum()) for r in range(size)]
    assert max(keys) < 1.01 * min(keys)


def check_autocast() -> None:
    """Under autocast the whole ring runs in the lower precision, and gradients come back in that of the parts."""
    cu_seqlens = _offsets((9, 14))
    x = torch.randn(23, 2, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        part = shard_packed(x, cu_seqlens).requires_grad_()
        found = ring_attention_varlen(part, part, part, cu_seqlens, is_causal=True, backend="torch")
    narrow = part.detach().bfloat16().requires_grad_()
    expected = ring_attention_varlen(narrow, narrow, narrow, cu_seqlens, is_causal=True, backend="torch")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    found.sum().backward()
    assert part.grad is not None
    assert part.grad.dtype == torch.float32


def check_errors() -> None:
    """Bad arguments end in an error before anything is sent: each rank raises, and the group still works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, cu_seqlens = torch.zeros(4, 2, 8), torch.tensor([0, 4 * size], dtype=torch.int32)

    def refused(
        error: type[Exception], message: str, *tensors: Any, cu_seqlens: Any = cu_seqlens, **options: Any
    ) -> None:
        with pytest.raises(error, match=message):
            ring_attention_varlen(*(tensors or (x, x, x)), cu_seqlens, **options)

    def offsets(*places: int) -> torch.Tensor:
        return torch.tensor(places, dtype=torch.int32)

    refused(TypeError, r"`cu_seqlens` must be a torch\.Tensor, got list", cu_seqlens=[0, 4])
    refused(TypeError, "`cu_seqlens` has dtype int64; accepted is int32", cu_seqlens=torch.tensor([0, 4]))
    refused(ValueError, r"`cu_seqlens` must be a vector of at least two .* \(1,\)", cu_seqlens=offsets(0))
    refused(ValueError, "`cu_seqlens` must begin with 0, got 1", cu_seqlens=offsets(1, 4))
    refused(ValueError, "`cu_seqlens` must hold offsets that never fall, got 3 after 5", cu_seqlens=offsets(0, 5, 3))
    refused(
        ValueError, rf"`query` must have 2 rows, the part of `cu_seqlens` that rank {rank} of {size} has .*, got 4",
        cu_seqlens=offsets(0, size, 2 * size),
    )  # fmt: skip
    refused(ValueError, "argument `key` must have 4 rows", x, x[:3], x)
    refused(ValueError, r"`value` must have 3 dimensions \(rows, H, D\), got \(4, 8\)", x, x, x[:, 0])
    refused(TypeError, "`query` and `key` must have the same dtype, got float32 and float64", x, x.double(), x)
    refused(TypeError, "argument `is_causal` must be a bool, got 'lower_right'", is_causal="lower_right")
    refused(ValueError, "`key` must have the 2 heads of `query` unless `enable_gqa`", x, x[:, :1], x[:, :1])
    refused(kernel_ladder.UnsupportedError, "torch.flash", backend="torch.flash")
    refused(kernel_ladder.BackendError, "rocket", backend="rocket")
    refused(TypeError, "argument `group` must be a process group or None, got str", group="ring")
    alone = dist.new_group([0])
    if rank:
        refused(ValueError, f"this process, rank {rank}, does not belong to argument `group`", group=alone)
    else:
        one = kernel_ladder.attention_varlen(x, x, x, offsets(0, 4), offsets(0, 4))
        assert torch.equal(ring_attention_varlen(x, x, x, offsets(0, 4), group=alone), one)
    with pytest.raises(ValueError, match=f"`cu_seqlens` must end with 3, the rows of `x`, got {4 * size}"):
        shard_packed(torch.zeros(3), cu_seqlens)
    with pytest.raises(ValueError, match=f"`x` must have 4 rows, the part of `cu_seqlens` that rank {rank}"):
        unshard_packed(torch.zeros(3), cu_seqlens)
    assert ring_attention_varlen(x, x, x, cu_seqlens).shape == x.shape
