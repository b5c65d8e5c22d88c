"""Configurations to choose from for kernels that work on rows: how many a program has, and how many warps."""

from __future__ import annotations

from typing import Any

import triton

from triton_impl import interpreted
from triton_impl.runtime.launch_cache import to_time

WARPS = (1, 2, 4, 8, 16, 32)
#: Rows of a program at most.
MAX_ROWS = 64


def warps_of_row(block: int) -> int:
    """Warps of a `naive` program that holds a row of `block` elements: 8 elements per thread where 16 warps suffice."""
    return min(max(block // 256, 1), 16)


def _shapes(block: int, per_thread: tuple[int, ...], totals: tuple[int, ...], most_warps: int) -> list[tuple[int, int]]:
    """(rows, warps) of a program: enough rows for some of `totals` elements, some of `per_thread` each, best first."""
    shapes = []
    for total in totals:
        rows = min(MAX_ROWS, max(1, total // block))
        for each in per_thread:
            warps = max(1, min(most_warps, rows * block // (32 * each)))
            shapes.append((rows, warps))
    return list(dict.fromkeys(shapes))


def forward_shapes(block: int) -> list[tuple[int, int]]:
    """(rows, warps) of a program that has rows of up to `block` elements in registers, best first."""
    shapes = _shapes(block, (16, 32, 8), (2048, 4096, 1024), 32 if block > 16384 else 16)
    # More than 64 registers a thread let an SM hold 16 such warps and no more: then 32 hide more latency.
    return [*shapes, (1, 32)] if block == 16384 else shapes


def backward_shapes(block: int) -> list[tuple[int, int]]:
    """The same where two operands are there at once."""
    return _shapes(block, (8, 16), (2048, 4096), 16)


#: A persistent program of one warp takes rows of up to ALONE elements, at least LEAST of them, so that no warp waits
#: for another. PERSISTENT_WARPS a multiprocessor keep enough loads in flight; fewer do (OF_WHOLE_BLOCKS) where a row
#: is a whole block, since each warp then has more loads, and fewer partial sums remain to be added.
ALONE = 512
LEAST = 8
PERSISTENT_WARPS = 12
OF_WHOLE_BLOCKS = 10
#: Rows of up to TWO_A_PROGRAM elements are taken by twos, 16 elements of each a thread. Half as many warps meet for
#: each sum of a row, and each has twice the loads.
TWO_A_PROGRAM = 1024


def persistent_shapes(block: int) -> list[tuple[int, int]]:
    """The same of a persistent program, which sums columns over its rows."""
    if block <= ALONE:
        return _shapes(block, (16,), (512, 256), 1)
    return _shapes(block, (16, 32, 8), (2048,), 16) if block <= TWO_A_PROGRAM else backward_shapes(block)


def persistent_programs(length: int, block: int, count: int, multiprocessors: int) -> int:
    """How many such programs share rows: as many as run at once, since later ones would wait for memory once more."""
    if block <= ALONE:
        return min(
            triton.cdiv(count, LEAST), multiprocessors * (OF_WHOLE_BLOCKS if length == block else PERSISTENT_WARPS)
        )
    whole = length == block == TWO_A_PROGRAM
    return min(count, multiprocessors * min(3 if whole else 4, max(1, 8192 // block)))


def row_configs(stages: tuple[int, ...]) -> list[triton.Config]:
    """Every choice that may suit some row; the interpreter, to which all are the same, gets one."""
    rows = [2**i for i in range(MAX_ROWS.bit_length())]
    constants = [{"STAGES": s} if s else {} for s in stages]
    if interpreted():
        return [triton.Config({"ROWS": 8, **constants[0]}, num_warps=4, num_stages=1)]
    return [
        triton.Config({"ROWS": r, **more}, num_warps=w, num_stages=1) for more in constants for r in rows for w in WARPS
    ]


def _chosen(configs: list[triton.Config], shapes: list[tuple[int, int]]) -> list[triton.Config]:
    if len(configs) == 1:
        return configs
    of = {}
    for c in configs:
        of.setdefault((c.kwargs["ROWS"], c.num_warps), []).append(c)
    return to_time([c for shape in shapes for c in of[shape]])


def suitable_forward(configs: list[triton.Config], named_args: dict, **constants: Any) -> list[triton.Config]:
    return _chosen(configs, forward_shapes(constants["BLOCK"]))


def suitable_backward(configs: list[triton.Config], named_args: dict, **constants: Any) -> list[triton.Config]:
    return _chosen(configs, backward_shapes(constants["BLOCK"]))


def suitable_persistent(configs: list[triton.Config], named_args: dict, **constants: Any) -> list[triton.Config]:
    return _chosen(configs, persistent_shapes(constants["BLOCK"]))


def blocks_of(*choices: tuple[int, int], stages: tuple[int, ...] = (0,)) -> list[triton.Config]:
    """Configurations of a program that goes through a row: (elements at a time, warps), and STAGES where there are any.

    The interpreter, to which all are the same, gets one.
    """
    every = [
        triton.Config({"BLOCK": block, **({"STAGES": s} if s else {})}, num_warps=warps, num_stages=1)
        for s in stages
        for block, warps in choices
    ]
    return every[:1] if interpreted() else every
