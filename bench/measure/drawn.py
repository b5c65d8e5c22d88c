"""Calls drawn at random from a seed: sizes that nobody tuned for, aligned and not, squares that no tile divides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from bench.measure.models import Call
from bench.measure.row_lengths import arguments
from kernel_ladder.spec import Case

#: Calls of each operation.
COUNT = 24
#: The seed unless --seed names another.
SEED = 2026
#: The largest size of a product, and of rows: elements of the largest tensor.
MOST_SIZE = 12288
MOST_ELEMENTS = 1 << 28
#: Multiply-adds of the largest product; rows of scores of the largest attention call.
MOST_PRODUCT = 1 << 39
LAYOUTS = {"N": "contiguous", "T": "transposed"}
ROWS = ("softmax", "layer_norm", "rms_norm", "add_rms_norm", "bias_gelu", "swiglu", "add")


def _size(choose: random.Random, least: int, most: int, aligned: bool) -> int:
    """Drawn evenly in the logarithm; a multiple of 8 if `aligned`, else odd."""
    size = round(least * (most / least) ** choose.random())
    return max(8, size // 8 * 8) if aligned else size | 1


def _products(choose: random.Random) -> Iterator[Call]:
    for i in range(COUNT):
        aligned, square = choose.random() < 0.5, i % 4 == 0
        while True:
            m, n, k = (_size(choose, 16, MOST_SIZE, aligned) for _ in range(3))
            if square:
                m = n = k = _size(choose, 512, MOST_SIZE, aligned) // 128 * 128 + choose.choice((8, 40, 72, 120))
            if m * n * k <= MOST_PRODUCT:
                break
        layout = choose.choice(("NN", "NT", "TN", "TT"))
        ident = f"{m}x{n}x{k}"
        name = f"{ident} {layout}" if layout != "NN" else ident
        fields: dict[str, Any] = {"passes": ("forward",), "climb": False, "quick": i < 4}
        yield Call("matmul", Case(name, ((m, k), (k, n)), layout=tuple(LAYOUTS[x] for x in layout), **fields), "")
        activation = choose.choice((None, "gelu"))
        shapes = ((m, k), (n, k), (n,))
        options = {"activation": activation}
        yield Call("linear", Case(f"{ident} {activation or 'none'}", shapes, options, climb=False, quick=i < 4), "")


def _attention(choose: random.Random) -> Iterator[Call]:
    for i in range(COUNT):
        head_dim, causal = choose.choice((64, 80, 96, 128)), choose.random() < 0.5
        kv_heads, group = choose.choice((1, 2, 4, 8)), choose.choice((1, 4, 8))
        batch, length = choose.randint(1, 4), _size(choose, 64, 6000, choose.random() < 0.5)
        q, kv = (batch, kv_heads * group, length, head_dim), (batch, kv_heads, length, head_dim)
        heads = f"H{kv_heads}" if group == 1 else f"H{kv_heads * group}/{kv_heads}"
        ident = f"B{batch} {heads} S{length} D{head_dim} {'causal' if causal else 'full'}"
        options = {"is_causal": causal, "scale": None, "enable_gqa": group > 1}
        yield Call("attention", Case(ident, (q, kv, kv), options, climb=False, quick=i < 4), "")


def _rows(op: str, choose: random.Random) -> Iterator[Call]:
    for i in range(COUNT):
        n = _size(choose, 128, 160_000, choose.random() < 0.5)
        m = _size(choose, 1, max(MOST_ELEMENTS // n, 1), False)
        ident = f"{m}x{n} none" if op == "bias_gelu" else f"{m}x{n}"
        yield Call(op, Case(ident, **arguments(op, m, n), climb=False, quick=i < 4), "")


def calls(seed: int) -> Iterator[Call]:
    """The same calls for one seed, on every machine."""
    yield from _products(random.Random(f"{seed} products"))
    yield from _attention(random.Random(f"{seed} attention"))
    for op in ROWS:
        yield from _rows(op, random.Random(f"{seed} {op}"))
