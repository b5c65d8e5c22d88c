"""Attention over a sequence that several GPUs share (Liu et al., Ring Attention, arXiv:2310.01889).

Each GPU keeps its queries. Keys and values travel around the ring, one hop a step, while the GPU attends to those that
it has. A step's result is merged with those before, in float32, by its log-sum-exp L:

    L = log(exp(L₁) + exp(L₂)),  O = exp(L₁ − L) · O₁ + exp(L₂ − L) · O₂

The backward pass sends keys and values around again, and with them their gradients, which arrive home after a last hop.
A step's gradient needs no step's result: with the whole O and L, its weights are exp(S − L).

The order of all sums is fixed, so two runs give the same bits where the attention's backward pass does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernel_ladder import autocast, ops, selection, table
from kernel_ladder.distributed import steps
from kernel_ladder.distributed.exchange import check_group, circulate
from kernel_ladder.distributed.peer_copy import guarded
from kernel_ladder.distributed.same import check_same
from kernel_ladder.distributed.sequence import check_layout, chunks_of
from kernel_ladder.ops.calls import as_number
from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.spec import check_tensors


class _Block(NamedTuple):
    """Queries and keys of one call of attention: ranges of local rows, and the call's mask."""

    queries: slice
    keys: slice
    is_causal: bool
    window_size: tuple[int, int]


class _Ring(NamedTuple):
    group: Any
    layout: str
    causal: bool
    window: tuple[int, int]
    options: dict[str, Any]
    backend: str

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def options_of(self, block: _Block) -> dict[str, Any]:
        return {
            **self.options, "is_causal": block.is_causal, "window_size": block.window_size, "return_lse": True,
        }  # fmt: skip

    def blocks(self, owner: int, length: int) -> Iterator[_Block]:
        """What to compute while this rank has the keys of rank `owner`."""
        everything, half = slice(0, length), length // 2
        if self.layout == "zigzag" and self.causal and self.window == NO_WINDOW:
            # Both halves of the local sequence are in order, so that one call covers them.
            if owner == self.rank:
                yield _Block(everything, everything, True, NO_WINDOW)
            elif owner < self.rank:
                yield _Block(everything, slice(0, half), False, NO_WINDOW)
            else:
                yield _Block(slice(half, length), everything, False, NO_WINDOW)
            return
        if not self.causal and self.window == NO_WINDOW:
            yield _Block(everything, everything, False, NO_WINDOW)
            return
        left, right = self.window
        right = 0 if self.causal else right
        for start, first_query in chunks_of(self.layout, self.rank, self.size, length):
            for at, first_key in chunks_of(self.layout, owner, self.size, length):
                size = length // 2 if self.layout == "zigzag" else length
                block = _band(start, at, size, first_query - first_key, left, right)
                if block is not None:
                    yield block


def _band(q: int, k: int, size: int, distance: int, left: int, right: int) -> _Block | None:
    """The rows and keys of two chunks that see each other, or None.

    `q` and `k` are the chunks' first local rows, `distance` their distance in the sequence. Query i sees the keys from
    ``i + distance − left`` to ``i + distance + right``; −1 is no limit.
    """
    keys = (max(0, distance - left) if left >= 0 else 0, min(size, size + distance + right) if right >= 0 else size)
    rows = (max(0, -distance - right) if right >= 0 else 0, min(size, size - distance + left) if left >= 0 else size)
    if keys[0] >= keys[1] or rows[0] >= rows[1]:
        return None
    count_q, count_k = rows[1] - rows[0], keys[1] - keys[0]
    shift = distance + rows[0] - keys[0] - (count_k - count_q)  # relative to the lower right corner
    before = -1 if left < 0 or left - shift >= count_k + count_q else left - shift
    after = -1 if right < 0 or right + shift >= count_k + count_q else right + shift
    queries, seen = slice(q + rows[0], q + rows[1]), slice(k + keys[0], k + keys[1])
    if (before, after) == (-1, 0) and count_q == count_k:
        return _Block(queries, seen, True, NO_WINDOW)
    return _Block(queries, seen, False, (before, after))


