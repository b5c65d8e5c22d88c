"""Dropout's mask in Triton, as :mod:`kernel_ladder.semantics.philox` specifies it.

``tl.philox`` gives the same words. It takes the two halves of a product by two multiplications, though, and those are
what drawing a mask costs; here one multiplication gives both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_ladder.semantics import philox

ROUNDS = tl.constexpr(philox.ROUNDS)
M0 = tl.constexpr(philox.M0)
M1 = tl.constexpr(philox.M1)
W0 = tl.constexpr(philox.W0)
W1 = tl.constexpr(philox.W1)

#: A mask's arguments, which change from call to call. No kernel may specialise on them, and their types are always
#: three 32-bit integers and a float32.
ARGUMENTS = ("key_low", "key_high", "threshold", "scale")


def arguments(p: float, seed: int) -> tuple[int, int, int, float]:
    """What a kernel takes for dropout with probability `p` and this seed, by the names in `ARGUMENTS`."""
    low, high = philox.signed(seed & philox.WORD), seed >> 32
    return low, high, philox.signed(philox.threshold(p)), philox.scale(p)


@triton.jit
def _word(argument):
    return tl.cast(argument, tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def words_of(lower, upper, part, key_low, key_high):
    """The four words of the counters (lower, upper, part, 0), all uint32, as four blocks.

    Where `upper` is one for all, as where a program's counters share it, half of the second round is computed once.
    """
    k0, k1 = _word(key_low), _word(key_high)
    c0, c1, c2, c3 = lower, upper, k0 * 0 + part, k0 * 0
    for _ in tl.static_range(ROUNDS):
        product0, product1 = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1
        c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, product1.to(tl.uint32)
        c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1, product0.to(tl.uint32)
        k0, k1 = k0 + W0, k1 + W1
    return c0, c1, c2, c3


@triton.jit
def _ties(word, threshold):
    # A bit for each half that is the threshold's upper half, or follows one that is.
    difference = word ^ ((_word(threshold) >> 16) * 0x10001)
    return (difference - 0x10001) & (difference ^ 0xFFFFFFFF) & 0x80008000


@triton.jit
def _settled(word, more, threshold):
    # Upper halves in `word`, lower halves in `more`: all ones for an element that is kept, else zeros.
    least = _word(threshold)
    first = (word & 0xFFFF0000) | (more >> 16)
    second = (word << 16) | (more & 0xFFFF)
    return tl.where(first >= least, 0xFFFF0000, 0).to(tl.uint32) | tl.where(second >= least, 0xFFFF, 0).to(tl.uint32)


@triton.jit
def deciding_words_of(lower, upper, key_low, key_high, threshold):
    """As `words_of`, each half of which decides for an element: its upper half does, or ties are settled.

    The second call is made where there is a tie in a program's block.
    """
    w0, w1, w2, w3 = words_of(lower, upper, 0, key_low, key_high)
    ties = _ties(w0, threshold) | _ties(w1, threshold) | _ties(w2, threshold) | _ties(w3, threshold)
    one = tl.max((ties != 0).to(tl.int32))  # or zero
    if one != 0:
        # Of numbers that the compiler does not know to be the same: it would keep parts of the first call for this.
        v0, v1, v2, v3 = words_of(lower + (one - 1).to(tl.uint32), upper, 1, key_low, key_high)
        w0, w1 = _settled(w0, v0, threshold), _settled(w1, v1, threshold)
        w2, w3 = _settled(w2, v2, threshold), _settled(w3, v3, threshold)
    return w0, w1, w2, w3


@triton.jit
def factors_of_deciding(words, threshold, scale):
    # Not below 2^16, so that a half of zeros is below it.
    floor = tl.maximum(_word(threshold) & 0xFFFF0000, 0x10000)
    return tl.where(words >= floor, tl.cast(scale, tl.float32), 0.0)


@triton.jit
def _in_order(w0, w1, w2, w3):
    # Along two new dimensions, of which the last is the lowest bit of their number.
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def eight_in_order(w0, w1, w2, w3):
    # Both halves of each, in the upper half of a word, along three new dimensions: upper halves are the first four.
    return _in_order(tl.join(w0, w0 << 16), tl.join(w1, w1 << 16), tl.join(w2, w2 << 16), tl.join(w3, w3 << 16))


@triton.jit
def factors_in_order(start, key_low, key_high, threshold, scale, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """What dropout multiplies BLOCK elements in a row by, of which the first is number `start`, a multiple of BLOCK.

    `VECTOR`, 4 or 8, is how many elements a thread holds side by side. Its words are drawn where they are used: one
    call of Philox serves eight elements, or four.
    """
    first_call = start // 8
    vector = tl.arange(0, BLOCK // VECTOR).to(tl.uint32)
    # A block's calls are a power of two, so that none carries into the upper word.
    lower = (first_call & 0xFFFFFFFF).to(tl.uint32) + vector // (8 // VECTOR)
    upper = (first_call >> 32).to(tl.uint32)
    w0, w1, w2, w3 = deciding_words_of(lower, upper, key_low, key_high, threshold)
    if VECTOR == 8:
        words = eight_in_order(w0, w1, w2, w3)
    else:
        shift = (vector % 2) * 16
        words = _in_order(w0 << shift, w1 << shift, w2 << shift, w3 << shift)
    return factors_of_deciding(words.reshape([BLOCK]), threshold, scale)


@triton.jit
def _words_from(index, part, key_low, key_high):
    # Words that begin with the half that each element has in its call.
    call = index // 8
    w0, w1, w2, w3 = words_of(call.to(tl.uint32), (call >> 32).to(tl.uint32), part, key_low, key_high)
    place = index % 4
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return tl.where(index % 8 < 4, word, word << 16)


@triton.jit
def factors_at(index, key_low, key_high, threshold, scale):
    """What dropout multiplies the elements at these int64 indices by: a call of Philox for each."""
    least = _word(threshold)
    word = _words_from(index, 0, key_low, key_high)
    one = tl.max(((word ^ least) < 0x10000).to(tl.int32))  # or zero
    if one != 0:
        # Of numbers that the compiler does not know to be the same: it would keep parts of the first call for this.
        word = (word & 0xFFFF0000) | (_words_from(index + (one - 1), 1, key_low, key_high) >> 16)
    return tl.where(word >= least, tl.cast(scale, tl.float32), 0.0)


@triton.jit
def factors_of_rows(first_call, key_low, key_high, threshold, scale, BLOCK: tl.constexpr):
    """What dropout multiplies BLOCK elements of each row by, of which the first are those of these calls of Philox.

    `first_call` is a block of int64; the result has a row for each. One call for eight elements.
    """
    call = first_call[:, None] + tl.arange(0, BLOCK // 8)[None, :]
    lower, upper = call.to(tl.uint32), (call >> 32).to(tl.uint32)
    w0, w1, w2, w3 = deciding_words_of(lower, upper, key_low, key_high, threshold)
    words = eight_in_order(w0, w1, w2, w3).reshape([first_call.shape[0], BLOCK])
    return factors_of_deciding(words, threshold, scale)
