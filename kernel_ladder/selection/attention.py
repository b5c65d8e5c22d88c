"""Which rung of attention a level's name stands for where the last rung is not the fastest."""

from __future__ import annotations

import functools
import math

import torch
from torch.compiler import is_compiling

from kernel_ladder import gpu
from kernel_ladder.selection.matmul import is_hopper
from kernel_ladder.semantics.masks import NO_WINDOW, band, keys_of_window
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete, product_of, wants_gradient

#: Head dimensions up to this one take tiles of 64 columns (csrc/attention/wgmma.cu, persistent.cu).
NARROW_HEAD = 64
#: Rows of queries and of keys in a tile at that head dimension.
WGMMA_TILE = (64, 64)
PERSISTENT_TILE = (192, 128)
#: What a tile of queries costs beside its keys, as a number of keys; in per cent what a score of ``wgmma`` costs beside
#: one of ``persistent``; and how many times the longest tile counts beside all of them. Five blocks of ``wgmma`` share
#: an SM, so that each takes longer by itself; of ``persistent`` the longest tile is the least that a call takes.
#: Fitted to 23 ratios of times at 512 to 16,384 keys on an H100 and an H200, to 3 %.
WGMMA_OVERHEAD = 30
PERSISTENT_OVERHEAD = 90
WGMMA_PER_CENT = 109
WGMMA_LONGEST = 2
#: Queries that share a head of keys, up to which ``split_kv`` takes the call.
SPLIT_ROWS = 16
#: Keys that a query sees through a window up to which ``triton.tma`` is ahead of ``triton.warp_specialized``: it takes
#: 0.77 of the time at 256 keys of 128, 1.03 at 513 (H200). A narrow window leaves few products beside the softmax.
NARROW_WINDOW = 256
#: Queries of a tile of ``triton.warp_specialized``, and keys up to which ``flash`` is ahead at narrow heads.
TRITON_QUERIES, SHORT_OF_TRITON = 128, 1024
#: Keys up to which ``triton.flash`` is ahead where tiles are few: those that a query sees in the mean, and with
#: gradients all of them, without and with a causal mask. It takes 0.69 to 0.79 of the time at 187 to 400 keys, 1.07 at
#: 433 and 1.35 at 2,024; with gradients 0.89 to 0.97 with a causal mask (H200, head dimensions from 80 to 128).
FEW_TILES_SEEN, FEW_TILES_WITH_GRADIENTS = 400, (256, 1536)
#: Keys up to which ``cuda.wgmma`` is ahead at wider heads too, where its blocks are few: 0.71 to 1.0 of the time of
#: ``persistent`` at 85 to 448 keys (H200).
SHORT_OF_CUDA = 512
#: Head dimensions whose gradients were measured beside cuDNN's on Hopper, keys up to which the cuda level is ahead at
#: the least one, and from which above `WIDEST_BACKWARD`. Tiles pad 72 to 120 as they do 80 and 96.
HEADS_WITH_GRADIENTS, LONGEST_NARROW, SHORTEST_WIDE = (*range(64, 129, 8), 160, 192, 256), 8192, 2048
#: Head dimensions of queries and of values that have tiles of their own (csrc/attention/persistent.cu).
OF_DEEPSEEK = (192, 128)
#: The widest head dimension of `warp_specialized`'s backward pass on Hopper; wider ones, up to 256, are `wgmma`'s.
WIDEST_BACKWARD = 128
#: Keys times padded head dimension up to which `wgmma` has the fastest backward on Hopper: a block of
#: `warp_specialized` then has few tiles of queries, between which it waits for its neighbours' sums.
SHORT_BACKWARD = 2**16
#: Keys of a block of that pass.
BACKWARD_KEYS = 128
#: Rows of a packed sequence, in the mean, from which `warp_specialized` takes the backward pass. It pads the sums of
#: dQ, in float32, to whole tiles of each sequence: shorter ones would multiply their memory.
SHORTEST_PACKED = 32


