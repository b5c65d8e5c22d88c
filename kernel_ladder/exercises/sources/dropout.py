"""Solution of the exercise `dropout`."""

import torch
import triton
import triton.language as tl

from kernel_ladder.exercises import not_plain
from kernel_ladder.semantics import philox
from kernel_ladder.table import register

EXERCISE = "dropout"
BLOCK = 1024


@triton.jit
def pick(words, place):
    """Element `place` (0 … 3) of four words."""
    w0, w1, w2, w3 = words
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def random_word(i, seed):
    """Given: the 32 random bits of element i, as kernel_ladder/semantics/philox.py defines them."""
    call = i // 8
    low, high, zero = call.to(tl.uint32), (call >> 32).to(tl.uint32), (call * 0).to(tl.uint32)
    first = pick(tl.philox(seed, low, high, zero, zero), i % 4)
    second = pick(tl.philox(seed, low, high, zero + 1, zero), i % 4)
    upper_half = i % 8 < 4
    return tl.where(upper_half, (first & 0xFFFF0000) | (second >> 16), (first << 16) | (second & 0xFFFF))


@triton.jit(do_not_specialize=["seed", "threshold"])
def dropout_kernel(out_ptr, input_ptr, seed, threshold, scale, numel, BLOCK: tl.constexpr):
    """Grid: one program per BLOCK elements. The mask follows from seed and index: it is never stored."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    x = tl.load(input_ptr + i, mask=mask).to(tl.float32)
    # TODO 1: `keep`, whether each element stays: its random word is at least `threshold`. The word is a uint32; compare
    # as int64. Every element needs a word of its own.
    # gap
    keep = random_word(i, seed).to(tl.int64) >= threshold
    # end
    # TODO 2: `y`, the element times `scale` where it stays. Multiply by 0 elsewhere, so that NaN stays NaN.
    # gap
    y = x * tl.where(keep, scale, 0.0)
    # end
    tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch(input, p, seed):
    output = torch.empty_like(input)
    numel = output.numel()
    arguments = (seed, philox.threshold(p), philox.scale(p), numel, BLOCK)
    dropout_kernel[(triton.cdiv(numel, BLOCK),)](output, input, *arguments)
    return output


def dropout(input, *, p, seed):
    return launch(input, p, seed), (p, seed)


def backward(saved, grad, needs):
    p, seed = saved
    # TODO 3: return a tuple with the input's gradient. It is the same kernel with the same seed.
    # gap
    return (launch(grad.contiguous(), p, seed),)
    # end


def unsupported(input, *, p, seed):
    return not_plain(input, backward=True)


register("dropout", "triton.my_dropout", forward=dropout, backward=backward, unsupported=unsupported)
