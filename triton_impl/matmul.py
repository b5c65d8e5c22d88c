"""Matrix product in Triton: one tile of the output a program, its operands streamed through shared memory.

Triton pipelines the loads (``num_stages`` tiles ahead) and chooses the tensor-core instruction: wgmma on Hopper.
Next to gain: each program starts its pipeline anew and stores its tile with nothing else in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_ladder.matmul_shapes import as_matrices, batch_shape, output_shape, sum_to
from kernel_ladder.precision import tf32_allowed
from kernel_ladder.strides import collapse
from triton_impl import interpreted, register, unsupported
from triton_impl.aot import entry
from triton_impl.matmul_tiles import CONFIGS, INTERPRETER_CONFIG, accumulate, arguments_of, grouped, kind_of
from triton_impl.tuning import Launch, Launches, Tuned


@triton.jit
def _tile(
    c_ptr, a_ptr, b_ptr, tile, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, LARGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc, offs_m, offs_n, mask = accumulate(
        a_ptr, b_ptr, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, LARGE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]  # C is contiguous
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tuning_key"])
def _matmul_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, LARGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    _tile(
        c_ptr, a_ptr, b_ptr, tl.program_id(0), M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, LARGE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tuning_key"])
def _batched_matmul_kernel(
    c_ptr, a_ptr, b_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    tuning_key,
    size1, size2, a0, a1, a2, b0, b1, b2,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, LARGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    batch = tl.program_id(0) // tiles
    # Three batch dimensions of sizes (any, size1, size2); a broadcast one has stride 0.
    i2 = (batch % size2).to(tl.int64)
    i1 = (batch // size2 % size1).to(tl.int64)
    i0 = (batch // size2 // size1).to(tl.int64)
    c_ptr += batch.to(tl.int64) * M * N
    a_ptr += i0 * a0 + i1 * a1 + i2 * a2
    b_ptr += i0 * b0 + i1 * b1 + i2 * b2
    _tile(
        c_ptr, a_ptr, b_ptr, tl.program_id(0) % tiles, M, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        PRECISION, EVEN_M, EVEN_N, EVEN_K, LARGE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
    )  # fmt: skip


def _by_kind(kernel: triton.JITFunction) -> dict[str, Tuned]:
    """The kernel tuned over each kind's configurations."""
    return {
        kind: Tuned(kernel, [INTERPRETER_CONFIG] if interpreted() else configs, ["tuning_key"])
        for kind, configs in CONFIGS.items()
    }


_matmul = _by_kind(_matmul_kernel)
_batched_matmul = _by_kind(_batched_matmul_kernel)
MAX_BATCH_DIMS = 3


#: By all that decides how two operands are multiplied: the output's shape, and the launch.
_launches: Launches = Launches()


def product(input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``input @ other`` with the shapes of torch.matmul and any strides, the output contiguous and of `dtype`."""
    if torch.compiler.is_compiling():
        return _first_product(input, other, dtype)[0]
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    device = input.device
    key = (input.shape, input.stride(), other.shape, other.stride(), input.dtype, dtype, tf32, device)
    known = _launches.get(key)
    if known is None:
        output, launch = _first_product(input, other, dtype)
        if launch is not None:
            _launches.remember(key, (output.shape, launch))
        return output
    shape, launch = known
    output = torch.empty(shape, dtype=dtype, device=device)
    launch(output, input, other)
    return output


def _first_product(input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Launch | None]:
    """The product, and the launch that made it if it was one launch on the memory of `input` and `other`."""
    a, b = as_matrices(input, other)
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = batch_shape(a, b)
    c = torch.empty((*batch, m, n), dtype=dtype, device=a.device)
    output = c.view(output_shape(input, other))
    if c.numel() == 0 or k == 0:
        c.zero_()
        return output, None
    if batch:
        a, b = a.expand(*batch, m, k), b.expand(*batch, k, n)
    return output, _launch(c, a, b)


def _launch(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Launch | None:
    """Write ``a @ b`` into contiguous `c`, all of the same batch dimensions."""
    arguments, flags = arguments_of(a, b)
    m, n = arguments[:2]
    kind = kind_of(a.dtype, m, n)
    if a.dim() == 2:

        def grid(meta):
            return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

        return _matmul[kind](grid, (c, a, b), arguments, flags)

    sizes, strides = collapse(c.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    if len(sizes) > MAX_BATCH_DIMS:
        for i in range(c.shape[0]):
            _launch(c[i], a[i], b[i])
        return None
    padding = MAX_BATCH_DIMS - len(sizes)
    batches = c.shape[:-2].numel()
    batch_arguments = [*([1] * padding), *sizes][1:]
    for s in strides:
        batch_arguments += [*([0] * padding), *s]

    def grid(meta):
        return (batches * triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    return _batched_matmul[kind](grid, (c, a, b), (*arguments, *batch_arguments), flags)


def matmul(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    return product(input, other, input.dtype), (input, other)


def matmul_backward(
    saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dA = dC · Bᵀ`` and ``dB = Aᵀ · dC``: the same kernel on transposed views."""
    input, other = saved
    a, b = as_matrices(input, other)
    # A view, unless the strides of the gradient keep rows from folding.
    grad = grad.reshape(*batch_shape(a, b), a.shape[-2], b.shape[-1])
    grad_a = _gradient(grad, b.mT, a) if needs[0] else None
    grad_b = _gradient(a.mT, grad, b) if needs[1] else None
    return (
        None if grad_a is None else grad_a.view(input.shape),
        None if grad_b is None else grad_b.view(other.shape),
    )


def _gradient(left: torch.Tensor, right: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``left @ right`` in the shape of `like`: summed over broadcast batch dimensions before it is rounded."""
    batch = batch_shape(left, right)
    if batch == like.shape[:-2]:
        return product(left, right, like.dtype)
    return sum_to(product(left, right, torch.float32), like.shape, like.dtype)


register("matmul", "triton.tiled", forward=matmul, backward=matmul_backward, unsupported=unsupported)


_ROWS = {"stride_ak": 1, "stride_bn": 1}  # row-major operands
_COLUMNS = {"stride_am": 1, "stride_bk": 1}  # both transposed
_EVEN = {"EVEN_M": True, "EVEN_N": True, "EVEN_K": True, "LARGE": False, "PRECISION": "ieee"}
_MASKED = {"EVEN_M": False, "EVEN_N": False, "EVEN_K": False, "LARGE": True, "PRECISION": "ieee"}

AOT = [
    *(entry(_matmul_kernel, "bf16", {**_ROWS, **_EVEN}, config) for config in CONFIGS["16-bit"][:4]),
    entry(_matmul_kernel, "fp16", {**_COLUMNS, **_MASKED}, CONFIGS["16-bit"][0]),
    entry(_matmul_kernel, "bf16", {**_ROWS, **_MASKED}, CONFIGS["16-bit thin"][0]),
    entry(_matmul_kernel, "fp32", {**_ROWS, **_EVEN, "PRECISION": "tf32"}, CONFIGS["tf32"][0]),
    entry(_matmul_kernel, "fp32", {**_ROWS, **_EVEN}, CONFIGS["ieee"][0]),
    entry(_batched_matmul_kernel, "bf16", {**_ROWS, **_MASKED}, CONFIGS["16-bit"][0]),
]