def _scores(
    tile: tuple[int, int], overhead: int, seqlen_q: int, seqlen_k: int, first: int, last: int
) -> tuple[int, int]:
    """Six times the scores that the tiles of a head compute, masked ones too, with the overhead of each tile.

    The second number is that of the longest tile, six times as well. A tile of queries walks over the tiles of keys
    between ``first`` and ``last``. Simpson's rule replaces the sum over all tiles of queries, so that lengths stay
    symbolic under torch.compile and the time of the rule stays constant.
    """
    queries, keys = tile
    tiles = -(-seqlen_q // queries)
    total = longest = 0
    for twice, weight in ((0, 1), (tiles - 1, 4), (2 * (tiles - 1), 1)):
        begin = twice * queries // 2
        end = max(-(-min(seqlen_k, begin + queries + last) // keys), 1)
        seen = end - min(max(begin + first, 0) // keys, end - 1)
        total += weight * (seen * keys + overhead)
        longest = max(longest, seen * keys + overhead)
    return total * tiles * queries, 6 * longest * queries


def _wgmma_is_cheaper(
    heads: int, seqlen_q: int, seqlen_k: int, is_causal: bool | str, window: tuple[int, int], sms: int
) -> bool:
    """Whether ``wgmma`` takes less time than ``persistent`` for so many heads, those of all sequences together."""
    first, last = band(is_causal, window, seqlen_q, seqlen_k)
    sizes = (seqlen_q, seqlen_k, first, last)
    of_wgmma, its_longest = _scores(WGMMA_TILE, WGMMA_OVERHEAD, *sizes)
    of_persistent, longest = _scores(PERSISTENT_TILE, PERSISTENT_OVERHEAD, *sizes)
    wgmma = heads * of_wgmma + sms * WGMMA_LONGEST * its_longest
    return WGMMA_PER_CENT * wgmma < 100 * max(heads * of_persistent, sms * longest)


_known = functools.lru_cache(maxsize=4096)(_wgmma_is_cheaper)


def prefer_wgmma(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``cuda.wgmma`` to ``cuda.persistent`` where keys are few: at wide heads in a call of few tiles alone.

    At head dimensions up to 64 the softmax takes as long as the products, and tiles of 192 queries by 128 keys compute
    many masked scores. Five blocks of ``wgmma`` share an SM, each with tiles of 64 by 64. Of few heads they leave SMs
    idle at the end.
    """
    query, key, value = inputs[:3]
    if len(inputs) > 3 and inputs[3] is not None:
        return ()
    heads, seqlen_q, seqlen_k = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    if seqlen_q * (query.shape[-3] // max(key.shape[-3], 1)) <= SPLIT_ROWS:
        return ()
    if query.shape[-1] > NARROW_HEAD or value.shape[-1] > NARROW_HEAD:
        short = concrete(seqlen_k) <= SHORT_OF_CUDA and _few_tiles(query, 1)
        return ("cuda.wgmma",) if short else ()
    is_causal, window = options.get("is_causal", False), tuple(options.get("window_size", NO_WINDOW))
    # torch.compile traces the arithmetic, with symbolic lengths; other calls remember it by length.
    cheaper = _wgmma_is_cheaper if is_compiling() else _known
    return ("cuda.wgmma",) if cheaper(heads, seqlen_q, seqlen_k, is_causal, window, gpu.multiprocessors(query)) else ()


def _few_tiles(query: torch.Tensor, waves: int) -> bool:
    """Whether tiles of 128 queries fill the GPU's multiprocessors at most so many times."""
    tiles = product_of(query.shape[:-2]) * -(-concrete(query.shape[-2]) // TRITON_QUERIES)
    return tiles <= waves * gpu.multiprocessors(query)


def triton_without_specialized_warps(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers other rungs to ``triton.warp_specialized``: ``tma`` for narrow windows, ``flash`` for little work.

    Without a gradient ``flash`` is ahead where tiles and keys are few. At head dimensions up to 64 it takes 0.83 to
    0.98 of the time with a causal mask, 0.96 to 0.98 without for up to 1,024 keys (H200).
    """
    seen = keys_of_window(options)
    if seen is not None:
        return ("triton.tma",) if seen <= NARROW_WINDOW else ()
    query, key, value = inputs[:3]
    if few_queries(query, key):
        return ()
    causal, keys = bool(options.get("is_causal")), concrete(key.shape[-2])
    few = _few_tiles(query, 2)
    if wants_gradient(query, key, value):
        return ("triton.flash",) if few and keys <= FEW_TILES_WITH_GRADIENTS[causal] else ()
    narrow = max(concrete(query.shape[-1]), concrete(value.shape[-1])) <= NARROW_HEAD
    short = causal or keys <= SHORT_OF_TRITON
    mean = keys // 2 if causal else keys
    return ("triton.flash",) if (few and mean <= FEW_TILES_SEEN) or (narrow and short) else ()


def few_queries(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether all queries that share a head of keys fit in the one tile of ``split_kv``."""
    queries, heads, heads_kv = map(concrete, (query.shape[-2], query.shape[-3], key.shape[-3]))
    return queries * heads <= SPLIT_ROWS * heads_kv


def automatic(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``cuda.split_kv`` for few queries; else the cuda level on Hopper, and ``triton.flash`` for masks there.

    Few queries decode. A cache that grows has a new length at every step, and for each new length cuDNN, which PyTorch
    takes on Hopper, builds a plan: 40 ms on the host, where a call of ``split_kv`` takes 28 µs (H200). The cache's
    length once known, cuDNN takes 0.7 to 1.03 of the time on the GPU.

    A cache of fixed size masks its free places. PyTorch's kernel for masks then has one block for each head of queries,
    which reads all of its keys, and PyTorch repeats grouped heads for it.

    With a boolean mask ``triton.flash`` takes 0.3 to 0.9 of the time of that kernel, whatever the mask's shape, and
    0.4 to 0.8 in the backward pass (H200, 777 and 4,096 keys). Additive masks have not been timed.
    """
    query = inputs[0]
    mask = inputs[3] if len(inputs) > 3 else None
    if not query.is_cuda or query.element_size() != 2:
        return ()
    split = ("cuda.split_kv",) if decodes(inputs) else ()
    if mask is None:
        return split or cuda_on_hopper(inputs, options)
    flash = mask.dtype == torch.bool and is_hopper(query.get_device())
    return (*split, "triton.flash") if flash else split


def decodes(inputs: Inputs) -> bool:
    """Whether a call of 16 bits on a GPU has few queries and needs no gradient."""
    query, key = inputs[:2]
    return query.is_cuda and query.element_size() == 2 and few_queries(query, key) and not wants_gradient(*inputs)


def cuda_on_hopper(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers the cuda level on Hopper; with gradients by head dimension and number of keys.

    cuDNN's forward pass takes 1.05 to 1.4 times as long, its backward pass 0.92 to 1.37 times as long as
    ``cuda.persistent``'s: less where sequences are long. At head dimension 256 and 4,096 keys its backward pass takes
    1.02 times as long with a causal mask, 1.08 without (H100).

    A block of our backward pass has 128 keys of a head, and all heads of queries that share them: with grouped heads
    blocks are few, and cuDNN's, which are of a head of queries, take 0.43 to 0.93 of the time (H200). So the level must
    fill whole waves.

    With values of 128 beside queries of 192, as DeepSeek's models have them, cuDNN's forward pass takes 1.1 to 1.3
    times as long from 4,096 keys on, and about as long at 1,024. Its backward pass takes 1.15 times as long, or 0.7
    with a causal mask (H200).
    """
    query, key, value = inputs[:3]
    d, d_v = concrete(query.shape[-1]), concrete(value.shape[-1])
    if not query.is_cuda or query.element_size() != 2 or (d != d_v and (d, d_v) != OF_DEEPSEEK):
        return ()
    keys = concrete(key.shape[-2])
    if not is_hopper(query.get_device()) or few_queries(query, key) or (d != d_v and keys < SHORTEST_WIDE):
        return ()
    if wants_gradient(*inputs):
        no_window = tuple(options.get("window_size") or NO_WINDOW) == NO_WINDOW
        behind = keys > LONGEST_NARROW if d <= NARROW_HEAD else d > WIDEST_BACKWARD and keys < SHORTEST_WIDE
        behind |= d != d_v and bool(options.get("is_causal"))
        behind |= not _fills_waves(query, key)
        if d not in HEADS_WITH_GRADIENTS or behind or not no_window:
            return ()
    return *prefer_wgmma(inputs, options), "cuda.persistent"


def _fills_waves(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether grouped heads have the blocks of two waves, and leave at most a tenth of them idle."""
    heads, heads_kv = concrete(query.shape[-3]), concrete(key.shape[-3])
    if heads == heads_kv:
        return True
    blocks = product_of(key.shape[:-2]) * -(-concrete(key.shape[-2]) // BACKWARD_KEYS)
    waves = -(-blocks // gpu.multiprocessors(query))
    return waves >= 2 and 10 * blocks >= 9 * waves * gpu.multiprocessors(query)


def triton_for_gradients_of_packed(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """Prefers ``triton.flash`` for gradients of packed sequences where the cuda level multiplies by mma.sync.

    Both passes of 16384 rows at head dimension 128 then take 1.21 times as long, with grouped heads and a causal mask
    1.32 times. On Hopper ``cuda.pingpong`` is ahead, 0.59 to 0.68 of the time (H100).
    """
    query, value = inputs[0], inputs[2]
    if not wants_gradient(*inputs):
        return ()
    widest = max(concrete(query.shape[-1]), concrete(value.shape[-1]))
    return () if widest <= WIDEST_BACKWARD and query.is_cuda and is_hopper(query.get_device()) else ("triton.flash",)


def backward_on_hopper(head_dim: int, keys: int, heads_kv: int, sms: int) -> str:
    """Whose backward pass is the fastest on Hopper, for the rungs of attention that have none of their own.

    `heads_kv` are those of all sequences. A block of ``warp_specialized`` has 128 keys of one; where blocks are fewer
    than half of the SMs, ``wgmma`` takes 0.7 to 0.8 of the time with its blocks of 64 (H200).
    """
    if head_dim > WIDEST_BACKWARD:
        return "wgmma"
    padded = NARROW_HEAD if head_dim <= NARROW_HEAD else WIDEST_BACKWARD
    few = 2 * heads_kv * -(-keys // BACKWARD_KEYS) < sms
    return "wgmma" if few or keys * padded <= SHORT_BACKWARD else "warp_specialized"


def packed_backward_on_hopper(head_dim: int, rows: int, sequences: int) -> str:
    """Whose backward pass packed sequences of so many rows have, after a forward pass on Hopper."""
    fits = head_dim <= WIDEST_BACKWARD and sequences * SHORTEST_PACKED <= rows
    return "warp_specialized" if fits else "flash"


RULES = {
    ("attention", "cuda"): prefer_wgmma,
    ("attention", "triton"): triton_without_specialized_warps,
    ("attention", "auto"): automatic,
    ("attention_varlen", "auto"): triton_for_gradients_of_packed,
}
