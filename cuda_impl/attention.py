"""Attention in CUDA C++: ``csrc/attention``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuda_impl import climb, unsupported
from cuda_impl.built_for import no_code, without_wgmma
from kernel_ladder import gpu
from kernel_ladder.selection.attention import backward_on_hopper
from kernel_ladder.semantics import philox
from kernel_ladder.semantics.masks import NO_WINDOW, band
from kernel_ladder.semantics.scale import scale_of
from kernel_ladder.semantics.strides import has_rows_at
from kernel_ladder.spec import Inputs, Options, Output
from kernel_ladder.table import register
from kernel_ladder.tracing import address, concrete

#: KiB of shared memory a block by the largest head dimension: csrc/attention/split_kv.cu. Tiles of flash.cuh and of
#: flash_backward.cuh fit in the 99 KiB that every GPU has.
SPLIT_KIB = {64: 98, 128: 100, 256: 136}

#: Steps whose backward kernels read dO by TMA: csrc/attention/hopper_backward.cuh.
HOPPER_BACKWARD = ("wgmma", "warp_specialized")
#: Steps that have backward kernels of their own.
BACKWARD = ("naive", "flash", *HOPPER_BACKWARD)
#: Steps that have kernels of their own for the gradient of an additive mask, as all have that take one.
MASK_BACKWARD = ("naive", "flash")
#: Further arguments of a step's backward: `deterministic`, which sums dQ in one order.
_MORE = {"warp_specialized": (True,)}

#: Values that a fused forward saves where no weight is dropped; else those of dropout's mask follow.
KEEPING_ALL = 10
#: Threshold, factor and seed of dropout where no weight is dropped.
_KEEPS_ALL = (0, 1.0, 0)

#: Queries, of all heads that share keys, that csrc/attention/split_kv.cu holds in one tile.
SPLIT_ROWS = 16


def _naive_unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    if (reason := unsupported(query)) is not None:
        return reason
    scores_bytes = 4 * query.numel() // query.shape[-1] * key.shape[-2]
    if scores_bytes > (limit := gpu.of(query.get_device()).memory):
        return f"the float32 scores take {scores_bytes / 2**30:.0f} GiB; the GPU has {limit / 2**30:.0f} GiB"
    return None


# Every call asks this, so it takes a device index, which costs less than a torch.device.
@gpu.cached
def _small(device: int) -> int | None:
    """Shared memory of a block, where there are tiles that need more; None where it holds them all."""
    limit = gpu.of(device).shared_per_block
    return None if limit >= 2**10 * max(SPLIT_KIB.values()) else limit


def flash_unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    """What ``flash`` asks of a call, of batches or of packed sequences."""
    return _mma_unsupported(query)


def split_too_large(query: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why the tiles of ``split_kv`` do not fit in a block's shared memory, or None."""
    if (limit := _small(query.get_device())) is None:
        return None
    head_dim = max(query.shape[-1], value.shape[-1])
    needed = 2**10 * next((k for largest, k in SPLIT_KIB.items() if head_dim <= largest), max(SPLIT_KIB.values()))
    if needed <= limit:
        return None
    return (
        f"tiles of split_kv for head dimensions of {head_dim} need {needed} bytes of shared memory a block; "
        f"this GPU has {limit}"
    )


def _mma_unsupported(query: torch.Tensor) -> str | None:
    """What every step that multiplies by mma.sync asks of a call."""
    if query.is_cuda and (query.dtype is torch.bfloat16 or query.dtype is torch.float16):
        return no_code(query.get_device())
    if (reason := unsupported(query)) is not None:
        return reason
    return "flash attention multiplies on tensor cores in float16 and bfloat16; they would round float32 to tf32"


# Every call asks this: one cached look-up for all conditions.
@gpu.cached
def _runs_hopper_steps(device: int, dtype: torch.dtype) -> bool:
    return device >= 0 and dtype in (torch.float16, torch.bfloat16) and without_wgmma(device) is None


def read_by_tma(x: torch.Tensor) -> bool:
    """Whether rows, of multiples of 8 elements, are dense, and each starts at a multiple of 16 bytes."""
    return address(x) % 16 == 0 and has_rows_at(x, 8)


