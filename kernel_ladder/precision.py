"""How precisely PyTorch lets float32 matrices be multiplied."""

from __future__ import annotations

import torch


def tf32_allowed() -> bool:
    """Whether PyTorch's switches permit tf32 in float32 products: ``allow_tf32`` or the newer ``fp32_precision``.

    Reading ``allow_tf32`` raises once the newer switch has been set; ``fp32_precision`` follows both.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
