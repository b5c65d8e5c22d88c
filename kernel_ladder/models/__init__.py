"""Run this package's kernels in models that exist: Hugging Face's, and those made of ``torch.nn``.

>>> report = kernel_ladder.models.patch(model, backend="auto")
>>> kernel_ladder.models.unpatch(model)

Parameters and their names stay, so checkpoints of a patched model load into the plain one. Imported on demand.
"""

from kernel_ladder.models.attention import NAME as ATTENTION
from kernel_ladder.models.attention import register_attention
from kernel_ladder.models.flash import register_flash_attention
from kernel_ladder.models.patching import patch, unpatch
from kernel_ladder.models.report import Report

__all__ = ["ATTENTION", "Report", "patch", "register_attention", "register_flash_attention", "unpatch"]
