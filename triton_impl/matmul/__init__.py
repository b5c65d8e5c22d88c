"""Matrix product in Triton: tiles of the output, one a program, their operands streamed through shared memory.

naive       one tile a program, in row order, nothing loaded ahead
tiled       Triton pipelines the loads (``num_stages`` tiles ahead); programs in groups that share the L2; tuned
tma         the copy engine fetches the tiles, by descriptors; in ``tma.py``, as the next
persistent  as many programs as run at once take tile after tile, and fetch the next while they store the last
split_k     where there are few tiles and k is long, programs share each one's k; in ``split_k.py``. Else as
            `persistent`, or where it has tiles for less than half of the multiprocessors, as `tiled`

On Hopper the tensor cores are fed by wgmma, save by `naive`, whose tiles are too small for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape, output_shape, sum_to
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import shapes_only
from triton_impl import interpreted, register, unsupported
from triton_impl.matmul import split_k as split
from triton_impl.matmul import tma as descriptors
from triton_impl.matmul.tiles import CONFIGS, INTERPRETER_CONFIG, accumulate, arguments_of, config, grouped, kind_of
from triton_impl.runtime.aot import Entry, entry
from triton_impl.runtime.autotuned_kernel import AutotunedKernel
from triton_impl.runtime.launch_cache import Launch, LaunchCache


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


def _by_kind(kernel: triton.JITFunction) -> dict[str, AutotunedKernel]:
    """The kernel tuned over each kind's configurations."""
    return {
        kind: AutotunedKernel(kernel, [INTERPRETER_CONFIG] if interpreted() else configs, ["tuning_key"])
        for kind, configs in CONFIGS.items()
    }


_matmul = _by_kind(_matmul_kernel)
_batched_matmul = _by_kind(_batched_matmul_kernel)
#: Small square tiles, in row order, one at a time: what a first program looks like.
NAIVE = config(32, 32, 32, 4, 1, GROUP_M=1)
_naive = AutotunedKernel(_matmul_kernel, [NAIVE], ["tuning_key"])
_batched_naive = AutotunedKernel(_batched_matmul_kernel, [NAIVE], ["tuning_key"])
MAX_BATCH_DIMS = 3


#: By all that decides how two operands are multiplied: the output's shape, and the launch.
_launches: LaunchCache = LaunchCache()

#: Writes ``a @ b`` into contiguous `c`, all of the same batch dimensions; returns what does it again, if it was one
#: launch that takes (c, a, b).
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[..., None] | None]


def product(input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, write: Write) -> torch.Tensor:
    """``input @ other`` with the shapes of torch.matmul and any strides, the output contiguous and of `dtype`."""
    if shapes_only():
        return torch.empty(output_shape(input, other), dtype=dtype, device=input.device)
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    device = input.device
    key = (input.shape, input.stride(), other.shape, other.stride(), input.dtype, dtype, tf32, device, write)
    known = _launches.get(key)
    if known is None:
        output, launch = _first_product(input, other, dtype, write)
        if launch is not None:
            _launches.remember(key, (output.shape, launch))
        return output
    shape, launch = known
    output = torch.empty(shape, dtype=dtype, device=device)
    launch(output, input, other)
    return output


def _first_product(
    input: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, write: Write
) -> tuple[torch.Tensor, Callable[..., None] | None]:
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
    return output, write(c, a, b)


