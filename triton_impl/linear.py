"""Linear layer in Triton: ``activation(input · weightᵀ + bias)``, with bias and activation in the product's epilogue.

tiled       the tiles of matmul's `tiled`, with an epilogue; takes everything
persistent  matmul's persistent kernel, whose epilogue has the same steps; takes what descriptors take

Where a gradient is wanted through an activation, the epilogue stores the tile twice: the product alone and the output.
Shared openly: the gradient before the activation is bias_gelu's or gelu's own backward. The gradient of a bias alone is
a column sum of ``sum/two_stage.py``, and the other two gradients are products by the same rung of matmul.
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
from triton_impl.matmul import descriptors, tiled
from triton_impl.matmul import persistent as persistent_matmul
from triton_impl.matmul.product import Write, product
from triton_impl.matmul.tiles import CONFIGS, INTERPRETER_CONFIG, accumulate, arguments_of, kind_of, rasterize
from triton_impl.matmul.tma_tiles import activate
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.descriptor_launch import ALIGNMENT_BYTES
from triton_impl.runtime.launch_cache import Launch, LaunchCache
from triton_impl.sum.two_stage import summed


@triton.jit(do_not_specialize=["tuning_key"])
def _linear_kernel(
    c_ptr, product_ptr, a_ptr, b_ptr, bias_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key, bias_stride,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``c = activation(A · B + bias)`` in float32, rounded once; with SAVE_PRODUCT also ``product = A · B``.

    Grid: (⌈M / BLOCK_M⌉ · ⌈N / BLOCK_N⌉,). Layout: A (M, K), B (K, N) and bias (N,) by strides, outputs contiguous.
    """
    tile_m, tile_n = rasterize(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, INT64_OFFSETS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    i = offs_m[:, None] * N + offs_n[None, :]
    if SAVE_PRODUCT:
        tl.store(product_ptr + i, acc.to(product_ptr.dtype.element_ty), mask=mask)
    if HAS_BIAS:
        bias_offsets = offs_n.to(tl.int64) * bias_stride
        acc += tl.load(bias_ptr + bias_offsets, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
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
    begin = None
    if persistent:  # an operand that begins off 16 bytes is copied for its tensor descriptor
        begin = input.data_ptr() % ALIGNMENT_BYTES, weight.data_ptr() % ALIGNMENT_BYTES
    layouts = input.shape, input.stride(), weight.shape, weight.stride(), begin, step
    operands = (*layouts, input.dtype, tf32, input.device)
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
    launch: Callable[..., None] | None
    if persistent:
        epilogue = descriptors.Epilogue(bias, form, kept if keep else None)
        launch = persistent_matmul.run(as_rows(output), a, b, epilogue)
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
    constants |= {"HAS_BIAS": bias is not None, "ACTIVATION": form, "SAVE_PRODUCT": keep}

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    tensors = (output, kept, a, b, b if bias is None else bias)  # what is there stands in for what is absent
    stride = 0 if bias is None else bias.stride(0)
    return _linear[kind_of(a.dtype, m, n)](grid, tensors, (*arguments, stride), constants)


def _backward(
    saved: tuple,
    grad: torch.Tensor,
    needs: tuple[bool, ...],
    write: Write,
    prepare: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    input, weight, bias, kept, activation = saved
    before, grad_bias = as_rows(grad), None  # the gradient of what stands before the activation
    if activation is not None and bias is not None:
        before, grad_bias = bias_gelu_backward((as_rows(kept), bias, ACTIVATIONS[activation]), before, (True, True))
    elif activation is not None:
        (before,) = gelu_backward((as_rows(kept), ACTIVATIONS[activation]), before, (True,))
    elif bias is not None and needs[2]:
        grad_bias = summed(before, (0,), False)
    before = prepare(before)
    return (
        product(before, weight, weight.dtype, write).view(input.shape) if needs[0] else None,
        product(before.mT, as_rows(input), weight.dtype, write) if needs[1] else None,
        grad_bias if needs[2] else None,
    )


def _register(
    name: str,
    persistent: bool,
    write: Write,
    unsupported: Callable[..., str | None],
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad,
) -> None:
    """Register a rung; `prepare` lays out the gradient before the activation as the rung's products take it."""

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
        return _backward(saved, grad, needs, write, prepare)

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
    if input.shape[-1] == 0:
        return "there is nothing to fetch where the inner dimension is 0; `tiled` takes that"
    if input.numel() == 0 or weight.numel() == 0:
        return None
    a, _ = as_matrices(input, weight.mT)
    if a.dim() > 2:  # what will be copied
        a = torch.empty(input.shape, dtype=input.dtype, device="meta").view(-1, input.shape[-1])
    reason = descriptors.tma_unsupported(a, weight.mT)
    return None if reason is not None and descriptors.is_copied(a, weight.mT) else reason


_register("tiled", False, tiled.write, unsupported)
_register("persistent", True, persistent_matmul.write, _persistent_unsupported, descriptors.pad_operand)