def _forward(
    ring: _Ring, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    length = query.shape[-2]
    calls = sum(len(list(ring.blocks(owner, length))) for owner in range(ring.size))
    merged = steps.Merged(calls, (*query.shape[:-1], value.shape[-1]))
    parts = key.contiguous(), value.contiguous()
    for owner, (key, value) in circulate("ring_attention", ring.group, *parts):
        for block in ring.blocks(owner, length):
            found, found_lse = ops.attention(
                query[..., block.queries, :], key[..., block.keys, :], value[..., block.keys, :],
                backend=ring.backend, **ring.options_of(block),
            )  # fmt: skip
            merged.add(found, found_lse, block.queries)
    return merged.result()


def _backward(
    ring: _Ring,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    length = query.shape[-2]
    grad_query = torch.zeros_like(query, dtype=lse.dtype)

    def step(owner: int, key: torch.Tensor, value: torch.Tensor) -> steps.Found:
        for block in ring.blocks(owner, length):
            rows = block.queries
            inputs = query[..., rows, :], key[..., block.keys, :], value[..., block.keys, :]
            dq, dk, dv = steps.gradients(
                "attention", ring.backend, inputs, ring.options_of(block),
                output[..., rows, :], lse[..., rows], grad[..., rows, :],
                None if grad_lse is None else grad_lse[..., rows],
            )  # fmt: skip
            grad_query[..., rows, :].add_(dq)
            yield (..., block.keys, slice(None)), dk, dv

    grad_key, grad_value = steps.gradients_around("ring_attention", ring.group, key, value, lse.dtype, step)
    return grad_query.to(query.dtype), grad_key, grad_value


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    *,
    group: Any = None,
    layout: str = "zigzag",
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] | None = NO_WINDOW,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """:func:`kernel_ladder.attention` over a sequence that the ranks of a group share, each with an equal part.

    Every rank of the group must call it, with parts of the same shape. :func:`kernel_ladder.distributed.shard_sequence`
    makes the parts.

    Args:
        query: this rank's part ``(B, H, S / n, D)`` of n ranks, in any dtype that the backend takes.
        key: this rank's part ``(B, H_kv, S / n, D)``.
        value: this rank's part ``(B, H_kv, S / n, D_v)``.
        is_causal: query i of the sequence sees keys 0 … i.
        group: the process group; None: the default one.
        layout: ``"zigzag"``: rank r has the chunks r and 2n − 1 − r of 2n, which shares causal work equally;
            ``"contiguous"``: rank r has the r-th of n.
        scale: as in :func:`kernel_ladder.attention`, like `enable_gqa`.
        window_size: (left, right): query i of the sequence sees only keys i − left … i + right. −1 or None: no limit.
        return_lse: also return the log-sum-exp ``(B, H, S / n)``, in float32 (float64 for float64).
        backend: as in :func:`kernel_ladder.attention`: a level, or a rung that returns the log-sum-exp.

    Returns:
        This rank's part ``(B, H, S / n, D_v)`` of the output. Differentiable once. Memory grows with S / n: at most two
        parts of keys, values and their gradients are on a rank at once. A group keeps its receive buffers
        (:mod:`kernel_ladder.distributed.peer_copy`).

    Raises:
        ValueError, TypeError: shapes or options that do not fit, or a `group` without this process; raised before
            anything is sent. ValueError, on every rank: shapes, a dtype or a mask that another rank has not. It is
            found in the first call with such operands. RuntimeError: no process group, or a neighbour that is gone.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; zigzag: Zhu, ring-flash-attention.
    """
    op = "ring_attention"
    check_group(op, group)
    check_layout(op, layout)
    if not isinstance(is_causal, bool):
        raise TypeError(f"{op}: argument `is_causal` must be a bool, got {is_causal!r}")
    if autocast.is_on():
        run = functools.partial(
            ring_attention, is_causal=is_causal, group=group, layout=layout, scale=scale, enable_gqa=enable_gqa,
            window_size=window_size, return_lse=return_lse, backend=backend,
        )  # fmt: skip
        return autocast.call(lambda given: run(*given), "attention", (query, key, value))
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    check_tensors(op, **tensors)  # before anything is sent: a rank that raises later leaves the others waiting
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{op}: argument `{name}` must be (B, H, S, D), got {x.dim()} dimensions")
        if x.shape[2] != query.shape[2]:
            raise ValueError(
                f"{op}: `query`, `key` and `value` must be equal parts of one sequence, got {query.shape[2]} rows of "
                f"`query` and {x.shape[2]} of `{name}`"
            )
    if layout == "zigzag" and query.shape[2] % 2:
        raise ValueError(f"{op}: layout='zigzag' needs parts of two equal chunks, got {query.shape[2]} rows")
    window = NO_WINDOW if window_size is None else tuple(window_size)
    if len(window) != 2 or not all(isinstance(n, int) and n >= -1 for n in window):
        raise ValueError(f"{op}: argument `window_size` must be two ints from -1 on, got {window_size!r}")
    options = {"scale": None if scale is None else as_number(scale), "enable_gqa": enable_gqa}
    ring = _Ring(group, layout, is_causal, window, options, table.asked_for("attention", backend))
    for block in ring.blocks(ring.rank, query.shape[2]):
        inputs = query[..., block.queries, :], key[..., block.keys, :], value[..., block.keys, :]
        table.spec("attention").check(*inputs, **ring.options_of(block))
        selection.resolve("attention", backend, inputs, ring.options_of(block))
    check_same(
        op, group, query.device, shape_of_query=tuple(query.shape), shape_of_key=tuple(key.shape),
        shape_of_value=tuple(value.shape), dtype_of_query=query.dtype, is_causal=is_causal, layout=layout,
        window_size=window,
    )  # fmt: skip
    passes = [functools.partial(guarded, op, group, each, ring) for each in (_forward, _backward)]
    output, lse = steps.Around.apply(*passes, query, key, value)
    return (output, lse) if return_lse else output