def _tiles(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, plain: Any, batched: Any) -> Launch | None:
    """Write ``a @ b`` into contiguous `c`, all of the same batch dimensions, by one of two kernels."""
    arguments, flags = arguments_of(a, b)
    m, n = arguments[:2]
    if a.dim() == 2:

        def grid(meta):
            return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

        return plain(grid, (c, a, b), arguments, flags)

    sizes, strides = collapse(c.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    if len(sizes) > MAX_BATCH_DIMS:
        for i in range(c.shape[0]):
            _tiles(c[i], a[i], b[i], plain, batched)
        return None
    padding = MAX_BATCH_DIMS - len(sizes)
    batches = c.shape[:-2].numel()
    batch_arguments = [*([1] * padding), *sizes][1:]
    for s in strides:
        batch_arguments += [*([0] * padding), *s]

    def grid(meta):
        return (batches * triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    return batched(grid, (c, a, b), (*arguments, *batch_arguments), flags)


# ---- the steps ------------------------------------------------------------------------------------------------------


def write_naive(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Launch | None:
    return _tiles(c, a, b, _naive, _batched_naive)


def write_tiled(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Launch | None:
    kind = kind_of(a.dtype, a.shape[-2], b.shape[-1])
    return _tiles(c, a, b, _matmul[kind], _batched_matmul[kind])


def _write_described(step: descriptors.LaunchPlan) -> Write:
    def write(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[..., None] | None:
        # A gradient need not be laid out as descriptors want it, and may be summed in float32.
        if c.dtype != a.dtype or descriptors.tma_unsupported(a, b) is not None:
            return write_tiled(c, a, b)
        launch = step(c, a, b)
        return lambda c, a, b: launch(c, c, a, b, b)

    return write


write_tma = _write_described(descriptors.tma)
write_persistent = _write_described(descriptors.persistent)


def write_split(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[..., None] | None:
    shares = split.shares(c, a, b)
    if shares > 1:
        return split.write(c, a, b, shares)
    return write_tiled(c, a, b) if descriptors.leaves_idle(c) else write_persistent(c, a, b)


def _register(name: str, write: Write, unsupported: Callable[..., str | None]) -> None:
    def matmul(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        return product(input, other, input.dtype, write), (input, other)

    def matmul_backward(
        saved: tuple, grad: torch.Tensor, needs: tuple[bool, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``dA = dC · Bᵀ`` and ``dB = Aᵀ · dC``: the same kernel on transposed views."""
        input, other = saved
        a, b = as_matrices(input, other)
        # A view, unless the strides of the gradient keep rows from folding.
        grad = grad.reshape(*batch_shape(a, b), a.shape[-2], b.shape[-1])
        grad_a = _gradient(grad, b.mT, a, write) if needs[0] else None
        grad_b = _gradient(a.mT, grad, b, write) if needs[1] else None
        return (
            None if grad_a is None else grad_a.view(input.shape),
            None if grad_b is None else grad_b.view(other.shape),
        )

    register("matmul", f"triton.{name}", forward=matmul, backward=matmul_backward, unsupported=unsupported)


def _gradient(left: torch.Tensor, right: torch.Tensor, like: torch.Tensor, write: Write) -> torch.Tensor:
    """``left @ right`` in the shape of `like`: summed over broadcast batch dimensions before it is rounded."""
    batch = batch_shape(left, right)
    if batch == like.shape[:-2]:
        return product(left, right, like.dtype, write)
    return sum_to(product(left, right, torch.float32, write), like.shape, like.dtype)


def _described_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if (reason := unsupported(input)) is not None:
        return reason
    if input.numel() == 0 or other.numel() == 0:
        return None
    a, b = as_matrices(input, other)
    return descriptors.tma_unsupported(a, b)


_register("naive", write_naive, unsupported)
_register("tiled", write_tiled, unsupported)
_register("tma", write_tma, _described_unsupported)
_register("persistent", write_persistent, _described_unsupported)
_register("split_k", write_split, unsupported)


_ROWS = {"stride_ak": 1, "stride_bn": 1}  # row-major operands
_COLUMNS = {"stride_am": 1, "stride_bk": 1}  # both transposed
_EVEN = {"EVEN_M": True, "EVEN_N": True, "EVEN_K": True, "LARGE": False, "PRECISION": "ieee"}
_MASKED = {"EVEN_M": False, "EVEN_N": False, "EVEN_K": False, "LARGE": True, "PRECISION": "ieee"}


def described_entry(
    dtype: str,
    a_along_k: bool,
    b_along_k: bool,
    config: triton.Config,
    kernel: Any = descriptors.persistent.kernel,
    **more: Any,
) -> Entry:
    """An entry of a kernel that takes descriptors."""
    block = config.kwargs
    m, n, k = block["BLOCK_M"], block["BLOCK_N"], block["BLOCK_K"]
    out = f"tensordesc<{dtype}[{m}, {n // block['SUBTILES']}]>"
    a, b = (m, k) if a_along_k else (k, m), (n, k) if b_along_k else (k, n)
    types = {
        "c": out,
        "kept": out,
        "a": f"tensordesc<{dtype}[{a[0]}, {a[1]}]>",
        "b": f"tensordesc<{dtype}[{b[0]}, {b[1]}]>",
    }
    constants = {
        "A_ALONG_K": a_along_k,
        "B_ALONG_K": b_along_k,
        "A_BATCHED": False,
        "B_BATCHED": False,
        "DESCRIBED": True,
    }
    follows = {"BIAS": False, "ACTIVATION": None, "KEEP": False}
    return entry(kernel, dtype, {**constants, **follows, **more}, config, types)


AOT = [
    *(entry(_matmul_kernel, "bf16", {**_ROWS, **_EVEN}, config) for config in CONFIGS["16-bit"][:4]),
    entry(_matmul_kernel, "fp16", {**_COLUMNS, **_MASKED}, CONFIGS["16-bit"][0]),
    entry(_matmul_kernel, "bf16", {**_ROWS, **_MASKED}, CONFIGS["16-bit thin"][0]),
    entry(_matmul_kernel, "fp32", {**_ROWS, **_EVEN, "PRECISION": "tf32"}, CONFIGS["tf32"][0]),
    entry(_matmul_kernel, "fp32", {**_ROWS, **_EVEN}, CONFIGS["ieee"][0]),
    entry(_batched_matmul_kernel, "bf16", {**_ROWS, **_MASKED}, CONFIGS["16-bit"][0]),
    *(
        described_entry("bf16", a_along_k, b_along_k, descriptors.CONFIGS[0], kernel)
        for kernel in (descriptors.tma.kernel, descriptors.persistent.kernel)
        for a_along_k in (True, False)
        for b_along_k in (True, False)
    ),
    *(described_entry("fp16", True, False, each) for each in descriptors.CONFIGS[1:]),
    *(
        entry(split.KERNEL, "bf16", {**_ROWS, **_EVEN}, each, {"partials_ptr": "*fp32"})
        for each in (split.CONFIGS[2], split.CONFIGS[5])
    ),
    entry(split.KERNEL, "fp32", {**_COLUMNS, **_MASKED}, split.FLOAT32[0]),
    entry(split.SUM_KERNEL, "bf16", {"BLOCK": split.SUM_BLOCK}, types={"partials_ptr": "*fp32"}),
]
