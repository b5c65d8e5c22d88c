"""Rows of rungs that have been split since: they measured the kernel that the level's rule names today.

Until 2026-11-26 the last rungs of some ladders launched the kernels of several. Each kernel then became a rung of its
own, and the thresholds of the host code became rules. So an older row is the time of its level's choice, and says
nothing of the rung that has its name now.
"""

from __future__ import annotations

from bench.rows.store import Row

_NORMS = ("layer_norm", "rms_norm", "add_rms_norm", "bias_dropout_add_layer_norm")

#: By operation and level: when rungs were split (UTC), and which.
SPLIT: dict[tuple[str, str], tuple[str, frozenset[str]]] = {
    ("attention", "cuda"): ("2026-11-26T02:53:32", frozenset({"cuda.persistent"})),
    ("softmax", "cuda"): ("2026-11-26T03:06:29", frozenset({"cuda.registers", "cuda.cluster"})),
    ("matmul", "cuda"): ("2026-11-26T03:07:08", frozenset({"cuda.registers", "cuda.split_k"})),
    ("matmul", "triton"): (
        "2026-11-26T03:07:08",
        frozenset({"triton.naive", "triton.tma", "triton.persistent", "triton.split_k"}),
    ),
    ("bias_gelu", "cuda"): ("2026-11-26T03:15:28", frozenset({"cuda.vectorized"})),
    ("softmax", "triton"): ("2026-11-26T03:34:48", frozenset({"triton.online", "triton.fused", "triton.cluster"})),
    **{
        (op, "triton"): ("2026-11-26T03:34:48", frozenset({"triton.online", "triton.fused", "triton.cluster"}))
        for op in _NORMS
    },
    **{(op, "cuda"): ("2026-11-26T03:39:58", frozenset({"cuda.registers", "cuda.cluster"})) for op in _NORMS},
}

#: Passes whose rungs have other kernels since (UTC): older rows say nothing of them.
REWRITTEN: dict[tuple[str, str, str], tuple[tuple[str, frozenset[str]], ...]] = {
    ("attention", "cuda", "backward"): (
        (
            "2026-11-26T11:00:00",
            frozenset({"cuda.wgmma", "cuda.warp_specialized", "cuda.pingpong", "cuda.persistent"}),
        ),
        # Heads take turns, tiles of 96 columns, grouped heads.
        ("2026-11-27T08:12:00", frozenset({"cuda.warp_specialized", "cuda.pingpong", "cuda.persistent"})),
    ),
    # Unaligned products in parts of equal size.
    ("matmul", "cuda", "forward"): (("2026-11-26T05:59:50", frozenset({"cuda.stream_k"})),),
    ("attention_varlen", "cuda", "backward"): (("2026-11-27T08:12:00", frozenset({"cuda.pingpong"})),),
    **{
        ("cross_entropy", level, pass_): (("2026-11-27T08:12:00", frozenset({f"{level}.online"})),)
        for level in ("cuda", "triton")
        for pass_ in ("forward", "backward")
    },
}


def _is_older(row: Row, change: tuple[str, frozenset[str]] | None) -> bool:
    """Whether a row is of one of the rungs of a change, and older than it."""
    return change is not None and row.backend in change[1] and row.when < change[0]


def is_of_other_kernels(row: Row) -> bool:
    """Whether a row was measured before its rung's pass had its kernels of today."""
    return any(_is_older(row, change) for change in REWRITTEN.get((row.op, row.level, row.pass_), ()))


def older_than_rung(row: Row) -> bool:
    """Whether a row was measured before its rung had its kernels of today."""
    return _is_older(row, SPLIT.get((row.op, row.level)))
