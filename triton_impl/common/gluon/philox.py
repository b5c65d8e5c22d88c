"""Dropout's random words in Gluon, one vector at a time: the Philox of :mod:`triton_impl.common.philox`, in PTX.

There, a block of threads checks at once whether any of its words is a tie, which costs a reduction and a barrier. A
kernel that works through a row vector by vector would pay that for each vector. So here each thread checks its own
words, by a branch that Gluon does not have.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernel_ladder.semantics import philox
from triton_impl.common.philox import eight_in_order, factors_of_deciding

_ROUNDS = philox.ROUNDS
_M0 = philox.M0
_M1 = philox.M1
_W0 = philox.W0
_W1 = philox.W1


@gluon.constexpr_function
def _rounds(part):
    """PTX that makes the words c0 to c3 of the counter (lower, upper, part, 0)."""
    text = [
        f"mov.b32 c0, lower; mov.b32 c1, upper; mov.b32 c2, {part}; mov.b32 c3, 0; mov.b32 k0, low; mov.b32 k1, high;"
    ]
    for _ in range(_ROUNDS):
        text.append(
            f"mul.wide.u32 product0, c0, {_M0}; mul.wide.u32 product1, c2, {_M1};"
            "mov.b64 {l0, h0}, product0; mov.b64 {l1, h1}, product1;"
            "xor.b32 c0, h1, c1; xor.b32 c0, c0, k0; xor.b32 c2, h0, c3; xor.b32 c2, c2, k1;"
            f"mov.b32 c1, l1; mov.b32 c3, l0; add.u32 k0, k0, {_W0}; add.u32 k1, k1, {_W1};"
        )
    return "".join(text)


@gluon.constexpr_function
def _drawing():
    """PTX that makes four words, each half of which decides for an element (see `deciding_words_of` there)."""
    # A half is the threshold's upper half where their difference is zero. Differences are taken for floating-point
    # numbers, two an instruction: zero alone, of either sign, has no magnitude, and a minimum passes over NaN.
    tie = "xor.b32 d, c{0}, both; abs.f16x2 d, d;"
    ties = tie.format(0) + "mov.b32 nearest, d;"
    ties += "".join(tie.format(i) + "min.f16x2 nearest, nearest, d;" for i in range(1, 4))
    stabilize = (
        "and.b32 d, w{0}, 0xffff0000; shr.u32 e, c{0}, 16; or.b32 d, d, e; setp.ge.u32 p, d, least;"
        "selp.b32 d, 0xffff0000, 0, p;"
        "shl.b32 e, w{0}, 16; and.b32 c{0}, c{0}, 0xffff; or.b32 e, e, c{0}; setp.ge.u32 p, e, least;"
        "selp.b32 e, 0xffff, 0, p; or.b32 w{0}, d, e;"
    )
    registers = "c<4>, w<4>, k<2>, l<2>, h<2>, d, e, nearest, both, lower, upper, low, high, least"
    return (
        f"{{ .reg .b32 {registers}; .reg .b64 product<2>; .reg .pred p, q;"
        "mov.b32 lower, $4; mov.b32 upper, $5; mov.b32 low, $6; mov.b32 high, $7; mov.b32 least, $8;"
        + _rounds(0)
        + "shr.u32 both, least, 16; mul.lo.u32 both, both, 0x10001;"
        + ties
        + "".join(f"mov.b32 w{i}, c{i};" for i in range(4))
        + "mov.b32 d, 0; setp.neu.f16x2 p|q, nearest, d; and.pred p, p, q; @p bra settled;"
        + _rounds(1)
        + "".join(stabilize.format(i) for i in range(4))
        + "settled:"
        + "".join(f"mov.b32 ${i}, w{i};" for i in range(4))
        + "}"
    )


@gluon.constexpr_function
def _four_words():
    return (gl.uint32,) * 4


@gluon.jit
def factors(call, key_low, key_high, threshold, scale, LAYOUT: gl.constexpr):
    """What dropout multiplies the eight elements of each of these calls of Philox by: (blocks, elements) in LAYOUT.

    `call` (blocks, calls) is of int64; LAYOUT has the elements of a call side by side in a thread.
    """
    text: gl.constexpr = _drawing()
    types: gl.constexpr = _four_words()
    words = gl.inline_asm_elementwise(
        text, "=r,=r,=r,=r,r,r,r,r,r",
        [call.to(gl.int32), (call >> 32).to(gl.int32), key_low, key_high, threshold],
        dtype=types, is_pure=True, pack=1,
    )  # fmt: skip
    w0, w1, w2, w3 = words
    halves = eight_in_order(w0, w1, w2, w3).reshape([call.shape[0], 8 * call.shape[1]])
    return gl.convert_layout(factors_of_deciding(halves, threshold, scale), LAYOUT, assert_trivial=True)
