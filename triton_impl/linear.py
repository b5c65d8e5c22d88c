"""A linear layer in Triton: matmul's products, whose tiles get bias and activation before they leave the registers.

Where a gradient is wanted through an activation, the tile is stored twice, before bias and activation and after. So
bias_gelu's own backward makes the gradient before them, and bias's; two products make the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.linear_shapes import ACTIVATIONS, as_rows, output_shape
from kernel_ladder.semantics.matmul_shapes import as_matrices
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.tracing import shapes_only
from triton_impl import interpreted, register, unsupported
from triton_impl.bias_gelu import bias_gelu_backward
from triton_impl.gelu import gelu_backward
from triton_impl.matmul import Write, described_entry, product, write_persistent, write_tiled
from triton_impl.matmul import tma as descriptors
from triton_impl.matmul.tiles import CONFIGS, INTERPRETER_CONFIG, accumulate, arguments_of, grouped, kind_of
from triton_impl.matmul.tma import activate
from triton_impl.runtime.aot import entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache
from triton_impl.sum import summed


@triton.jit(do_not_specialize=["tuning_key"])
def _linear_kernel(
    c_ptr, kept_ptr, a_ptr, b_ptr, bias_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key, bias_step,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, LARGE: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, LARGE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    i = offs_m[:, None] * N + offs_n[None, :]
    if KEEP:
        tl.store(kept_ptr + i, acc.to(kept_ptr.dtype.element_ty), mask=mask)
    if BIAS:
        at = offs_n.to(tl.int64) * bias_step
        acc += tl.load(bias_ptr + at, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(c_ptr + i, activate(acc, ACTIVATION).to(c_ptr.dtype.element_ty), mask=mask)


_linear = {
    kind: AutotunedKernel(_linear_kernel, [INTERPRETER_CONFIG] if interpreted() else configs, ["tuning_key"])
    for kind, configs in CONFIGS.items()
}

#: By all that decides the product and what follows it: the output's shape, and the launch.
_launches: LaunchCache = LaunchCache()


def _run(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    keep: bool,
    persistent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the product alone if it is to be kept, else the output again."""
    asked = (activation, keep, persistent)
    if shapes_only():
        output = torch.empty(output_shape(input, weight), dtype=input.dtype, device=input.device)
        return output, torch.empty_like(output) if keep else output
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    step = None if bias is None else bias.stride()
    operands = (input.shape, input.stride(), weight.shape, weight.stride(), step, input.dtype, tf32, input.device)
    known = _launches.get((operands, asked))
    if known is None:
        outputs, launch = _first(input, weight, bias, *asked)
        if launch is not None:
            _launches.remember((operands, asked), (outputs[0].shape, launch))
        return outputs
    shape, launch = known
    output = torch.empty(shape, dtype=input.dtype, device=input.device)
    kept = torch.empty_like(output) if keep else output
    launch(output, kept, input, weight, weight if bias is None else bias)
    return output, kept


def _first(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    keep: bool,
    persistent: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Callable[..., None] | None]:
    """As :func:`_run`, with the launch, if it was one on the memory of these tensors."""
    output = torch.empty(output_shape(input, weight), dtype=input.dtype, device=input.device)
    kept = torch.empty_like(output) if keep else output
    if output.numel() == 0:
        return (output, kept), None
    a, b = as_rows(input), weight.mT
    form = None if activation is None else ACTIVATIONS[activation]
    if persistent and input.shape[-1] > 0:
        follows = descriptors.Epilogue(bias, form, kept if keep else None)
        launch = descriptors.persistent(as_rows(output), a, b, follows)
    else:
        launch = _write_tiled(output, kept, a, b, bias, form, keep)
    in_place = launch is not None and a.data_ptr() == input.data_ptr()
    return (output, kept), launch if in_place else None


