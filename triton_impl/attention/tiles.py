"""Device functions that the attention kernels share: tile order, loads and stores, masks, the online softmax state."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from triton_impl import interpreted
from triton_impl.common.fast_math import LOG2E, exp2
from triton_impl.common.philox import factors_at, factors_of_rows
from triton_impl.runtime.launch_cache import to_time

# Softmax in base two: exp(x) = exp2(x · log2 e), and the hardware has exp2.
LOG2_E = LOG2E.value
LN_2 = math.log(2)

#: Values of BAND, the scores that queries see by place: all, all up to a diagonal, or those between two diagonals.
EVERYTHING, BELOW_DIAGONAL, BETWEEN_DIAGONALS = range(3)
#: Values of MASK, the mask in memory: none, one byte per score, or a number to add to each score.
NO_MASK, BOOLEAN, ADDITIVE = range(3)

#: Values of DROPOUT: weights are kept, or dropped where rows have any length, or multiples of eight.
NO_DROPOUT, DROPOUT_BY_ELEMENT, DROPOUT_BY_EIGHTS = range(3)

#: Bytes of keys and values of one section of heads, at most: they stay in the L2, of which Hopper has 50 MB or more.
L2_BYTES = 24 * 2**20


@triton.jit
def program_tile(num_tiles, num_heads, section):
    """(tile, head) of this program. Programs take `section` heads tile by tile, then the next section.

    The keys and values of one section stay in the L2. Inside a section the tiles come in one order for all heads, so
    that the caller can put the longest ones first.
    """
    pid = tl.program_id(0)
    first = pid // (section * num_tiles) * section
    inside = pid - first * num_tiles
    width = tl.minimum(section, num_heads - first)
    return inside // width, first + inside % width


@triton.jit
def _pointers(base, start, rows, cols, stride_row, stride_col, INT64_OFFSETS: tl.constexpr):
    """Pointers to `rows` × `cols` of the tile that begins at row `start`."""
    # The offset of a tile's start has 64 bits; offsets inside a tile have 32, unless INT64_OFFSETS.
    base += tl.cast(start, tl.int64) * stride_row
    if INT64_OFFSETS:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return base + (rows[:, None] * stride_row + cols[None, :] * stride_col)


@triton.jit
def load_tile(
    base, start, stride_row, stride_col, num_rows, num_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Rows ``start … start + BLOCK_ROWS`` of a (num_rows, num_cols) matrix, zeros outside it."""
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    pointers = _pointers(base, start, rows, cols, stride_row, stride_col, INT64_OFFSETS)
    if EVEN_ROWS and EVEN_COLS:
        return tl.load(pointers)
    if EVEN_ROWS:
        return tl.load(pointers, mask=cols[None, :] < num_cols, other=0.0)
    if EVEN_COLS:
        return tl.load(pointers, mask=rows[:, None] < num_rows - start, other=0.0)
    return tl.load(pointers, mask=(rows[:, None] < num_rows - start) & (cols[None, :] < num_cols), other=0.0)


