"""Products whose tiles the copy engine fetches: tensor descriptors (TMA), one tile a program, or as many as there are.

A descriptor wants memory that is dense along one dimension and starts every row on 16 bytes; it is made along whichever
dimension is dense, and the tile is transposed on its way into the tensor cores, which read either order.

The persistent loop, with the tile that is stored counted apart from the tile that is fetched, is as in Triton's
tutorial 09-persistent-matmul.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_ladder import gpu
from kernel_ladder.semantics.strides import collapse
from kernel_ladder.tracing import address
from triton_impl import interpreted, multiprocessors
from triton_impl.common.dot import dot
from triton_impl.gelu import gelu_of
from triton_impl.matmul.tiles import MULTIPROCESSORS, config, grouped, likeliest, programs_at_once
from triton_impl.runtime.autotuner import Autotuner

#: Rows and columns of the largest tile, or columns and rows.
LARGEST = 128, 256
#: Candidates, of which the cost model leaves COUNT. Tiles are stored whole, or in two halves where that leaves shared
#: memory for one more stage.
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
IEEE = tl.constexpr("ieee")
INTERPRETED = [config(64, 64, 64, 1, 1, SUBTILES=2)]


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """None, "none" or "tanh": the forms of GELU by their names."""
    if ACTIVATION is None:
        return x
    return gelu_of(x, ACTIVATION == "tanh")


@triton.jit
def _fetch(
    desc, batch, x, k, ALONG_K: tl.constexpr, BATCHED: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A tile (BLOCK_X, BLOCK_K) of an operand: rows of A, or columns of B."""
    if ALONG_K and BATCHED:
        return desc.load([batch, x, k]).reshape(BLOCK_X, BLOCK_K)
    elif ALONG_K:
        return desc.load([x, k])
    elif BATCHED:
        return desc.load([batch, k, x]).reshape(BLOCK_K, BLOCK_X).T
    else:
        return desc.load([k, x]).T


