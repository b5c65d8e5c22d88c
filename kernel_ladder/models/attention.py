"""``attn_implementation="kernel_ladder"``: attention of Hugging Face's models through their AttentionInterface."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from kernel_ladder import ops
from kernel_ladder.models import dropping
from kernel_ladder.models.masks import CausalWindow, build_mask
from kernel_ladder.nn.arguments import check_mask
from kernel_ladder.semantics.masks import NO_WINDOW

#: The name under which transformers finds this attention.
NAME = "kernel_ladder"
#: The attribute of a patched attention module that holds its backend.
BACKEND = "_kernel_ladder_backend"


def register_attention() -> str:
    """Let transformers find this package's attention, and return its name, for ``attn_implementation=``.

    Each call's backend is that of the patch, else what :func:`kernel_ladder.use` or the environment says.

    Raises:
        ImportError: transformers is not installed, or too old to have an AttentionInterface.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"register_attention: transformers with AttentionInterface and AttentionMaskInterface is needed ({error}); "
            "run `pip install kernel_ladder[models]`"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, build_mask)
    return NAME


def unsupported(config: Any) -> str | None:
    """Why attention of a model with this configuration cannot be replaced, or None."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"caps scores at {config.attn_logit_softcapping} by tanh, which no rung does"
    if getattr(config, "output_attentions", False):
        return "returns its weights, as config.output_attentions asks"
    return None


def _collects_weights() -> bool:
    """Whether transformers gathers attention weights, also of models that do not pass ``output_attentions`` on."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    asked: dict[str, Any] = (None if collector is None else collector.get()) or {}
    return not asked.keys().isdisjoint(("attentions", "cross_attentions"))


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | CausalWindow | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: ``(B, H, S, D)`` tensors to ``(B, S_q, H, D_v)``, and None for the weights.

    The mask alone says which keys are seen: a :class:`CausalWindow` is a window, and None is causal as in transformers'
    own call of PyTorch's attention. The keyword ``sliding_window`` that some models pass beside a mask is not read.
    ``s_aux`` are attention sinks, ``(H,)``. :mod:`kernel_ladder.models.dropping` does the calls that drop weights.

    ``output_attentions`` warns, as transformers' own call of PyTorch's attention does.
    ``position_bias`` (T5), which broadcasts to ``(B, H, S_q, S_k)``, is added to the scores and has its gradient.

    Raises:
        TypeError: a mask is neither boolean nor floating-point.
        ValueError: an argument that changes scores in another way.
    """
    if more.get("softcap") is not None:
        raise ValueError(f"attn_implementation={NAME!r}: argument `softcap` must be None; use 'eager'")
    if not torch.compiler.is_compiling() and (more.get("output_attentions") or _collects_weights()):
        warnings.warn(
            f"attn_implementation={NAME!r}: `output_attentions=True` returns no attention weights, which are never in "
            "memory; call model.set_attn_implementation('eager') for them",
            stacklevel=2,
        )
    window, sinks = NO_WINDOW, s_aux
    if sinks is not None and sinks.dtype not in (torch.float32, query.dtype):
        sinks = sinks.float()
    if isinstance(attention_mask, CausalWindow):
        if attention_mask.size < query.shape[2]:
            window = (attention_mask.size - 1, 0)
        attention_mask, is_causal = None, True
    if attention_mask is not None:
        check_mask(f"attn_implementation={NAME!r}", "attention_mask", attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = query.shape[2] > 1 and attention_mask is None and causal
    if causal and key.shape[2] > query.shape[2]:  # the first tokens of a static cache, whose other places are empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]].contiguous()  # T5's is a view whose heads are dense
        if attention_mask is None or attention_mask.dtype == torch.bool:
            attention_mask = dropping.both(bias, attention_mask)
        else:
            attention_mask = bias + attention_mask
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.to(query.dtype)
    options: dict[str, Any] = {
        "is_causal": causal, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1], "window_size": window,
        "sinks": sinks, "backend": getattr(module, BACKEND, None),
    }  # fmt: skip
    if dropout:
        options["learned_mask"] = position_bias is not None
        output = dropping.attention(query, key, value, attention_mask, dropout, **options)
    else:
        output = ops.attention(query, key, value, attention_mask, **options)
    return output.transpose(1, 2).contiguous(), None
