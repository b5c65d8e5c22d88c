"""The steps of ring attention, whatever the layout: merge a step's result, differentiate a step by the whole result.

:mod:`kernel_ladder.distributed.ring` has the formulas. Its tensors are ``(B, H, S, D)``; those of packed sequences are
``(T, H, D)``, and their log-sum-exp ``(H, T)``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kernel_ladder import autograd, selection, table
from kernel_ladder.distributed.exchange import circulate, exchange


def merge(
    into: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, found: torch.Tensor, found_lse: torch.Tensor
) -> None:
    """Write what `output` and `found` are together into `into`, and their log-sum-exp into `lse`.

    The share of `found` in a row is exp(L₂) / (exp(L₁) + exp(L₂)), the sigmoid of L₂ − L₁. On a GPU with the triton
    level this is one kernel.

    Args:
        into: ``(…, S, D)``, of any floating-point dtype; it may be `output`.
        output, found: of that shape and of any floating-point dtype; 0 in rows that saw no key.
        lse, found_lse: ``(…, S)``, float32 or float64; −inf in rows that saw no key.
    """
    if into.is_cuda and lse.dtype == torch.float32 and table.unavailable("attention", "triton") is None:
        importlib.import_module("triton_impl.attention.merge").merge(into, output, lse, found, found_lse)
        return
    share = torch.sigmoid(found_lse - lse).masked_fill_(found_lse == -math.inf, 0.0)
    into.copy_(torch.lerp(output.to(lse.dtype), found.to(lse.dtype), share[..., None]))
    lse.copy_(torch.logaddexp(lse, found_lse))


class Merged:
    """The results of a ring's calls of attention, merged as they come.

    Between the first result and the last merge they are kept in float32. The first result stays as it is, and the last
    merge writes the output's dtype: with two results, nothing is written in float32.

    Args:
        calls: how many results come.
        shape: of the whole output, ``(…, S, D_v)``.
    """

    def __init__(self, calls: int, shape: tuple[int, ...]) -> None:
        self._left, self._shape = calls, shape
        self._output: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, found: torch.Tensor, found_lse: torch.Tensor, rows: slice | None = None) -> None:
        """Merge the next result, which is overwritten later: output and log-sum-exp of `rows`; None: of all rows."""
        self._left -= 1
        rows = slice(0, self._shape[-2]) if rows is None else rows
        dtype = found_lse.dtype if self._left else found.dtype
        if self._output is None or self._lse is None:
            if found.shape[-2] == self._shape[-2]:
                self._output, self._lse = found, found_lse
                return
            self._output = found.new_zeros(self._shape, dtype=dtype)
            self._lse = found_lse.new_full(self._shape[:-1], -math.inf)
        before = self._output
        if before.dtype != dtype:
            self._output = torch.empty_like(before, dtype=dtype)
            for others in (slice(0, rows.start), slice(rows.stop, None)):
                self._output[..., others, :] = before[..., others, :]
        merge(self._output[..., rows, :], before[..., rows, :], self._lse[..., rows], found, found_lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, in the results' dtype, and log-sum-exp."""
        assert self._left == 0
        assert self._output is not None
        assert self._lse is not None
        return self._output, self._lse


def gradients(
    op: str,
    backend: str | None,
    inputs: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    output: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> Sequence[torch.Tensor]:
    """Gradients of a step's query, key and value, by the whole output and log-sum-exp of its queries.

    Args:
        op: ``"attention"`` or ``"attention_varlen"``.
        backend: as in :func:`kernel_ladder.attention`.
        inputs: the call's tensors: query, key, value, and the offsets of packed sequences.
        options: the call's options, with ``return_lse=True``.
        output, lse: of the whole attention.
        grad, grad_lse: their gradients; no `grad_lse` is one of zeros.
    """
    packed = op == "attention_varlen"
    leaves = (*[x.detach().requires_grad_() for x in inputs[:3]], *inputs[3:])
    with torch.enable_grad():
        variant = selection.resolve(op, backend, leaves, options)
    if variant.saved_from is not None:
        needs = (*[True] * 3, *[False] * len(inputs[3:]))
        with torch.no_grad():
            saved = variant.saved_from(inputs, (output.contiguous(), lse.contiguous()), options)
            of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
            return autograd.gradients(variant, saved, (grad, of_lse), needs)[:3]  # type: ignore[return-value]
    # The rung cannot take another output: differentiate the merge instead. With w = exp(L₁ − L), dO₁ = w · dO and
    # dL₁ = w · (Σ dO · (O₁ − O) + dL).
    with torch.enable_grad():
        found, found_lse = autograd.run(variant, leaves, options)
    weight = torch.exp(found_lse.detach() - torch.where(lse == -math.inf, 0.0, lse))
    of_lse = (grad.to(lse.dtype) * (found.detach().to(lse.dtype) - output.to(lse.dtype))).sum(-1)
    of_lse = of_lse.mT if packed else of_lse
    of_lse = weight * (of_lse if grad_lse is None else of_lse + grad_lse)
    share = (weight.mT if packed else weight)[..., None]
    return torch.autograd.grad(
        (found, found_lse), leaves[:3], ((share * grad).to(found.dtype), of_lse.to(found_lse.dtype))
    )


#: What a step adds: an index of rows of key and value, and the gradients of these rows.
Found = Iterable[tuple[Any, torch.Tensor, torch.Tensor]]


def gradients_around(
    caller: str,
    group: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    dtype: torch.dtype,
    step: Callable[[int, torch.Tensor, torch.Tensor], Found],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send keys and values around the ring with their gradients. Returns the gradients of this rank's, in its dtypes.

    ``step(owner, key, value)`` returns what this rank adds to the gradients of rank `owner`. They travel in `dtype`.
    """
    parts = key.contiguous(), value.contiguous()
    totals = tuple([torch.zeros_like(x, dtype=dtype) for x in parts])  # of the keys and values that this rank has now
    alone = dist.get_world_size(group) == 1
    hops = None if alone else exchange(caller, group, "sums", *totals)
    for turn, (owner, part) in enumerate(circulate(caller, group, *parts)):
        found = list(step(owner, *part))
        if hops is not None and turn:
            totals = hops.wait()
        for rows, *grads in found:
            for total, grad in zip(totals, grads, strict=True):
                total[rows].add_(grad)
        if hops is not None:  # they follow their keys: one hop behind the step that adds to them
            hops.send(*totals)
    if hops is not None:
        totals = hops.wait()
    of_key, of_value = (x.to(y.dtype, copy=True) for x, y in zip(totals, parts, strict=True))  # own memory
    return of_key, of_value


class Around(torch.autograd.Function):
    """A ring's forward and backward pass as one differentiable call.

    ``forward(query, key, value)`` returns the output and its log-sum-exp. ``backward(query, key, value, output, lse,
    grad, grad_lse)`` returns three gradients; `grad_lse` may be None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> Any:
        output, lse = forward(query, key, value)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        query, key, value, output, lse = ctx.saved_tensors
        grad = torch.zeros_like(output) if grad is None else grad
        return None, None, *ctx.run_backward(query, key, value, output, lse, grad, grad_lse)
