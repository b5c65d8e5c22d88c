"""Attention's positional masks: causal masks and sliding windows, expressed as one band of scores."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: ``window_size`` that hides nothing.
NO_WINDOW = (-1, -1)

#: The largest window size passed to an operator, beyond every length. Operators take 64-bit integers, windows any.
LONGEST = 2**31 - 1

#: The value of ``is_causal`` that aligns to the lower right corner; True aligns to the upper left one.
LOWER_RIGHT = "lower_right"


def band(is_causal: bool | str, window_size: Sequence[int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(first, last): query i sees the keys j with ``i + first <= j <= i + last``.

    ``is_causal=True`` aligns the diagonal to the upper left corner of the scores, ``"lower_right"`` to the lower right
    one. A window is always aligned to the lower right. A side that hides nothing is ``-seqlen_q`` or ``seqlen_k``.
    """
    if not is_causal and window_size == NO_WINDOW:  # the common case
        return -seqlen_q, seqlen_k
    corner = seqlen_k - seqlen_q
    left, right = window_size
    first = -seqlen_q if left < 0 else corner - left
    last = seqlen_k if right < 0 else corner + right
    if is_causal:
        last = min(last, corner if is_causal == LOWER_RIGHT else 0)
    # If query 0 sees all keys on the right, every query does. Likewise the last query on the left.
    if last >= seqlen_k - 1:
        last = seqlen_k
    if first <= 1 - seqlen_q:
        first = -seqlen_q
    return min(first, seqlen_k), max(last, -seqlen_q)


def keys_of_window(options: Mapping[str, Any]) -> int | None:
    """The keys that a query far from both ends sees through a window; None where a side of it has no limit."""
    left, right = options.get("window_size") or NO_WINDOW
    right = 0 if options.get("is_causal") else right
    return None if min(left, right) < 0 else left + right + 1


def hides_nothing(first: int, last: int, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether every query sees every key."""
    return first == -seqlen_q and last == seqlen_k


def seen(first: int, last: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """The band as a boolean matrix, True where a query sees a key."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(last).triu(first)


def pairs(first: int, last: int, seqlen_q: int, seqlen_k: int) -> int:
    """The number of scores in the band."""
    rows = torch.arange(seqlen_q)
    return int(((rows + last + 1).clamp(max=seqlen_k) - (rows + first).clamp(min=0)).clamp(min=0).sum())


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is one of PyTorch's causal bias objects.

    Their module imports the compiler, which takes seconds. If it was not imported, no such object exists.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def causal_of(op: str, bias: Any, is_causal: Any, query: Any, key: Any) -> bool | str:
    """The ``is_causal`` that a causal bias object stands for.

    Raises:
        ValueError: `is_causal` is set as well, or the bias is for other lengths than those of `query` and `key`.
    """
    if is_causal is not False:
        raise ValueError(f"{op}: argument `is_causal` must be False where `attn_mask` is a causal bias")
    lengths = bias.seq_len_q, bias.seq_len_kv
    if all(isinstance(x, torch.Tensor) and x.dim() >= 2 for x in (query, key)):
        expected = query.shape[-2], key.shape[-2]
        if lengths != expected:
            raise ValueError(f"{op}: argument `attn_mask` is a causal bias for lengths {lengths}, got {expected}")
    return True if bias.variant.name == "UPPER_LEFT" else LOWER_RIGHT
