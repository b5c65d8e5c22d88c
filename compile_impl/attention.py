"""Attention compiled.

formula          Product, softmax, product: Inductor fuses scale, mask and softmax between two matrix products. Where
                 its pattern matcher recognises the formula, it calls PyTorch's fused kernel instead.
default          `scaled_dot_product_attention`: one call of a fused kernel, which the compiler leaves alone
reduce_overhead  `default` launched as a CUDA graph
max_autotune     `default`, tuned: the copies around the call alone are
"""

from typing import Any

import torch

from compile_impl import ROUNDED, Forward, register
from kernel_ladder.semantics import philox
from kernel_ladder.spec import Output
from torch_ref.attention import naive
from torch_ref.attention_builtin import builtin, lower_right_faults
from torch_ref.attention_builtin import unsupported as builtin_unsupported


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    **options: Any,
) -> Output:
    return naive(query, key, value, attn_mask, seed=seed, **options)


def _with_seed(run: Forward) -> Forward:
    """Pass the seed of dropped weights as a tensor: an integer would be a constant, and each seed would recompile."""

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Output, tuple]:
        if "seed" not in options:
            return run(*inputs, **options)
        query, key, value, attn_mask = (*inputs, None)[:4]
        assert query is not None
        seed = philox.seed_tensor(options.pop("seed"), query.device)
        return run(query, key, value, attn_mask, seed, **options)

    return forward


def unsupported(*inputs: torch.Tensor, **options: Any) -> str | None:
    return builtin_unsupported(*inputs, **options) or lower_right_faults(*inputs, **options)


register(
    "attention",
    builtin,
    unsupported=unsupported,
    formula=_formula,
    calling=_with_seed,
    formula_settings={"options": ROUNDED},
    formula_drops_weights=True,
)
