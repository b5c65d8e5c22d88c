"""Attention of models that drops weights in training: by a fused rung of this package, else by PyTorch's function.

Only `FUSED` levels have rungs that drop weights without holding all of them. The formulas of other levels do hold them,
with a random word each, where PyTorch's function has fused kernels. So a formula drops weights only if it is asked for
by its own name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from kernel_ladder import autocast, gpu, ops, selection, table
from kernel_ladder.errors import UnsupportedError
from kernel_ladder.nn.dropout import draw_seed
from kernel_ladder.ops.calls import is_sharded
from kernel_ladder.semantics import weight_dropout
from kernel_ladder.semantics.masks import NO_WINDOW, band, seen

#: Levels whose rungs hold no matrix of weights.
FUSED = ("triton", "cuda")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int] = NO_WINDOW,
    sinks: torch.Tensor | None = None,
    learned_mask: bool = False,
    backend: str | None,
) -> torch.Tensor:
    """Attention as :func:`kernel_ladder.attention`, with ``dropout_p`` above 0 and a seed of its own in every call.

    A rung gets a seed from PyTorch's CPU generator, so ``torch.manual_seed`` and activation checkpoints repeat it.
    PyTorch's function draws from its own generator. It does the calls that no such rung takes, those of DTensors, and
    those that drop every weight. It also does those that torch.compile traces or a CUDA graph captures: a graph would
    hold one seed for all of its runs.
    `learned_mask`: the mask wants a gradient in training, also where none is recorded now.
    """
    options: dict[str, Any] = {
        "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "window_size": window_size,
    }  # fmt: skip
    dropping = {**options, "dropout_p": dropout_p, "seed": 0, "return_lse": sinks is not None}
    rung = _rung_of(query, key, value, mask, dropping, learned_mask, backend)
    if rung is None:
        return _pytorchs(query, key, value, mask, dropout_p, sinks=sinks, **options)
    options |= {"sinks": sinks, "seed": draw_seed(), "backend": rung}
    return ops.attention(query, key, value, mask, dropout_p, **options)


def rungs(backend: str) -> list[str]:
    """The rungs by which attention may drop weights under a backend's name."""
    named = table.asked_for("attention", backend)
    if named == "auto" and not gpu.count():
        return []  # on a CPU it is PyTorch's function
    levels = FUSED if named == "auto" else (named.partition(".")[0],)
    climbs = [climb for level in levels for reason, climb in [table.at_level("attention", level)] if reason is None]
    found = [name for climb in climbs for name, rung in climb.items() if _drops(rung)]
    if "." in named:
        return [name for name in found if name == named]
    return [name for name in found if name.partition(".")[0] in FUSED]


def by(p: float, backend: str) -> str:
    """What a report says drops weights with probability `p`."""
    drops = f"drops weights with probability {p}"
    found = rungs(backend)
    if not found:
        return f"PyTorch's, which {drops}"
    return f"it {drops} by {' or '.join(found)}; PyTorch's does where none takes the call, and in graphs"


def _drops(rung: table.Variant) -> bool:
    """Whether a rung drops weights. Those that do not refuse any call for that reason first."""
    tiny = torch.zeros(1, 1, 1, 8)
    options = {"is_causal": False, "scale": None, "enable_gqa": False, "dropout_p": 0.5, "seed": 0}
    return rung.unsupported(tiny, tiny, tiny, **options) != weight_dropout.REFUSAL


def _rung_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    learned_mask: bool,
    backend: str | None,
) -> str | None:
    """The rung that drops this call's weights, or None for PyTorch's function.

    It does not depend on the grad mode: a checkpoint runs a block without gradients first, then with them, and
    PyTorch's function draws another mask than a rung. So operands count as if they wanted a gradient.
    """
    inputs = (query, key, value) if mask is None else (query, key, value, mask)
    if is_compiling() or gpu.capturing() or options["dropout_p"] >= 1 or any(map(is_sharded, inputs)):
        return None
    if autocast.applies_to(inputs):
        inputs = autocast.converted("attention", inputs)
    with torch.enable_grad():
        learned = len(inputs) if learned_mask else 3
        wanting = *(x.detach().requires_grad_() for x in inputs[:learned]), *inputs[learned:]
        try:
            rung = selection.resolve("attention", backend, wanting, options)
        except UnsupportedError:
            return None
    named = table.asked_for("attention", backend)
    return rung.name if rung.level in FUSED or rung.name == named else None


def _pytorchs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    window_size: tuple[int, int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The call by ``scaled_dot_product_attention``, which has no windows, no sinks, and takes a mask or ``is_causal``.

    A sink is the score of one more key, whose value is zero. Windows are those of as many queries as keys.
    """
    if is_causal and (mask is not None or sinks is not None or window_size != NO_WINDOW):
        lengths = query.shape[-2], key.shape[-2]
        mask, is_causal = both(mask, seen(*band(True, window_size, *lengths), *lengths, query.device)), False
    if sinks is not None:
        rows = (query.shape[0], query.shape[1], query.shape[2])
        scores = query.new_zeros(()) if mask is None else mask
        if scores.dtype == torch.bool:
            scores = query.new_zeros(()).masked_fill(~scores, -torch.inf)
        column = sinks.to(query.dtype)[:, None, None].expand(*rows, 1)
        mask = torch.cat((scores.expand(*rows, key.shape[-2]), column), dim=-1)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    if enable_gqa and mask is not None:  # PyTorch's fused kernels take grouped heads or a mask, not both
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        enable_gqa = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def both(mask: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
    """A mask, boolean, added to scores or None, that also hides what a boolean one hides."""
    if mask is None or visible is None:
        return visible if mask is None else mask
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
