"""Attention to keys in pages in CUDA C++: ``csrc/attention/paged.cu``."""

from __future__ import annotations

import torch

from cuda_impl import climb
from cuda_impl.attention import flash_unsupported, split_too_large
from kernel_ladder.semantics.masks import LONGEST, NO_WINDOW
from kernel_ladder.semantics.no_gradient import refuse, wanted
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.spec import Output
from kernel_ladder.table import register


def _unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    query, key_cache, value_cache, *_ = inputs
    return wanted(*inputs) or flash_unsupported(query, key_cache, value_cache) or split_too_large(query, value_cache)


def _register(name: str) -> None:
    run = getattr(torch.ops.kernel_ladder.attention_paged, name)

    def forward(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *,
        is_causal: bool | str,
        scale: float | None,
        enable_gqa: bool,
        window_size: tuple[int, int] = NO_WINDOW,
        return_lse: bool = False,
        batch_invariant: bool = False,
    ) -> tuple[Output, tuple]:
        left, right = (min(side, LONGEST) for side in window_size)
        right = 0 if is_causal else right
        options = left, right, scale_of(query.shape[-1], scale), enable_gqa, batch_invariant
        output, lse = run(query, key_cache, value_cache, block_table, cache_seqlens, *options)
        return ((output, lse) if return_lse else output), ()

    @torch.library.register_fake(f"kernel_ladder::attention_paged.{name}")
    def _(query, key_cache, value_cache, block_table, cache_seqlens, left, right, scale, enable_gqa, batch_invariant):
        rows = query.shape[:-1]
        output = query.new_empty((*rows, value_cache.shape[-1]))
        return output, query.new_empty(rows, dtype=torch.float32)

    backward = refuse("attention_paged", f"cuda.{name}")
    register("attention_paged", f"cuda.{name}", forward=forward, backward=backward, unsupported=_unsupported)


for _name in climb("attention_paged"):
    _register(_name)
