"""Attention, ``softmax(query · keyᵀ · scale + mask) · value`` (Vaswani et al., arXiv:1706.03762, equation 1).

scores:  S[i, j] = scale · Σ_d query[i, d] · key[j, d] + mask[i, j], and −inf where query i does not see key j
weights: P[i, j] = exp(S[i, j] − max_j S[i, j]) / Σ_j exp(S[i, j] − max_j S[i, j])
output:  O[i, d] = Σ_j P[i, j] · value[j, d]
lse:     L[i] = log Σ_j exp(S[i, j])

A query that sees no key gives zeros, and −inf as its log-sum-exp. Causal masks and sliding windows depend on positions
alone; :mod:`kernel_ladder.semantics.masks` defines them.
Grouped queries (Ainslie et al., arXiv:2305.13245): consecutive query heads share one head of key and value.

naive    the formula: the S_q × S_k matrix of scores goes to memory and comes back at every step
builtin  scaled_dot_product_attention, which chooses among PyTorch's kernels
flash    scaled_dot_product_attention, limited to its FlashAttention-2 kernel
cudnn    scaled_dot_product_attention, limited to cuDNN's kernel
"""

import math
import numbers
import sys
from collections.abc import Callable, Iterator

import torch

from kernel_ladder import gpu
from kernel_ladder.semantics import weight_dropout
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW, band, hides_nothing, pairs, seen
from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import (
    DTYPES,
    Case,
    Inputs,
    Options,
    Output,
    Restated,
    Spec,
    check_tensors,
    dtype_name,
    dtype_names,
    each,
    unchanged,
)
from kernel_ladder.table import register, register_spec
from kernel_ladder.tracing import wants_gradient
from torch_ref import attention_builtin as own
from torch_ref import attention_samples as samples

MAX_HEAD_DIM = 256


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> Output:
    """The formula: the whole matrix of scores goes to memory and comes back at every step.

    The seed may be a tensor of one int64, so that torch.compile does not take it for a constant.
    """
    if enable_gqa and key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    lengths = query.shape[-2], key.shape[-2]
    if lengths[1] == 0:
        scores = query @ key.transpose(-1, -2)
        output = scores @ value  # a sum over no keys: zeros, as PyTorch gives
        return (output, scores.sum(-1, dtype=lse_dtype(scores)) - math.inf) if return_lse else output
    limits = band(is_causal, window_size, *lengths)
    hidden = None if hides_nothing(*limits, *lengths) else ~seen(*limits, *lengths, query.device)

    def scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = query * scale @ key.transpose(-1, -2)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if attn_mask is None:
            return scores
        return scores + attn_mask if attn_mask.is_floating_point() else scores.masked_fill(~attn_mask, -math.inf)

    drop = None
    if dropout_p and seed is not None:
        drop = weight_dropout.factors((*query.shape[:-1], lengths[1]), dropout_p, seed, query.device)
    return weighted(scores_of, query, key, value, return_lse, drop)


def weighted(
    scores_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    return_lse: bool,
    drop: torch.Tensor | None = None,
) -> Output:
    """Softmax of the scores, times the values. A row that is −inf everywhere gives zeros.

    `drop` multiplies the weights.

    With 16-bit operands, ``scores_of(query, key)`` rounds the scores to 16 bits, as every tensor. Rows are summed in
    float32. The log-sum-exp is float32 too, and is computed from float32 scores.
    """
    scores = scores_of(query, key)
    exp, _, row_sum = _exponentials(scores)
    weights = exp / row_sum.masked_fill(row_sum == 0, 1)
    if drop is not None:
        weights = weights * drop
    output = weights.to(value.dtype) @ value
    if not return_lse:
        return output
    if (dtype := lse_dtype(scores)) != scores.dtype:
        scores = scores_of(query.to(dtype), key.to(dtype))
    _, row_max, row_sum = _exponentials(scores)
    sees_nothing = row_sum == 0
    lse = row_max + row_sum.masked_fill(sees_nothing, 1).log()
    return output, lse.masked_fill(sees_nothing, -math.inf).squeeze(-1)


