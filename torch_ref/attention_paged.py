"""Attention to keys and values that lie in pages, as in decoding with a paged cache.

A cache has pages of `page_size` keys. Sequence b has ``cache_seqlens[b]`` keys, the new tokens' included. Its key j is
in page ``block_table[b, j // page_size]``, row ``j % page_size`` (Kwon et al., PagedAttention, arXiv:2309.06180; the
same arguments as FlashAttention's ``flash_attn_with_kvcache``). Each sequence has :mod:`torch_ref.attention`'s formula.
A causal mask is aligned to the lower right corner: the last of the new tokens sees every key.

naive  the formula over a copy of the keys and values, gathered from the pages
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from kernel_ladder import gpu
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW, band, pairs
from kernel_ladder.spec import Case, Output, Spec, check_tensors
from kernel_ladder.table import register, register_spec
from kernel_ladder.testing.samples import lengths_of
from kernel_ladder.transforms import is_wrapped
from torch_ref import attention
from torch_ref import attention_paged_samples as samples
from torch_ref.attention import MAX_HEAD_DIM, check_options, weighted
from torch_ref.matmul import running_sum

OP = "attention_paged"


def naive(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Output:
    """The formula over the keys of all pages that a row of the table names; those that no query sees are zeros.

    Pages hold what was written before, NaN too, and zero times NaN is NaN. So a weight of zero does not suffice.
    """
    keys, values = (_gathered(x, block_table) for x in (key_cache, value_cache))
    if enable_gqa and keys.shape[1]:
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    capacity = keys.shape[-2]
    if capacity == 0:
        scores = query @ keys.transpose(-1, -2)
        output = scores @ values
        return (output, scores.sum(-1, dtype=attention.lse_dtype(scores)) - math.inf) if return_lse else output
    seen = _seen(cache_seqlens, (query.shape[-2], capacity), is_causal, window_size)
    unused = ~seen.any(-2)[..., None]
    keys, values = keys.masked_fill(unused, 0), values.masked_fill(unused, 0)

    def scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query * scale @ key.transpose(-1, -2)).masked_fill(~seen, -math.inf)

    return weighted(scores_of, query, keys, values, return_lse)


def _gathered(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The keys or values of each sequence as (B, H_kv, capacity, D). Page numbers are clamped to the cache."""
    if cache.shape[0] == 0:
        return cache.flatten(0, 1).expand(block_table.shape[0], -1, -1, -1).transpose(1, 2)
    pages = block_table.long().clamp(0, cache.shape[0] - 1)
    return cache[pages].flatten(1, 2).transpose(1, 2)


def _seen(
    cache_seqlens: torch.Tensor, shape: tuple[int, int], is_causal: bool | str, window_size: tuple[int, int]
) -> torch.Tensor:
    """Which new token sees which key: (B, 1, L, capacity)."""
    rows, capacity = shape
    lengths = cache_seqlens.clamp(0, capacity)[:, None, None, None]
    key = torch.arange(capacity, device=cache_seqlens.device)
    # Distance of a key behind its query, of which the last is at the last key.
    after = key - lengths + (rows - torch.arange(rows, device=cache_seqlens.device))[:, None]
    left, right = (min(side, rows + capacity) for side in window_size)  # no key is farther; fits in 64 bits
    seen = key < lengths
    if is_causal:
        right = 0
    if right >= 0:
        seen = seen & (after <= right)
    if left >= 0:
        seen = seen & (after >= -left)
    return seen.expand(-1, -1, rows, -1)


