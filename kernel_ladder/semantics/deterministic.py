"""``torch.use_deterministic_algorithms``, as rungs that are not deterministic obey it."""

from __future__ import annotations

import torch

REFUSAL = "cuDNN's attention is not deterministic, and torch.use_deterministic_algorithms(True) asks for it"


def refusal() -> str | None:
    """Why a rung that sums in any order does not run now, or None. With ``warn_only`` PyTorch lets such rungs run."""
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return None
    return REFUSAL