@triton.jit
def store_tile(
    base, start, stride_row, stride_col, num_rows, num_cols, tile,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Store the part of `tile` that lies inside a (num_rows, num_cols) matrix."""
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    pointers = _pointers(base, start, rows, cols, stride_row, stride_col, INT64_OFFSETS)
    mask = (rows[:, None] < num_rows - start) & (cols[None, :] < num_cols)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def apply_mask(
    scores, scale, mask, rows, cols, seqlen_q, seqlen_k, first, last, BAND: tl.constexpr, MASK: tl.constexpr
):
    """Scores with −inf where a query does not see a key; with an additive mask ``scores · scale + mask``.

    With an additive mask scores are exponents of e: times log2 e, the lowest float32 number would become −inf and hide
    its key. `rows` and `cols` are the indices of queries and keys, in shapes that broadcast to the scores; `mask` holds
    a pointer per score.
    """
    seen = cols < seqlen_k
    if BAND != 0:
        seen = seen & (cols <= rows + last)
    if BAND == 2:
        seen = seen & (cols >= rows + first)
    if MASK != 0:
        inside = (rows < seqlen_q) & (cols < seqlen_k)
        value = tl.load(mask, mask=inside, other=0)
        if MASK == 1:
            seen = seen & (value != 0)
        else:
            scores = scores * scale + value.to(tl.float32)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def mask_pointers(base, start_m, start_n, rows, cols, m_q, m_k, INT64_OFFSETS: tl.constexpr):
    """Pointers to the mask of a tile of scores that begins at (start_m, start_n), where `rows` and `cols` are 0."""
    base += tl.cast(start_m, tl.int64) * m_q + tl.cast(start_n, tl.int64) * m_k
    if INT64_OFFSETS:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return base + (rows * m_q + cols * m_k)


@triton.jit
def online_softmax(scores, factor, acc, row_sum, row_max, MASK: tl.constexpr = 0):
    """One step of online softmax: the weights of a tile of scores, and the state (acc, row_sum, row_max) rescaled.

    ``scores · factor`` are exponents of two. With an additive mask scores and maxima are exponents of e, and only their
    difference is multiplied by log2 e. It is exact next to any number that a mask holds.
    """
    largest = tl.max(scores, 1)
    if MASK != 2:
        largest *= factor
    new_max = tl.maximum(row_max, largest)
    # A row of −inf alone subtracts 0: its exponentials are 0, not NaN.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    if MASK == 2:
        weights = exp2((scores - shift[:, None]) * LOG2E)
        correction = exp2((row_max - shift) * LOG2E)
    else:
        weights = exp2(scores * factor - shift[:, None])
        correction = exp2(row_max - shift)
    return weights, acc * correction[:, None], row_sum * correction + tl.sum(weights, 1), new_max


@triton.jit
def key_range(start_m, seqlen_k, first, last, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, whole, end): BLOCK_M queries see no key outside begin … end; causal, they see all below `whole`."""
    begin = 0
    whole = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k
    if BAND != 0:
        end = tl.maximum(tl.minimum(seqlen_k, start_m + BLOCK_M + last), 0)
        whole = tl.maximum(tl.minimum(seqlen_k, start_m + 1 + last), 0) // BLOCK_N * BLOCK_N
    if BAND == 2:
        begin = tl.maximum(start_m + first, 0) // BLOCK_N * BLOCK_N
    return begin, whole, end


@triton.jit
def store_lse(pointer, num_rows, row_max, row_sum, mask, MASK: tl.constexpr):
    """Store log-sum-exps in base two.

    With an additive mask the maximum (an exponent of e) and, `num_rows` further on, the log2 of the sum are stored
    apart. The logarithm could vanish beside a large number of the mask.
    """
    if MASK == 2:
        tl.store(pointer, row_max, mask=mask)
        tl.store(pointer + tl.cast(num_rows, tl.int64), tl.log2(row_sum), mask=mask)
    else:
        tl.store(pointer, row_max + tl.log2(row_sum), mask=mask)


@triton.jit
def load_lse(pointer, num_rows, mask, MASK: tl.constexpr):
    """(row_max, lse) as :func:`store_lse` stored them; row_max matters with an additive mask alone.

    lse is +inf for rows outside and for rows that see nothing: their weights become 0.
    """
    lse = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=float("inf"))
    row_max = lse
    if MASK == 2:
        pointer += tl.cast(num_rows, tl.int64)
        lse = tl.load(pointer) if mask is None else tl.load(pointer, mask=mask, other=float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    return tl.where(lse == float("inf"), 0.0, row_max), lse


@triton.jit
def recompute_weights(scores, factor, row_max, lse, MASK: tl.constexpr):
    """The weights of scores from their rows' (row_max, lse), in shapes that broadcast to the scores."""
    if MASK == 2:
        below = scores - row_max
        # Recomputed scores may round to above their maximum. NaN stays.
        return exp2(tl.where(below > 0.0, 0.0, below) * LOG2E - lse)
    return exp2(scores * factor - lse)


@triton.jit
def drop_factors(
    head, start_m, start_n, seqlen_q, seqlen_k, key_low, key_high, threshold, drop_scale,
    DROPOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the weights of a tile of a head, of all batches' heads, are multiplied by: see ``weight_dropout``."""
    rows = tl.cast(head, tl.int64) * seqlen_q + start_m + tl.arange(0, BLOCK_M)
    first = rows * seqlen_k + start_n
    if DROPOUT == 2:
        return factors_of_rows(first // 8, key_low, key_high, threshold, drop_scale, BLOCK_N)
    index = first[:, None] + tl.arange(0, BLOCK_N)[None, :]
    return factors_at(index, key_low, key_high, threshold, drop_scale)


@triton.jit
def sequence(cu_seqlens_ptr, b, total):
    """(first row, length) of packed sequence `b`, clamped to the `total` rows whatever the offsets hold."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), start), total)
    return start.to(tl.int64), end - start


#: (BLOCK_M, BLOCK_N, num_warps, num_stages) to time, by the wider head dimension. Negative keys are float32,
#: whose products run on CUDA cores. A thread holds whole rows of a tile, and larger tiles of wide heads spill kilobytes
#: and compile for a minute. :func:`triton_impl.runtime.launch_cache.to_time` says what the first and the last must be.
TileTable = dict[int, tuple[tuple[int, int, int, int], ...]]


def configs(choices: TileTable) -> list[triton.Config]:
    """Every row of a table as autotuning configurations, without duplicates."""
    return configs_of_rows(dict.fromkeys(choice for row in choices.values() for choice in row))


def configs_of_rows(choices: Iterable[tuple[int, int, int, int]]) -> list[triton.Config]:
    """Tiles as autotuning configurations; for the interpreter a single small one."""
    if interpreted():
        choices = ((64, 64, 4, 1),)
    return [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in choices]


def choose(choices: TileTable, configs: list[triton.Config], constants: dict) -> list[triton.Config]:
    """The configurations of the table's row for a call's constants, in its order."""
    if len(configs) == 1:
        return configs
    width = max(64, constants["BLOCK_D"], constants["BLOCK_DV"])
    row = choices[-width if constants["PRECISION"] == "ieee" else width]
    if constants["MASK"] or constants.get("DROPOUT"):  # values of a mask take registers that larger tiles do not have
        row = row[-1:]
    return to_time([c for choice in row for c in configs if _is(c, choice)])


def _is(config: triton.Config, choice: tuple[int, int, int, int]) -> bool:
    return (config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"], config.num_warps, config.num_stages) == choice


#: Arguments whose values share a tuned configuration.
TUNING_KEY = ("BLOCK_D", "BLOCK_DV", "BAND", "MASK", "DROPOUT", "seqlen_class")

#: Arguments that no kernel is compiled for: those of a mask of dropout change from call to call.
UNSPECIALIZED = [
    *("first", "last", "section", "seqlen_class", "total_q", "total_k"),
    *("key_low", "key_high", "threshold", "drop_scale"),
]


def block(head_dim: int) -> int:
    """The padded size of a head dimension; tl.dot takes no fewer than 16."""
    return max(16, triton.next_power_of_2(head_dim))


def blocks(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The padded sizes of the head dimensions of queries and of values.

    Where neither fills its tile, and the value's is the narrower, Hopper's product of weights and values reads past its
    shared memory (Triton 3.6; head dimensions 24 and 8, or 40 and 8): then the value's is as wide as the other.
    """
    block_d, block_dv = block(head_dim), block(head_dim_v)
    return block_d, max(block_d, block_dv) if head_dim < block_d and head_dim_v < block_dv else block_dv


def needs_int64(*strides: tuple[int, ...]) -> bool:
    """Whether offsets inside a tile of 256 by 256 may pass 32 bits."""
    return max(map(max, strides)) >= 2**22


def mask_kind(mask: torch.Tensor | None) -> int:
    """The value of MASK for a mask; booleans come as bytes."""
    if mask is None:
        return NO_MASK
    return BOOLEAN if mask.dtype == torch.uint8 else ADDITIVE


def band_kind(first: int, last: int, seqlen_q: int, seqlen_k: int) -> int:
    """The value of BAND for a band of scores (:func:`kernel_ladder.semantics.masks.band`)."""
    if first != -seqlen_q:
        return BETWEEN_DIAGONALS
    return EVERYTHING if last == seqlen_k else BELOW_DIAGONAL


def section(is_causal: bool, group: int, bytes_per_head: int) -> int:
    """How many query heads form a section (:func:`program_tile`).

    Without a causal mask all tiles take equally long, and one head of keys and values at a time uses the L2 best.
    """
    return group * max(1, L2_BYTES // bytes_per_head) if is_causal else group


def seqlen_class(seqlen: int) -> int:
    """Lengths that share a tuned configuration."""
    return 0 if seqlen <= 256 else 1 if seqlen <= 1024 else 2
