"""One streaming multiprocessor: its parts, its warps, the loads on their way, and the reuse of tiles."""

from __future__ import annotations

from figures.canvas import HBM, INK, REGISTERS, SHARED, TENSOR, Canvas
from figures.machine import REGISTERS_KIB, SHARED_KIB, SMS
from figures.rows import best_ceiling, gpu
from kernel_ladder.inspection import architecture

HOPPER = architecture.named("sm_90a")
LANES = architecture.WARP
#: What an answer of HBM takes here, in µs; the page gives its range.
LATENCY = 0.9


def streaming_multiprocessor(canvas: Canvas) -> str:
    parts = architecture.SCHEDULERS
    warps = HOPPER.threads // LANES // parts
    canvas.size(3.7, 100, 55)
    canvas.rounded(1, 1.5, 98, 46.5, INK)
    wide, step = 22, 24
    for i in range(parts):
        x = 3 + step * i
        canvas.box(x, 3.5, wide, 30, INK, pale=0.04, linewidth=0.6)
        canvas.text(x + wide / 2, 6.5, f"scheduler, {warps} warps", ha="center", size=9.5)
        canvas.box(x + 1, 9.5, wide - 2, 5, REGISTERS, f"registers {REGISTERS_KIB // parts} KiB", size=9.5)
        canvas.text(x + wide / 2, 16.9, f"{LANES} lanes for float32", ha="center", size=9.5)
        for lane in range(LANES):
            across, down = lane % 8, lane // 8
            canvas.box(x + 1 + 2.5 * across, 19 + 1.7 * down, 2.2, 1.4, TENSOR, pale=0.15, linewidth=0.5)
        canvas.box(x + 1, 26, wide - 2, 6, TENSOR, "tensor core", pale=0.4)
    canvas.box(3, 36, 94, 5, SHARED, f"shared memory and L1 cache: {SHARED_KIB} KiB of shared memory at most")
    canvas.box(3, 42.3, 94, 4, HBM, "copy engine (TMA)", size=9.5, pale=0.15)
    canvas.arrow((50, 52.5), (50, 46.3), INK)
    canvas.text(52, 51, "L2 cache, HBM", size=9.5)
    return (
        f"A streaming multiprocessor; an H100 has {SMS}. Each of its {parts} parts issues one instruction a clock, "
        f"for one of up to {warps} warps. A block's warps spread over all parts and share its shared memory."
    )


def kib_needed() -> float:
    """KiB that an SM must have on their way so that HBM is busy."""
    return best_ceiling("ceiling.copy", "gbs") * 1e9 / SMS * LATENCY * 1e-6 / 1024


def bytes_in_flight(canvas: Canvas) -> str:
    widths, need = (2, 4, 8, 16), kib_needed()
    canvas.size(2.7, 100, 40)
    held = [HOPPER.threads * width / 1024 for width in widths]
    left = 26
    scale = 62 / max(held)
    canvas.text(1, 2.5, f"loads on their way, {HOPPER.threads:,} threads on an SM", weight="bold", size=9.5)
    for i, (width, kib) in enumerate(zip(widths, held, strict=True)):
        y = 6 + 7 * i
        canvas.text(1, y + 2.4, f"{width} bytes a thread", size=9.5)
        canvas.box(left, y, kib * scale, 4.8, SHARED if kib > need else HBM, pale=0.5)
        share = "" if kib > need else f", {100 * kib / need:.0f} % of the rate"
        canvas.text(left + max(kib, need) * scale + 1, y + 2.4, f"{kib:.0f} KiB{share}", size=9.5)
    x = left + need * scale
    canvas.axes.plot([x, x], [5, 35], color=INK, linewidth=1.2, linestyle="--")
    canvas.text(x, 37.5, f"needed: {need:.0f} KiB", size=9.5, ha="center")
    return (
        f"The dashed line is what HBM sends to one SM in {LATENCY} µs, the time of an answer, at the copy rate of "
        f"an {gpu()}. With fewer bytes on their way memory idles. A thread may also ask for several vectors before "
        "it uses the first."
    )


