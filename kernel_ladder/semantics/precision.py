"""How precisely PyTorch lets float32 matrices be multiplied."""

from __future__ import annotations

import torch

_SWITCHES = torch.backends.cuda.matmul


def tf32_allowed() -> bool:
    """Whether PyTorch's switches permit tf32 in float32 products: ``allow_tf32`` or the newer ``fp32_precision``.

    Reading ``allow_tf32`` raises once the newer switch has been set; ``fp32_precision`` follows both.
    """
    # The attribute, without first looking for it where it is not: this is asked on every call in float32.
    return _SWITCHES.__getattr__("fp32_precision") == "tf32"


# What torch.compiler.assume_constant_result sets (calling that would import the compiler): Dynamo cannot trace the
# switches, reads them once, and guards on them by itself.
tf32_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]
