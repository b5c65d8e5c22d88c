"""Who does what: threads, warps, blocks and grids, and the sum that threads form together."""

from __future__ import annotations

import re

from figures.canvas import HBM, INK, REGISTERS, Canvas
from figures.addresses import LANES
from figures.rows import ROOT

#: Warps of a Triton program where a kernel does not say otherwise, and the 16 bits of an element in 16-byte loads.
WARPS = 4
ELEMENTS = 8


def program_block() -> int:
    """The values that a program of gelu in Triton computes."""
    found = re.search(r"^BLOCK = (\d+)$", (ROOT / "triton_impl" / "gelu.py").read_text(), re.MULTILINE)
    if found is None:
        raise LookupError("triton_impl/gelu.py has no constant BLOCK")
    return int(found[1])


def threads_or_block(canvas: Canvas) -> str:
    block = program_block()
    threads = block // ELEMENTS
    canvas.size(4.2, 100, 60)
    canvas.text(1, 2.5, "CUDA: you write what one thread does", weight="bold", size=9.5)
    canvas.text(1, 7, f"i = {ELEMENTS} · (blockIdx.x · {threads} + threadIdx.x)", size=9.5, family="monospace")
    shown = (0, 1, 2, None, threads - 1)
    step = 19.8
    for n, thread in enumerate(shown):
        x = 1 + step * n
        if thread is None:
            for y in (13.5, 28.5, 53.5):
                canvas.text(x + 9, y, "· · ·", ha="center", size=12)
            continue
        first = ELEMENTS * thread
        canvas.box(x, 11, 17.6, 5, REGISTERS, f"thread {thread}")
        canvas.arrow((x + 8.8, 26), (x + 8.8, 16), INK, 1)
        canvas.text(x + 9.8, 21, "16 bytes", size=9)
        for i in range(ELEMENTS):
            canvas.box(x + 2.2 * i, 26, 2.2, 5, HBM, pale=0.4, linewidth=0.6)
        canvas.text(x + 8.8, 33.5, f"{first} … {first + ELEMENTS - 1}", ha="center", size=9)
    canvas.text(1, 39, "Triton: you write what a program does with a block of values", weight="bold", size=9.5)
    canvas.text(1, 43.5, f"i = tl.program_id(0) * {block} + tl.arange(0, {block})", size=9.5, family="monospace")
    canvas.box(0.6, 47.5, 98.8, 9, REGISTERS, pale=0.1)
    canvas.text(1.6, 50, f"x = tl.load(p + i): {block:,} values", size=9.5)
    canvas.text(50, 50, f"the compiler: {WARPS} warps, {LANES} lanes, {ELEMENTS} values each", size=9.5)
    for n, thread in enumerate(shown):
        if thread is not None:
            for i in range(ELEMENTS):
                canvas.box(1 + step * n + 2.2 * i, 52.2, 2.2, 3.2, HBM, pale=0.4, linewidth=0.6)
    if WARPS * LANES * ELEMENTS != block:
        raise ArithmeticError(f"{WARPS} warps of {LANES} lanes with {ELEMENTS} values do not make {block}")
    return (
        f"The same {block:,} bfloat16 values twice. In CUDA the index formula gives each thread its {ELEMENTS} elements. In Triton "
        "the program names the whole block, and the compiler divides it among threads. The loads are the same."
    )
