"""Gradients of `warp_specialized`'s attention on Hopper, in Gluon.

Idea      As in the forward pass a producer warp has the copy engine fetch tiles, and two consumer warpgroups compute.
          For dK and dV a consumer keeps 64 keys and their values; for dQ, 64 queries and their dO. Programs are
          persistent: one consumer stores a gradient while the other computes.
Kernels   `_delta_kernel` of ``delta.py``, `_of_keys_kernel` of ``specialized_keys.py`` for dK and dV,
          `_of_queries_kernel` of ``specialized_queries.py`` for dQ; they share ``specialized_passing.py``.
Limit now Seven products where five suffice, as in ``backward.py``: each kernel recomputes S and dP.

Head dimensions up to 128: the sums of dK and dV, in float32, take 128 registers of a thread there. Wider heads, and few
keys, have the kernels of ``backward.py``. A gradient that no descriptor describes, as that of a sum, is copied.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_ladder.semantics.strides import has_rows_at
from kernel_ladder.spec import Output
from kernel_ladder.tracing import concrete
from triton_impl.attention import backward, specialized_keys, specialized_queries
from triton_impl.attention.call import Call
from triton_impl.attention.delta import launch_delta
from triton_impl.attention.tiles import blocks
from triton_impl.runtime.descriptor_launch import DescriptorLaunch, unaligned

#: The widest head dimension, padded.
WIDEST = 128
#: Keys times padded head dimension from which the kernels are ahead of those of ``backward.py``, two of whose programs
#: share an SM: with a causal mask 1.18 times as fast at 2048 keys by 128, 1.04 at 2048 by 64, and 0.98 and 0.90 at 512
#: keys (H200).
LONG = 2**17
#: The same of the keys that a query sees through a window: 1.05 times as fast at 513 keys by 128, 1.08 at 1024 by 64,
#: 0.93 at 256 by 128.
SEEN = 2**16


def takes(call: Call) -> bool:
    """Whether the kernels take a call that the forward pass has taken."""
    widest = max(blocks(call.q.shape[3], call.v.shape[3]))
    keys, first, last = map(concrete, (call.k.shape[2], *call.limits))
    seen = min(keys, last - first + 1)
    return widest <= WIDEST and keys * widest >= LONG and seen * widest >= SEEN


def describable(grad: torch.Tensor) -> torch.Tensor:
    """The output's gradient, or a copy, such that a descriptor describes it."""
    apart = all(stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 1)
    return grad if apart and has_rows_at(grad, 8) and not unaligned(grad) else grad.contiguous()


def _first_launches(call: Call, of_delta: tuple, of_keys: tuple, of_queries: tuple) -> backward.Launches:
    """As :func:`backward.first_launches`."""
    for_delta = launch_delta(call, of_delta)
    for_keys = for_queries = None
    if of_keys[0] is not None:
        for_keys = _without_mask(specialized_keys.launch(call, *of_keys[:8]), 8)
    if of_queries[0] is not None:
        for_queries = _without_mask(specialized_queries.launch(call, *of_queries[:7]), 7)
    return for_delta, for_keys, for_queries


def _without_mask(launch: DescriptorLaunch, count: int) -> Any:
    """A launch on the first `count` of the tensors that the kernels of ``backward.py`` take."""

    def run(*tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> None:
        launch(*tensors[:count])

    return run


def attention_backward(saved: tuple, grad: Output, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    _, _, _, _, *of_call = saved
    if not takes(Call(*of_call)):
        return backward.attention_backward(saved, grad, needs)
    of_output, *of_lse = grad if isinstance(grad, tuple) else (grad,)
    of_output = describable(of_output)
    return backward.attention_backward(saved, (of_output, *of_lse) if of_lse else of_output, needs, _first_launches)
