"""Dropout's mask in Triton, as :mod:`kernel_ladder.philox` specifies it.

``tl.philox`` gives the same words. It takes the two halves of a product by two multiplications, though, and those are
what drawing a mask costs; here one multiplication gives both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_ladder import philox

ROUNDS = tl.constexpr(philox.ROUNDS)
M0, M1 = tl.constexpr(philox.M0), tl.constexpr(philox.M1)
W0, W1 = tl.constexpr(philox.W0), tl.constexpr(philox.W1)

#: A mask's arguments, which change from call to call: no kernel may specialise on them, and their types are always
#: three 32-bit integers and a float32.
ARGUMENTS = ("key_low", "key_high", "threshold", "scale")


def arguments(p: float, seed: int) -> tuple[int, int, int, float]:
    """What a kernel takes for dropout with probability `p` and this seed, by the names in `ARGUMENTS`."""
    low, high = philox.signed(seed & philox.WORD), seed >> 32
    return low, high, philox.signed(philox.threshold(p)), philox.scale(p)


@triton.jit
def _word(argument):
    # torch.compile passes integers as int64 where they change, and floats as float64.
    return tl.cast(argument, tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def factors_of_words(words, threshold, scale):
    return tl.where(words >= _word(threshold), tl.cast(scale, tl.float32), 0.0)


@triton.jit
def words_of(lower, upper, key_low, key_high):
    """The four words of the counters (lower, upper, 0, 0), all uint32, as four blocks.

    Where `upper` is one for all, as where a program's counters share it, half of the second round is computed once.
    """
    k0, k1 = _word(key_low), _word(key_high)
    c0, c1, c2, c3 = lower, upper, k0 * 0, k0 * 0
    for _ in tl.static_range(ROUNDS):
        product0, product1 = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1
        c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, product1.to(tl.uint32)
        c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1, product0.to(tl.uint32)
        k0, k1 = k0 + W0, k1 + W1
    return c0, c1, c2, c3


@triton.jit
def factors_in_order(start, key_low, key_high, threshold, scale, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """What dropout multiplies BLOCK elements in a row by, of which the first is number `start`, a multiple of BLOCK.

    `VECTOR`, 4 or 8, is how many elements a thread holds side by side: its words are drawn where they are used, by one
    call of Philox for four.
    """
    first_call = start // 4
    # A block's calls are a power of two, so that none carries into the upper word.
    lower = (first_call & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, BLOCK // VECTOR).to(tl.uint32) * (VECTOR // 4)
    upper = (first_call >> 32).to(tl.uint32)
    w0, w1, w2, w3 = words_of(lower, upper, key_low, key_high)
    if VECTOR == 8:
        v0, v1, v2, v3 = words_of(lower + 1, upper, key_low, key_high)
        w0, w1, w2, w3 = tl.join(w0, v0), tl.join(w1, v1), tl.join(w2, v2), tl.join(w3, v3)
    # Of each call the words in order: the last dimension is the lowest bit of their number.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK])
    return factors_of_words(words, threshold, scale)


@triton.jit
def factors_at(index, key_low, key_high, threshold, scale):
    """What dropout multiplies the elements at these int64 indices by: a call of Philox for each."""
    call = index // 4
    w0, w1, w2, w3 = words_of(call.to(tl.uint32), (call >> 32).to(tl.uint32), key_low, key_high)
    place = index % 4
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return factors_of_words(word, threshold, scale)


@triton.jit
def factors_of_rows(first_call, key_low, key_high, threshold, scale, BLOCK: tl.constexpr):
    """What dropout multiplies BLOCK elements of each row by, of which the first are those of these calls of Philox.

    `first_call` is a block of int64; the result has a row for each. One call for four elements.
    """
    call = first_call[:, None] + tl.arange(0, BLOCK // 4)[None, :]
    w0, w1, w2, w3 = words_of(call.to(tl.uint32), (call >> 32).to(tl.uint32), key_low, key_high)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([first_call.shape[0], BLOCK])
    return factors_of_words(words, threshold, scale)
