"""A key-value cache whose sequences have one length."""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.nn.arguments import as_size, check_dtype, check_shape


def without_graph(memory: torch.Tensor) -> torch.Tensor:
    """A cache's memory without the autograd graph of what was written to it; itself where there is none."""
    return memory.detach() if memory.requires_grad else memory


class KVCache:
    """Keys and values of the tokens before, in memory allocated once: ``(B, H_kv, max_length, D)`` each.

    Args:
        batch_size, num_kv_heads, max_length, head_dim: sizes.
        device, dtype: of the memory.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"num_kv_heads": num_kv_heads, "max_length": max_length, "head_dim": head_dim}
        batch_size = as_size("KVCache", "batch_size", batch_size, 0)
        shape = [batch_size, *(as_size("KVCache", name, size) for name, size in sizes.items())]
        check_dtype("KVCache", dtype)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def update(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, ``(B, H_kv, S, D)``, and return all so far, as views.

        Raises:
            TypeError: an argument is no tensor. ValueError: shapes do not fit, or tokens are too many. Then nothing is
                changed.
        """
        batch, heads, _, head_dim = self.keys.shape
        dims: dict[str, int | None] = {"B": batch, "H_kv": heads, "S": None, "D": head_dim}
        check_shape("KVCache", "key", key, dims)
        check_shape("KVCache", "value", value, {**dims, "S": key.shape[2]})
        end = self.length + key.shape[-2]
        if end > self.keys.shape[-2]:
            raise ValueError(f"KVCache: {end} tokens do not fit in a cache of max_length {self.keys.shape[-2]}")
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reset(self) -> None:
        """Forget all tokens, and the autograd graph of them; the memory stays."""
        self.length = 0
        self.keys, self.values = without_graph(self.keys), without_graph(self.values)
