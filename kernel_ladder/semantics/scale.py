"""The scale of attention's scores."""

from __future__ import annotations

#: The smallest normal float32. A kernel may flush a smaller scale to zero, and 0 · −inf is NaN.
SMALLEST_SCALE = 2.0**-126


def scale_of(head_dim: int, scale: float | None) -> float:
    """The given scale, at least SMALLEST_SCALE, or for None the default, ``1/√head_dim``."""
    return head_dim**-0.5 if scale is None else max(float(scale), SMALLEST_SCALE)
