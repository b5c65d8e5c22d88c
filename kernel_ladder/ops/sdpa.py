"""Attention, of batches, of packed sequences, and to keys in pages."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from kernel_ladder.ops.calls import as_int, as_ints, as_number, call
from kernel_ladder.semantics import sinks as of_sinks
from kernel_ladder.semantics.masks import NO_WINDOW, causal_of, is_causal_bias
from kernel_ladder.spec import Inputs


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] | None = NO_WINDOW,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    seed: int | None = None,
    backend: str | None = None,
) -> Any:
    """``softmax(query · keyᵀ · scale + mask) · value``, as :func:`torch.nn.functional.scaled_dot_product_attention`.

    A query that sees no key gives a row of zeros.

    Args:
        query: ``(B, H, S_q, D)``, or with any other number of batch dimensions, or ``(S_q, D)``; float16, bfloat16,
            float32 (float64 at the torch, compile and xla levels); any strides.
        key: ``(B, H_kv, S_k, D)``. The batch dimensions of all three broadcast. So do the heads without `enable_gqa`.
            If key and value are broadcast, their gradients are computed in the broadcast shapes and then summed.
        value: ``(B, H_kv, S_k, D_v)``.
        attn_mask: broadcasts to the scores ``(B, H, S_q, S_k)`` and is read in place. Boolean, True where a query sees
            a key; or of the query's dtype, added to the scores; or PyTorch's own
            :func:`torch.nn.attention.bias.causal_upper_left` or ``causal_lower_right``, which is never expanded.
        dropout_p: the probability to drop a weight, from 0 up to but not including 1; the others are divided by 1 − p,
            after the softmax. Above 0 it needs `seed`, and is taken by ``torch.naive``, ``compile.formula``,
            ``triton.flash`` and ``cuda.flash``. It is applied in every call: pass 0 outside of training.
        is_causal: True: query i sees keys 0 … i, aligned to the upper left as in PyTorch. ``"lower_right"``: the last
            query sees every key, query i keys 0 … i + S_k − S_q, as with ``causal_lower_right``. Both combine with a
            mask.
        scale: a positive factor on the scores; ``1/√D`` if None.
        enable_gqa: allow H to be a multiple of H_kv: consecutive query heads share one key and value head. With one
            head for all queries, the gradient has that one head.
        window_size: (left, right): query i sees only keys i + S_k − S_q − left … i + S_k − S_q + right. The window is
            aligned to the lower right, as FlashAttention's, whatever `is_causal` says. −1 or None: no limit.
        return_lse: also return the logarithm of each row's sum of exponentials.
        sinks: ``(H,)``, float32 or the query's dtype: one logit a head, which joins the softmax of each of its rows and
            has no value, as in gpt-oss. Differentiable. It takes one pass over the output, from the log-sum-exp.
        seed: an integer from 0 to 2⁶³ − 1, with `dropout_p`: it gives the mask of :func:`dropout` for a tensor of the
            shape ``(B, H, S_q, S_k)`` of the weights. The backward pass draws it again.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(B, H, S_q, D_v)``, or ``(S_q, D_v)`` for matrices. With `return_lse` also one of shape
        ``(B, H, S_q)``, or ``(S_q,)``, in float32 (float64 for float64), −inf for a query that sees no key.
        Differentiable once, in query, key, value and an additive mask, whose gradient has the mask's own shape.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
    """
    if attn_mask is not None and type(attn_mask) is not torch.Tensor and is_causal_bias(attn_mask):
        is_causal, attn_mask = causal_of("attention", attn_mask, is_causal, query, key), None
    options = {
        "is_causal": is_causal,
        "scale": None if scale is None else as_number(scale),
        "enable_gqa": enable_gqa,
        "window_size": NO_WINDOW if window_size is None or window_size is NO_WINDOW else as_ints(window_size),
        "return_lse": return_lse,
    }
    if type(dropout_p) is not float or dropout_p or seed is not None:
        options |= _dropping(dropout_p, seed)
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if sinks is not None:
        return _with_sinks("attention", backend, inputs, options, sinks)
    return call("attention", backend, inputs, options)


def _dropping(dropout_p: Any, seed: Any) -> dict[str, Any]:
    """The options of a call that drops weights, and none of one that keeps all; what is wrong is left to the check."""
    p, seed = as_number(dropout_p), seed if type(seed) is int else as_int(seed)
    if type(p) is float and p == 0 and (seed is None or (type(seed) is int and seed >= 0)):
        return {}
    return {"dropout_p": p, "seed": seed}


def _with_sinks(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any], sinks: Any) -> Any:
    packed = op == "attention_varlen"
    query, key, value, *_ = inputs
    heads = of_sinks.heads_of(query, key, value, options["enable_gqa"] is True, packed)
    if heads is not None:
        of_sinks.check(op, query, heads, sinks)
    return_lse = options["return_lse"]
    options = {**options, "return_lse": True if return_lse is False else return_lse}
    output, lse = call(op, backend, inputs, options)
    return of_sinks.with_sinks(output, lse, sinks, packed, return_lse)


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] | None = NO_WINDOW,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Any:
    """:func:`attention` within sequences of different lengths, packed one after the other without padding.

    Args:
        query: ``(T_q, H, D)``, the queries of all sequences; float16, bfloat16, float32 (float64 at the torch, compile
            and xla levels); any strides.
        key: ``(T_k, H_kv, D)``.
        value: ``(T_k, H_kv, D_v)``.
        cu_seqlens_q: ``(B + 1,)``, int32, dense, from 0 to T_q, never decreasing: sequence b has the queries
            ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``. Offsets on the CPU are checked. Offsets on a GPU are clamped to
            0 … T_q when they are read. There, wrong offsets give wrong rows, and rows of no sequence are undefined, but
            no memory outside the tensors is read or written.
        cu_seqlens_k: likewise for keys and values.
        max_seqlen_q: at least the longest number of queries, checked as the offsets are. None means T_q, which is
            correct but slower.
        max_seqlen_k: likewise for keys.
        is_causal: within each sequence, aligned to the lower right: the last query sees every key.
        scale: a positive factor on the scores; ``1/√D`` if None.
        enable_gqa: allow H to be a multiple of H_kv: consecutive query heads share one key and value head.
        window_size: as for :func:`attention`, within each sequence.
        return_lse: also return the logarithm of each row's sum of exponentials.
        sinks: ``(H,)``, as for :func:`attention`.
        dropout_p: must be 0: attention weights are not dropped.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(T_q, H, D_v)``. With `return_lse` also one of shape ``(H, T_q)`` in float32 (float64 for float64).
        A query that sees no key gives zeros and −inf. Differentiable once, in query, key and value.

    Source: Dao, FlashAttention-2, arXiv:2307.08691; its ``flash_attn_varlen_func`` has the same arguments.
    """
    if type(dropout_p) is not float or dropout_p:
        _no_dropout("attention_varlen", dropout_p)
    options = {
        "max_seqlen_q": None if max_seqlen_q is None else as_int(max_seqlen_q),
        "max_seqlen_k": None if max_seqlen_k is None else as_int(max_seqlen_k),
        "is_causal": is_causal,
        "scale": None if scale is None else as_number(scale),
        "enable_gqa": enable_gqa,
        "window_size": NO_WINDOW if window_size is None or window_size is NO_WINDOW else as_ints(window_size),
        "return_lse": return_lse,
    }
    inputs = (query, key, value, cu_seqlens_q, cu_seqlens_k)
    if sinks is not None:
        return _with_sinks("attention_varlen", backend, inputs, options, sinks)
    return call("attention_varlen", backend, inputs, options)


def attention_paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Sequence[int] | None = NO_WINDOW,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Any:
    """:func:`attention` of new tokens to keys and values that lie in the pages of a cache, as in decoding.

    Key j of sequence b is in page ``block_table[b, j // page_size]``, row ``j % page_size``.

    Args:
        query: ``(B, H, L, D)``, L new tokens of each of B sequences; float16, bfloat16, float32 (float64 at the torch,
            compile and xla levels); any strides.
        key_cache: ``(pages, page_size, H_kv, D)``; any strides. The keys of the new tokens are there already.
        value_cache: ``(pages, page_size, H_kv, D_v)``.
        block_table: ``(B, max_pages)``, int32: the pages of each sequence, in order. Entries past its keys are not
            read. Several sequences may name one page. A table on the CPU is checked. Entries on a GPU are clamped to
            the cache when they are read: wrong ones give wrong numbers, but no memory outside the tensors is read.
        cache_seqlens: ``(B,)``, int32: the keys of each sequence, those of its new tokens included, from 0 to
            ``max_pages · page_size``; checked or clamped likewise.
        is_causal: within each sequence, aligned to the lower right: the last new token sees every key, the one before
            it all but one.
        scale: a positive factor on the scores; ``1/√D`` if None.
        enable_gqa: allow H to be a multiple of H_kv: consecutive query heads share one key and value head.
        window_size: as for :func:`attention`, within each sequence.
        return_lse: also return the logarithm of each row's sum of exponentials.
        sinks: ``(H,)``, as for :func:`attention`.
        batch_invariant: give a sequence the same bits whatever else is in the batch, for one L and one backend. The
            kernels then split its keys by its own length alone. ``torch.naive`` takes one sequence at a time, and reads
            the lengths from a GPU. The compile and xla levels refuse it.
        dropout_p: must be 0: attention weights are not dropped.
        backend: see :func:`kernel_ladder.use`.

    Returns:
        A tensor ``(B, H, L, D_v)``. With `return_lse` also one of shape ``(B, H, L)`` in float32 (float64 for float64).
        A query that sees no key gives zeros and −inf. The kernels of the triton and cuda levels have no gradient and
        refuse a call that wants one; the formula of the other levels has it.

    Source: Kwon et al., PagedAttention, arXiv:2309.06180; FlashAttention's ``flash_attn_with_kvcache`` has the same
    caches, table and lengths.
    """
    if type(dropout_p) is not float or dropout_p:
        _no_dropout("attention_paged", dropout_p)
    options = {
        "is_causal": is_causal,
        "scale": None if scale is None else as_number(scale),
        "enable_gqa": enable_gqa,
        "window_size": NO_WINDOW if window_size is None or window_size is NO_WINDOW else as_ints(window_size),
        "return_lse": return_lse,
        "batch_invariant": batch_invariant,
    }
    inputs = (query, key_cache, value_cache, block_table, cache_seqlens)
    if sinks is None:
        return call("attention_paged", backend, inputs, options)
    if isinstance(query, torch.Tensor) and query.dim() == 4:
        of_sinks.check("attention_paged", query, query.shape[1], sinks)
    asked = {**options, "return_lse": True if return_lse is False else return_lse}
    output, lse = call("attention_paged", backend, inputs, asked)
    return of_sinks.with_sinks(output, lse, sinks, False, return_lse)


def _no_dropout(op: str, dropout_p: Any) -> None:
    wrong = isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real)
    if wrong or dropout_p != 0:
        given = type(dropout_p).__name__ if wrong else dropout_p
        error = TypeError if wrong else ValueError
        raise error(f"{op}: argument `dropout_p` must be 0: weights are not dropped here, got {given}")
