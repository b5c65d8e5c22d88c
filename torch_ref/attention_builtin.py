"""PyTorch's own attention: its choice among its kernels, two kernels by name, and the calls that each refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from kernel_ladder import gpu
from kernel_ladder.semantics.deterministic import refusal as refused_as_not_deterministic
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW, seen
from kernel_ladder.semantics.strides import gradients_in_layout_of
from kernel_ladder.tracing import concrete, dense_at_a_glance, in_graph, wants_gradient
from kernel_ladder.transforms import under_vmap

#: Most batches, or heads, in the grid of PyTorch's fused kernels.
MAX_GRID = 65535

#: PyTorch's fused kernels index masks and the backward's accumulators with 32-bit offsets.
MAX_PLACES = 2**31


#: The name of the library whose kernels stand for PyTorch's flash attention, or None: PyTorch's own.
_implementation: Callable[[], str | None] = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)


def _rounded_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _repeats(x: torch.Tensor) -> bool:
    """Whether an operand is broadcast: several of its elements share one address."""
    strides = x.stride()
    return 0 in strides and any(step == 0 and size > 1 for step, size in zip(strides, x.shape, strict=True))


def lower_right(seqlen_q: int, seqlen_k: int) -> torch.Tensor | None:
    """PyTorch's own object for the lower-right causal mask, or None if it hides nothing."""
    if seqlen_q == 1:
        return None
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes seconds

    return causal_lower_right(seqlen_q, seqlen_k)


def _lower_right_tensor(query: torch.Tensor, seqlen_k: int) -> torch.Tensor | None:
    """The same mask as a boolean tensor, which a graph can hold, or None if it hides nothing."""
    seqlen_q = query.shape[-2]
    if seqlen_q == 1:
        return None
    return seen(-seqlen_q, seqlen_k - seqlen_q, seqlen_q, seqlen_k, query.device)


