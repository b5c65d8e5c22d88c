"""Which rung ``backend="cuda"`` stands for in a product on Hopper: `split_k`, `stream_k` or `persistent`.

A model counts the cycles of each. Its constants are fitted to the times of ten products in a hundred ways on an H200,
which it predicts to a tenth; docs/selection.md has its error on the rows of an H100. It also chooses the tile of
`split_k`, and how many blocks share the K of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernel_ladder import gpu
from kernel_ladder.selection import matmul_parts
from kernel_ladder.selection.matmul_parts import Operand, Part
from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of


class Tile(NamedTuple):
    """A tile of `split_k`; a pair is two of them side by side, made by a cluster of two blocks."""

    rows: int
    columns: int
    pair: bool
    stages: int


class Plan(NamedTuple):
    """The rung with the fewest cycles, and the best tile of `split_k` with the number of blocks that share its K."""

    rung: str
    rows: int
    columns: int
    splits: int
    pair: bool


#: csrc/matmul/split_k.cu. On equal cycles the first is taken.
TILES = (
    Tile(128, 192, False, 4),
    Tile(128, 128, False, 6),
    Tile(128, 64, False, 8),
    Tile(128, 64, True, 8),
    Tile(64, 64, False, 8),
)
#: The tile of `persistent` and `stream_k`. A cluster of two blocks makes two of them at once.
WHOLE_ROWS = 128
WHOLE_COLUMNS = 256
WHOLE_BLOCKS = 2
SPLITS = (1, 2, 4, 8)
ROW_BYTES = 128  # of k in a stage, for each row of A and column of B

START_CYCLES = 3000
MULTIPLY_ADDS_PER_CYCLE = 2000  # of an SM, for 64 k in 16 bits; tf32 has half the k in a stage, at half the rate
L2_BYTES_PER_CYCLE = 55  # for one SM
MEMORY_BYTES_PER_CYCLE = 1900  # for the GPU
CLUSTER_REDUCTION_CYCLES = 6500
PAIR_CYCLES = 2000  # not fitted: leaves pairs to products of few rows
OUTPUTS_PER_CYCLE = 5
PERSISTENT_START_CYCLES = 2000
#: stream-K: a block stores and adds 128 KiB of partial sums. Beyond so many shared stages of a block, operands at
#: places of K far apart leave the L2 before another block reads them.
FIXUP_CYCLES = 20000
NEAR_STAGES, FAR_STAGE_CYCLES = 128, 600

#: `split_k` copies an A of few rows to lie along K: csrc/matmul/pad_operands.cu.
FEW_ROWS = 32
FEW_ROWS_MIN_K = 4096
FEW_ROWS_MIN_B = 1 << 24
FEW_ROWS_MAX_A = 1 << 25

#: Rows up to which `split_k` is taken: tiles of 128 rows then take up to 1.3 times as long, and the model does not see
#: it (H200).
FEWEST_ROWS = 16

_H100_SMS = 132
MAX_PLANS = 4096  # kept for each device


def whole_clusters(device: int) -> tuple[int, ...]:
    """An estimate of how many blocks run at once, in clusters of 1, 2, 4 and 8, one block an SM."""
    sms = gpu.of(device).multiprocessors if gpu.visible() else _H100_SMS
    return tuple(sms // size * size for size in SPLITS)


#: How many blocks, in clusters of 1, 2, 4 and 8, run at once on a device. The cuda level replaces this estimate by what
#: the driver says.
blocks_at_once: Callable[[int], tuple[int, ...]] = whole_clusters


@gpu.cached
def is_hopper(device: int) -> bool:
    return not gpu.visible() or gpu.of(device).capability == (9, 0)


@gpu.cached
def _plans(device: int) -> dict[tuple[object, ...], Plan]:
    """Plans made before for a device, by shapes, strides and dtype."""
    return {}


def _up(x: int, y: int) -> int:
    return -(-x // y)


def _multiply_cycles(rows: int, columns: int) -> int:
    """Cycles of an SM for one stage of a tile."""
    return rows * columns * 64 // MULTIPLY_ADDS_PER_CYCLE


class _Product(NamedTuple):
    m: int
    n: int
    k_tiles: int
    batches: int
    a_batches: int  # 1 where all batches share the operand
    b_batches: int

    def cycles(self, on_sms: int) -> int:
        """An SM's cycles and the memory's: the most of the shorter is hidden under the longer."""
        operand_rows = self.a_batches * self.m + self.b_batches * self.n
        memory = START_CYCLES + operand_rows * self.k_tiles * ROW_BYTES // MEMORY_BYTES_PER_CYCLE
        return max(on_sms, memory) + min(on_sms, memory) * 3 // 8

    def split_cycles(self, tile: Tile, splits: int, at_once: int) -> int:
        """`split_k`: waves of tiles. Stages past those asked for at the start wait for the L2."""
        beside = 2 if tile.pair else 1
        multiply = _multiply_cycles(tile.rows, tile.columns)
        load = (tile.columns * ROW_BYTES + tile.rows * ROW_BYTES // beside) // L2_BYTES_PER_CYCLE
        clusters = _up(self.m, tile.rows) * _up(self.n, beside * tile.columns) * self.batches
        waves, steps = _up(clusters * beside * splits, at_once), _up(self.k_tiles, splits)
        waiting = max(0, steps - tile.stages) * max(0, load - multiply)
        store = tile.rows * tile.columns // OUTPUTS_PER_CYCLE * (1 if self.n % 8 == 0 else 4)
        meet = PAIR_CYCLES if tile.pair else CLUSTER_REDUCTION_CYCLES if splits > 1 else 0
        return self.cycles(waves * (START_CYCLES + steps * multiply + waiting + store + meet))

    def tile_pairs(self) -> int:
        """Pairs of `persistent`'s tiles: one below the other, or side by side where that leaves fewer empty."""
        rows, columns = _up(self.m, WHOLE_ROWS), _up(self.n, WHOLE_COLUMNS)
        below = rows % 2 == 0 or columns % 2 != 0
        return (_up(rows, 2) * columns if below else rows * _up(columns, 2)) * self.batches

    def whole_cycles(self, pairs: int, workers: int, stream_k: bool) -> int:
        """`persistent` goes by waves of tile pairs. `stream_k` leaves no wave unfilled, but has partial sums to add."""
        steps, fixup = _up(pairs, workers) * self.k_tiles, 0
        if stream_k:
            shared = (pairs % workers + workers if pairs > workers else pairs) * self.k_tiles // workers
            steps = _up(pairs * self.k_tiles, workers)
            fixup = FIXUP_CYCLES + FAR_STAGE_CYCLES * max(0, shared - NEAR_STAGES)
        outputs = WHOLE_ROWS * WHOLE_COLUMNS
        return self.cycles(
            START_CYCLES
            + PERSISTENT_START_CYCLES
            + steps * _multiply_cycles(WHOLE_ROWS, WHOLE_COLUMNS)
            + outputs // OUTPUTS_PER_CYCLE
            + fixup
        )


