"""Row-wise operations at lengths of rows that no kernel was tuned for, on tensors that no cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.measure.models import Call
from kernel_ladder.spec import Case

#: Hidden sizes, feed-forward sizes and vocabularies of public models, few of them multiples of a tile.
LENGTHS = (1000, 1536, 4104, 5120, 11008, 50257, 152064)
#: The length of the quick subset.
QUICK = 5120
#: Elements of a tensor, at least: 64 MiB in 16 bits.
ELEMENTS = 1 << 25
OPS = (
    "gelu", "softmax", "add", "sum", "layer_norm", "rms_norm", "dropout", "bias_gelu", "cross_entropy", "swiglu",
    "add_rms_norm", "bias_dropout_add_layer_norm",
)  # fmt: skip


def arguments(op: str, m: int, n: int) -> dict[str, Any]:
    """Fields of the case of an operation on m rows of n elements: shapes, options, and kinds where it has some."""
    x, vector = (m, n), (n,)
    found: dict[str, tuple[Any, ...]] = {
        "gelu": ((x,), {"approximate": "none"}),
        "softmax": ((x,), {"dim": -1}),
        "add": ((x, x), {}),
        "sum": ((x,), {"dim": -1, "keepdim": False}),
        "layer_norm": ((x, vector, vector), {"normalized_shape": vector, "eps": 1e-5}),
        "rms_norm": ((x, vector), {"normalized_shape": vector, "eps": None}),
        "dropout": ((x,), {"p": 0.1, "seed": 42}),
        "bias_gelu": ((x, vector), {"approximate": "none"}),
        "cross_entropy": (
            (x, (m,)),
            {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0},
            {1: "classes"},
        ),
        "swiglu": ((x, x), {}),
        "add_rms_norm": ((x, x, vector), {"eps": None}),
        "bias_dropout_add_layer_norm": ((x, vector, x, vector, vector), {"p": 0.1, "seed": 42, "eps": 1e-5}),
    }
    return dict(zip(("shapes", "options", "kinds"), found[op], strict=False))


def calls() -> Iterator[Call]:
    """Every operation at every length, in as many rows as make 64 MiB of a 16-bit tensor."""
    for op in OPS:
        for n in LENGTHS:
            m = -(-ELEMENTS // n)
            yield Call(op, Case(f"{m}x{n} rows", **arguments(op, m, n), climb=False, quick=n == QUICK), "")
