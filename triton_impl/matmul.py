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
from triton_impl.dot import dot
from triton_impl.tuning import Launch, Launches, Tuned


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}
    return triton.Config(blocks, num_warps=num_warps, num_stages=num_stages)


#: By kind of product. A configuration that needs more shared memory than the GPU has drops out of the tuning by itself.
#: The first is the choice without tuning, the last that choice where the first does not fit.
CONFIGS = {
    # Two warpgroups hold a 128×256 accumulator in registers; smaller tiles where those would leave SMs idle.
    "16-bit": [
        _config(128, 256, 64, 8, 3),
        _config(128, 256, 64, 8, 4),
        _config(256, 128, 64, 8, 3),
        _config(256, 128, 64, 8, 4),
        _config(128, 128, 64, 4, 4),
        _config(128, 128, 64, 8, 4),
        _config(128, 64, 64, 4, 5),
        _config(64, 128, 64, 4, 5),
        _config(64, 64, 64, 4, 5),
    ],
    # At most 64 rows or columns: bound by reading the other matrix, so narrow tiles (many programs), deep pipelines.
    "16-bit thin": [
        _config(16, 32, 256, 4, 4),
        _config(16, 64, 128, 4, 5),
        _config(16, 128, 64, 4, 5),
        _config(32, 64, 128, 4, 5),
        _config(64, 16, 128, 4, 5),
        _config(64, 32, 128, 4, 5),
        _config(64, 64, 128, 4, 4),
        _config(32, 16, 256, 4, 4),
    ],
    "tf32": [
        _config(128, 256, 32, 8, 3),
        _config(256, 128, 32, 8, 3),
        _config(128, 128, 32, 8, 4),
        _config(128, 128, 32, 4, 4),
        _config(64, 128, 32, 4, 4),
        _config(64, 64, 32, 4, 5),
        _config(16, 64, 64, 4, 4),
    ],
    # On the CUDA cores: the tile is a thread's registers, so it stays small.
    "ieee": [
        _config(128, 128, 16, 8, 3),
        _config(128, 64, 16, 4, 3),
        _config(64, 128, 16, 4, 3),
        _config(64, 64, 16, 4, 3),
        _config(64, 32, 32, 4, 3),
        _config(16, 64, 32, 4, 4),
    ],
}
#: Every block size divides it: sizes that are multiples of it need no masks.
BLOCK_MULTIPLE = 256

#: The interpreter has nothing to tune.
INTERPRETER_CONFIG = _config(64, 64, 64, 1, 1)


@triton.jit
def _tile(
    c_ptr, a_ptr, b_ptr, tile, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, LARGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Grouped order: programs that run together cover GROUP_M rows of tiles, and share their A and B through the L2.
    grid_m = tl.cdiv(M, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // per_group * GROUP_M
    rows = min(grid_m - first_m, GROUP_M)
    tile_m = first_m + tile % per_group % rows
    tile_n = tile % per_group // rows

    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = tl.full((BLOCK_M,), True, tl.int1) if EVEN_M else offs_m < M
    mask_n = tl.full((BLOCK_N,), True, tl.int1) if EVEN_N else offs_n < N
    if LARGE:
        offs_m, offs_n, offs_k = offs_m.to(tl.int64), offs_n.to(tl.int64), offs_k.to(tl.int64)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn

    step = tl.full((), BLOCK_K, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_k = tl.full((BLOCK_K,), True, tl.int1) if EVEN_K else offs_k < K - k
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk

    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]  # C is contiguous
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


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


_UNIT, _WIDE = 1 << 12, 1 << 13  # bits of the tuning key, of A; those of B are two further up


def _magnitude(size: int) -> int:
    """The power of two that a size reaches, up to 2¹⁵: sizes alike in this are tuned alike."""
    power = 0
    while power < 15 and size > 1 << power:
        power += 1
    return power


def _kind(dtype: torch.dtype, m: int, n: int) -> str:
    if dtype == torch.float32:
        return "tf32" if tf32_allowed() else "ieee"
    return "16-bit thin" if m <= 64 or n <= 64 else "16-bit"


#: By all that decides how two operands are multiplied: the output's shape, and the launch.
_launches: Launches = Launches()


def _product(input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    m, k = a.shape[-2:]
    n = b.shape[-1]
    stride_am, stride_ak = a.stride()[-2:]
    stride_bk, stride_bn = b.stride()[-2:]
    even_m, even_n, even_k = m % BLOCK_MULTIPLE == 0, n % BLOCK_MULTIPLE == 0, k % BLOCK_MULTIPLE == 0
    # The last element's offset, with room for the blocks that reach past it.
    large = (
        (m + 257) * n >= 2**31
        or (m + 256) * stride_am + (k + 256) * stride_ak >= 2**31
        or (k + 256) * stride_bk + (n + 256) * stride_bn >= 2**31
    )
    kind = _kind(a.dtype, m, n)
    tuning_key = _magnitude(m) + (_magnitude(n) << 4) + (_magnitude(k) << 8)
    # What decides how wide the loads are: the unit strides, and whether the others keep 16-byte alignment.
    tuning_key += (_WIDE if stride_am % 8 == 0 else 0) + _UNIT if stride_ak == 1 else _WIDE if stride_ak % 8 == 0 else 0
    wide_b = (_WIDE if stride_bk % 8 == 0 else 0) + _UNIT if stride_bn == 1 else _WIDE if stride_bn % 8 == 0 else 0
    tuning_key += 4 * wide_b
    arguments = (m, n, k, stride_am, stride_ak, stride_bk, stride_bn, tuning_key)
    flags = {
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "EVEN_M": even_m,
        "EVEN_N": even_n,
        "EVEN_K": even_k,
        "LARGE": large,
    }
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
    return _product(input, other, input.dtype), (input, other)


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
        return _product(left, right, like.dtype)
    return sum_to(_product(left, right, torch.float32), like.shape, like.dtype)


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
