"""The precision in which PyTorch's switches let float32 matrices be multiplied."""

from __future__ import annotations

import torch

_SWITCHES = torch.backends.cuda.matmul


def tf32_allowed() -> bool:
    """Whether PyTorch's switches permit tf32 in float32 products: ``allow_tf32`` or the newer ``fp32_precision``.

    Reading ``allow_tf32`` raises once the newer switch has been set; ``fp32_precision`` follows both.
    """
    # Call __getattr__ directly: every float32 call reads this, and a normal lookup fails first.
    return _SWITCHES.__getattr__("fp32_precision") == "tf32"


# The attribute that torch.compiler.assume_constant_result sets; calling that function would import the compiler.
# Dynamo cannot trace the switches, so it reads them once. It guards on them by itself.
tf32_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]