def occupancy(canvas: Canvas) -> str:
    registers = (32, 64, 96, 128, 168, 255)
    warps = HOPPER.threads // LANES
    block = 128
    canvas.size(3.3, 100, 49)
    left, step = 17, 62 / warps
    canvas.text(1, 2.5, "registers a thread", weight="bold", size=9.5)
    canvas.text(left + warps * step, 2.5, f"{warps} places for warps", weight="bold", size=9.5, ha="right")
    for i, count in enumerate(registers):
        y = 6 + 7 * i
        found = architecture.occupancy(HOPPER, block, count, 0)
        resident = found.blocks * block // LANES
        canvas.text(1, y + 2.2, f"{count}", size=10)
        for warp in range(warps):
            canvas.box(
                left + step * warp,
                y,
                step - 0.15,
                4.4,
                REGISTERS,
                pale=0.65 if warp < resident else 0.05,
                linewidth=0.4,
            )
        canvas.text(left + warps * step + 1.5, y + 2.2, f"{resident} warps, {100 * found.share:.0f} %", size=9.5)
    return (
        f"Warps that live on an SM at a time, in blocks of {block} threads, as registers limit them: an SM has "
        f"{architecture.REGISTERS:,}. Shared memory limits blocks in the same way. Few warps are enough where each "
        "has much on its way."
    )


TILES = ((32, 32), (128, 128), (128, 256))


def intensity(rows: int, columns: int) -> float:
    """FLOP for each byte that a tile of a 16-bit product asks of L2."""
    return 2 * rows * columns / (2 * (rows + columns))


def tile_reuse(canvas: Canvas) -> str:
    ridge = best_ceiling("ceiling.tensor", "tflops", "bfloat16") * 1e12 / (best_ceiling("ceiling.l2", "gbs") * 1e9)
    canvas.size(3.6, 100, 53)
    rows, columns = TILES[-1]
    canvas.box(1, 24, 21, 26, SHARED, pale=0.08)
    canvas.box(1, 30, 21, 7, SHARED, pale=0.55)
    canvas.text(11.5, 33.5, f"{rows} rows of A", ha="center", size=9)
    canvas.box(25, 1.5, 25, 20, HBM, pale=0.08)
    canvas.box(31, 1.5, 10, 20, HBM, pale=0.55)
    canvas.text(36, 11.5, f"{columns}\ncolumns\nof B", ha="center", size=9)
    canvas.box(25, 24, 25, 26, REGISTERS, pale=0.08)
    canvas.box(31, 30, 10, 7, REGISTERS, "a tile", pale=0.7, size=9)
    canvas.text(48.5, 47, "C", ha="right", size=10)
    canvas.text(2.5, 47, "A", size=10)
    canvas.text(26.5, 4.5, "B", size=10)
    canvas.arrow((22, 33.5), (31, 33.5), INK, 1)
    canvas.arrow((36, 21.5), (36, 30), INK, 1)
    canvas.text(55, 3.5, "FLOP a byte asked of L2", weight="bold", size=9.5)
    scale = 26 / max(ridge, *(intensity(*tile) for tile in TILES))
    for i, tile in enumerate(TILES):
        y = 9 + 12 * i
        canvas.text(55, y, f"{tile[0]} × {tile[1]}", size=9.5)
        canvas.box(55, y + 2.5, intensity(*tile) * scale, 4.5, TENSOR, pale=0.5)
        canvas.text(56 + intensity(*tile) * scale, y + 4.7, f"{intensity(*tile):.0f}", size=9.5)
    x = 55 + ridge * scale
    canvas.axes.plot([x, x], [7, 43.5], color=INK, linewidth=1.2, linestyle="--")
    canvas.text(x, 46.5, f"L2's ridge: {ridge:.0f}", size=9.5, ha="center" if ridge * scale > 12 else "left")
    return (
        "A tile of the product walks along K over its rows of A and columns of B. Each loaded element of A serves "
        "all columns of the tile, each of B all rows. `BM · BN / (BM + BN)` grows with the tile. The dashed line "
        f"is the tensor cores' rate over that of L2, both measured on an {gpu()}; multicast in a cluster asks L2 "
        "for less."
    )
