"""Host code shared by the rungs `tma` and `persistent`: how operands are described, configurations and launches.

A descriptor needs memory that is dense along one dimension and starts every row on 16 bytes. It is made along whichever
dimension is dense; the tile is transposed on its way into the tensor cores, which read either order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_ladder.semantics.matmul_shapes import as_matrices, batch_shape
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import concrete
from triton_impl import interpreted, multiprocessors
from triton_impl import unsupported as unsupported_by_triton
from triton_impl.matmul.tiles import MULTIPROCESSORS, config, likeliest, programs_at_once
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.descriptor_launch import (
    DescriptorLaunch,
    unaligned,
    without_copy_engine,
    without_descriptors,
)

#: Rows and columns of the largest tile, or columns and rows.
LARGEST = 128, 256
#: Candidates, of which the cost model leaves COUNT. SUBTILES: a tile is stored whole, or in two halves where that
#: leaves shared memory for one more stage.
CONFIGS = [
    *(config(*LARGEST, 64, 8, stages, SUBTILES=2) for stages in (3, 4)),
    *(config(*LARGEST[::-1], 64, 8, stages, SUBTILES=2) for stages in (3, 4)),
    config(*LARGEST, 128, 8, 2, SUBTILES=2),
    *(config(128, 128, 64, warps, 4, SUBTILES=1) for warps in (4, 8)),
    config(128, 128, 128, 8, 3, SUBTILES=1),
    config(64, 256, 64, 4, 4, SUBTILES=2),
    config(256, 64, 64, 8, 4, SUBTILES=1),
    config(64, 128, 64, 4, 4, SUBTILES=1),
    config(128, 64, 64, 4, 4, SUBTILES=1),
    config(64, 128, 128, 4, 3, SUBTILES=1),
    config(64, 64, 128, 4, 4, SUBTILES=1),
]
COUNT = 8
INTERPRETED = [config(64, 64, 64, 1, 1, SUBTILES=2)]


class Operand(NamedTuple):
    """Memory of rows of A, or columns of B, ``(…, X, K)``, as a descriptor takes it: the dense dimension last."""

    along_k: bool
    shape: list[int]
    strides: list[int]

    @property
    def batched(self) -> bool:
        return len(self.shape) == 3

    def descriptor(self, tensor: torch.Tensor, block_x: int, block_k: int) -> TensorDescriptor:
        block = [block_x, block_k] if self.along_k else [block_k, block_x]
        return TensorDescriptor(tensor, self.shape, self.strides, [1, *block] if self.batched else block)


def operand(matrix: torch.Tensor) -> Operand | str:
    """How to describe ``(…, X, K)``, or why no descriptor can."""
    x, k = matrix.shape[-2:]
    stride_x, stride_k = matrix.stride()[-2:]
    unit = 16 // matrix.element_size()
    batch_sizes, (batch_strides,) = (
        collapse(matrix.shape[:-2], matrix.stride()[:-2]) if matrix.dim() > 2 else ([], [[]])
    )
    batched = any(batch_strides)
    if batched and (len(batch_sizes) > 1 or batch_strides[0] % unit):
        return f"batches must lie at one stride that is a multiple of {unit} for a tensor descriptor"
    for along_k, rows, step, columns, inner in ((True, x, stride_x, k, stride_k), (False, k, stride_k, x, stride_x)):
        if inner != 1 and columns != 1:
            continue
        if rows == 1:
            step = triton.cdiv(columns, unit) * unit  # a single row has no next one: any stride does
        if step % unit == 0 and step >= columns:
            shape, strides = [rows, columns], [step, 1]
            return (
                Operand(along_k, batch_sizes + shape, batch_strides + strides)
                if batched
                else Operand(along_k, shape, strides)
            )
    return (
        f"a tensor descriptor needs one stride of 1 and the other a multiple of {unit}, got {stride_x} and {stride_k}"
    )


def pad_operand(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it with padded rows (columns, if those are dense) where no descriptor takes it as it is.

    An output's gradient has the strides that autograd gives it, which no `unsupported` has seen.
    """
    if x.numel() == 0 or not (unaligned(x) or isinstance(operand(x), str)):
        return x
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        return pad_operand(x.mT).mT
    unit = 16 // x.element_size()
    *sizes, columns = x.shape
    return x.new_empty((*sizes, triton.cdiv(columns, unit) * unit))[..., :columns].copy_(x)


#: Multiply-adds of a product from which on a copy of its operands costs less than loads of single elements.
COPIED_FROM = 2**28


