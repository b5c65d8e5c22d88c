"""What the scores of attention are multiplied by."""

from __future__ import annotations

#: The smallest normal float32. A smaller scale may be zero to a kernel, which would make NaN of a score of −inf.
SMALLEST_SCALE = 2.0**-126


def scale_of(head_dim: int, scale: float | None) -> float:
    """The scale that was given, as kernels can hold it, or the usual one of a head dimension."""
    return head_dim**-0.5 if scale is None else max(float(scale), SMALLEST_SCALE)
