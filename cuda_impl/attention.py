"""Attention in CUDA C++: ``csrc/attention``."""

from __future__ import annotations

import functools

import torch

from cuda_impl import climb, unsupported
from kernel_ladder.table import register

#: Shared memory of the largest tiles, those of the backward pass, as csrc/attention/flash_backward.cu sizes them.
FLASH_SHARED_BYTES = 129 * 1024


# Asked at every call, and so by device index, which is cheaper to make than a device.
@functools.cache
def _memory_bytes(device: int) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _naive_unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> str | None:
    if (reason := unsupported(query)) is not None:
        return reason
    scores_bytes = 4 * query.numel() // query.shape[-1] * key.shape[-2]
    if scores_bytes > (limit := _memory_bytes(query.get_device())):
        return f"the float32 scores take {scores_bytes / 2**30:.0f} GiB; the GPU has {limit / 2**30:.0f} GiB"
    return None


@functools.cache
def _flash_unavailable(device: int) -> str | None:
    """Why a GPU cannot run the flash kernels, or None."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return "flash attention needs compute capability 8.0 or later (mma.sync, cp.async)"
    if (limit := properties.shared_memory_per_block_optin) < FLASH_SHARED_BYTES:
        return f"flash attention needs {FLASH_SHARED_BYTES} bytes of shared memory per block; this GPU has {limit}"
    return None


def _flash_unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> str | None:
    if query.is_cuda and (query.dtype is torch.bfloat16 or query.dtype is torch.float16):
        return _flash_unavailable(query.get_device())
    if (reason := unsupported(query)) is not None:
        return reason
    return "flash attention multiplies on tensor cores in float16 and bfloat16; they would round float32 to tf32"


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _gradients(gradients: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


def _register_naive() -> None:
    run, run_backward = torch.ops.kernel_ladder.attention.naive, torch.ops.kernel_ladder.attention_backward.naive

    def forward(query, key, value, *, is_causal, scale, enable_gqa) -> tuple[torch.Tensor, tuple]:
        scale = _scale(query, scale)
        return run(query, key, value, is_causal, scale, enable_gqa), (query, key, value, is_causal, scale, enable_gqa)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        return _gradients(run_backward(grad, *saved), needs)

    @torch.library.register_fake("kernel_ladder::attention.naive")
    def _(query, key, value, is_causal, scale, enable_gqa):
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @torch.library.register_fake("kernel_ladder::attention_backward.naive")
    def _(grad, query, key, value, is_causal, scale, enable_gqa):
        return tuple(x.new_empty(x.shape) for x in (query, key, value))

    register("attention", "cuda.naive", forward=forward, backward=backward, unsupported=_naive_unsupported)


def _register_flash() -> None:
    run, run_backward = torch.ops.kernel_ladder.attention.flash, torch.ops.kernel_ladder.attention_backward.flash

    def forward(query, key, value, *, is_causal, scale, enable_gqa) -> tuple[torch.Tensor, tuple]:
        scale = _scale(query, scale)
        output, lse = run(query, key, value, is_causal, scale, enable_gqa)
        return output, (query, key, value, output, lse, is_causal, scale, enable_gqa)

    def backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        return _gradients(run_backward(grad, *saved), needs)

    @torch.library.register_fake("kernel_ladder::attention.flash")
    def _(query, key, value, is_causal, scale, enable_gqa):
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        return output, query.new_empty(query.shape[:-1], dtype=torch.float32)

    @torch.library.register_fake("kernel_ladder::attention_backward.flash")
    def _(grad, query, key, value, output, lse, is_causal, scale, enable_gqa):
        return tuple(x.new_empty(x.shape) for x in (query, key, value))

    register("attention", "cuda.flash", forward=forward, backward=backward, unsupported=_flash_unsupported)


_REGISTER = {"naive": _register_naive, "flash": _register_flash}

for _name in climb("attention"):
    _REGISTER[_name]()
