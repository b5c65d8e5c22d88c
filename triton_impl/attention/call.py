"""One call of attention as its kernels see it: four dimensions, a band, a mask, and packed sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_ladder.semantics.masks import NO_WINDOW, band
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Inputs, Options, Output
from kernel_ladder.tracing import shapes_only
from triton_impl.attention.tiles import (
    BELOW_DIAGONAL,
    BETWEEN_DIAGONALS,
    DROPOUT_BY_EIGHTS,
    DROPOUT_BY_ELEMENT,
    EVERYTHING,
    LN_2,
    LOG2_E,
    NO_DROPOUT,
    band_kind,
    blocks,
    mask_kind,
    section,
)
from triton_impl.common.philox import arguments
from triton_impl.runtime.launch_cache import LaunchCache

#: A kernel's arguments of a mask where no weight is dropped.
_NO_DROPOUT = (0, 0, 0, 0.0)
#: Past every length, and such that a length can be added to it in 32 bits.
UNLIMITED = 2**29


class Call(NamedTuple):
    """Operands (B, H, S, D), and what else decides a call.

    Of packed sequences S is the total length, and every batch entry is a view of the same memory; the offsets `cu_q`
    and `cu_k` tell the sequences apart.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None  # broadcast to the scores; booleans seen as bytes
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    lengths: tuple[int, int]  # of queries and keys; of packed sequences the longest
    limits: tuple[int, int]  # of the band; of packed sequences relative to the lower right corner of each
    kind: int  # BAND of the kernels
    scale: float
    dropout: tuple[float, int] | None = None  # probability and seed, where weights are dropped

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        is_causal: bool | str,
        scale: float | None,
        window_size: tuple[int, int],
        dropout: tuple[float, int] | None = None,
    ) -> Call:
        """A call on (..., H, S, D)."""
        q, k, v = _batched(query), _batched(key), _batched(value)
        mask = None if attn_mask is None else _batched_mask(attn_mask, query, key.shape[-2])
        lengths = q.shape[2], k.shape[2]
        limits = band(is_causal, window_size, *lengths)
        return cls(
            q, k, v, mask, None, None, lengths, limits, band_kind(*limits, *lengths), scale_of(query.shape[-1], scale),
            dropout,
        )  # fmt: skip

    @classmethod
    def of_packed(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        is_causal: bool | str,
        scale: float | None,
        window_size: tuple[int, int],
    ) -> Call:
        """A call on packed (total, H, D). An unknown longest length is the total."""
        sequences = cu_seqlens_q.shape[0] - 1
        q, k, v = (x.transpose(0, 1).expand(sequences, -1, -1, -1) for x in (query, key, value))
        lengths = (
            query.shape[0] if max_seqlen_q is None else min(max_seqlen_q, query.shape[0]),
            key.shape[0] if max_seqlen_k is None else min(max_seqlen_k, key.shape[0]),
        )
        left, right = window_size
        if is_causal:
            right = 0
        # The kernels add a length to these in 32 bits: a limit that would not fit reaches past every key.
        first = -left if 0 <= left < UNLIMITED else -UNLIMITED
        last = right if 0 <= right < UNLIMITED else UNLIMITED
        kind = BETWEEN_DIAGONALS if first > -UNLIMITED else BELOW_DIAGONAL if last < UNLIMITED else EVERYTHING
        return cls(
            q, k, v, None, cu_seqlens_q, cu_seqlens_k, lengths, (first, last), kind, scale_of(query.shape[-1], scale)
        )

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of queries and of keys in memory."""
        return self.q.shape[2], self.k.shape[2]

    @property
    def launch_key(self) -> tuple:
        """All that decides a launch."""
        q, k, v, mask, _, _, lengths, limits, kind, scale, _ = self
        return (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.device,
            None if mask is None else (mask.stride(), mask.dtype), lengths, limits, kind, scale, self.packed,
            self.dropping,
        )  # fmt: skip

    @property
    def dropping(self) -> int:
        """The kernels' DROPOUT."""
        if self.dropout is None:
            return NO_DROPOUT
        return DROPOUT_BY_ELEMENT if self.lengths[1] % 8 else DROPOUT_BY_EIGHTS

    @property
    def of_mask(self) -> tuple[int, int, int, float]:
        """The kernels' arguments of dropout's mask: see :data:`triton_impl.common.philox.ARGUMENTS`."""
        return _NO_DROPOUT if self.dropout is None else arguments(*self.dropout)

    @property
    def mask_and_offsets(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mask and offsets for a kernel; any address stands for what is absent."""
        mask = self.q if self.mask is None else self.mask
        return (mask, self.cu_q, self.cu_k) if self.packed else (mask, self.q, self.q)  # type: ignore[return-value]

    @property
    def additive(self) -> bool:
        """Whether a mask is added to the scores."""
        return self.mask is not None and self.mask.dtype != torch.uint8

    @property
    def score_scale(self) -> float:
        """The factor of the scores, which makes them exponents of two, or of e where a mask is added to them."""
        return self.scale if self.additive else self.scale * LOG2_E

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that all kernels have, without tile sizes and INT64_OFFSETS."""
        head_dim, head_dim_v = self.q.shape[3], self.v.shape[3]
        block_d, block_dv = blocks(head_dim, head_dim_v)
        return {
            "BAND": self.kind,
            "MASK": mask_kind(self.mask),
            "VARLEN": self.packed,
            "DROPOUT": self.dropping,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "EVEN_D": head_dim == block_d,
            "EVEN_DV": head_dim_v == block_dv,
        }

    @property
    def heads_per_section(self) -> int:
        """How many query heads form a section (:func:`triton_impl.attention.tiles.program_tile`)."""
        batch, heads, _, head_dim = self.q.shape
        _, heads_kv, _, head_dim_v = self.v.shape
        bytes_per_head = self.lengths[1] * (head_dim + head_dim_v) * self.q.element_size()
        return min(section(self.kind == BELOW_DIAGONAL, heads // heads_kv, bytes_per_head), batch * heads)

    @property
    def mask_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Strides of batch entry and head in the log-sum-exp, (B, H, S) or packed (H, S)."""
        _, heads, rows, _ = self.q.shape
        return (0 if self.packed else heads * rows), rows

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Packed (total, H, D) as (B, H, total, D), every batch entry the same memory. For reading only.

        Autograd forbids modification of a view that an operation returns.
        """
        return x.transpose(0, 1).expand(self.q.shape[0], -1, -1, -1)

    def strides(self, result: torch.Tensor) -> tuple[int, ...]:
        """Strides of a result in four dimensions, as the kernels write it."""
        return (self.spread(result) if self.packed else result).stride()

    def new_like(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for the gradient of an operand: in its shape, or packed (total, H, D)."""
        if not self.packed:
            return torch.empty_like(x)
        _, heads, total, dim = x.shape
        return x.new_empty((total, heads, dim))

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the output, in the query's memory order where that keeps rows dense, and for the log-sum-exp.

        The log-sum-exp has two parts where a mask is added to the scores: see attention.tiles.store_lse.
        """
        (batch, heads, rows, head_dim), dim = self.q.shape, self.v.shape[3]
        output = torch.empty_like(self.q)
        if dim != head_dim or output.stride(3) != 1:
            output = self.q.new_empty((batch, heads, rows, dim))
        return output, self.empty_lse((2, batch * heads, rows) if self.additive else (batch * heads, rows))

    def empty_lse(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)


def fill_without_keys(output: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the results of a call without keys: zeros, and log-sum-exps of −inf."""
    output.zero_()
    lse.fill_(-math.inf)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(..., H, S, D) as (B, H, S, D): a view wherever the strides of the batch dimensions allow one."""
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _batched_mask(mask: torch.Tensor, query: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """A mask as (B, H, S_q, S_k), broadcast by strides of zero."""
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    mask = mask[(None,) * (query.dim() - mask.dim())]
    mask = _batched(mask.expand(*query.shape[:-3], *mask.shape[-3:]))
    return mask.expand(-1, *query.shape[-3:-1], seqlen_k)


def finished(
    query: torch.Tensor,
    attn_mask: torch.Tensor | None,
    call: Call,
    output: torch.Tensor,
    lse: torch.Tensor,
    return_lse: bool,
) -> tuple[Output, tuple]:
    """What a forward returns and what the backward needs, from results of four dimensions."""
    if query.dim() != 4:  # a view could not be modified under autograd
        output = torch.ops.aten._unsafe_view(output, (*query.shape[:-1], output.shape[-1]))
    mask_shape = None if attn_mask is None else tuple(attn_mask.shape)
    saved = (output, lse, tuple(query.shape[:-3]), mask_shape, *call)
    if not return_lse:
        return output, saved
    lse = lse[0] + lse[1] * LN_2 if call.additive else lse * LN_2
    return (output, torch.ops.aten._unsafe_view(lse, query.shape[:-1])), saved


def saved_from(inputs: Inputs, outputs: tuple[torch.Tensor, ...], options: Options) -> tuple:
    """What a forward without a mask saves, by outputs from elsewhere: see :class:`kernel_ladder.table.Variant`."""
    query, key, value = inputs
    output, lse = outputs
    call = Call.of(query, key, value, None, options["is_causal"], options["scale"], options["window_size"])
    lse = (lse / LN_2).reshape(-1, query.shape[-2])
    return (_batched(output), lse, tuple(query.shape[:-3]), None, *call)


def forward_by(run: Callable[[Call], tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    """A rung's `forward`; ``run(call)`` computes output and log-sum-exp of four dimensions."""

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        is_causal: bool | str,
        scale: float | None,
        enable_gqa: bool,
        window_size: tuple[int, int] = NO_WINDOW,
        return_lse: bool = False,
        dropout_p: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Output, tuple]:
        dropout = None if seed is None else (dropout_p, seed)
        call = Call.of(query, key, value, attn_mask, is_causal, scale, window_size, dropout)
        output, lse = run(call)
        return finished(query, attn_mask, call, output, lse, return_lse)

    return forward


def forward_by_launch(first: Callable[[Call, torch.Tensor, torch.Tensor], Callable[..., None]]) -> Callable[..., Any]:
    """A rung's `forward`, without masks in memory. ``first(call, output, lse)`` launches the first call of its kind.

    It returns a launch that takes (output, lse, q, k, v) and serves every later call of the kind.
    """
    launches = LaunchCache()

    def run(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = call.empty_results()
        if shapes_only():
            pass
        elif call.k.shape[2] == 0 or output.numel() == 0:
            fill_without_keys(output, lse)
        elif (known := launches.get(call.launch_key)) is None:
            launches.remember(call.launch_key, first(call, output, lse))
        else:
            known(output, lse, call.q, call.k, call.v)
        return output, lse

    return forward_by(run)
