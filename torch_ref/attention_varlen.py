"""Attention within sequences of different lengths, packed one after the other without padding.

Sequence b has queries ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and keys and values
``cu_seqlens_k[b] : cu_seqlens_k[b + 1]``. These are the cumulative offsets of FlashAttention's function of this name
(Dao, arXiv:2307.08691). Each sequence has :mod:`torch_ref.attention`'s formula. A causal mask is aligned to the lower
right corner, so that the queries of a sequence see its cached keys.

naive  the formula over the scores of all queries with all keys, those between sequences hidden
flash  PyTorch's FlashAttention-2 kernel, which reads the offsets
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.compiler import is_compiling

from kernel_ladder.semantics.masks import LONGEST, LOWER_RIGHT, NO_WINDOW, band, pairs
from kernel_ladder.spec import Case, ErrorCase, Output, Spec, check_tensors, dtype_name
from kernel_ladder.table import register, register_spec
from kernel_ladder.testing.samples import offsets, offsets_of
from kernel_ladder.transforms import is_wrapped
from torch_ref import attention
from torch_ref.attention import MAX_HEAD_DIM, check_options, weighted
from torch_ref.attention_builtin import faults, too_many_heads, too_many_places


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> Output:
    """The formula over the scores of all queries with all keys; scores between sequences are hidden.

    A hidden key has weight zero, and zero times NaN or infinity is NaN. So one of these in `key` or `value` reaches
    every sequence. On the CPU torch.naive runs :func:`by_sequence`, where it stays within its sequence.
    """
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    if enable_gqa and k.shape[0]:
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if k.shape[-2] == 0:
        scores = q @ k.transpose(-1, -2)
        output = (scores @ v).transpose(0, 1).contiguous()
        return (output, scores.sum(-1, dtype=attention.lse_dtype(scores)) - math.inf) if return_lse else output
    hidden = ~_seen(cu_seqlens_q, cu_seqlens_k, (q.shape[-2], k.shape[-2]), is_causal, window_size)

    def scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query * scale @ key.transpose(-1, -2)).masked_fill(hidden, -math.inf)

    results = weighted(scores_of, q, k, v, return_lse)
    if isinstance(results, tuple):
        return results[0].transpose(0, 1).contiguous(), results[1]
    return results.transpose(0, 1).contiguous()


def _seen(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    totals: tuple[int, int],
    is_causal: bool | str,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Which query sees which key, as a boolean matrix."""
    places, sequences, from_the_end = [], [], []
    for cu_seqlens, total in zip((cu_seqlens_q, cu_seqlens_k), totals, strict=True):
        place = torch.arange(total, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens, place, right=True, out_int32=True) - 1
        end = cu_seqlens[(sequence + 1).clamp(max=cu_seqlens.shape[0] - 1)]
        places.append(place)
        sequences.append(sequence)
        from_the_end.append(end - place)
    # The band is aligned to the lower right. The last query is at the last key, and only distances to it count.
    after = from_the_end[0][:, None] - from_the_end[1][None, :]  # distance of a key behind its query
    left, right = (min(side, sum(totals)) for side in window_size)  # no key is farther; fits in 64 bits
    seen = sequences[0][:, None] == sequences[1][None, :]
    if is_causal:
        right = 0
    if right >= 0:
        seen = seen & (after <= right)
    return seen if left < 0 else seen & (after >= -left)