def is_copied(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether operands of ``(M, K) @ (K, N)``, each dense in a dimension, are copied if no descriptor takes them."""
    if a.dim() > 2 or b.dim() > 2 or a.dtype not in (torch.float16, torch.bfloat16) or without_copy_engine(b):
        return False
    m, k, n = (concrete(size) for size in (*a.shape, b.shape[-1]))
    dense = all(1 in map(concrete, x.stride()) for x in (a, b))
    return dense and min(m, n, k) >= 16 and m * n * k >= COPIED_FROM


def tma_unsupported(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why ``(…, M, K) @ (…, K, N)`` cannot be fetched by descriptors, or None."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return "tensor descriptors feed the 16-bit tensor cores alone here; float32 is for `tiled`"
    if (reason := without_descriptors(a, b)) is not None:
        return reason
    for matrix in (a, b.mT):
        described = operand(matrix)
        if isinstance(described, str):
            return described
    return None


def unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why the operands of a matmul cannot be fetched by descriptors, or None."""
    if (reason := unsupported_by_triton(input)) is not None:
        return reason
    if input.numel() == 0 or other.numel() == 0:
        return None
    a, b = as_matrices(input, other)
    if a.dim() > 2 or b.dim() > 2:  # a broadcast batch dimension has stride 0
        batch = batch_shape(a, b)
        a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    return tma_unsupported(a, b)


def unsupported_unless_copied(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """As :func:`unsupported`, where operands of large products may be copied first."""
    reason = unsupported(input, other)
    return None if reason is not None and is_copied(*as_matrices(input, other)) else reason


class Epilogue(NamedTuple):
    """What follows a product; nothing, for matmul."""

    bias: torch.Tensor | None = None
    activation: str | None = None  # None, "none" or "tanh"
    product: torch.Tensor | None = None  # where the product alone is stored too


IDENTITY = Epilogue()


class DescriptorProduct:
    """A kernel of descriptors and its configurations. Persistent or not, it takes the same arguments."""

    def __init__(self, kernel: Any, persistent: bool) -> None:
        self.kernel, self.persistent = kernel, persistent
        self.choose = Autotuner(kernel)

    def __call__(
        self, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue = IDENTITY
    ) -> Callable[..., None]:
        """Write ``a @ b`` into `c`, all of the same batch dimensions; the returned launch does it again.

        Of one product, the rows of `c` may lie further apart, by a multiple of 16 bytes; else `c` is contiguous.

        That launch takes ``(c, product, a, b, bias)``, with `c` and `b` in place of what is absent. Operands that no
        descriptor takes are copied, each time.
        """
        given, (a, b) = (a, b), (pad_operand(a), pad_operand(b))
        (m, k), n = a.shape[-2:], b.shape[-1]
        batches = c.shape[:-2].numel()
        rows, columns = operand(a), operand(b.mT)
        assert isinstance(rows, Operand), rows
        assert isinstance(columns, Operand), columns
        # A float32 tile of a gradient that is summed further needs the shared memory of a stage: stored by pointer.
        row_stride = c.stride(-2) if c.dim() == 2 else n
        described = batches == 1 and row_stride % (16 // c.element_size()) == 0 and c.dtype == a.dtype
        assert described or c.is_contiguous()
        bias, product = epilogue.bias, epilogue.product
        tensors = (c, c if product is None else product, a, b, b if bias is None else bias)

        def launch(config: triton.Config) -> DescriptorLaunch:
            blocks = config.kwargs
            tiles = batches * triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"])
            at_once = multiprocessors(c.device, MULTIPROCESSORS) * programs_at_once(config, a.element_size())
            out = None
            if described:
                block = [blocks["BLOCK_M"], blocks["BLOCK_N"] // blocks["SUBTILES"]]
                out = TensorDescriptor(c, [c.numel() // n, n], [row_stride, 1], block)
            describe = (
                out,
                out,
                rows.descriptor(a, blocks["BLOCK_M"], blocks["BLOCK_K"]),
                columns.descriptor(b, blocks["BLOCK_N"], blocks["BLOCK_K"]),
                None,
            )
            constants = (rows.along_k, columns.along_k, rows.batched, columns.batched, described)
            follows = (bias is not None, epilogue.activation, product is not None)
            sizes = (m, n, k, 0 if bias is None else bias.stride(0), tiles)
            names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SUBTILES")
            arguments = (*sizes, *constants, *follows, *(blocks[name] for name in names))
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            programs = min(tiles, at_once) if self.persistent else tiles
            return DescriptorLaunch(self.kernel, programs, describe, arguments, options)

        key = (str(c.dtype), m, n, k, batches, rows.along_k, columns.along_k, rows.batched, columns.batched, described)
        candidates = (
            INTERPRETED if interpreted() else likeliest(CONFIGS, COUNT, m, n, k, batches, a.element_size(), c.device)
        )
        found = self.choose.launch(key, candidates, launch, *tensors)
        if a is given[0] and b is given[1]:
            return found
        return lambda c, product, a, b, bias: found(c, product, pad_operand(a), pad_operand(b), bias)

    def write(self, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[..., None]:
        """See :data:`triton_impl.matmul.product.Write`."""
        launch = self(c, a, b)
        return lambda c, a, b: launch(c, c, a, b, b)