def _write_tiled(
    output: torch.Tensor,
    kept: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    form: str | None,
    keep: bool,
) -> Launch | None:
    arguments, constants = arguments_of(a, b)
    m, n = arguments[:2]
    constants |= {"BIAS": bias is not None, "ACTIVATION": form, "KEEP": keep}

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    tensors = (output, kept, a, b, b if bias is None else bias)  # what is there stands in for what is absent
    step = 0 if bias is None else bias.stride(0)
    return _linear[kind_of(a.dtype, m, n)](grid, tensors, (*arguments, step), constants)


def _backward(
    saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...], write: Write
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    input, weight, bias, kept, activation = saved
    before, grad_bias = as_rows(grad), None  # the gradient of what stands before the activation
    if activation is not None and bias is not None:
        before, grad_bias = bias_gelu_backward((as_rows(kept), bias, ACTIVATIONS[activation]), before, (True, True))
    elif activation is not None:
        (before,) = gelu_backward((as_rows(kept), ACTIVATIONS[activation]), before, (True,))
    elif bias is not None and needs[2]:
        grad_bias = summed(before, (0,), False)
    return (
        product(before, weight, weight.dtype, write).view(input.shape) if needs[0] else None,
        product(before.mT, as_rows(input), weight.dtype, write) if needs[1] else None,
        grad_bias if needs[2] else None,
    )


def _register(name: str, persistent: bool, write: Write, unsupported: Callable[..., str | None]) -> None:
    def inference(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
    ) -> torch.Tensor:
        return _run(input, weight, bias, activation, False, persistent)[0]

    def linear(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
    ) -> tuple[torch.Tensor, tuple]:
        output, kept = _run(input, weight, bias, activation, activation is not None, persistent)
        return output, (input, weight, bias, None if activation is None else kept, activation)

    def linear_backward(saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]) -> tuple:
        return _backward(saved, grad, needs, write)

    register(
        "linear",
        f"triton.{name}",
        forward=linear,
        backward=linear_backward,
        unsupported=unsupported,
        inference=inference,
    )


def _persistent_unsupported(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: object
) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if input.numel() == 0 or weight.numel() == 0:
        return None
    a, _ = as_matrices(input, weight.mT)
    if a.dim() > 2:  # what will be copied
        a = torch.empty(input.shape, dtype=input.dtype, device="meta").view(-1, input.shape[-1])
    return descriptors.tma_unsupported(a, weight.mT)


_register("tiled", False, write_tiled, unsupported)
_register("persistent", True, write_persistent, _persistent_unsupported)


_LAYER = {"stride_ak": 1, "stride_bk": 1, "bias_step": 1}  # rows of input and of weight dense
_EVEN = {"EVEN_M": True, "EVEN_N": True, "EVEN_K": True, "LARGE": False, "PRECISION": "ieee"}
_MASKED = {"EVEN_M": False, "EVEN_N": False, "EVEN_K": False, "LARGE": True, "PRECISION": "ieee"}
_GELU = {"BIAS": True, "ACTIVATION": "none", "KEEP": False}
_TANH_KEPT = {"BIAS": True, "ACTIVATION": "tanh", "KEEP": True}

AOT = [
    *(entry(_linear_kernel, "bf16", {**_LAYER, **_EVEN, **_GELU}, config) for config in CONFIGS["16-bit"][:4]),
    entry(_linear_kernel, "bf16", {**_LAYER, **_EVEN, **_TANH_KEPT}, CONFIGS["16-bit"][0]),
    entry(_linear_kernel, "fp16", {**_LAYER, **_MASKED, **_TANH_KEPT}, CONFIGS["16-bit"][5]),
    entry(_linear_kernel, "bf16", {**_LAYER, **_MASKED, **_GELU}, CONFIGS["16-bit thin"][0]),
    entry(_linear_kernel, "fp32", {**_LAYER, **_EVEN, **_GELU}, CONFIGS["ieee"][0]),
    *(described_entry("bf16", True, True, each, **_GELU) for each in descriptors.CONFIGS[:5]),
    described_entry("fp16", True, True, descriptors.CONFIGS[0], **_TANH_KEPT),
]
