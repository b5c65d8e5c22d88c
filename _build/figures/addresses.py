"""Where bytes lie: the sectors of a warp's load, and the swizzle of shared memory."""

from __future__ import annotations

import re

from figures.canvas import HBM, INK, SHARED, Canvas
from figures.rows import ROOT

LANES = 32
SECTOR = 32


def sectors(bytes_a_lane: int, stride: int) -> int:
    """The 32-byte sectors that a warp's load touches; lanes stand `stride` bytes apart."""
    return len({(lane * stride + b) // SECTOR for lane in range(LANES) for b in range(bytes_a_lane)})


def coalescing(canvas: Canvas) -> str:
    canvas.size(4.1, 100, 62)
    row = 4096 * 2  # bytes from row to row of a bfloat16 matrix
    cases = (
        ("2 bytes a lane, neighbours", 2, 2),
        ("16 bytes a lane, neighbours", 16, 16),
        ("2 bytes a lane, each in a row of its own", 2, row),
    )
    for i, (name, width, stride) in enumerate(cases):
        y, touched = 3 + 20 * i, sectors(width, stride)
        used = LANES * width / (touched * SECTOR)
        canvas.text(1, y, name, weight="bold", size=9.5)
        canvas.text(99, y, f"{touched} sectors, {100 * used:.3g} % of their bytes used", ha="right", size=9.5)
        for lane in range(LANES):
            x = 1 + lane * 98 / LANES
            canvas.box(x, y + 3, 2.5, 3, SHARED, pale=0.5, linewidth=0.6)
            sector = len({(k * stride) // SECTOR for k in range(lane + 1)}) - 1
            last = (lane * stride + width - 1) // SECTOR - (lane * stride) // SECTOR
            for extra in range(last + 1):
                canvas.axes.plot(
                    [x + 1.25, 1 + (sector + extra + 0.5) * 98 / LANES], [y + 6, y + 11], color=INK, linewidth=0.5
                )
        for sector in range(touched):
            x = 1 + sector * 98 / LANES
            canvas.box(x, y + 11, 2.7, 3.4, HBM, pale=0.08, linewidth=0.9)
            canvas.box(x, y + 11, 2.7 * used, 3.4, HBM, pale=0.75, linewidth=0)
    return (
        f"One load of a warp: {LANES} lanes above, the 32-byte sectors that memory delivers below; the filled part is used. "
        f"Neighbouring lanes should read neighbouring bytes. Lanes that walk down rows of 4096 bfloat16 values waste "
        f"{SECTOR - 2} of {SECTOR} bytes."
    )


VECTOR = 8  # elements of two bytes in 16 bytes


def vectors(begin: int, end: int, first: int) -> list[tuple[int, int, bool]]:
    """Vectors from element `first` on that cover a row of elements: begin, end, and whether each is aligned and whole."""
    found = [(at, at + VECTOR) for at in range(first, end, VECTOR)]
    return [(max(a, begin), min(b, end), a % VECTOR == 0 and begin <= a and b <= end) for a, b in found]


def odd_rows(canvas: Canvas) -> str:
    canvas.size(2.9, 100, 43)
    length, cells = 21, 48
    unit = 98 / cells
    begin, end = length, 2 * length
    canvas.text(1, 3, f"memory: rows of {length} elements; one in eight begins on 16 bytes", weight="bold", size=9.5)
    for i in range(cells):
        row = i // length
        canvas.box(
            1 + i * unit, 6, unit, 4.5, HBM if row == 1 else SHARED, pale=0.5 if row == 1 else 0.15, linewidth=0.5
        )
    for top in (5, 18, 34):
        for i in range(0, cells + 1, VECTOR):
            canvas.axes.plot([1 + i * unit] * 2, [top, top + 6.5], color=INK, linewidth=0.8, linestyle=":")
    cases = (
        ("counted from the row's start", begin),
        ("counted from the 16 bytes before it", begin // VECTOR * VECTOR),
    )
    for i, (name, first) in enumerate(cases):
        y, found = 16 + 16 * i, vectors(begin, end, first)
        whole = sum(aligned for *_, aligned in found)
        canvas.text(1, y, f"vectors {name}", weight="bold", size=9.5)
        canvas.text(99, y, f"{whole} of {len(found)} aligned", ha="right", size=9.5)
        for a, b, aligned in found:
            canvas.box(1 + a * unit + 0.2, y + 3, (b - a) * unit - 0.4, 4.5, HBM, pale=0.75 if aligned else 0.12)
    return (
        f"A row whose length {VECTOR} does not divide. Dotted lines stand every 16 bytes; filled vectors are one load each. "
        "Counted from the row's start, no vector is aligned. Counted from the line before it, all but the ends are."
    )


def swizzle_expression() -> str:
    """What ``swizzled`` in csrc/sm90/sm90.cuh returns, as it is compiled."""
    text = (ROOT / "csrc" / "sm90" / "sm90.cuh").read_text()
    found = re.search(r"constexpr uint32_t swizzled\(uint32_t row, uint32_t chunk\) \{\s*return ([^;]*);", text)
    if found is None:
        raise LookupError("csrc/sm90/sm90.cuh has no function swizzled(row, chunk)")
    return found[1]


def swizzled(row: int, chunk: int) -> int:
    """The byte offset of a 16-byte chunk, by the expression of csrc. Its operators mean the same in Python."""
    return eval(swizzle_expression(), {"SWIZZLE_ROW": 128}, {"row": row, "chunk": chunk})


def bank_group(offset: int) -> int:
    """Which eighth of the 32 banks holds the 16 bytes at an offset."""
    return offset // 16 % 8


def swizzle(canvas: Canvas) -> str:
    canvas.size(3.9, 100, 57)
    wanted = 2
    groups = []
    for title, left, place in (
        ("row by row", 4, lambda row, chunk: row * 128 + chunk * 16),
        ("swizzled: chunk ^ (row % 8)", 54, swizzled),
    ):
        canvas.text(left + 20, 2.5, title, weight="bold", ha="center")
        hit = set()
        for row in range(8):
            for chunk in range(8):
                offset = place(row, chunk)
                column, line = bank_group(offset), offset // 128
                mine = chunk == wanted
                hit |= {column} if mine else set()
                canvas.box(
                    left + 5.2 * column, 6 + 5 * line, 5, 4.8, HBM if mine else SHARED, str(chunk), pale=0.55 if mine else 0.1
                )
            if left == 4:
                canvas.text(left - 1, 8.4 + 5 * row, f"{row}", size=9, ha="right")
        groups.append(len(hit))
        for group in range(8):
            canvas.text(left + 5.2 * group + 2.5, 48, f"{4 * group}–{4 * group + 3}", size=7.5, ha="center")
        canvas.text(left + 20, 51.5, "banks", size=9, ha="center")
        word = "bank groups: served at once" if len(hit) == 8 else "bank group: eight rounds"
        canvas.text(left + 20, 55, f"chunk {wanted} of eight rows: {len(hit)} {word}", size=9, ha="center")
    return (
        "Eight rows of 128 bytes in shared memory, in chunks of 16 bytes; the number is the chunk's place in the matrix. "
        f"A product reads one chunk of eight rows at a time. Row by row, chunk {wanted} always lies in the same four banks. "
        f"With `{swizzle_expression()}` from `csrc/sm90/sm90.cuh` it lies in all of them in turn."
    )