def _exponentials(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(scores − maximum), each row's maximum (0 if the row is −inf everywhere), and each row's sum."""
    # Softmax does not depend on the value subtracted, so no gradient flows through the maximum.
    row_max = scores.detach().amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0)
    exp = torch.exp(scores - row_max)
    return exp, row_max, exp.sum(-1, keepdim=True, dtype=lse_dtype(exp))


def lse_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the log-sum-exp and of its sums: float64 for float64, else float32."""
    return computation_dtype(x.dtype)


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str = False,
    scale: object = None,
    enable_gqa: bool = False,
    window_size: object = NO_WINDOW,
    return_lse: bool = False,
    **dropout: object,
) -> Restated | None:
    if dropout:
        weight_dropout.check("attention", **dropout)
    check_tensors("attention", query=query, key=key, value=value)
    q, k, v = query.shape, key.shape, value.shape
    # Every call runs this check. The common case is tested first; the detailed checks run only where it fails.
    if not (
        len(q) >= 3
        and ((k == q and v == q) or (k[:-2] == q[:-2] and k[-1] == q[-1] and v[:-1] == k[:-1]))
        and 1 <= q[-1] <= MAX_HEAD_DIM
        and 1 <= v[-1] <= MAX_HEAD_DIM
        and isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
        and (scale is None or (type(scale) is float and 0 < scale <= sys.float_info.max))
        and window_size is NO_WINDOW  # not ==, which gives an array for an array
        and isinstance(return_lse, bool)
    ):
        if not (
            len(q) >= 3
            and k[:-3] == q[:-3] == v[:-3]
            and k[-3:-1] == v[-3:-1]
            and (k[-3] == q[-3] or enable_gqa is True)
        ):
            return _broadcast(query, key, value, attn_mask, enable_gqa is True)
        _check_head_dims(q[-1], k[-1], v[-1])
        check_options("attention", q[-3], k[-3], is_causal, scale, enable_gqa, window_size, return_lse)
    if attn_mask is not None:
        _check_mask(query, key, attn_mask)
    return None


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: object, grouped: bool
) -> Restated:
    """The call with query, key and value expanded to the batch dimensions and heads that they broadcast to.

    Raises:
        ValueError: they do not broadcast, or a length does not fit.
    """
    q, k, v = query.shape, key.shape, value.shape
    for name, shape in (("query", q), ("key", k), ("value", v)):
        if len(shape) < 2:
            raise ValueError(
                f"attention: argument `{name}` must have at least 2 dimensions (..., H, S, D), got {tuple(shape)}"
            )
    for name, shape, (of, others) in (("key", k, ("query", q)), ("value", v, ("query", q)), ("value", v, ("key", k))):
        if _joined(shape[:-3], others[:-3]) is None:
            raise ValueError(
                f"attention: argument `{name}` must have batch dimensions that broadcast (are equal, or 1) with those "
                f"of `{of}` {tuple(others)}, got {tuple(shape)}"
            )
    heads_kv = _joined(k[-3:-2], v[-3:-2])
    if v[-2] != k[-2] or heads_kv is None:
        raise ValueError(
            f"attention: argument `value` must have the heads, or 1, and the length of `key` (H, S) = "
            f"{tuple(k[-3:-1])}, got {tuple(v[-3:-1])}"
        )
    heads = _joined(q[-3:-2], heads_kv)
    if heads is None and not grouped:
        raise ValueError(
            f"attention: argument `key` must have the {q[-3]} heads of `query`, or 1, unless `enable_gqa` is True, "
            f"got {heads_kv[-1]}"
        )
    batch = _joined(q[:-3], k[:-3], v[:-3])
    assert batch is not None
    of_query, of_key = (q[-3:-2], heads_kv) if grouped else (heads, heads)
    inputs = [
        x.expand(*batch, *(lead or (1,)), *x.shape[-2:])
        for x, lead in ((query, of_query), (key, of_key), (value, of_key))
    ]
    if attn_mask is not None:
        inputs.append(attn_mask)  # broadcasts by itself
    return Restated(tuple(inputs), _without_heads if len(q) == len(k) == len(v) == 2 else unchanged)


def _without_heads(output: Output) -> Output:
    return each(lambda x: x.squeeze(0), output) if isinstance(output, tuple) else output.squeeze(0)