class _Parts(NamedTuple):
    """Products that a call is computed in, each with their number, one after the other; or the call itself, once."""

    products: tuple[tuple[_Product, int], ...]
    in_parts: bool

    def whole_cycles(self, workers: int) -> int:
        """Cycles of `persistent`."""
        return sum(count * p.whole_cycles(p.tile_pairs(), workers, False) for p, count in self.products)

    def streamed_cycles(self, workers: int) -> int | None:
        """Cycles of `stream_k`, or None where tiles are too few for it."""
        total = 0
        for p, count in self.products:
            pairs = p.tile_pairs()
            if not self.in_parts and pairs < workers:
                return None
            unshared = _up(pairs, workers) * p.k_tiles
            share = not self.in_parts or matmul_parts.shared_stages(pairs, p.k_tiles, workers) < unshared
            total += count * p.whole_cycles(pairs, workers, share)
        return total

    def split_cycles(self, tile: Tile, splits: int, at_once: int) -> int:
        """Cycles of `split_k` with one tile for all parts."""
        return sum(count * p.split_cycles(tile, splits, at_once) for p, count in self.products)


class Costs(NamedTuple):
    """Cycles of each rung, None where tiles are too few for `stream_k`; `best` has the tile of `split_k`."""

    best: Plan
    split_k: int
    stream_k: int | None
    persistent: int

    @property
    def plan(self) -> Plan:
        """The plan with the fewest cycles. `stream_k` must gain 3 %: of a small gain the model is not sure."""
        streamed, whole = self.stream_k, self.persistent
        stream_k = streamed is not None and streamed < whole - whole // 32
        if self.split_k < (streamed if stream_k and streamed is not None else whole):
            return self.best
        return self.best._replace(rung="cuda.stream_k" if stream_k else "cuda.persistent")


_NOTHING = Plan("cuda.split_k", 64, 64, 1, False)


