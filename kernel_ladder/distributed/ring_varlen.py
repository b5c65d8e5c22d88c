"""Ring attention of packed sequences, each of which all GPUs share (:mod:`kernel_ladder.distributed.packed`).

The ring, the merge and the backward pass are those of :mod:`kernel_ladder.distributed.ring`. A step is one call of
:func:`kernel_ladder.attention_varlen` on all queries of this rank and all keys that are there. Under a causal mask the
offsets of the call say what is seen, so no rows are gathered or copied. Chunk r of a sequence and chunk 2n − 1 − r are
an early and a late one. With keys of

    this rank      the sequence's rows are in order: the causal mask of the call
    a lower rank   (both, no queries) see (early, late keys): every query sees the early chunk
    a higher rank  (early, late queries) see (no, both keys): the late queries see both chunks

where each sequence is a pair of sequences of the call, one of which has no queries or no keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernel_ladder import autocast, ops, selection, table
from kernel_ladder.distributed import steps
from kernel_ladder.distributed.exchange import check_group, circulate
from kernel_ladder.distributed.packed import check_rows, cut_of, offsets_of, padded
from kernel_ladder.distributed.peer_copy import guarded
from kernel_ladder.distributed.same import check_same
from kernel_ladder.ops.calls import as_number
from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.spec import check_tensors

_OP = "ring_attention_varlen"
#: Offsets in a row of a plan are a multiple of this many: 16 bytes, to which kernels may align their reads.
_ALIGNMENT = 4


class _Step(NamedTuple):
    """The call of attention for the keys of one rank: lines of the plan's offsets, and what depends on these."""

    queries: int
    keys: int
    offsets: int  # how many each has
    longest: tuple[int, int]
    is_causal: bool