def _joined(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that the shapes broadcast to, or None if they do not broadcast."""
    joined = []
    for d in range(-max(map(len, shapes)), 0):
        size = 1
        for shape in shapes:
            if len(shape) >= -d and shape[d] != 1:
                if size not in (1, shape[d]):
                    return None
                size = shape[d]
        joined.append(size)
    return tuple(joined)


def _check_head_dims(of_query: int, of_key: int, of_value: int) -> None:
    """Raise for the first fault of the head dimensions, if there is one."""
    if of_key != of_query:
        raise ValueError(f"attention: argument `key` must have the head dimension of `query`, {of_query}, got {of_key}")
    for name, dim in (("query", of_query), ("value", of_value)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"attention: argument `{name}` has head dimension {dim}; accepted are 1 to {MAX_HEAD_DIM}")


def check_options(
    op: str,
    heads: int,
    heads_kv: int,
    is_causal: object,
    scale: object,
    enable_gqa: object,
    window_size: object,
    return_lse: object,
    *,
    key: str = "key",
) -> None:
    """Raise for the first fault of an attention call's options, if there is one. `key` names the argument of keys."""
    if isinstance(is_causal, str):
        if is_causal != LOWER_RIGHT:
            raise ValueError(f"{op}: argument `is_causal` must be a bool or {LOWER_RIGHT!r}, got {is_causal!r}")
    elif not isinstance(is_causal, bool):
        raise TypeError(f"{op}: argument `is_causal` must be a bool or {LOWER_RIGHT!r}, got {type(is_causal).__name__}")
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: argument `{name}` must be a bool, got {type(flag).__name__}")
    if heads_kv != heads:
        if not enable_gqa:
            raise ValueError(
                f"{op}: argument `{key}` must have the {heads} heads of `query` unless `enable_gqa` is True, "
                f"got {heads_kv}"
            )
        if heads_kv == 0 or heads % heads_kv:
            raise ValueError(
                f"{op}: argument `{key}` must have a number of heads that divides query's {heads}, got {heads_kv}"
            )
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise TypeError(f"{op}: argument `scale` must be a positive number or None, got {type(scale).__name__}")
        if not 0 < scale <= sys.float_info.max:
            raise ValueError(f"{op}: argument `scale` must be positive and finite, got {scale}")
    if not (
        isinstance(window_size, tuple)
        and len(window_size) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) for n in window_size)
    ):
        raise TypeError(f"{op}: argument `window_size` must be two ints (left, right) or None, got {window_size!r}")
    if min(window_size) < -1:
        raise ValueError(f"{op}: argument `window_size` must hold numbers from -1, for no limit, up, got {window_size}")


def _check_mask(query: torch.Tensor, key: torch.Tensor, attn_mask: object) -> None:
    """Raise unless a mask is boolean or of query's dtype, on its device, and broadcasts to the scores."""
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(
            f"attention: argument `attn_mask` must be a torch.Tensor, a causal bias of torch.nn.attention.bias or "
            f"None, got {type(attn_mask).__name__}"
        )
    if attn_mask.dtype is torch.bool:
        check_tensors("attention", (torch.bool,), attn_mask=attn_mask)
        if attn_mask.device != query.device:
            raise ValueError(
                f"attention: arguments `query` and `attn_mask` must be on the same device, "
                f"got {query.device} and {attn_mask.device}"
            )
    elif attn_mask.dtype not in DTYPES:
        raise TypeError(
            f"attention: argument `attn_mask` has dtype {dtype_name(attn_mask.dtype)}; accepted are bool and the dtype "
            f"of `query`, {dtype_name(query.dtype)}"
        )
    elif attn_mask.dtype is not query.dtype:
        raise TypeError(
            f"attention: arguments `query` and `attn_mask` must have the same dtype, "
            f"got {dtype_names([query.dtype, attn_mask.dtype]).replace(', ', ' and ')}; a bool one goes with any"
        )
    else:
        check_tensors("attention", query=query, attn_mask=attn_mask)
    scores, mask = (*query.shape[:-1], key.shape[-2]), tuple(attn_mask.shape)
    if len(mask) > len(scores) or any(m not in (1, s) for m, s in zip(mask[::-1], scores[::-1], strict=False)):
        raise ValueError(
            f"attention: argument `attn_mask` must broadcast to the shape {scores} of the scores, got {mask}"
        )


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    q, _, v, *mask = case.shapes
    inputs, output = sum(map(math.prod, case.shapes[:3])), math.prod((*q[:-1], v[-1]))
    # Forward reads query, key, value and writes the output.
    # Backward reads these, the output and its gradient and writes three gradients.
    moved = itemsize * (2 * inputs + 2 * output if backward else inputs + output)
    # A mask is read; an additive one's gradient is written. The log-sum-exp is one float32 per query.
    if mask:
        moved += math.prod(mask[0]) * (1 if 3 in case.kinds else (2 * itemsize if backward else itemsize))
    return moved + (4 * math.prod(q[:-1]) if case.options.get("return_lse") else 0)