def by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool | str = False,
    return_lse: bool = False,
    **options: Any,
) -> Output:
    """The same formula, one sequence at a time: it needs memory for the scores of one sequence only."""
    outputs, lses = [], []
    for q, k, v in zip(
        _sequences(query, cu_seqlens_q), _sequences(key, cu_seqlens_k), _sequences(value, cu_seqlens_k), strict=True
    ):
        causal = LOWER_RIGHT if is_causal else False
        output, lse = attention.naive(q, k, v, is_causal=causal, return_lse=True, **options)
        outputs.append(output.transpose(0, 1))
        lses.append(lse)
    output = torch.cat(outputs)
    return (output, torch.cat(lses, 1)) if return_lse else output


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """Each sequence as (H, S, D). Rows after the last offset form one more sequence."""
    starts = [*cu_seqlens.tolist(), x.shape[0]]
    return [x[a:b].transpose(0, 1) for a, b in itertools.pairwise(starts)]


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: object = None,
    max_seqlen_k: object = None,
    is_causal: bool | str = False,
    scale: object = None,
    enable_gqa: bool = False,
    window_size: object = NO_WINDOW,
    return_lse: bool = False,
) -> None:
    op = "attention_varlen"
    check_tensors(op, query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(f"{op}: argument `{name}` must have 3 dimensions (total, H, D), got {tuple(x.shape)}")
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"{op}: argument `value` must have the length and heads of `key` {tuple(key.shape[:2])}, "
            f"got {tuple(value.shape[:2])}"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{op}: argument `key` must have the head dimension of `query`, {query.shape[2]}, got {key.shape[2]}"
        )
    for name, dim in (("query", query.shape[2]), ("value", value.shape[2])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{op}: argument `{name}` has head dimension {dim}; accepted are 1 to {MAX_HEAD_DIM}")
    _check_offsets(op, query, cu_seqlens_q, cu_seqlens_k)
    assert isinstance(cu_seqlens_q, torch.Tensor)
    assert isinstance(cu_seqlens_k, torch.Tensor)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
            raise TypeError(f"{op}: argument `{name}` must be an int or None, got {type(length).__name__}")
        if length is not None and length < 0:
            raise ValueError(f"{op}: argument `{name}` must be a length, got {length}")
    if _readable(cu_seqlens_q):
        _check_places(op, "q", cu_seqlens_q.tolist(), "query", query.shape[0], max_seqlen_q)
        _check_places(op, "k", cu_seqlens_k.tolist(), "key", key.shape[0], max_seqlen_k)
    check_options(op, query.shape[1], key.shape[1], is_causal, scale, enable_gqa, window_size, return_lse)


def _check_offsets(op: str, query: torch.Tensor, cu_seqlens_q: object, cu_seqlens_k: object) -> None:
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: argument `{name}` must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype != torch.int32:
            given = dtype_name(x.dtype)
            raise TypeError(f"{op}: argument `{name}` has dtype {given}; accepted is int32")
        if x.dim() != 1 or x.shape[0] < 2 or not x.is_contiguous():
            raise ValueError(
                f"{op}: argument `{name}` must be a dense vector of at least two offsets, got shape {tuple(x.shape)} "
                f"with strides {x.stride()}"
            )
        if x.device != query.device:
            raise ValueError(
                f"{op}: arguments `query` and `{name}` must be on the same device, got {query.device} and {x.device}"
            )
    assert isinstance(cu_seqlens_q, torch.Tensor)
    assert isinstance(cu_seqlens_k, torch.Tensor)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"{op}: argument `cu_seqlens_k` must have as many offsets as `cu_seqlens_q`, {cu_seqlens_q.shape[0]}, "
            f"got {cu_seqlens_k.shape[0]}"
        )


def _readable(offsets: torch.Tensor) -> bool:
    """Whether the host can read the offsets for free. Those on a GPU need a synchronization, and a trace has none."""
    return offsets.is_cpu and type(offsets) is torch.Tensor and not is_compiling() and not is_wrapped(offsets)


def _check_places(op: str, of: str, places: list[int], rows: str, total: int, longest: object) -> None:
    """Raise unless offsets start at 0, never decrease and end at the last row, and no sequence exceeds `longest`."""
    name = f"cu_seqlens_{of}"
    if places[0] != 0 or places[-1] != total:
        raise ValueError(
            f"{op}: argument `{name}` must go from 0 to {total}, the rows of `{rows}`, "
            f"got offsets from {places[0]} to {places[-1]}"
        )
    for a, b in itertools.pairwise(places):
        if b < a:
            raise ValueError(f"{op}: argument `{name}` must hold offsets that never fall, got {b} after {a}")
        if isinstance(longest, int) and b - a > longest:
            raise ValueError(
                f"{op}: argument `max_seqlen_{of}` must be at least the longest sequence of `{name}`, "
                f"got {longest} for one of {b - a}"
            )


def _options(causal: bool, h: int, h_kv: int, **more: Any) -> dict[str, Any]:
    return {"is_causal": causal, "scale": None, "enable_gqa": h != h_kv, **more}