@triton.jit
def _store_run(
    out, batch, m, n, M, N, x, DESCRIBED: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`x` into the output's tile at (m, n), by its descriptor, or where it has none (N odd, batches) by its pointer."""
    if DESCRIBED:
        out.store([m, n], x.to(out.dtype))
    else:
        offs_m = m + tl.arange(0, BLOCK_M)
        offs_n = n + tl.arange(0, COLUMNS)
        pointers = out + (batch.to(tl.int64) * M + offs_m[:, None]) * N + offs_n[None, :]
        tl.store(pointers, x.to(out.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _finish(
    c, kept, bias_ptr, batch, m, n, M, N, bias_step, x,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if KEEP:
        _store_run(kept, batch, m, n, M, N, x, DESCRIBED, BLOCK_M, COLUMNS)
    if BIAS:
        offs_n = n + tl.arange(0, COLUMNS)
        at = offs_n.to(tl.int64) * bias_step
        x += tl.load(bias_ptr + at, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    _store_run(c, batch, m, n, M, N, activate(x, ACTIVATION), DESCRIBED, BLOCK_M, COLUMNS)


@triton.jit
def _store_tile(
    c, kept, bias_ptr, batch, m, n, M, N, bias_step, acc,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    if SUBTILES == 1:
        _finish(
            c, kept, bias_ptr, batch, m, n, M, N, bias_step, acc,
            BIAS, ACTIVATION, KEEP, DESCRIBED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _finish(
            c, kept, bias_ptr, batch, m, n, M, N, bias_step, left,
            BIAS, ACTIVATION, KEEP, DESCRIBED, BLOCK_M, HALF,
        )  # fmt: skip
        _finish(
            c, kept, bias_ptr, batch, m, n + HALF, M, N, bias_step, right,
            BIAS, ACTIVATION, KEEP, DESCRIBED, BLOCK_M, HALF,
        )  # fmt: skip


@triton.jit
def _place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Batch, first row and first column of a tile."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = grouped(tile % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    return tile // tiles, tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def _matmul_tma_kernel(
    c, kept, a, b, bias_ptr, M, N, K, bias_step, tiles,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr,
    DESCRIBED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    batch, m, n = _place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a_tile = _fetch(a, batch, m, k, A_ALONG_K, A_BATCHED, BLOCK_M, BLOCK_K)
        b_tile = _fetch(b, batch, n, k, B_ALONG_K, B_BATCHED, BLOCK_N, BLOCK_K)
        acc = dot(a_tile, b_tile.T, acc, IEEE)
    _store_tile(
        c, kept, bias_ptr, batch, m, n, M, N, bias_step, acc,
        BIAS, ACTIVATION, KEEP, DESCRIBED, BLOCK_M, BLOCK_N, SUBTILES,
    )  # fmt: skip


@triton.jit
def _matmul_persistent_kernel(
    c, kept, a, b, bias_ptr, M, N, K, bias_step, tiles,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr,
    DESCRIBED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    # The loops are made one, in which the next tile's operands are fetched while this one is stored. What is stored is
    # counted on its own, so that nothing is carried over the whole of the pipeline.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        batch, m, n = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = _fetch(a, batch, m, k, A_ALONG_K, A_BATCHED, BLOCK_M, BLOCK_K)
            b_tile = _fetch(b, batch, n, k, B_ALONG_K, B_BATCHED, BLOCK_N, BLOCK_K)
            acc = dot(a_tile, b_tile.T, acc, IEEE)
        stored += tl.num_programs(0)
        batch_stored, m_stored, n_stored = _place(stored, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        _store_tile(
            c, kept, bias_ptr, batch_stored, m_stored, n_stored, M, N, bias_step, acc,
            BIAS, ACTIVATION, KEEP, DESCRIBED, BLOCK_M, BLOCK_N, SUBTILES,
        )  # fmt: skip


# ---- host: how an operand is described ------------------------------------------------------------------------------


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
    """How to describe ``(…, X, K)``, or why that cannot be."""
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
            step = triton.cdiv(columns, unit) * unit  # of a single row, any
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


def unaligned(*tensors: torch.Tensor) -> bool:
    """Whether one does not start on 16 bytes."""
    return any(address(t) % 16 for t in tensors)


def without_descriptors(*tensors: torch.Tensor) -> str | None:
    """Why there can be no descriptors of tensors, whatever their strides, or None."""
    device = tensors[0].device
    if device.type == "cuda" and gpu.visible() and gpu.of(tensors[0].get_device()).capability < (9, 0):
        return "the copy engine that takes tensor descriptors needs compute capability 9.0 or newer"
    return "operands must start on 16 bytes for a tensor descriptor" if unaligned(*tensors) else None


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


def leaves_idle(c: torch.Tensor) -> bool:
    """Whether there are fewer of the largest tiles of `c` than half as many as multiprocessors."""
    m, n = c.shape[-2:]
    tiles = c.shape[:-2].numel() * triton.cdiv(m, LARGEST[0]) * triton.cdiv(n, LARGEST[1])
    return 2 * tiles < multiprocessors(c.device, MULTIPROCESSORS)


# ---- host: launches -------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def _enter_context(tensor: torch.Tensor) -> None:
    """Make the GPU's context this thread's. A descriptor is made in it, and no call before need have entered it."""
    # A stream that is being captured may not be asked; who captures it has a context.
    if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(tensor.device).query()
    _thread.has_context = True


class DescriptorLaunch:
    """As :class:`triton_impl.runtime.launch_cache.Launch`, for a kernel that takes descriptors of some of its tensors.

    ``describe`` holds a descriptor for each tensor that has one, None for one that is passed as a pointer.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        describe: tuple[TensorDescriptor | None, ...],
        arguments: tuple[Any, ...],
        options: dict[str, int],
    ) -> None:
        self._kernel, self._run, self._grid = kernel, kernel[(programs,)], (programs, 1, 1)
        # Without the tensors that they were made for, which a launch that is kept would keep.
        self._describe = tuple(None if d is None else _moved(d, None) for d in describe)
        self._arguments, self._options = arguments, options
        self._aligned: dict[int, Callable[..., None]] = {}  # by device

    def __call__(self, *tensors: torch.Tensor) -> None:
        given = [t if d is None else _moved(d, t) for d, t in zip(self._describe, tensors, strict=True)]
        if not _thread.has_context:
            _enter_context(tensors[0])
        if interpreted() or any(d is None and t.data_ptr() % 16 for d, t in zip(self._describe, tensors, strict=True)):
            self._run(*given, *self._arguments, **self._options)
            return
        device = triton.runtime.driver.active.get_current_device()
        run = self._aligned.get(device)
        if run is None:
            compiled = self._run(*given, *self._arguments, **self._options)
            self._aligned[device] = compiled[self._grid]
        else:
            run(*given, *self._arguments)

    def compile(self, *tensors: torch.Tensor) -> Any:
        """Compile the kernel for these tensors, as a launch would."""
        given = [t if d is None else _moved(d, t) for d, t in zip(self._describe, tensors, strict=True)]
        return self._kernel.warmup(*given, *self._arguments, grid=self._grid, **self._options)


def _moved(descriptor: TensorDescriptor, tensor: torch.Tensor | None) -> TensorDescriptor:
    """The same description of another tensor's memory; checked when it was first made."""
    moved = object.__new__(type(descriptor))  # Triton's, or Gluon's
    moved.__dict__.update(descriptor.__dict__)
    moved.base = tensor
    return moved


class Epilogue(NamedTuple):
    """What follows a product: nothing, for matmul."""

    bias: torch.Tensor | None = None
    activation: str | None = None  # None, "none" or "tanh"
    kept: torch.Tensor | None = None


NONE = Epilogue()


class Step:
    """A kernel of this page as a way to write a product. Persistent or not, it takes the same arguments."""

    def __init__(self, kernel: Any, persistent: bool) -> None:
        self.kernel, self.persistent = kernel, persistent
        self.choose = Autotuner(kernel)

    def __call__(
        self, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue = NONE
    ) -> DescriptorLaunch:
        """Write ``a @ b`` into contiguous `c`, all of the same batch dimensions; what is returned does it again.

        It takes ``(c, kept, a, b, bias)``, with `c` and `b` for what is absent.
        """
        (m, k), n = a.shape[-2:], b.shape[-1]
        batches = c.shape[:-2].numel()
        rows, columns = operand(a), operand(b.mT)
        assert isinstance(rows, Operand), rows
        assert isinstance(columns, Operand), columns
        described = batches == 1 and n % (16 // c.element_size()) == 0
        bias, kept = epilogue.bias, epilogue.kept
        tensors = (c, c if kept is None else kept, a, b, b if bias is None else bias)

        def launch(config: triton.Config) -> DescriptorLaunch:
            blocks = config.kwargs
            tiles = batches * triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"])
            at_once = multiprocessors(c.device, MULTIPROCESSORS) * programs_at_once(config, c.element_size())
            out = None
            if described:
                block = [blocks["BLOCK_M"], blocks["BLOCK_N"] // blocks["SUBTILES"]]
                out = TensorDescriptor(c, [c.numel() // n, n], [n, 1], block)
            describe = (
                out,
                out,
                rows.descriptor(a, blocks["BLOCK_M"], blocks["BLOCK_K"]),
                columns.descriptor(b, blocks["BLOCK_N"], blocks["BLOCK_K"]),
                None,
            )
            constants = (rows.along_k, columns.along_k, rows.batched, columns.batched, described)
            follows = (bias is not None, epilogue.activation, kept is not None)
            sizes = (m, n, k, 0 if bias is None else bias.stride(0), tiles)
            names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SUBTILES")
            arguments = (*sizes, *constants, *follows, *(blocks[name] for name in names))
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            programs = min(tiles, at_once) if self.persistent else tiles
            return DescriptorLaunch(self.kernel, programs, describe, arguments, options)

        key = (str(c.dtype), m, n, k, batches, rows.along_k, columns.along_k, rows.batched, columns.batched, described)
        candidates = (
            INTERPRETED if interpreted() else likeliest(CONFIGS, COUNT, m, n, k, batches, c.element_size(), c.device)
        )
        return self.choose.launch(key, candidates, launch, *tensors)


tma = Step(_matmul_tma_kernel, persistent=False)
persistent = Step(_matmul_persistent_kernel, persistent=True)