class _Plan(NamedTuple):
    """A rank's steps, by the rank whose keys are there; None for keys that no query sees."""

    offsets: torch.Tensor  # int32, on the CPU, a line for each vector of offsets
    steps: tuple[_Step | None, ...]
    own: _Step  # for this rank's own keys, even if there are none
    rows: tuple[int, ...]  # of each rank's part


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # kept for calls outside of it
def _plan(sequences: tuple[int, ...], rank: int, size: int, causal: bool) -> _Plan:
    cut = cut_of(sequences, size)
    bounds = [cut.bounds(r) for r in range(size)]
    ends = [x[2::2].repeat_interleave(2) for x in bounds]
    start = bounds[0][:1]  # 0
    nothing_second = [torch.cat((start, x)) for x in ends]
    nothing_first = [torch.cat((start, start, x[:-1])) for x in ends]
    lines: list[torch.Tensor] = []
    planned: list[_Step] = []
    seen: list[bool] = []
    for owner in range(size):
        if not causal or owner == rank:
            queries, keys = bounds[rank][::2], bounds[owner][::2]
        elif owner < rank:
            queries, keys = nothing_second[rank], bounds[owner]
        else:
            queries, keys = bounds[rank], nothing_first[owner]
        of_queries, of_keys = queries.diff(), keys.diff()
        longest = int(of_queries.max()), int(of_keys.max())
        planned.append(_Step(len(lines), len(lines) + 1, len(queries), longest, causal and owner == rank))
        lines += queries, keys
        seen.append(bool((of_queries * of_keys).any()))
    width = -(-(2 * len(sequences) - 1) // _ALIGNMENT) * _ALIGNMENT
    offsets = torch.zeros((len(lines), width), dtype=torch.int32, device="cpu")
    for line, places in zip(offsets, lines, strict=True):
        line[: len(places)] = places
    needed = tuple([step if any_seen else None for step, any_seen in zip(planned, seen, strict=True)])
    return _Plan(offsets, needed, planned[rank], cut.rows)


class _Ring(NamedTuple):
    group: Any
    plan: _Plan
    offsets: torch.Tensor  # the plan's, on the tensors' device
    options: dict[str, Any]
    backend: str

    def options_of(self, step: _Step) -> dict[str, Any]:
        longest_q, longest_k = step.longest
        return {
            **self.options, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k, "is_causal": step.is_causal,
            "window_size": NO_WINDOW, "return_lse": True,
        }  # fmt: skip

    def offsets_of(self, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offsets[step.queries, : step.offsets], self.offsets[step.keys, : step.offsets]


def _forward(
    ring: _Ring, backend: str | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp. `backend` is the caller's, which messages name."""
    longest = max(ring.plan.rows)
    parts = padded(key, longest), padded(value, longest)
    own = [x[: key.shape[0]] for x in parts]  # before anything is sent, as the rungs will get them
    inputs = query, *own, *ring.offsets_of(ring.plan.own)
    selection.resolve("attention_varlen", backend, inputs, ring.options_of(ring.plan.own))
    rows, heads, _ = query.shape
    calls = sum(step is not None for step in ring.plan.steps)
    merged = steps.Merged(calls, (heads, rows, value.shape[-1]))
    for owner, part in circulate(_OP, ring.group, *parts):
        step = ring.plan.steps[owner]
        if step is None:
            continue
        key, value = (x[: ring.plan.rows[owner]] for x in part)
        found, found_lse = ops.attention_varlen(
            query, key, value, *ring.offsets_of(step), backend=ring.backend, **ring.options_of(step)
        )
        merged.add(found.transpose(0, 1), found_lse)
    if calls == 0:  # this rank has no rows
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        return query.new_zeros((rows, heads, value.shape[-1])), query.new_full((heads, rows), -math.inf, dtype=wide)
    output, lse = merged.result()
    return output.transpose(0, 1), lse


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
    rows, longest = key.shape[0], max(ring.plan.rows)
    grad_query = torch.zeros_like(query, dtype=lse.dtype)

    def step(owner: int, key: torch.Tensor, value: torch.Tensor) -> steps.Found:
        planned, own = ring.plan.steps[owner], slice(0, ring.plan.rows[owner])
        if planned is None:
            return
        inputs = query, key[own], value[own], *ring.offsets_of(planned)
        dq, dk, dv = steps.gradients(
            "attention_varlen", ring.backend, inputs, ring.options_of(planned), output, lse, grad, grad_lse
        )
        grad_query.add_(dq)
        yield own, dk, dv

    keys, values = padded(key, longest), padded(value, longest)
    grad_key, grad_value = steps.gradients_around(_OP, ring.group, keys, values, lse.dtype, step)
    return grad_query.to(query.dtype), grad_key[:rows], grad_value[:rows]


def ring_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    is_causal: bool = False,
    group: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """:func:`kernel_ladder.attention_varlen` of packed sequences, each of which the ranks of a group share.

    Every rank of the group must call it, with the same offsets. :func:`kernel_ladder.distributed.shard_packed` makes
    the parts: of each sequence two chunks a rank, so that causal work is shared equally. Sequences may have any length.

    Args:
        query: this rank's part ``(T_r, H, D)``, in any dtype that the backend takes. Parts of n ranks have T / n rows,
            rounded up or down.
        key: this rank's part ``(T_r, H_kv, D)``.
        value: this rank's part ``(T_r, H_kv, D_v)``.
        cu_seqlens: ``(B + 1,)``, int32, from 0 to T, never decreasing: where each whole sequence begins among all T
            rows, and T. On the CPU, or on the tensors' device: then the host waits for it.
        is_causal: query i of a sequence sees its keys 0 … i.
        group: the process group; None: the default one.
        scale: as in :func:`kernel_ladder.attention_varlen`, like `enable_gqa`.
        return_lse: also return the log-sum-exp ``(H, T_r)``, in float32 (float64 for float64).
        backend: as in :func:`kernel_ladder.attention_varlen`: a level, or a rung that returns the log-sum-exp.

    Returns:
        This rank's part ``(T_r, H, D_v)`` of the output. Differentiable once. Memory grows with T / n: at most two
        parts of keys, values and their gradients are on a rank at once. A group keeps its receive buffers
        (:mod:`kernel_ladder.distributed.peer_copy`).

    Raises:
        TypeError, ValueError: tensors, offsets or options that do not fit, or a `group` without this process; raised
            before anything is sent. RuntimeError: no process group, or a neighbour that is gone.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; zigzag: Zhu, ring-flash-attention.
    """
    check_group(_OP, group)
    if not isinstance(is_causal, bool):
        raise TypeError(f"{_OP}: argument `is_causal` must be a bool, got {is_causal!r}")
    if autocast.is_on():
        run = functools.partial(
            ring_attention_varlen, cu_seqlens=cu_seqlens, is_causal=is_causal, group=group, scale=scale,
            enable_gqa=enable_gqa, return_lse=return_lse, backend=backend,
        )  # fmt: skip
        return autocast.call(lambda given: run(*given), "attention_varlen", (query, key, value))
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    check_tensors(_OP, **tensors)  # before anything is sent: a rank that raises later leaves the others waiting
    sequences = offsets_of(_OP, cu_seqlens)
    if cu_seqlens.device.type != "cpu" and cu_seqlens.device != query.device:
        raise ValueError(
            f"{_OP}: argument `cu_seqlens` must be on the CPU or on the device of `query`, {query.device}, "
            f"got {cu_seqlens.device}"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, x in tensors.items():
        if x.dim() != 3:
            raise ValueError(f"{_OP}: argument `{name}` must have 3 dimensions (rows, H, D), got {tuple(x.shape)}")
        check_rows(_OP, name, x.shape[0], cut_of(sequences, size), rank)
    plan, factor = _plan(sequences, rank, size, is_causal), None if scale is None else as_number(scale)
    ring = _ring(group, plan, **tensors, backend=backend, scale=factor, enable_gqa=enable_gqa)
    # Offsets change with every batch. On a GPU each would be a new call, for which the ranks wait.
    offsets = {"offsets_of_cu_seqlens": sequences} if query.device.type == "cpu" else {}
    check_same(
        _OP, group, query.device, heads_of_query=tuple(query.shape[1:]), heads_of_key=tuple(key.shape[1:]),
        heads_of_value=tuple(value.shape[1:]), dtype_of_query=query.dtype, is_causal=is_causal,
        **offsets,
    )  # fmt: skip
    passes = [functools.partial(guarded, _OP, group, *each) for each in ((_forward, ring, backend), (_backward, ring))]
    output, lse = steps.Around.apply(*passes, query, key, value)
    return (output, lse) if return_lse else output


def _ring(
    group: Any, plan: _Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: Any, **options: Any
) -> _Ring:
    """The ring, once the operation's own check accepts the call on this rank's keys."""
    offsets, device = plan.offsets, query.device
    if device.type == "cuda":  # the host need not wait for a copy from pinned memory
        offsets = offsets.pin_memory()
    offsets = offsets.to(device, non_blocking=True)
    ring = _Ring(group, plan, offsets, options, table.asked_for("attention_varlen", backend))
    inputs = query, key, value, *ring.offsets_of(plan.own)
    table.spec("attention_varlen").check(*inputs, **ring.options_of(plan.own))
    return ring