def _cases() -> list[Case]:
    def case(
        name: str,
        of_q: list[int],
        of_k: list[int],
        h: int,
        h_kv: int,
        d: int,
        causal: bool = False,
        d_v: int = 0,
        **more,
    ) -> Case:
        layout, values = more.pop("layout", "contiguous"), more.pop("values", "normal")
        shapes = (of_q[-1], h, d), (of_k[-1], h_kv, d), (of_k[-1], h_kv, d_v or d), (len(of_q),), (len(of_k),)
        kinds = {3: "offsets:" + ",".join(map(str, of_q)), 4: "offsets:" + ",".join(map(str, of_k))}
        ident = f"{name}-causal" if causal else name
        return Case(ident, shapes, _options(causal, h, h_kv, **more), layout=layout, values=values, kinds=kinds)

    same, special = [0, 5, 5, 38, 167, 168], [0, 1, 3, 4, 7, 8, 14, 19]
    return [
        case("tail", [0, 5, 38, 67], [0, 5, 38, 67], 1, 1, 40),
        case("one", [0, 1], [0, 1], 1, 1, 1),
        case("small", [0, 2, 5], [0, 3, 5], 1, 1, 6),
        case("sequence", [0, 35], [0, 67], 2, 2, 16),
        case("several", same, same, 2, 2, 40),
        case("several", same, same, 2, 2, 16, True),
        case("tiles", [0, 64, 192, 257], [0, 64, 192, 257], 1, 1, 64, True, max_seqlen_q=128, max_seqlen_k=128),
        case("cached", [0, 1, 4, 5], [0, 70, 133, 140], 4, 2, 16, True),
        case("fewer-keys", [0, 20, 50], [0, 7, 40], 2, 1, 8, True),
        case("no-keys", [0, 3, 9], [0, 0, 17], 2, 2, 8),
        case("no-queries", [0, 0, 9], [0, 5, 17], 2, 2, 8),
        case("none-at-all", [0, 0, 0], [0, 3, 5], 1, 1, 8),
        case("nothing-to-see", [0, 2, 3], [0, 0, 0], 1, 1, 8),
        case("gqa", [0, 33, 70], [0, 33, 70], 6, 2, 16, True),
        case("d24-dv40", [0, 21, 47], [0, 30, 64], 2, 2, 24, d_v=40),
        case("window", [0, 67, 90], [0, 67, 113], 2, 2, 8, window_size=(9, 3)),
        case("window", [0, 67, 90], [0, 67, 113], 2, 2, 8, True, window_size=(20, -1)),
        case("lse", [0, 20, 50], [0, 7, 40], 2, 1, 8, True, return_lse=True),
        case("lse-no-keys", [0, 3, 9], [0, 0, 17], 2, 2, 8, return_lse=True),
        case("odd", [0, 17, 40], [0, 20, 33], 2, 2, 17, d_v=33),
        case("strided", [0, 17, 40], [0, 20, 33], 2, 2, 16, layout="strided"),
        case("sliced", [0, 17, 40], [0, 20, 33], 2, 2, 64, True, layout="sliced"),
        # Window sizes up to 32 bits and beyond 64 bits.
        case("window-endless", [0, 20, 50], [0, 7, 40], 1, 1, 8, window_size=(2, 2**31 - 1)),
        case("window-endless-left", [0, 20, 50], [0, 7, 40], 1, 1, 8, window_size=(2**31, 0)),
        case("window-endless-both", [0, 20, 50], [0, 37, 40], 1, 1, 8, window_size=(2**63 - 1, 2**70)),
        case("no-heads", [0, 3, 9], [0, 2, 9], 0, 0, 8, enable_gqa=True),
        # One element in seven is special, so every other sequence has none.
        case("nan", special, special, 1, 1, 1, values="nan"),
        case("inf", special, special, 1, 1, 1, values="inf"),
    ]