def costs_of(
    m: int,
    n: int,
    k: int,
    batches: int,
    a_batches: int,
    b_batches: int,
    item: int,
    along_m: bool,
    at_once: tuple[int, ...],
    parts: Sequence[tuple[Part, int]] = (),
) -> Costs:
    """The cycles of a product of `item` bytes an element, by the kernels alone: copies of operands come before them.

    `along_m`: A lies along M, and its type can be read so. `parts` are those of :func:`matmul_parts.parts`.
    """
    k_tiles, workers = _up(k, ROW_BYTES // item), at_once[0] // WHOLE_BLOCKS
    product = _Parts(((_Product(m, n, k_tiles, batches, a_batches, b_batches), 1),), False)
    if parts:
        shared = (a_batches == 1, b_batches == 1)
        products = (
            (_Product(p.m, p.n, k_tiles, p.batches, *(1 if s else p.batches for s in shared)), c) for p, c in parts
        )
        product = _Parts(tuple(products), True)
    transposed = (  # A is copied to lie along K
        m <= FEW_ROWS and batches == 1 and k >= FEW_ROWS_MIN_K and k * n >= FEW_ROWS_MIN_B and k * m <= FEW_ROWS_MAX_A
    )
    best, best_cycles = _NOTHING, 0
    for tile in TILES:
        if tile.pair and (not along_m or transposed):
            continue
        for log_splits, splits in enumerate(SPLITS):
            if splits > (1 if tile.pair else k_tiles):
                break
            count = product.split_cycles(tile, splits, at_once[1 if tile.pair else log_splits])
            if best is _NOTHING or count < best_cycles:
                best, best_cycles = Plan("cuda.split_k", tile.rows, tile.columns, splits, tile.pair), count
    return Costs(best, best_cycles, product.streamed_cycles(workers), product.whole_cycles(workers))


def plan_of(
    m: int,
    n: int,
    k: int,
    batches: int,
    a_batches: int,
    b_batches: int,
    item: int,
    along_m: bool,
    at_once: tuple[int, ...],
    parts: Sequence[tuple[Part, int]] = (),
) -> Plan:
    """The plan of a product: see :func:`costs_of`."""
    if m * n * k * batches == 0:
        return _NOTHING
    costs = costs_of(m, n, k, batches, a_batches, b_batches, item, along_m, at_once, parts)
    return costs.best if m <= FEWEST_ROWS and batches == 1 else costs.plan


def costs(input: torch.Tensor, other: torch.Tensor) -> Costs:
    """What the model says of ``matmul(input, other)`` on Hopper, which has at least one element and one product."""
    return costs_of(*_sizes(input, other))


def plan(input: torch.Tensor, other: torch.Tensor) -> Plan:
    """The plan of ``matmul(input, other)`` on Hopper. Made once for each pair of shapes and strides."""
    plans = _plans(input.get_device())
    key = (input.shape, other.shape, input.stride(), other.stride(), input.dtype)
    try:
        if (known := plans.get(key)) is not None:
            return known
    except TypeError:  # symbols of torch.compile have no hash
        return _plan(input, other)
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = found = _plan(input, other)
    return found


def _plan(input: torch.Tensor, other: torch.Tensor) -> Plan:
    return plan_of(*_sizes(input, other))


def _sizes(input: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of :func:`plan_of`."""
    a, b = input, other
    if b.dim() > 2 and 0 not in b.shape[:-2] and not any(b.stride()[:-2]):
        b = b.as_strided(b.shape[-2:], b.stride()[-2:])  # one matrix for the whole batch
    a, b = as_matrices(a, b)
    batches = product_of(batch_shape(a, b))
    a_batches, b_batches = (batches if x.dim() > 2 and any(x.stride()[:-2]) else 1 for x in (a, b))
    m, n, k = concrete(a.shape[-2]), concrete(b.shape[-1]), concrete(a.shape[-1])
    item = a.element_size()
    along_m = item == 2 and k != 1 and a.stride(-1) != 1
    at_once = blocks_at_once(a.get_device())
    parts = matmul_parts.parts(
        _operand(a, -2, m, a_batches), _operand(b, -1, n, b_batches), k, batches, item, at_once[0]
    )
    return m, n, k, batches, a_batches, b_batches, item, along_m, at_once, parts


def _operand(x: torch.Tensor, rows: int, size: int, batches: int) -> Operand:
    """An operand of `size` rows (columns), which are its dimension `rows`."""
    batch_step = next((s for s in reversed(x.stride()[:-2]) if s), 0)
    return Operand(size, concrete(x.stride(rows)), concrete(x.stride(-3 - rows)), batches, concrete(batch_step))


def rule(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """On Hopper's tensor cores the rung with the fewest cycles; elsewhere the last that supports the call."""
    input, other = inputs
    assert input is not None
    assert other is not None
    if not input.is_cuda or not is_hopper(input.get_device()):
        return ()
    if input.dtype is torch.float32 and not tf32_allowed():
        return ()
    return (plan(input, other).rung,)


def rule_of_linear(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """``cuda.split_k`` where the product's plan names it on Hopper, else ``cuda.persistent``; none for few rows."""
    input, weight = inputs[0], inputs[1]
    assert input is not None
    assert weight is not None
    if product_of(input.shape[:-1]) <= FEWEST_ROWS:
        return ()
    by_split_k = rule((input, weight.detach().mT), options) == ("cuda.split_k",)
    return ("cuda.split_k", "cuda.persistent") if by_split_k else ("cuda.persistent",)


RULES = {("matmul", "cuda"): rule, ("linear", "cuda"): rule_of_linear}