def by_sequence(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    is_causal: bool | str = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    batch_invariant: bool = False,
    **options: Any,
) -> Output:
    """The same formula, one sequence at a time, over its own keys alone: what else is in the batch changes nothing."""
    if query.shape[0] == 0:
        tensors = query, key_cache, value_cache, block_table, cache_seqlens
        return naive(*tensors, is_causal=is_causal, window_size=window_size, return_lse=return_lse, **options)
    pages, page_size = key_cache.shape[:2]
    causal = LOWER_RIGHT if is_causal else False
    outputs, lses = [], []
    for q, table, length in zip(query, block_table, cache_seqlens.tolist(), strict=True):
        length = max(0, min(length, table.shape[0] * page_size if pages else 0))
        begin = max(0, length - q.shape[-2] - window_size[0]) if window_size[0] >= 0 else 0
        own = table[: -(-length // page_size)].long().clamp(0, max(pages - 1, 0))
        k, v = (x[own].flatten(0, 1)[min(begin, length) : length].transpose(0, 1) for x in (key_cache, value_cache))
        output, lse = attention.naive(
            q, k, v, is_causal=causal, window_size=window_size, return_lse=True, **options
        )  # fmt: skip
        outputs.append(output)
        lses.append(lse)
    return (torch.stack(outputs), torch.stack(lses)) if return_lse else torch.stack(outputs)


class _RunningSums(TorchFunctionMode):
    """Makes each product of matrices one running sum an element, as a plain kernel computes it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return running_sum(*args)
        return function(*args, **(kwargs or {}))


def one_key_after_another(query: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> Output:
    """:func:`by_sequence`, which sets the bound of the agreement check.

    One new token makes products of a vector. PyTorch splits their sums over blocks, and so rounds less in float32 than
    a kernel that adds up keys one after another, which is no fault of the kernel. In 16 bits the rounding of the
    weights hides the difference.
    """
    if query.dtype is not torch.float32:
        return by_sequence(query, *tensors, **options)
    with _RunningSums():
        return by_sequence(query, *tensors, **options)


def check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    is_causal: bool | str = False,
    scale: object = None,
    enable_gqa: bool = False,
    window_size: object = NO_WINDOW,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> None:
    check_tensors(OP, query=query, key_cache=key_cache, value_cache=value_cache)
    for name, x, dims in (
        ("query", query, "(B, H, L, D)"),
        ("key_cache", key_cache, "(pages, page_size, H_kv, D)"),
        ("value_cache", value_cache, "(pages, page_size, H_kv, D_v)"),
    ):
        if x.dim() != 4:
            raise ValueError(f"{OP}: argument `{name}` must have 4 dimensions {dims}, got {tuple(x.shape)}")
    (pages, page_size, heads_kv, head_dim), heads = key_cache.shape, query.shape[1]
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise ValueError(
            f"{OP}: argument `value_cache` must have the pages, page size and heads of `key_cache` "
            f"{tuple(key_cache.shape[:3])}, got {tuple(value_cache.shape[:3])}"
        )
    if page_size < 1:
        raise ValueError(f"{OP}: argument `key_cache` must have pages of at least 1 key, got {tuple(key_cache.shape)}")
    if head_dim != query.shape[3]:
        raise ValueError(
            f"{OP}: argument `key_cache` must have the head dimension of `query`, {query.shape[3]}, got {head_dim}"
        )
    for name, dim in (("query", query.shape[3]), ("value_cache", value_cache.shape[3])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{OP}: argument `{name}` has head dimension {dim}; accepted are 1 to {MAX_HEAD_DIM}")
    _check_integers(query, "block_table", block_table, ("B", "max_pages"))
    _check_integers(query, "cache_seqlens", cache_seqlens, ("B",))
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"{OP}: argument `batch_invariant` must be a bool, got {type(batch_invariant).__name__}")
    check_options(OP, heads, heads_kv, is_causal, scale, enable_gqa, window_size, return_lse, key="key_cache")
    if readable(block_table, cache_seqlens):
        _check_values(block_table, cache_seqlens.tolist(), pages, page_size)


def _check_integers(query: torch.Tensor, name: str, x: object, dims: tuple[str, ...]) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{OP}: argument `{name}` must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype != torch.int32:
        given = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"{OP}: argument `{name}` has dtype {given}; accepted is int32")
    if x.device != query.device:
        raise ValueError(
            f"{OP}: arguments `query` and `{name}` must be on the same device, got {query.device} and {x.device}"
        )
    if x.dim() != len(dims) or x.shape[0] != query.shape[0]:
        raise ValueError(
            f"{OP}: argument `{name}` must have {len(dims)} dimension{'s' * (len(dims) > 1)}, {' by '.join(dims)}, of "
            f"query's {query.shape[0]} sequences, got shape {tuple(x.shape)}"
        )


def readable(*tensors: torch.Tensor) -> bool:
    """Whether the host can read tensors for free. Those on a GPU need a synchronization, and a trace has none."""
    return not is_compiling() and all(x.is_cpu and type(x) is torch.Tensor and not is_wrapped(x) for x in tensors)


def _check_values(block_table: torch.Tensor, lengths: list[int], pages: int, page_size: int) -> None:
    """Raise unless each sequence's keys fit in its row of the table, and the row names pages of the cache for them."""
    columns = block_table.shape[1]
    for b, length in enumerate(lengths):
        if not 0 <= length <= columns * page_size:
            raise ValueError(
                f"{OP}: argument `cache_seqlens` must hold lengths from 0 to {columns * page_size}, which are the "
                f"{columns} pages of a row of `block_table`, got {length} for sequence {b}"
            )
        used = block_table[b, : -(-length // page_size)]
        wrong = used[(used < 0) | (used >= pages)].tolist()
        if wrong:
            raise ValueError(
                f"{OP}: argument `block_table` must name pages from 0 to {pages - 1} for the {length} keys of "
                f"sequence {b}, got {wrong[0]}"
            )


def _counts(case: Case) -> list[int]:
    """Keys of each sequence of a case."""
    return lengths_of(case, 4)


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    (batch, heads, rows, d), (_, _, heads_kv, _), (*_, d_v), *_ = case.shapes
    left = case.options.get("window_size", NO_WINDOW)[0]
    keys = sum(min(n, rows + left) if left >= 0 else n for n in _counts(case))
    inputs = batch * heads * rows * d + keys * heads_kv * (d + d_v)
    output = batch * heads * rows * d_v
    # The table and the lengths are negligible. A gradient of the caches is written for every page.
    moved = itemsize * (inputs + output)
    if backward:
        moved = itemsize * (2 * output + inputs + batch * heads * rows * d + sum(map(math.prod, case.shapes[1:3])))
    return moved + (4 * batch * heads * rows if case.options.get("return_lse") else 0)


def _flops(case: Case, backward: bool) -> int:
    (_, heads, rows, d), _, (*_, d_v), *_ = case.shapes
    causal = LOWER_RIGHT if case.options["is_causal"] else False
    window = case.options.get("window_size", NO_WINDOW)
    scores = sum(pairs(*band(causal, window, rows, n), rows, n) for n in _counts(case))
    return 2 * heads * scores * (3 * d + 2 * d_v if backward else d + d_v)


SPEC = register_spec(
    Spec(
        name=OP,
        reference=naive,
        builtin=None,
        check=check,
        samples=samples.cases(),
        errors=samples.ERRORS,
        sweep=samples.sweep(),
        bytes=_bytes,
        flops=_flops,
        oracle=by_sequence,
        yardstick=one_key_after_another,
    )
)


def _unsupported(*inputs: Any, **options: Any) -> str | None:
    query, key_cache, value_cache, block_table, cache_seqlens = inputs
    traced = is_compiling() or type(cache_seqlens) is not torch.Tensor or is_wrapped(cache_seqlens)
    if options.get("batch_invariant") and (traced or (cache_seqlens.is_cuda and gpu.capturing())):
        return "with `batch_invariant` it takes one sequence at a time, whose length the host must be able to read"
    if not query.is_cuda:
        return None
    keys = block_table.numel() * key_cache.shape[1]
    heads, rows = query.shape[1:3]
    # Twice the gathered caches, and the scores with their intermediates: those of attention's formula.
    elements = keys * heads * (2 * (query.shape[3] + value_cache.shape[3]) + 6 * rows)
    needed, total = elements * max(query.element_size(), 4), gpu.of(query.get_device()).memory
    if needed > total:
        return f"the gathered keys and their scores need {needed / 2**30:.0f} GiB; the GPU has {total / 2**30:.0f} GiB"
    return None


def _naive(*inputs: Any, **options: Any) -> tuple[Output, tuple]:
    alone = options.get("batch_invariant") or readable(inputs[4])
    return (by_sequence if alone else naive)(*inputs, **options), ()


register(OP, "torch.naive", forward=_naive, unsupported=_unsupported)