def _bad(
    q: tuple[int, ...] = (5, 4, 8),
    k: tuple[int, ...] = (7, 4, 8),
    v: tuple[int, ...] | None = None,
    of_q: Any = (0, 2, 5),
    of_k: Any = (0, 3, 7),
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Callable[[], tuple[tuple[Any, ...], dict]]:
    def arguments() -> tuple[tuple[Any, ...], dict]:
        tensors = [torch.zeros(shape, dtype=dtype) for shape in (q, k, k if v is None else v)]
        places = [torch.tensor(x, dtype=torch.int32) if isinstance(x, tuple) else x for x in (of_q, of_k)]
        return (*tensors, *places), dict(options)

    return arguments


ERRORS = [
    ErrorCase("integer", _bad(dtype=torch.int32), TypeError, r"`query` has dtype int32; accepted are float16"),
    ErrorCase("offsets-type", _bad(of_q=[0, 2]), TypeError, r"`cu_seqlens_q` must be a torch\.Tensor, got list"),
    ErrorCase(
        "offsets-dtype",
        _bad(of_k=torch.tensor([0, 7])),
        TypeError,
        r"`cu_seqlens_k` has dtype int64; accepted is int32",
    ),
    ErrorCase("offsets-one", _bad(of_q=(0,)), ValueError, r"`cu_seqlens_q` must be a dense vector of at least two"),
    ErrorCase("offsets-many", _bad(of_k=(0, 7)), ValueError, r"`cu_seqlens_k` must have as many offsets .* 3, got 2"),
    # The host does not read offsets on a GPU: these cases have theirs on the CPU.
    ErrorCase("offsets-past", _bad(of_k=(0, 4, 50)), ValueError, r"`cu_seqlens_k` must go from 0 to 7, .* to 50"),
    ErrorCase("offsets-short", _bad(of_q=(0, 2, 4)), ValueError, r"`cu_seqlens_q` must go from 0 to 5, .* from 0 to 4"),
    ErrorCase("offsets-start", _bad(of_q=(1, 2, 5)), ValueError, r"`cu_seqlens_q` must go from 0 to 5, .* from 1 to 5"),
    ErrorCase("offsets-fall", _bad(of_q=(0, 8, 4, 5), of_k=(0, 1, 2, 7)), ValueError, r"never fall, got 4 after 8"),
    ErrorCase("offsets-below", _bad(of_k=(0, -3, 7)), ValueError, r"`cu_seqlens_k` .* never fall, got -3 after 0"),
    ErrorCase("max-short", _bad(max_seqlen_k=3), ValueError, r"`max_seqlen_k` must be at least .* got 3 for one of 4"),
    ErrorCase("dimensions", _bad(q=(1, 5, 4, 8)), ValueError, r"`query` must have 3 dimensions .* got \(1, 5, 4, 8\)"),
    ErrorCase(
        "value", _bad(v=(6, 4, 8)), ValueError, r"`value` must have the length and heads .* \(7, 4\), got \(6, 4"
    ),
    ErrorCase("head-dim", _bad(k=(7, 4, 9)), ValueError, r"`key` must have the head dimension of `query`, 8, got 9"),
    ErrorCase("head-dim-257", _bad(v=(7, 4, 257)), ValueError, r"`value` has .* 257; accepted are 1 to 256"),
    ErrorCase("heads", _bad(k=(7, 2, 8)), ValueError, r"`key` must have the 4 heads of `query` unless .* got 2"),
    ErrorCase("max-type", _bad(max_seqlen_q=2.0), TypeError, r"`max_seqlen_q` must be an int or None, got float"),
    ErrorCase("max-negative", _bad(max_seqlen_k=-1), ValueError, r"`max_seqlen_k` must be a length, got -1"),
    ErrorCase(
        "is-causal-array",
        _bad(is_causal=np.ones(2)),
        TypeError,
        r"`is_causal` must be a bool or .lower_right., got ndarray",
    ),
    ErrorCase("window-array", _bad(window_size=np.array([3, 0])), TypeError, r"`window_size` must be two ints .*array"),
    ErrorCase(
        "is-causal", _bad(is_causal=None), TypeError, r"`is_causal` must be a bool or .lower_right., got NoneType"
    ),
    ErrorCase("window", _bad(window_size=(0, -3)), ValueError, r"`window_size` must hold numbers from -1"),
    ErrorCase("dropout", _bad(dropout_p=0.5), ValueError, r"`dropout_p` must be 0"),
]


def _sweep() -> list[Case]:
    def case(h: int, h_kv: int, d: int, causal: bool, quick: bool = False) -> Case:
        total, count = 16384, 9
        shapes = (total, h, d), (total, h_kv, d), (total, h_kv, d), (count,), (count,)
        kinds = {3: "offsets@0", 4: "offsets@1"}
        longest = max(b - a for a, b in itertools.pairwise(offsets(total, count)))
        options = _options(causal, h, h_kv, max_seqlen_q=longest, max_seqlen_k=longest)
        heads = f"H{h}" if h == h_kv else f"H{h}/{h_kv}"
        name = f"T{total} {heads} D{d} {'causal' if causal else 'full'}"
        return Case(name, shapes, options, quick=quick, kinds=kinds)

    def equal(length: int, causal: bool) -> Case:
        """Sequences of one length, the sizes of a case of dense attention: what do the offsets cost?"""
        total, h, d = 16384, 16, 128
        kinds = {3: "equal_offsets@0", 4: "equal_offsets@1"}
        shapes = *((total, h, d),) * 3, *((total // length + 1,),) * 2
        options = _options(causal, h, h, max_seqlen_q=length, max_seqlen_k=length)
        name = f"B{total // length} of S{length} H{h} D{d} {'causal' if causal else 'full'}"
        return Case(name, shapes, options, kinds=kinds)

    return [
        *(case(16, 16, 128, True, quick=True), case(16, 16, 128, False), case(32, 8, 128, True)),
        *(equal(4096, causal) for causal in (True, False)),
    ]


def _lengths(case: Case) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence of a case."""
    of_q, of_k = ([b - a for a, b in itertools.pairwise(offsets_of(case, place))] for place in (3, 4))
    return list(zip(of_q, of_k, strict=True))


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    (total, heads, _), _, (*_, d_v), *_ = case.shapes
    inputs, output = sum(map(math.prod, case.shapes[:3])), total * heads * d_v
    # The offsets are negligible.
    moved = itemsize * (2 * inputs + 2 * output if backward else inputs + output)
    return moved + (4 * total * heads if case.options.get("return_lse") else 0)


def _flops(case: Case, backward: bool) -> int:
    (_, heads, d), _, (*_, d_v), *_ = case.shapes
    causal = LOWER_RIGHT if case.options["is_causal"] else False
    window = case.options.get("window_size", NO_WINDOW)
    scores = sum(pairs(*band(causal, window, *lengths), *lengths) for lengths in _lengths(case))
    return 2 * heads * scores * (3 * d + 2 * d_v if backward else d + d_v)


SPEC = register_spec(
    Spec(
        name="attention_varlen",
        reference=naive,
        builtin=None,
        check=check,
        samples=_cases(),
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
        oracle=by_sequence,
        yardstick=by_sequence,
    )
)


def _too_large(*inputs: Any, **options: Any) -> str | None:
    return attention.too_large(*(x.transpose(0, 1) for x in inputs[:3]), **options)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> tuple[torch.Tensor, tuple]:
    cu_seqlens_q, cu_seqlens_k = _inside(cu_seqlens_q, query.shape[0]), _inside(cu_seqlens_k, key.shape[0])
    left, right = (min(side, LONGEST) for side in window_size)
    results = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, bool(is_causal), False,
        scale=None if scale is None else float(scale), window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return results[0], ()


def _inside(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Offsets clamped to the tensors and made non-decreasing: PyTorch's kernel does not check them."""
    return offsets.clamp(0, total).cummax(0).values


def _flash_unsupported(*inputs: Any, **options: Any) -> str | None:
    query, key, value = inputs[:3]
    if not query.is_cuda:
        return f"PyTorch's flash attention takes CUDA tensors, got {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"PyTorch's flash attention takes float16 and bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    if options.get("max_seqlen_q") is None or options.get("max_seqlen_k") is None:
        return "PyTorch's flash attention must be told `max_seqlen_q` and `max_seqlen_k`"
    if options.get("return_lse"):
        return "PyTorch's flash attention gives no gradient through the log-sum-exp"
    if value.shape[2] != query.shape[2] or query.shape[2] % 8:
        return f"head dimensions must be equal and multiples of 8, got {query.shape[2]} and {value.shape[2]}"
    sequences, (total, heads, head_dim) = inputs[3].shape[0] - 1, query.shape
    rows = total + 128 * sequences  # rows of query's gradient, padded as the backward does
    return (
        faults(query, key, value)
        or too_many_heads(sequences, heads)
        or too_many_places(heads, rows, head_dim, query, key, value)
    )


def _naive(*inputs: Any, **options: Any) -> tuple[Output, tuple]:
    return (by_sequence if _readable(inputs[3]) else naive)(*inputs, **options), ()


register("attention_varlen", "torch.naive", forward=_naive, unsupported=_too_large)
register("attention_varlen", "torch.flash", forward=_flash, unsupported=_flash_unsupported)
