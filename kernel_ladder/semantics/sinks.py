"""Attention sinks: one logit a head that joins the softmax of each of its rows, and has no value.

With L the log-sum-exp of a row's scores and s the sink of its head::

    share  = exp(L) / (exp(L) + exp(s)) = sigmoid(L - s)
    output = share * (output without a sink)
    lse    = log(exp(L) + exp(s))

So every rung that returns the log-sum-exp and has its gradient takes sinks, and autograd gives theirs. Xiao et al.,
arXiv:2309.17453, keep tokens as sinks; learned logits in their place are those of OpenAI's gpt-oss, arXiv:2508.10925.
"""

from __future__ import annotations

import torch

from kernel_ladder.spec import Output, dtype_name, dtype_names


def check(op: str, query: object, heads: int, sinks: object) -> None:
    """Raise unless sinks are one number a head, in float32 or query's dtype, on query's device."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"{op}: argument `sinks` must be a torch.Tensor or None, got {type(sinks).__name__}")
    assert isinstance(query, torch.Tensor)
    if sinks.dtype not in (torch.float32, query.dtype):
        accepted = dtype_names(list(dict.fromkeys((torch.float32, query.dtype))))
        raise TypeError(f"{op}: argument `sinks` has dtype {dtype_name(sinks.dtype)}; accepted are {accepted}")
    if sinks.device != query.device:
        raise ValueError(
            f"{op}: arguments `query` and `sinks` must be on the same device, got {query.device} and {sinks.device}"
        )
    if sinks.shape != (heads,):
        raise ValueError(
            f"{op}: argument `sinks` must have one logit for each of the heads, shape ({heads},), "
            f"got {tuple(sinks.shape)}"
        )


def heads_of(query: object, key: object, value: object, grouped: bool, packed: bool) -> int | None:
    """The number of query heads of a call, None where its operands are wrong, which its own check tells."""
    operands = (query, key, value)
    if not all(isinstance(x, torch.Tensor) and x.dim() >= 2 for x in operands):
        return None
    counts = [x.shape[-2 if packed else -3] if x.dim() > 2 else 1 for x in operands]  # type: ignore[attr-defined]
    return counts[0] if grouped or packed else max(counts)


def with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, packed: bool, return_lse: bool) -> Output:
    """The results of attention with sinks from those without.

    Args:
        output: ``(..., H, S_q, D_v)`` or ``(S_q, D_v)``; where `packed`, ``(T_q, H, D_v)``.
        lse: ``(..., H, S_q)`` or ``(S_q,)``; where `packed`, ``(H, T_q)``.
        sinks: ``(H,)``.
    """
    logits = sinks.to(lse.dtype)
    if lse.dim() > 1:
        logits = logits[:, None]
    # The share of a row that sees no key is 0, also where its sink is −∞.
    share = torch.sigmoid(lse.clamp(min=torch.finfo(lse.dtype).min) - logits)
    share = share.transpose(0, 1) if packed else share
    output = (output * share[..., None]).to(output.dtype)
    return (output, torch.logaddexp(lse, logits)) if return_lse else output
