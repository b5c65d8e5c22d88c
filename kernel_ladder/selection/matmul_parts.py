"""The parts in which Hopper's matmul rungs compute a product whose unaligned operands are copied.

TMA reads rows that begin at multiples of 16 bytes. Where a product is worth it, other operands are copied to such rows
first, at most 64 MiB at a time. A larger product is computed in parts of its outputs (csrc/matmul/pad_operands.cu). The
cost model needs the sizes of those parts: the last wave of a part is not that of the product. :func:`parts_of` repeats
``csrc/matmul/chunked_copy.h``; a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

MIB = 1 << 20
#: The most that copies take at a time, in bytes.
MOST_BYTES = 64 * MIB
#: A copy pays from this many multiply-adds on, for each element copied and in total.
WORTH_PER_ELEMENT = 192
WORTH_IN_TOTAL = 1 << 29
#: TMA reads rows at multiples of these bytes; a copy's rows begin at multiples of ROW_BYTES.
ALIGNMENT = 16
ROW_BYTES = 128
#: The tile of `persistent`, of which a cluster computes two.
TILE_M = 128
TILE_N = 256
#: In stages of 128 bytes of K: the launches of a part, and the fix-up of shared tiles. A copy of STAGE_BYTES takes as
#: long as a stage.
LAUNCH_STAGES = 17
SHARE_STAGES = 16
STAGE_BYTES = MIB
#: Parts fill at least one in this many of the multiprocessors; else plain loads are faster.
LEAST_FULL = 5
#: Numbers of parts down the rows to compare: smaller parts may fill their waves better.
MORE_PARTS = 4


class Part(NamedTuple):
    """Sizes of a part: batches, rows and columns of outputs."""

    batches: int
    m: int
    n: int


class Operand(NamedTuple):
    """An operand of `x` rows (columns), its steps in elements; `batches` is 1 where all batches share it."""

    x: int
    x_step: int
    k_step: int
    batches: int = 1
    batch_step: int = 0

    def by_tma(self, k: int, item: int) -> bool:
        """Whether TMA reads it as it lies, if it begins at a multiple of 16 bytes."""
        grid = ALIGNMENT // item

        def steps(size: int, step: int) -> bool:
            return size == 1 or (step > 0 and step % grid == 0)

        if self.batches > 1 and not steps(self.batches, self.batch_step):
            return False
        along_k = (k == 1 or self.k_step == 1) and steps(self.x, self.x_step)
        return along_k or (item == 2 and (self.x == 1 or self.x_step == 1) and steps(k, self.k_step))

    def along_k(self, k: int) -> bool:
        return k == 1 or self.k_step == 1

    def can_be_copied(self, k: int, item: int) -> bool:
        return self.along_k(k) or (item == 2 and (self.x == 1 or self.x_step == 1))

    def copy_bytes(self, k: int, item: int) -> int:
        """Bytes of one batch's copy."""
        inner, outer = (k, self.x) if self.along_k(k) else (self.x, k)
        return outer * (_up(inner * item, ROW_BYTES) * ROW_BYTES)


class Copied(NamedTuple):
    """Bytes of an operand's copy: of one batch, and of a tile's rows (columns). Zeros if it is not copied."""

    of_batch: int
    of_tile: int
    per_batch: bool

    def of_batches(self, count: int) -> int:
        return self.of_batch * (count if self.per_batch else 1)


