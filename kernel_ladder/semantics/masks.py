"""Which keys a query of attention sees by its place alone: causal masks and sliding windows, as one band of scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

#: ``window_size`` that hides nothing.
NO_WINDOW = (-1, -1)

#: The longest reach to hand over to an operator, past every length: it takes integers of 64 bits, and a window any.
LONGEST = 2**31 - 1

#: What ``is_causal`` can say beside False and True, which is the upper left.
LOWER_RIGHT = "lower_right"


def band(is_causal: bool | str, window_size: Sequence[int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(first, last): query i sees the keys j with ``i + first <= j <= i + last``.

    ``is_causal=True`` aligns the diagonal to the upper left corner of the scores, ``"lower_right"`` to the lower right,
    as a window always is. A side that hides nothing is ``-seqlen_q`` or ``seqlen_k``, whatever it was made of.
    """
    if not is_causal and window_size == NO_WINDOW:  # as it mostly is
        return -seqlen_q, seqlen_k
    corner = seqlen_k - seqlen_q
    left, right = window_size
    first = -seqlen_q if left < 0 else corner - left
    last = seqlen_k if right < 0 else corner + right
    if is_causal:
        last = min(last, corner if is_causal == LOWER_RIGHT else 0)
    # Query 0 misses no key on the right, the last query none on the left: so does no other.
    if last >= seqlen_k - 1:
        last = seqlen_k
    if first <= 1 - seqlen_q:
        first = -seqlen_q
    return min(first, seqlen_k), max(last, -seqlen_q)


def hides_nothing(first: int, last: int, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether every query sees every key."""
    return first == -seqlen_q and last == seqlen_k


def seen(first: int, last: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """The band as a boolean matrix, True where a query sees a key."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(last).triu(first)


def pairs(first: int, last: int, seqlen_q: int, seqlen_k: int) -> int:
    """How many scores lie in the band."""
    rows = torch.arange(seqlen_q)
    return int(((rows + last + 1).clamp(max=seqlen_k) - (rows + first).clamp(min=0)).clamp(min=0).sum())


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is one of PyTorch's causal bias objects.

    Their module imports the compiler, which takes seconds. Where it has not been imported there is no such object.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def causal_of(op: str, bias: Any, is_causal: Any, query: Any, key: Any) -> bool | str:
    """What a causal bias object says, as ``is_causal``.

    Raises:
        ValueError: beside another causal mask, or made for other lengths than those of `query` and `key`.
    """
    if is_causal is not False:
        raise ValueError(f"{op}: argument `is_causal` must be False where `attn_mask` is a causal bias")
    lengths = bias.seq_len_q, bias.seq_len_kv
    if all(isinstance(x, torch.Tensor) and x.dim() >= 2 for x in (query, key)):
        expected = query.shape[-2], key.shape[-2]
        if lengths != expected:
            raise ValueError(f"{op}: argument `attn_mask` is a causal bias for lengths {lengths}, got {expected}")
    return True if bias.variant.name == "UPPER_LEFT" else LOWER_RIGHT