def hopper_unsupported(step: str, max_head_dim: int) -> Callable[..., str | None]:
    """What a step of csrc/attention/hopper.cuh asks of a call."""

    def unsupported(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: object,
    ) -> str | None:
        if not _runs_hopper_steps(query.get_device(), query.dtype):
            return _mma_unsupported(query) or without_wgmma(query.get_device())
        if attn_mask is not None:
            return f"{step} takes causal masks and windows, but no mask in memory"
        sizes = query.shape
        if len(sizes) != 4:
            return f"{step} takes 4 dimensions (B, H, S, D), got {len(sizes)}"
        d, d_v = sizes[3], value.shape[3]
        if d % 8 or d_v % 8:
            return f"head dimensions must be multiples of 8, got {d} and {d_v}"
        if max(d, d_v) > max_head_dim:
            return f"{step} takes head dimensions up to {max_head_dim}, got {max(d, d_v)}"
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not read_by_tma(x):
                return f"TMA reads dense rows that start on 16 bytes; those of `{name}` do not"
        return None

    return unsupported


def _split_unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **options: object,
) -> str | None:
    rows = query.shape[-2] * (query.shape[-3] // max(key.shape[-3], 1))
    if rows > SPLIT_ROWS:
        return f"split_kv is for few queries: at most {SPLIT_ROWS} share a head of keys, got {rows}"
    return _mma_unsupported(query) or split_too_large(query, value)


def ordered_like(x: torch.Tensor, columns: int) -> torch.Tensor:
    """``(…, H, S, columns)`` in the memory order of `x`: ``empty_ordered_like`` in csrc/attention/attention.cuh.

    It is ``(…, S, H, columns)`` in memory where heads of `x` lie closer together than its rows.
    """
    *batch, heads, rows, _ = x.shape
    if heads > 1 and rows > 1 and x.stride(-3) < x.stride(-2):
        return x.new_empty((*batch, rows, heads, columns)).transpose(-3, -2)
    return x.new_empty((*batch, heads, rows, columns))


def _gradients(gradients: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """Those that are wanted: of query, key and value, and where the call has a mask, of that."""
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=False))


def _read_by_kernels(name: str, grad: torch.Tensor) -> torch.Tensor:
    """The output's gradient as a step's backward reads it: TMA asks for dense rows that start on 16 bytes."""
    if name not in HOPPER_BACKWARD or read_by_tma(grad):
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _with_readable_output(name: str, saved: tuple) -> tuple:
    """What a step saved, with dense rows of the output: one that was merged from parts of the keys may have others."""
    if name not in HOPPER_BACKWARD or read_by_tma(saved[3]):
        return saved
    return (*saved[:3], saved[3].clone(memory_format=torch.contiguous_format), *saved[4:])