def _as_matrix(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask with at least two dimensions, as scaled_dot_product_attention requires."""
    return mask if mask.dim() >= 2 else mask.expand(query.shape[-2], key.shape[-2])


def _takes_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch's memory-efficient kernel takes these operands, which :func:`faults` did not refuse."""
    if not query.is_cuda or query.dim() != 4 or query.dtype == torch.float64:
        return False
    if gpu.of(query.get_device()).capability < (8, 0):
        return False
    aligned = 16 // query.element_size()
    return all(x.stride(3) == 1 and x.shape[3] % aligned == 0 for x in (query, key, value))


def _aligned_mask(mask: torch.Tensor, query: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """An additive mask in the scores' shape: a view if its rows are aligned, else a copy.

    The memory-efficient kernel reads 16 bytes at a time. PyTorch checks the strides, but not a mask's start address.
    Numbers that overflow float32 when the kernel multiplies them by log2 e are halved: they hide as much.
    """
    if mask.dtype in (torch.float32, torch.bfloat16):
        lowest = torch.finfo(mask.dtype).min / 2
        mask = mask.clamp(min=lowest).masked_fill(mask == -math.inf, -math.inf)
    in_place = (
        mask.dtype != torch.bool
        and mask.dim() > 0
        and mask.shape[-1] == seqlen_k
        and mask.stride(-1) == 1
        and all(step % 8 == 0 for step in mask.stride()[:-1])
        and not torch.compiler.is_compiling()  # a trace has no addresses
        and type(mask) is torch.Tensor
        and mask.data_ptr() % 16 == 0
    )
    if not in_place:
        # Copy an expanded dimension once.
        mask = mask[tuple(slice(1 if step == 0 else None) for step in mask.stride()[:-1])]
        rows = query.new_zeros((*mask.shape[:-1], _rounded_up(seqlen_k, 8)))[..., :seqlen_k]
        mask = rows.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else rows.copy_(mask)
    return mask.expand(*query.shape[:-1], seqlen_k)


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """PyTorch's memory-efficient kernel, called directly because PyTorch may choose cuDNN for a masked call.

    With any mask, cuDNN's gradients are NaN where a row's log-sum-exp is below −88 and the length is 64 modulo 128.
    """
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    wants_grad = wants_gradient(query, key, value)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned_mask(mask, query, key.shape[2]), wants_grad, scale=scale
    )[0]


def builtin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
) -> torch.Tensor:
    """PyTorch's own choice among its kernels. It has no sliding window and does not return the log-sum-exp.

    It adds a boolean mask to the scores as −inf, so a hidden key that is NaN or infinite makes the output NaN.
    """
    assert window_size == NO_WINDOW
    assert not return_lse
    scale = None if scale is None else float(scale)
    bias = None
    if is_causal == LOWER_RIGHT:
        is_causal = False
        if query.shape[-2] == key.shape[-2]:  # a branch, because symbols compare to a symbol
            is_causal = True
        elif query.is_cuda and not in_graph():
            bias = lower_right(query.shape[-2], key.shape[-2])
        else:  # on a CPU, PyTorch makes this tensor of its object
            attn_mask = _lower_right_tensor(query, key.shape[-2])
    if attn_mask is not None:
        if _takes_efficient(query, key, value):
            return _efficient(query, key, value, attn_mask, scale)
        attn_mask = _as_matrix(attn_mask, query, key)
    if query.is_cuda:  # cuDNN fails on broadcast operands
        query, key, value = (x.contiguous() if _repeats(x) else x for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask if bias is None else bias, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output if not query.is_cuda or in_graph() else _of_one_layout(output)


def _of_one_layout(output: torch.Tensor) -> torch.Tensor:
    """`output`, whose gradient gets its own strides.

    PyTorch keeps a cuDNN plan by the strides of query, key and value. It was made for one layout of gradients, and
    gives wrong numbers for another (ATen/native/cudnn/MHA.cpp; PyTorch's pull request 141147 allows any layout).
    """
    return gradients_in_layout_of(output)


def _other_options(
    attn_mask: torch.Tensor | None,
    lengths: tuple[int, int],
    *,
    is_causal: bool | str,
    window_size: tuple[int, int] = NO_WINDOW,
    return_lse: bool = False,
    **others: object,
) -> str | None:
    """Why scaled_dot_product_attention does not take these options, or None."""
    if window_size != NO_WINDOW:
        return "scaled_dot_product_attention has no sliding window"
    if return_lse:
        return "scaled_dot_product_attention does not return the log-sum-exp"
    if is_causal and attn_mask is not None:
        return "scaled_dot_product_attention takes no causal mask beside another mask"
    if is_causal == LOWER_RIGHT and lengths[0] > lengths[1]:
        return f"PyTorch's lower right causal bias gives NaN for more queries than keys, {lengths[0]} and {lengths[1]}"
    return None


def _scale_faults(query: torch.Tensor, scale: float | None) -> str | None:
    """Why PyTorch's fused kernels give NaN at this scale, or None. They multiply −inf by it in float32."""
    if scale is not None and query.is_cuda and query.dtype != torch.float64 and float(scale) < 2.0**-126:
        return f"PyTorch's fused attention gives NaN at a scale that float32 does not hold, {scale}"
    return None


def faults(*inputs: torch.Tensor) -> str | None:
    """Why PyTorch's fused kernels fault or fail on these inputs, or None. Observed in PyTorch 2.11.

    Rows that do not start at a multiple of 16 bytes are misread, abort the CUDA context, or find no kernel. Empty
    tensors give no output, or a backward that fails. Batches and heads are grid dimensions. The backward accumulates
    the gradient of query at 32-bit offsets.
    """
    query = inputs[0]
    if not query.is_cuda:
        return None
    if any(x.numel() == 0 for x in inputs):
        return "PyTorch's fused attention takes no empty tensors"
    if query.dtype == torch.float64:
        return None
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        unit = 16 // x.element_size()
        if x.shape[-1] % unit:
            continue  # PyTorch pads it into an aligned copy, or takes no fused kernel
        if dense_at_a_glance(x) and x.storage_offset() % unit == 0:
            continue  # the common case, and a quick check
        strides = zip(x.stride()[:-1], x.shape[:-1], strict=True)
        # A torch.compile trace knows where a view begins. Inductor copies inputs that begin elsewhere than its example.
        aligned = concrete(x.storage_offset()) % unit == 0
        if not (aligned and all(s % unit == 0 for s, size in strides if size > 1)):
            return f"PyTorch's fused attention faults on rows that do not start on 16 bytes, as those of `{name}`"
    return _too_many(*inputs) if query.dim() == 4 else None


def _too_many(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why a call has too many batches, heads or queries for PyTorch's fused kernels, or None."""
    batch, heads, seqlen_q, head_dim = query.shape
    return too_many_heads(batch, heads) or too_many_places(batch * heads, seqlen_q, head_dim, query, key, value)


def too_many_heads(batch: int, heads: int) -> str | None:
    """Why the grids of PyTorch's fused kernels cannot hold these batches and heads, or None."""
    if batch > MAX_GRID or heads > MAX_GRID:
        return f"PyTorch's fused attention takes at most {MAX_GRID} batches and heads, got {batch} and {heads}"
    return None


def too_many_places(heads: int, seqlen_q: int, head_dim: int, *inputs: torch.Tensor) -> str | None:
    """Why the backward of PyTorch's flash attention would write out of bounds, or None. Checked if it will run.

    It accumulates the gradient of query in float32, in rows padded to 32 elements and heads padded to 128 rows.
    """
    if not (inputs[0].element_size() == 2 and wants_gradient(*inputs)):
        return None
    places = heads * _rounded_up(seqlen_q, 128) * _rounded_up(head_dim, 32)
    if places > MAX_PLACES:
        return f"PyTorch's flash attention counts places of query's gradient to {MAX_PLACES}, got {places}"
    return None


def _mask_faults(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> str | None:
    """Why PyTorch's attention gives wrong results with this mask, or None. Observed in PyTorch 2.11."""
    inputs = query, key, value, mask
    if mask.dtype != torch.bool and wants_gradient(*inputs):
        # The backward recomputes the weights from a row's log-sum-exp. Beside the lowest number, the logarithm of the
        # sum rounds away. If only the mask needs a gradient, no log-sum-exp is saved.
        return "the gradients of PyTorch's fused attention are wrong where an additive mask holds large numbers"
    return _tensor_faults(mask.shape[-3:-1], *inputs)


def _tensor_faults(rows: Sequence[int], *inputs: torch.Tensor) -> str | None:
    """Why PyTorch's fused attention does not take a mask of `rows` (heads and queries) for these inputs, or None."""
    query, key = inputs[:2]
    if not query.is_cuda:
        return None
    if under_vmap(*inputs):
        return "PyTorch's fused attention takes no mask under torch.func.vmap"
    places = math.prod(rows) * _rounded_up(key.shape[-2], 8)
    if places >= MAX_PLACES and query.dtype != torch.float64:
        return f"PyTorch's fused attention counts places of a mask to {MAX_PLACES}, got {places}"
    return None


def _heads_too_far(*inputs: torch.Tensor) -> str | None:
    """Why the backward of PyTorch's memory-efficient kernel would read another head's memory, or None."""
    if not (inputs[0].is_cuda and wants_gradient(*inputs)):
        return None
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        if x.dim() > 2 and (x.shape[-3] - 1) * x.stride(-3) >= 2**31:
            return f"PyTorch's memory-efficient attention counts places of heads in 32 bits, too few for `{name}`"
    return None


def lower_right_faults(*inputs: torch.Tensor, is_causal: bool | str, **_: object) -> str | None:
    """Why PyTorch's attention does not take the lower-right causal mask as a tensor, or None."""
    query, key = inputs[:2]
    lengths = query.shape[-2], key.shape[-2]
    if is_causal != LOWER_RIGHT or lengths[0] in (1, lengths[1]):
        return None
    return _tensor_faults(lengths[:1], *inputs)


def unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    if attn_mask is not None and (reason := _mask_faults(query, key, value, attn_mask)) is not None:
        return reason
    efficient = attn_mask is not None or query.dtype == torch.float32  # the memory-efficient kernel takes these
    if efficient and (reason := _heads_too_far(query, key, value)) is not None:
        return reason
    reason = _other_options(attn_mask, (query.shape[-2], key.shape[-2]), **options)
    if reason is None and in_graph():
        reason = lower_right_faults(query, key, value, **options)
    return reason or _scale_faults(query, options.get("scale")) or faults(query, key, value)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, tuple]:
    """PyTorch's flash attention, by its own operator: ``sdpa_kernel`` sets what all threads of a process see.

    It takes head dimensions that are multiples of 8; others are padded with zeros. Its causal mask is lower-right.
    """
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else float(scale)
    causal = is_causal is True or (is_causal == LOWER_RIGHT and query.shape[-2] > 1)
    padding = -head_dim % 8
    if padding:
        query, key, value = (F.pad(x, (0, padding)) for x in (query, key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]
    return output[..., :head_dim] if padding else output, ()


def cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool | str = False,
    scale: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, tuple]:
    """cuDNN's attention, by PyTorch's operator for it."""
    output = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query,
        key,
        value,
        None,
        wants_gradient(query, key, value),
        is_causal=is_causal is True,
        scale=None if scale is None else float(scale),
    )[0]
    return output if in_graph() else _of_one_layout(output), ()


def _pinned_unsupported(
    name: str,
    takes: Callable[..., bool],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    if not query.is_cuda:
        return f"PyTorch's {name} attention takes CUDA tensors, got {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"PyTorch's {name} attention takes float16 and bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    if query.dim() != 4:
        return f"PyTorch's {name} attention takes 4 dimensions (B, H, S, D), got {query.dim()}"
    lengths = query.shape[-2], key.shape[-2]
    if (reason := _other_options(attn_mask, lengths, **options) or faults(query, key, value)) is not None:
        return reason
    if (reason := _scale_faults(query, options.get("scale"))) is not None:
        return reason
    for operand, x in (("query", query), ("key", key), ("value", value)):
        if _repeats(x):
            return f"PyTorch's {name} attention fails on operands that are broadcast, as `{operand}` is"
    causal = options["is_causal"]
    if attn_mask is not None:  # cuDNN takes masks, but see `_efficient`
        return f"PyTorch's {name} attention takes no mask but a causal one here"
    if name == "flash":
        if value.shape[-1] != query.shape[-1]:
            return f"value's head dimension must be query's, {query.shape[-1]}, got {value.shape[-1]}"
        if causal is True and lengths[0] != lengths[1]:
            return f"a causal mask needs as many queries as keys, got {lengths[0]} and {lengths[1]}"
    elif causal == LOWER_RIGHT and lengths[0] > 1:
        return (
            f"a causal mask from the lower right is flash attention's alone, got lengths {lengths[0]} and {lengths[1]}"
        )
    elif query.shape[-1] % 8 or value.shape[-1] % 8:
        return f"head dimensions must be multiples of 8, got {query.shape[-1]} and {value.shape[-1]}"
    elif (reason := refused_as_not_deterministic()) is not None:  # PyTorch's own check says no without a reason
        return reason
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal is True, options["enable_gqa"])
    # PyTorch's check asks the driver. A machine without a GPU may lack one: there, only tensors without data come here.
    if (torch.cuda.is_initialized() or torch.cuda.is_available()) and not takes(params):
        return f"PyTorch's {name} attention does not take these shapes or strides on this GPU"
    return None


def flash_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    if _implementation() == "kernel_ladder":
        return "PyTorch's flash attention is this package's while torch.nn.attention has 'kernel_ladder' activated"
    return _pinned_unsupported("flash", torch.backends.cuda.can_use_flash_attention, *inputs, **options)


def cudnn_unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    return _pinned_unsupported("cuDNN", torch.backends.cuda.can_use_cudnn_attention, *inputs, **options)
