"""Calls of `attention_paged` for the tests, bad ones, and the sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernel_ladder.spec import Case, ErrorCase


def _case(
    name: str,
    lengths: list[int],
    h: int,
    h_kv: int,
    rows: int,
    d: int,
    page_size: int,
    *,
    causal: bool = False,
    pages: int | None = None,
    columns: int | None = None,
    d_v: int | None = None,
    **more: Any,
) -> Case:
    """A call on sequences of these lengths. There is one page more than the tables name, unless `pages` says it."""
    batch = len(lengths)
    if columns is None:
        columns = -(-max(lengths, default=0) // page_size)
    if pages is None:
        pages = batch * columns + 1
    fields = {name: more.pop(name) for name in ("layout", "values") if name in more}
    cache = pages, page_size, h_kv
    shapes = (batch, h, rows, d), (*cache, d), (*cache, d_v or d), (batch, columns), (batch,)
    kinds = {3: "pages@1", 4: "lengths:" + ",".join(map(str, lengths))}
    options = {"is_causal": causal, "scale": None, "enable_gqa": h != h_kv, **more}
    return Case(f"{name}-causal" if causal else name, shapes, options, kinds=kinds, **fields)


def cases() -> list[Case]:
    return [
        _case("decode", [70, 1, 33], 4, 2, 1, 40, 16),
        _case("one", [1], 1, 1, 1, 1, 1),
        _case("small", [5, 3], 1, 1, 2, 6, 2),
        _case("new-tokens", [20, 37], 4, 2, 3, 16, 8, causal=True),
        _case("fewer-keys", [2, 0, 9], 2, 1, 3, 8, 4, causal=True),
        _case("odd-pages", [11, 64], 2, 2, 2, 16, 5),
        _case("shared-pages", [30, 25, 32], 2, 1, 1, 16, 8, pages=3),
        _case("many-rows", [40, 33], 16, 1, 5, 16, 16, causal=True),
        _case("long", [700, 300], 2, 1, 1, 16, 64, columns=40),
        _case("invariant", [70, 600], 2, 1, 1, 16, 16, batch_invariant=True),
        _case("d24-dv40", [21, 9], 2, 2, 1, 24, 4, d_v=40),
        _case("window", [67, 20, 300], 2, 2, 2, 8, 4, window_size=(9, 0)),
        _case("window", [67, 20], 2, 2, 3, 8, 4, causal=True, window_size=(20, -1)),
        _case("window-endless", [20, 7], 1, 1, 2, 8, 4, window_size=(2**31, 2**70)),
        _case("lse", [20, 0, 7], 2, 1, 2, 8, 4, causal=True, return_lse=True),
        _case("no-pages", [0, 0], 2, 2, 1, 8, 4, pages=0, columns=2, return_lse=True),
        _case("no-columns", [0, 0], 2, 2, 1, 8, 4, pages=3),
        _case("no-tokens", [5, 3], 2, 2, 0, 8, 4),
        _case("no-sequences", [], 2, 1, 1, 8, 4, pages=3),
        _case("strided", [17, 40], 2, 2, 1, 16, 8, layout="strided"),
        _case("sliced", [17, 40], 2, 1, 2, 64, 8, layout="sliced"),
        _case("nan", [3, 1, 6], 1, 1, 1, 1, 2, values="nan"),
        _case("inf", [3, 1, 6], 1, 1, 1, 1, 2, values="inf"),
    ]


def _bad(
    q: tuple[int, ...] = (2, 4, 1, 8),
    k: tuple[int, ...] = (5, 4, 4, 8),
    v: tuple[int, ...] | None = None,
    table: Any = ((0, 1), (2, 4)),
    lengths: Any = (8, 3),
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Callable[[], tuple[tuple[Any, ...], dict]]:
    def arguments() -> tuple[tuple[Any, ...], dict]:
        tensors = [torch.zeros(shape, dtype=dtype) for shape in (q, k, k if v is None else v)]
        integers = [torch.tensor(x, dtype=torch.int32) if isinstance(x, tuple) else x for x in (table, lengths)]
        return (*tensors, *integers), dict(options)

    return arguments


ERRORS = [
    ErrorCase("integer", _bad(dtype=torch.int32), TypeError, r"`query` has dtype int32; accepted are float16"),
    ErrorCase("table-type", _bad(table=[[0, 1]]), TypeError, r"`block_table` must be a torch\.Tensor, got list"),
    ErrorCase(
        "lengths-dtype",
        _bad(lengths=torch.tensor([8, 3])),
        TypeError,
        r"`cache_seqlens` has dtype int64; accepted is int32",
    ),
    ErrorCase("table-shape", _bad(table=((0, 1),)), ValueError, r"`block_table` .* query's 2 sequences, .* \(1, 2\)"),
    ErrorCase(
        "table-flat", _bad(table=(0, 1)), ValueError, r"`block_table` must have 2 dimensions, B by max_pages, of"
    ),
    ErrorCase("lengths-shape", _bad(lengths=(8, 3, 1)), ValueError, r"`cache_seqlens` must have 1 dimension, B, of"),
    # The host does not read tables and lengths on a GPU: these cases have theirs on the CPU.
    ErrorCase(
        "length-past", _bad(lengths=(8, 9)), ValueError, r"`cache_seqlens` .* from 0 to 8, .* got 9 for sequence 1"
    ),
    ErrorCase("length-below", _bad(lengths=(-1, 3)), ValueError, r"`cache_seqlens` .* from 0 to 8, .* got -1 for"),
    ErrorCase(
        "page-past", _bad(table=((0, 5), (2, 4))), ValueError, r"`block_table` .* from 0 to 4 .* sequence 0, got 5"
    ),
    ErrorCase(
        "page-below", _bad(table=((0, 1), (-1, 4))), ValueError, r"`block_table` must name pages .* sequence 1, got -1"
    ),
    ErrorCase("dimensions", _bad(q=(2, 4, 8)), ValueError, r"`query` must have 4 dimensions .* got \(2, 4, 8\)"),
    ErrorCase(
        "cache-dimensions", _bad(k=(20, 4, 8)), ValueError, r"`key_cache` must have 4 dimensions \(pages, page_size"
    ),
    ErrorCase("value", _bad(v=(5, 2, 4, 8)), ValueError, r"`value_cache` must have the pages, page size and heads"),
    ErrorCase("page-size", _bad(k=(5, 0, 4, 8)), ValueError, r"`key_cache` must have pages of at least 1 key"),
    ErrorCase("head-dim", _bad(k=(5, 4, 4, 9)), ValueError, r"`key_cache` must have the head dimension of `query`, 8"),
    ErrorCase("head-dim-257", _bad(v=(5, 4, 4, 257)), ValueError, r"`value_cache` has .* 257; accepted are 1 to 256"),
    ErrorCase(
        "heads", _bad(k=(5, 4, 2, 8)), ValueError, r"`key_cache` must have the 4 heads of `query` unless .* got 2"
    ),
    ErrorCase(
        "is-causal", _bad(is_causal=None), TypeError, r"`is_causal` must be a bool or .lower_right., got NoneType"
    ),
    ErrorCase("window-array", _bad(window_size=np.array([3, 0])), TypeError, r"`window_size` must be two ints .*array"),
    ErrorCase("scale", _bad(scale=0.0), ValueError, r"`scale` must be positive and finite, got 0\.0"),
    ErrorCase("invariant", _bad(batch_invariant=1), TypeError, r"`batch_invariant` must be a bool, got int"),
    ErrorCase("dropout", _bad(dropout_p=0.5), ValueError, r"`dropout_p` must be 0"),
]


def sweep() -> list[Case]:
    """Decoding: each sequence has from half as many keys as its row of the table holds to all. Forward only.

    Calls named "invariant" show what batch invariance costs a large batch and a single sequence.
    """

    def case(
        batch: int, columns: int, page_size: int, rows: int = 1, quick: bool = False, invariant: bool = False
    ) -> Case:
        h, h_kv, d = 32, 8, 128
        cache = batch * columns, page_size, h_kv, d
        shapes = (batch, h, rows, d), cache, cache, (batch, columns), (batch,)
        name = f"B{batch} H{h}/{h_kv} Q{rows} pages {columns}x{page_size} D{d}"
        options = {"is_causal": True, "scale": None, "enable_gqa": True}
        if invariant:
            name, options = f"{name} invariant", {**options, "batch_invariant": True}
        kinds = {3: "pages@1", 4: "lengths@3,1"}
        return Case(name, shapes, options, quick=quick, kinds=kinds, passes=("forward",))

    return [
        case(64, 256, 16, quick=True),
        case(8, 512, 16),
        case(1, 8192, 16),
        case(64, 16, 256),
        case(64, 256, 16, rows=4),
        case(64, 256, 16, invariant=True),
        case(1, 8192, 16, invariant=True),
    ]