def _register(name: str, unsupported, backward_of: Callable[[int, int, int, int], str]) -> None:
    """Add a step of the climb.

    `backward_of` names its backward by the largest head dimension, the numbers of keys and of their heads in all
    sequences, and the GPU's multiprocessors: its own, or that of an earlier step, which takes the same lse.
    """
    run = getattr(torch.ops.kernel_ladder.attention, name)
    takes_output = name != "naive"
    place_of_mask = 5 if takes_output else 3  # in what a forward saves
    dropping = name in climb("attention_dropout")

    def in_two_parts(attn_mask: torch.Tensor | None) -> bool:
        """Whether the log-sum-exp is (2, …): maxima, and logarithms of sums, which an additive mask's numbers drown."""
        return takes_output and attn_mask is not None and attn_mask.dtype is not torch.bool

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        is_causal: bool | str,
        scale: float | None,
        enable_gqa: bool,
        window_size: tuple[int, int] = NO_WINDOW,
        return_lse: bool = False,
        dropout_p: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Output, tuple]:
        sizes, seqlen_k = query.shape, key.shape[-2]
        first, last = band(is_causal, window_size, sizes[-2], seqlen_k)
        scale = scale_of(sizes[-1], scale)
        expanded = None if attn_mask is None else attn_mask.expand(*sizes[:-1], seqlen_k)
        others = (first, last, scale, enable_gqa)
        if seed is None:
            output, lse = run(query, key, value, expanded, *others)
        else:  # of a rung that drops weights
            others = (*others, philox.threshold(dropout_p), philox.scale(dropout_p), seed)
            output, lse = torch.ops.kernel_ladder.attention_dropout.flash(query, key, value, expanded, *others)
        results = (output, lse) if takes_output else ()
        saved = (query, key, value, *results, attn_mask, *others)  # the mask's gradient has its own shape
        if not return_lse:
            return output, saved
        return (output, lse[0] + lse[1] if in_two_parts(attn_mask) else lse), saved

    def backward(saved: tuple, grad: Output, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        grad, grad_lse = (grad[0], grad[1].contiguous()) if isinstance(grad, tuple) else (grad, None)
        key, head_dim = saved[1], max(saved[0].shape[-1], saved[2].shape[-1])
        heads_kv = concrete(key.shape[0]) * concrete(key.shape[1])
        step = backward_of(head_dim, concrete(key.shape[-2]), heads_kv, gpu.multiprocessors(key))
        run_backward = getattr(torch.ops.kernel_ladder.attention_backward, step)
        if len(saved) > KEEPING_ALL:
            run_backward = torch.ops.kernel_ladder.attention_dropout_backward.flash
        saved = _with_readable_output(step, saved)
        grad = _read_by_kernels(step, grad)
        of_mask = None
        if (attn_mask := saved[place_of_mask]) is not None:
            if needs[3]:
                run_mask_backward = getattr(torch.ops.kernel_ladder.attention_mask_backward, step)
                dropout = _KEEPS_ALL if len(saved) == KEEPING_ALL else ()
                of_mask = run_mask_backward(grad, grad_lse, *saved, *dropout)
            expanded = attn_mask.expand(*saved[0].shape[:-1], saved[1].shape[-2])
            saved = (*saved[:place_of_mask], expanded, *saved[place_of_mask + 1 :])
        gradients = run_backward(grad, grad_lse, *saved, *_MORE.get(step, ()))
        return _gradients((*gradients, of_mask), needs)

    def saved_from(inputs: Inputs, outputs: tuple[torch.Tensor, ...], options: Options) -> tuple:
        query, key, value = inputs
        first, last = band(options["is_causal"], options["window_size"], query.shape[-2], key.shape[-2])
        scale = scale_of(query.shape[-1], options["scale"])
        return (query, key, value, *outputs, None, first, last, scale, options["enable_gqa"])

    def fake(query, key, value, attn_mask, *others):
        columns = value.shape[-1]
        row_by_row = name == "split_kv"  # as its merge writes
        output = query.new_empty((*query.shape[:-1], columns)) if row_by_row else ordered_like(query, columns)
        parts = (2,) if in_two_parts(attn_mask) else ()
        return output, query.new_empty((*parts, *query.shape[:-1]), dtype=torch.float32)

    def fake_gradients(grad, grad_lse, query, key, value, *others):
        return tuple(ordered_like(x, x.shape[-1]) for x in (query, key, value))

    def fake_of_mask(grad, grad_lse, *saved):
        attn_mask = saved[place_of_mask]
        return attn_mask.new_empty(attn_mask.shape)

    if name in MASK_BACKWARD:
        torch.library.register_fake(f"kernel_ladder::attention_mask_backward.{name}", fake_of_mask)
    operators = ("attention", "attention_dropout") if dropping else ("attention",)
    for operator in operators:
        torch.library.register_fake(f"kernel_ladder::{operator}.{name}", fake)
        if name in BACKWARD:
            torch.library.register_fake(f"kernel_ladder::{operator}_backward.{name}", fake_gradients)

    register(
        "attention",
        f"cuda.{name}",
        forward=forward,
        backward=backward,
        unsupported=unsupported,
        saved_from=saved_from if takes_output else None,
        drops_weights=dropping,
    )


def _only(step: str) -> Callable[[int, int, int, int], str]:
    """The backward of one step, for every call."""
    return lambda head_dim, keys, heads_kv, sms: step


#: By step: what it asks of a call, and whose backward it has.
_STEPS = {
    "naive": (_naive_unsupported, _only("naive")),
    "flash": (flash_unsupported, _only("flash")),
    "wgmma": (hopper_unsupported("wgmma", 128), _only("wgmma")),
    "warp_specialized": (hopper_unsupported("warp_specialized", 128), _only("warp_specialized")),
    "pingpong": (hopper_unsupported("pingpong", 128), backward_on_hopper),
    "persistent": (hopper_unsupported("persistent", 256), backward_on_hopper),
    "split_kv": (_split_unsupported, _only("flash")),
}

for _name in climb("attention"):
    _register(_name, *_STEPS[_name])
