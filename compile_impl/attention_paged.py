"""Paged attention compiled: Inductor fuses the gather of pages with mask and softmax between two products.

PyTorch has no public function of it, so a user would write the formula.
"""

from typing import Any

from compile_impl import ROUNDED, register
from torch_ref.attention_paged import naive


def unsupported(*inputs: Any, **options: Any) -> str | None:
    if options.get("batch_invariant"):
        return "its products are chosen by the size of the batch; `batch_invariant` needs torch, triton or cuda"
    return None


register("attention_paged", naive, unsupported=unsupported, settings={"options": ROUNDED})
