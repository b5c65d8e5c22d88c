"""Timelines: a pipeline of stages, ping-pong, stream-K. Each is simulated, then drawn."""

from __future__ import annotations

from figures.canvas import HBM, INK, REGISTERS, SHARED, TENSOR, Canvas

LOAD = 3.0
MULTIPLY = 1.0


def pipelined(tiles: int, stages: int) -> list[tuple[float, float]]:
    """When each tile's load starts and its product starts, with `stages` buffers in shared memory."""
    found: list[tuple[float, float]] = []
    for i in range(tiles):
        load = 0.0 if i < stages else found[i - stages][1] + MULTIPLY
        product = max(load + LOAD, found[-1][1] + MULTIPLY if found else 0.0)
        found.append((load, product))
    return found


def pipeline(canvas: Canvas) -> str:
    tiles = 6
    ends = {stages: pipelined(tiles, stages)[-1][1] + MULTIPLY for stages in (1, 2, 4)}
    scale = 97 / ends[1]
    canvas.size(3.9, 100, 60)
    y = 3.0
    for stages in (1, 2, 4):
        word = "stage" if stages == 1 else "stages"
        canvas.text(1, y, f"{stages} {word}: {ends[stages]:.0f} units of time", weight="bold", size=9.5)
        height = 3.0
        for i, (load, product) in enumerate(pipelined(tiles, stages)):
            lane = y + 2.5 + i % stages * (height + 0.3)
            canvas.box(1 + load * scale, lane, LOAD * scale, height, HBM, f"load {i}", size=8)
            bottom = y + 2.5 + stages * (height + 0.3)
            canvas.box(1 + product * scale, bottom, MULTIPLY * scale, height, TENSOR, str(i), pale=0.5, size=8)
        y += 2.5 + (stages + 1) * (height + 0.3) + 4.5
    return (
        f"Six tiles; a load takes {LOAD:.0f} units of time, its product {MULTIPLY:.0f} (lower line). With one stage in shared "
        "memory a load waits until the product before it has read the stage. With more stages loads run ahead: "
        f"{ends[1]:.0f}, {ends[2]:.0f} and {ends[4]:.0f} units. Past {LOAD / MULTIPLY + 1:.0f} stages nothing is left to gain."
    )


#: A tile of 64 queries and 128 keys at head dimension 128 on one SM.
QUERIES = 64
KEYS = 128
DIM = 128
FLOP_A_CLOCK = 4096
EXPONENTIALS_A_CLOCK = 16
LANE_OPERATIONS_A_CLOCK = 128
PRODUCTS = 4 * QUERIES * KEYS * DIM // FLOP_A_CLOCK
#: The exponentials, and some five more instructions a score.
SOFTMAX = QUERIES * KEYS // EXPONENTIALS_A_CLOCK + 5 * QUERIES * KEYS // LANE_OPERATIONS_A_CLOCK


