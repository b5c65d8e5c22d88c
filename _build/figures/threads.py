"""Who does what: threads, warps, blocks and grids, and the sum that threads form together."""

from __future__ import annotations

import re

from figures.addresses import LANES
from figures.canvas import HBM, INK, REGISTERS, SHARED, Canvas
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
    if block != WARPS * LANES * ELEMENTS:
        raise ArithmeticError(f"{WARPS} warps of {LANES} lanes with {ELEMENTS} values do not make {block}")
    return (
        f"The same {block:,} bfloat16 values twice. In CUDA the index formula gives each thread its {ELEMENTS} "
        "elements. In Triton the program names the whole block, and the compiler divides it among threads. The "
        "loads are the same."
    )


BLOCK_THREADS = 256
LENGTH = 900
MARKED = 582


def place(i: int) -> tuple[int, int, int, int]:
    """Block, thread of the block, warp and lane of the thread that computes element i."""
    block, thread = divmod(i, BLOCK_THREADS)
    return block, thread, *divmod(thread, LANES)


def grid(canvas: Canvas) -> str:
    blocks = -(-LENGTH // BLOCK_THREADS)
    block, thread, warp, lane = place(MARKED)
    canvas.size(3.9, 100, 58)
    wide, left = 98 / blocks, 1
    used = LENGTH - (blocks - 1) * BLOCK_THREADS
    canvas.text(1, 2.5, f"a grid of {blocks} blocks for {LENGTH:,} elements", weight="bold", size=9.5)
    for b in range(blocks):
        share = used / BLOCK_THREADS if b == blocks - 1 else 1.0
        x = left + wide * b
        canvas.box(x, 5.5, wide - 1, 7, REGISTERS, f"block {b}", pale=0.12)
        canvas.box(x, 14, (wide - 1) * share, 3.5, HBM, pale=0.4)
        last = min((b + 1) * BLOCK_THREADS, LENGTH) - 1
        canvas.text(x, 20, f"{b * BLOCK_THREADS} … {last}", size=9)
        if share < 1:
            canvas.box(x + (wide - 1) * share, 5.5, (wide - 1) * (1 - share), 7, HBM, pale=0.6)
            canvas.text(x + wide - 1, 20, f"{BLOCK_THREADS - used} idle", size=9, ha="right")

    def zoom(parent: tuple[float, float], y: float) -> None:
        for a, b in ((parent[0], left), (parent[1], left + 98)):
            canvas.axes.plot([a, b], [y, y + 6], color=INK, linewidth=0.6, linestyle=":")

    warps = BLOCK_THREADS // LANES
    x = left + wide * block
    zoom((x, x + wide - 1), 22)
    canvas.text(1, 30, f"block {block}: {BLOCK_THREADS} threads in {warps} warps", weight="bold", size=9.5)
    step = 98 / warps
    for w in range(warps):
        mine = w == warp
        canvas.box(left + step * w, 32.5, step - 0.6, 5, REGISTERS, f"warp {w}", pale=0.5 if mine else 0.12, size=9.5)
    zoom((left + step * warp, left + step * (warp + 1) - 0.6), 38)
    canvas.text(1, 46, f"warp {warp}: {LANES} lanes, one instruction at a time", weight="bold", size=9.5)
    step = 98 / LANES
    for n in range(LANES):
        canvas.box(left + step * n, 48.5, step - 0.5, 4, REGISTERS, pale=0.9 if n == lane else 0.2, linewidth=0.6)
    canvas.text(
        99,
        56,
        f"lane {lane} is thread {thread}: i = {block} · {BLOCK_THREADS} + {thread} = {MARKED}",
        size=9.5,
        ha="right",
    )
    return (
        "From grid to thread. `blockIdx.x` is the block, `threadIdx.x` the thread of its block, `blockDim.x` the "
        f"{BLOCK_THREADS} threads of each. The last block overhangs the end; `if (i < n)` stops its surplus "
        "threads."
    )


def shuffled(values: list[float]) -> list[list[float]]:
    """What the lanes hold before and after each step of a sum by ``__shfl_xor_sync``, as ``csrc/reduce`` has it."""
    found, offset = [values], len(values) // 2
    while offset:
        found.append([found[-1][lane] + found[-1][lane ^ offset] for lane in range(len(values))])
        offset //= 2
    return found


def reduction(canvas: Canvas) -> str:
    steps = shuffled([1.0] * LANES)
    warps = BLOCK_THREADS // LANES
    canvas.size(4.5, 100, 68)
    step, left = 84 / LANES, 15
    canvas.text(1, 2.5, f"in a warp: {len(steps) - 1} shuffles", weight="bold", size=9.5)
    for n, held in enumerate(steps):
        y, offset = 6 + 7.2 * n, LANES >> n
        label = "one value each" if not n else f"lane ^ {offset}"
        canvas.text(1, y + 1.7, "a lane's" if not n else label, size=9.5)
        for lane in range(offset):
            x = left + step * lane
            canvas.box(x, y, step - 0.3, 3.4, REGISTERS, pale=0.6, linewidth=0.6)
            for source in (lane, lane + offset) if n else ():
                ends = [x + step / 2 - 0.15, left + step * source + step / 2 - 0.15]
                canvas.axes.plot(ends, [y, y - 3.8], color=INK, linewidth=0.5)
        if n:
            canvas.text(left + step * offset + 0.8, y + 1.7, f"sums of {held[0]:.0f}", size=9)
    y = 6 + 7.2 * len(steps) + 2.5
    canvas.text(1, y, f"in a block: {warps} warps, shared memory, one barrier", weight="bold", size=9.5)
    wide = 7.2
    for w in range(warps):
        x = left + (wide + 0.6) * w
        canvas.box(x, y + 3, wide, 4, REGISTERS, f"warp {w}", size=8.5)
        canvas.arrow((x + wide / 2, y + 7), (x + wide / 2, y + 10.5), INK, 0.8)
        canvas.box(x, y + 10.5, wide, 4, SHARED, pale=0.5)
    canvas.text(1, y + 12.5, "partial sums", size=9.5)
    end = left + (wide + 0.6) * warps
    canvas.arrow((end, y + 12.5), (end + 4, y + 12.5), INK, 1)
    canvas.text(end + 5, y + 12.5, f"{len(shuffled([1.0] * warps)) - 1} more\nshuffles", size=9.5)
    return (
        "A sum over a block. In each step a lane adds what another lane holds; the drawn tree ends in lane 0. As "
        f"every lane does so (`__shfl_xor_sync`), all have the warp's sum after {len(steps) - 1} steps, without "
        "memory or barrier. Only sums of whole warps pass through shared memory."
    )
