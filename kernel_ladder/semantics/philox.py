"""Philox 4×32-10: dropout's mask, bit for bit the same at every level.

Philox is a counter-based generator: a keyed bijection of a 128-bit counter, in ten rounds of two multiplications
(Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11; the constants are those of their
library Random123). It has no state: an element's mask follows from the seed and the element's index. So the backward
pass recomputes the mask instead of loading it.

With ``i`` the row-major index of an element in the tensor (whatever its strides), and ``seed`` from 0 to 2⁶³ − 1::

    j, h    = i div 8, i mod 8
    key     = (seed mod 2³², seed div 2³²)
    words_n = philox((j mod 2³², j div 2³², n, 0), key)      for n of 0 and 1
    half_n  = bits 16 to 31 of words_n[h] if h < 4, else bits 0 to 15 of words_n[h − 4]
    word    = half_0 · 2¹⁶ + half_1                          an integer from 0 to 2³² − 1
    kept    = word >= floor(p · 2³²)                         an element is dropped with probability p
    scale   = 1 / (1 − p), rounded to float32
    output  = input · kept · scale                           a product: a dropped NaN or ±inf gives NaN

The upper half of a word decides, unless it equals the threshold's upper half, which has probability 1 / 65536. So one
call of Philox serves eight elements, and a second call resolves such ties.

One round, with 32-bit words, ``hi`` and ``lo`` the halves of a 64-bit product, and the key updated after each round::

    (c0, c1, c2, c3) -> (hi(M1 · c2) ^ c1 ^ k0, lo(M1 · c2), hi(M0 · c0) ^ c3 ^ k1, lo(M0 · c0))
    (k0, k1) -> (k0 + W0, k1 + W1)
"""

from __future__ import annotations

import math

import torch

from kernel_ladder.tracing import in_graph

ROUNDS = 10
M0 = 0xD2511F53
M1 = 0xCD9E8D57
W0 = 0x9E3779B9  # the golden ratio's fraction, times 2³²
W1 = 0xBB67AE85  # that of √3, times 2³²
WORD = 2**32 - 1


def check(op: str, p: object, seed: object) -> None:
    """Raise unless `p` is a probability below one and `seed` an integer of 63 bits."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"{op}: argument `p` must be a number, got {type(p).__name__}")
    if not 0 <= p < 1:  # NaN too
        raise ValueError(f"{op}: argument `p` must be at least 0 and less than 1, got {p}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        needed = "; every call draws its mask from a seed of its own" if seed is None else ""
        raise TypeError(f"{op}: argument `seed` must be an int, got {type(seed).__name__}{needed}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{op}: argument `seed` must be from 0 to 2^63 - 1, got {seed}")


def threshold(p: float) -> int:
    """The smallest word that keeps an element: ``floor(p · 2³²)``, exactly, for 0 ≤ p < 1."""
    return math.floor(p * 2**32)


def scale(p: float) -> float:
    """``1 / (1 − p)`` rounded to float32's 24 bits by Veltkamp's splitting: arithmetic that torch.compile can trace."""
    quotient = 1 / (1 - p)
    shifted = quotient * (2**29 + 1)
    return shifted - (shifted - quotient)


def signed(word: int) -> int:
    """A word's bits as a signed 32-bit integer, so that a kernel's argument has one type for all values."""
    return word - 2**32 if word > WORD >> 1 else word


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor | int, torch.Tensor | int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words for each counter. All are int64 tensors of one shape; the key's words may be integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # M times a word can overflow int64, which is undefined in the C++ that Inductor writes (GCC then drops a mask).
        # So multiply by M - 2^32 and add the word to the upper half.
        product0, product1 = (M0 - 2**32) * c0, (M1 - 2**32) * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) + c2 ^ c1 ^ k0,
            product1 & WORD,
            (product0 >> 32) + c0 ^ c3 ^ k1,
            product0 & WORD,
        )
        k0, k1 = k0 + W0 & WORD, k1 + W1 & WORD
    return c0, c1, c2, c3


def words(numel: int, seed: torch.Tensor | int, device: torch.device | str) -> torch.Tensor:
    """The words of elements 0 to ``numel - 1``: int64, shape ``(numel,)``. Makes both calls per eight elements."""
    call = torch.arange((numel + 7) // 8, device=device)
    return words_of_calls(call, seed).view(-1)[:numel]


def words_of_calls(call: torch.Tensor, seed: torch.Tensor | int) -> torch.Tensor:
    """The words of eight elements for each call index: int64, shape ``(calls, 8)``."""
    if not isinstance(seed, torch.Tensor) and in_graph():
        seed = seed_tensor(seed, call.device)
    zero, key = torch.zeros_like(call), (seed & WORD, seed >> 32)
    uppers, lowers = (philox((call & WORD, call >> 32, zero + n, zero), key) for n in (0, 1))
    first = [u & 0xFFFF0000 | v >> 16 for u, v in zip(uppers, lowers, strict=True)]
    second = [u << 16 & WORD | v & 0xFFFF for u, v in zip(uppers, lowers, strict=True)]
    return torch.stack(first + second, -1)


def seed_tensor(seed: int, device: torch.device) -> torch.Tensor:
    """A seed as a tensor of one int64, so that one compilation of :func:`words` serves all seeds."""
    return _loaded(seed, device) if in_graph() else torch.full((), seed, device=device)


@torch.library.custom_op("kernel_ladder::loaded_seed", mutates_args=())
def _loaded(seed: int, device: torch.device) -> torch.Tensor:
    """An integer as a tensor that is opaque to the compiler.

    Inductor stores no result of rounds that load nothing from memory. It would repeat the rounds at each use.
    """
    return torch.full((), seed, dtype=torch.int64, device=device)


@_loaded.register_fake
def _(seed: int, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)