def _flops(case: Case, backward: bool) -> int:
    (*batch, s_q, d), (*_, s_k, _), (*_, d_v), *_ = case.shapes
    scores = pairs(*band(case.options["is_causal"], case.options.get("window_size", NO_WINDOW), s_q, s_k), s_q, s_k)
    # Forward: scores and output. Backward: the scores again, and the gradients of query, key, weights and value.
    return 2 * math.prod(batch) * scores * (3 * d + 2 * d_v if backward else d + d_v)


def _parts(inputs: Inputs, options: Options) -> Iterator[tuple[tuple, tuple]]:
    """One part per batch entry and head of key and value, with the query heads that share it.

    None where weights are dropped: a mask belongs to the whole call.
    """
    if options.get("dropout_p"):
        return
    query, key, _, *masks = inputs
    heads_kv = key.shape[-3]
    group = query.shape[-3] // max(heads_kv, 1)
    for *batch, head in _indices((*query.shape[:-3], heads_kv)):
        of_query, of_key = (*batch, slice(head * group, (head + 1) * group)), (*batch, slice(head, head + 1))
        of_mask = [_of_mask(mask, of_query, query.dim()) for mask in masks if mask is not None]
        yield (of_query, of_key, of_key, *of_mask), of_query


def _of_mask(mask: torch.Tensor, of_query: tuple, dims: int) -> tuple:
    """A mask's index for one batch entry and its query heads. The mask may have fewer dimensions, or broadcast."""
    missing = dims - mask.dim()
    sizes = mask.shape[:-2] if mask.dim() >= 2 else ()
    chosen = of_query[missing:] if missing < len(of_query) else ()
    keep_all, first = slice(None), 0
    return tuple(
        (keep_all if isinstance(i, slice) else first) if n == 1 else i for i, n in zip(chosen, sizes, strict=True)
    )


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
    else:
        for outer in _indices(shape[:-1]):
            yield from ((*outer, i) for i in range(shape[-1]))


SPEC = register_spec(
    Spec(
        name="attention",
        reference=naive,
        builtin=own.builtin,
        check=check,
        samples=samples.cases(),
        errors=samples.ERRORS,
        sweep=samples.sweep(),
        bytes=_bytes,
        flops=_flops,
        parts=_parts,
    )
)


def too_large(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor | None, **options: object
) -> str | None:
    """Why the matrix of scores does not fit in the GPU's memory, or None."""
    if not query.is_cuda:
        return None
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    # Without gradients, three matrices are alive: masked scores, exponentials and one more. With gradients, saved
    # exponentials and weights, two of their gradients and two intermediates.
    wants_grad = wants_gradient(query, key, value)
    needed = scores * query.element_size() * (6 if wants_grad else 3)
    if options.get("dropout_p"):  # words of the mask, eight bytes each
        needed += scores * 8 * 6
    if query.element_size() == 2:  # plus float32 weights before rounding; a log-sum-exp needs all of it again
        needed += scores * 4 * (1 + (6 if wants_grad else 3) * bool(options.get("return_lse")))
    total = gpu.of(query.get_device()).memory
    if needed > total:
        return f"the scores and their intermediates need {needed / 2**30:.0f} GiB; the GPU has {total / 2**30:.0f} GiB"
    return None


def _naive(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, tuple]:
    return naive(*inputs, **options), ()


def _builtin(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, tuple]:
    return own.builtin(*inputs, **options), ()


register("attention", "torch.naive", forward=_naive, unsupported=too_large, drops_weights=True)
register("attention", "torch.builtin", forward=_builtin, unsupported=own.unsupported)
register("attention", "torch.flash", forward=own.flash, unsupported=own.flash_unsupported)
register("attention", "torch.cudnn", forward=own.cudnn, unsupported=own.cudnn_unsupported)
