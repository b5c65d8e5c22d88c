"""README.md's comparison with other libraries: over all calls of the sweep, not one shape of each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from bench.rows.store import Row
from bench.show import markdown
from kernel_ladder.spec import PASSES

#: What is compared: operations, the other library and its variant.
AGAINST: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("matmul", "linear"), "PyTorch (cuBLAS)", "torch.builtin"),
    (("attention",), "flash-attn-4", "peer.flash-attn-4"),
    (("attention",), "cuDNN, in PyTorch", "torch.cudnn"),
    (("softmax", "layer_norm", "rms_norm", "add_rms_norm", "cross_entropy"), "quack", "peer.quack"),
    (("softmax", "layer_norm", "rms_norm", "add_rms_norm", "swiglu", "cross_entropy"), "Liger", "peer.liger"),
)
OURS = {"triton": "Triton", "cuda": "CUDA"}
HEADER = ("operations", "against", *(f"{name} {pass_}" for name in OURS.values() for pass_ in PASSES))


def write(_: Path, found: Sequence[Row]) -> str:
    """A Markdown table of :func:`lines`; empty without rows of others."""
    told = lines(found)
    return markdown.grid(HEADER, told, [False, False, *[True] * (len(HEADER) - 2)]) if told else ""


def lines(found: Sequence[Row]) -> list[list[str]]:
    """A line for each comparison that has rows: its operations, the other library, and a cell a level and pass."""
    calls: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in found:
        if row.us is not None and row.dtype in ("bfloat16", "float16"):
            calls.setdefault((row.op, row.pass_, row.dtype, row.shape), {})[row.backend] = row
    told = []
    for ops, name, other in AGAINST:
        measured = [op for op in ops if any(key[0] == op and other in call for key, call in calls.items())]
        if measured:
            of_calls = {key: call for key, call in calls.items() if key[0] in measured}
            cells = [_cell(_ratios(of_calls, level, pass_, other)) for level in OURS for pass_ in PASSES]
            told.append([", ".join(f"`{op}`" for op in measured), name, *cells])
    return told


def _ratios(calls: Mapping[tuple[str, ...], Mapping[str, Row]], level: str, pass_: str, other: str) -> list[float]:
    """Times of the other over those of the level's best rung, of every call that both have."""
    ratios = []
    for (_, of_pass, *_), call in calls.items():
        ours = [row.us for row in call.values() if row.level == level and row.us]
        if of_pass == pass_ and ours and other in call and (theirs := call[other].us):
            ratios.append(theirs / min(ours))
    return ratios


def _cell(ratios: Sequence[float]) -> str:
    """Geometric mean, least and greatest, and of how many calls."""
    if not ratios:
        return "–"
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f}; {len(ratios)})"