def alternating(tiles: int) -> tuple[list[tuple[int, int, int]], int]:
    """Two warpgroups that take turns at the tensor cores: (warpgroup, start, tile) of each product, and the end."""
    free, ready, found = 0, [0, 0], []
    for i in range(2 * tiles):
        group = i % 2
        start = max(free, ready[group])
        found.append((group, start, i // 2))
        free = start + PRODUCTS
        ready[group] = free + SOFTMAX
    return found, max(ready)


def pingpong(canvas: Canvas) -> str:
    tiles = 3
    products, end = alternating(tiles)
    alone = 2 * tiles * (PRODUCTS + SOFTMAX)
    canvas.size(3.5, 100, 52)
    scale = 82 / alone
    left = 17
    canvas.text(1, 2.5, f"in series: {alone:,} clocks", weight="bold", size=9.5)
    canvas.text(1, 8, "one warpgroup", size=9)
    for i in range(2 * tiles):
        x = left + i * (PRODUCTS + SOFTMAX) * scale
        canvas.box(x, 5.5, PRODUCTS * scale, 5, TENSOR, "products", pale=0.5, size=7.5)
        canvas.box(x + PRODUCTS * scale, 5.5, SOFTMAX * scale, 5, REGISTERS, "softmax", size=7.5)
    canvas.text(1, 18, f"ping-pong: {end:,} clocks for the same six tiles", weight="bold", size=9.5)
    for group in (0, 1):
        canvas.text(1, 23.5 + 7 * group, f"warpgroup {group + 1}", size=9)
    canvas.text(1, 39.5, "tensor cores", size=9)
    for group, start, _tile in products:
        x, y = left + start * scale, 21 + 7 * group
        canvas.box(x, y, PRODUCTS * scale, 5, TENSOR, "products", pale=0.5, size=7.5)
        canvas.box(x + PRODUCTS * scale, y, SOFTMAX * scale, 5, REGISTERS, "softmax", size=7.5)
        canvas.box(x, 37, PRODUCTS * scale, 5, TENSOR, str(group + 1), pale=0.5, size=8)
    canvas.arrow((left, 47), (left + 82, 47), INK)
    canvas.text(left + 82, 50, "time", ha="right", size=9)
    share = 2 * tiles * PRODUCTS
    return (
        f"A tile of {QUERIES} queries and {KEYS} keys at head dimension {DIM} takes {PRODUCTS:,} clocks of the tensor cores; "
        f"its softmax about {SOFTMAX}. In series the tensor cores work {100 * share / alone:.0f} % of the time. When two "
        f"warpgroups alternate, one's softmax runs beside the other's products: {100 * share / end:.0f} % with six tiles, "
        "and more with more."
    )


def split(tiles: int, sms: int) -> list[list[tuple[int, float, float]]]:
    """Stream-K as ``csrc/matmul/stream_k.cu`` has it: per SM, (tile, from, to) in shares of the tile's K.

    Whole waves first. The tiles of the last two waves are cut into equal parts, one per SM.
    """
    whole = max(tiles // sms - (1 if tiles % sms else 0), 0) * sms
    found = [[(tile, 0.0, 1.0) for tile in range(sm, whole, sms)] for sm in range(sms)]
    part = (tiles - whole) / sms
    for sm in range(sms):
        at, end = whole + sm * part, whole + (sm + 1) * part
        while at < end - 1e-9:
            tile = int(at + 1e-9)
            until = min(tile + 1, end)
            found[sm].append((tile, at - tile, until - tile))
            at = until
    return found


def stream_k(canvas: Canvas) -> str:
    tiles, sms = 9, 4
    canvas.size(3.6, 100, 54)
    waves = -(-tiles // sms)
    parts = split(tiles, sms)
    length = max(sum(end - begin for _, begin, end in mine) for mine in parts)
    scale = 90 / waves
    canvas.text(1, 2.5, f"a tile per block: {waves} waves, {100 * tiles / (waves * sms):.0f} % busy", weight="bold", size=9.5)
    canvas.text(1, 29.5, f"stream-K: {length:g} tile times, {100 * tiles / (length * sms):.0f} % busy", weight="bold", size=9.5)
    for sm in range(sms):
        for y in (5.5, 32.5):
            canvas.text(1, y + 5 * sm + 2.2, f"SM {sm}", size=9)
        for wave, tile in enumerate(range(sm, tiles, sms)):
            canvas.box(9 + wave * scale, 5.5 + 5 * sm, scale, 4.5, SHARED, f"tile {tile}", size=8.5)
        at = 0.0
        for tile, begin, end in parts[sm]:
            cut = end - begin < 1
            name = f"tile {tile}" if not cut else f"{tile}"
            colour = HBM if cut else SHARED
            canvas.box(9 + at * scale, 32.5 + 5 * sm, (end - begin) * scale, 4.5, colour, name, size=8.5)
            at += end - begin
    return (
        f"{tiles} tiles on {sms} SMs. The last wave has one tile and leaves three SMs idle. Stream-K cuts the tiles of the last "
        "two waves into equal parts along K (orange: a tile that several SMs share). Whoever has a part of another's tile "
        "hands over its partial sums."
    )