def _up(x: int, y: int) -> int:
    return -(-x // y)


def shared_stages(pairs: int, stages: int, workers: int) -> int:
    """Stages of a worker for so many tile pairs, with the last waves shared (stream-K) where that promises 1/16."""
    whole = _up(pairs, workers) * stages
    shared = _up(pairs * stages, workers) + SHARE_STAGES
    return shared if shared < whole - whole // 16 else whole


def _part_stages(rows: int, columns: int, stages: int, sms: int) -> int:
    """Stages of a part of so many tiles, with its launches."""
    below = rows % 2 == 0 or columns % 2 != 0
    pairs = _up(rows, 2) * columns if below else rows * _up(columns, 2)
    return (stages if pairs < sms // 2 else shared_stages(pairs, stages, sms // 2)) + LAUNCH_STAGES


def _sizes(total: int, each: int) -> Iterator[tuple[int, int]]:
    """The sizes of the parts of a dimension, each with its number: `each`, and what is left."""
    count = _up(total, each)
    yield each, count - 1
    yield total - (count - 1) * each, 1


def _cost(tiles: tuple[int, int], each: tuple[int, int], copies: tuple[int, int], stages: int, sms: int) -> int:
    """What even parts cost, as bytes of a copy. A column of parts keeps its copy of B; one row of parts, that of A."""
    total = sum(
        m_count * n_count * _part_stages(rows, columns, stages, sms)
        for rows, m_count in _sizes(tiles[0], each[0])
        for columns, n_count in _sizes(tiles[1], each[1])
        if m_count and n_count
    )
    parts_m, parts_n = _up(tiles[0], each[0]), _up(tiles[1], each[1])
    copied = (1 if parts_m == 1 else parts_n) * tiles[0] * copies[0] + tiles[1] * copies[1]
    return total * STAGE_BYTES + copied


def _even_tiles(
    tiles: tuple[int, int], copies: tuple[int, int], stages: int, most: int, sms: int
) -> tuple[int, int] | None:
    """Tiles of a part, down and across, at the least cost; None where every part leaves most of the GPU idle."""
    best, best_cost, columns = None, 0, tiles[1]
    while True:
        left = most - columns * copies[1]
        fit = 0 if left < 0 else tiles[0] if copies[0] == 0 else min(tiles[0], left // copies[0])
        fewest = _up(tiles[0], fit) if fit else 0
        for count in range(fewest, fewest + MORE_PARTS) if fit else ():
            each = (_up(tiles[0], count), columns)
            full = each[0] * columns
            if full * LEAST_FULL < _up(full, sms) * sms:
                continue
            cost = _cost(tiles, each, copies, stages, sms)
            if best is None or cost < best_cost:
                best, best_cost = each, cost
        if columns == 1:
            return best
        columns = _up(tiles[1], _up(tiles[1], columns - 1))


def parts_of(
    batches: int, m: int, n: int, row_bytes: int, a: Copied, b: Copied, most: int, sms: int
) -> list[tuple[int, int, int, int, int, int]]:
    """Parts ``(batch, batches, m, rows, n, columns)`` whose copies take at most `most` bytes, in order.

    Args:
        batches: of the product, with `m` rows and `n` columns each.
        row_bytes: bytes of a row along K.
        a, b: what copies of the operands take.
        most: bytes for both copies of a part.
        sms: multiprocessors of the GPU.

    Returns:
        No part where parts of a batch would leave most of the GPU idle.
    """
    if (one := a.of_batches(1) + b.of_batches(1)) <= most:
        more = a.of_batches(2) + b.of_batches(2) - one
        fit = batches if more == 0 else min(batches, 1 + (most - one) // more)
        each = _up(batches, _up(batches, fit))
        return [(batch, min(each, batches - batch), 0, m, 0, n) for batch in range(0, batches, each)]
    tiles = _up(m, TILE_M), _up(n, TILE_N)
    even = _even_tiles(tiles, (a.of_tile, b.of_tile), _up(row_bytes, ROW_BYTES), most, sms)
    if even is None:
        return []
    rows, columns = even[0] * TILE_M, even[1] * TILE_N
    return [
        (batch, 1, m0, min(rows, m - m0), n0, min(columns, n - n0))
        for batch in range(batches)
        for n0 in range(0, n, columns)
        for m0 in range(0, m, rows)
    ]


def parts(a: Operand, b: Operand, k: int, batches: int, item: int, sms: int) -> list[tuple[Part, int]]:
    """The parts of a product, each size with its number; none where it is computed as a whole."""
    unread = [x for x in (a, b) if not x.by_tma(k, item)]
    if not unread or not all(x.can_be_copied(k, item) for x in unread):
        return []
    elements = sum(x.x * k * x.batches for x in unread)
    if a.x * b.x * k * batches < max(elements * WORTH_PER_ELEMENT, WORTH_IN_TOTAL):
        return []
    if sum(x.copy_bytes(k, item) * x.batches for x in unread) <= MOST_BYTES:
        return []

    def copied(x: Operand, tile: int) -> Copied:
        if x not in unread:
            return Copied(0, 0, False)
        return Copied(x.copy_bytes(k, item), x._replace(x=tile).copy_bytes(k, item), x.batches > 1)

    found = parts_of(batches, a.x, b.x, k * item, copied(a, TILE_M), copied(b, TILE_N), MOST_BYTES, sms)
    return list(Counter(Part(count, rows, columns) for _, count, _, rows, _, columns in found).items())
