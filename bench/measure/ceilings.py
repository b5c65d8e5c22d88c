"""What this machine can do at most, measured in the same run and by the same method as the variants.

Each ceiling is the best of several ways to reach it; its row says which won, as ``options["by"]``.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import ModuleType

import torch

from bench.measure import clocks, environment, intervals, timing
from bench.rows import resume
from bench.rows.store import CEILING, Row
from kernel_ladder.semantics.precision import tf32_allowed
from kernel_ladder.spec import dtype_name

MIB = 2**20
#: Bytes moved. The first sizes show where the rate of a short kernel gives way to the memory's.
SIZES = tuple(4**i * MIB for i in range(7))
QUICK_SIZES = (16 * MIB, 256 * MIB, 1024 * MIB)
#: Working sets that stay in the L2, as parts of it: small, since half of a large GPU's L2 may mirror the other.
L2_PARTS = (8, 4)
L2_PASSES = 16
#: M, N, K of the matrix products, of which the best counts.
PRODUCTS = {
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 14336)),
    "cpu": ((512, 512, 512), (1024, 1024, 1024)),
}
#: How float32 is multiplied decides which units do it; tf32 is float32 in memory.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
    "float64": torch.float64,
}
CUDA_CORES = ("float32", "float64")
#: Operations that have no ceiling: the matrix rate of float8 is not measured, and a row's dtype is another.
WITHOUT_CEILING = ("linear_float8",)
CHAIN = "multiply-add chain"
CHAIN_TURNS = 64

#: Ways to reach a ceiling, by name: functions of the index of the copy of the data.
Ways = Mapping[str, timing.Call]


@dataclass(frozen=True)
class Best:
    """The way with the smallest median: its name, seconds of one call round by round, and the state of the GPU."""

    by: str
    times: list[float | None]
    graph: bool | None
    state: clocks.State

    @property
    def seconds(self) -> float:
        return intervals.quartiles(self.times)[1]


def _best(ways: Ways, copies: int, device: torch.device, capture: bool = True) -> Best:
    with timing.side_stream(device):
        launches = {by: timing.prepare(call, copies, device, capture=capture) for by, call in ways.items()}
        timing.settle(list(launches.values()), cap_s=0.15)
        with clocks.watch(device) as watch:
            times = timing.interleave(launches, budget_s=0.1, observe=watch.ran)
    by = min(times, key=lambda name: intervals.quartiles(times[name])[1])
    return Best(by, times[by], launches[by].graph, watch.state())


def _kernels(device: torch.device) -> ModuleType | None:
    """Our own Triton kernels; None where they would be interpreted or Triton is missing, and others must do."""
    if device.type != "cuda":
        return None
    try:
        from bench.measure import ceiling_kernels
    except ImportError:
        return None
    return ceiling_kernels


@functools.cache
def copying(nbytes: int, device: torch.device) -> Best:
    """A device copy that moves `nbytes`: half read, half written."""
    x, y = _buffers(nbytes // 2, device), _buffers(nbytes // 2, device)
    ways: dict[str, timing.Call] = {
        "copy_": lambda i: y[i].copy_(x[i]),
        "torch.abs": lambda i: torch.abs(x[i], out=y[i]),
    }
    if kernels := _kernels(device):
        ways["triton"] = lambda i: kernels.copy(y[i], x[i])
    return _best(ways, len(x), device)


@functools.cache
def reading(nbytes: int, device: torch.device) -> Best:
    """Reading `nbytes` and keeping next to nothing."""
    x = _buffers(nbytes, device)
    ways: dict[str, timing.Call] = {"torch.sum": lambda i: x[i].sum(), "torch.amax": lambda i: x[i].amax()}
    if kernels := _kernels(device):
        ways["triton"] = lambda i: kernels.read(x[i])
    return _best(ways, len(x), device)


@functools.cache
def writing(nbytes: int, device: torch.device) -> Best:
    """Writing `nbytes`."""
    y = _buffers(nbytes, device)
    ways: dict[str, timing.Call] = {"zero_": lambda i: y[i].zero_(), "fill_": lambda i: y[i].fill_(1.0)}
    if kernels := _kernels(device):
        ways["triton"] = lambda i: kernels.write(y[i])
    return _best(ways, len(y), device)


@functools.cache
def rereading(nbytes: int, device: torch.device) -> Best:
    """Reading `nbytes` that stay in the L2, `L2_PASSES` times over. On a GPU, with Triton."""
    from bench.measure import ceiling_kernels

    (x,) = _buffers(nbytes, device, copies=1)
    return _best({"triton": lambda i: ceiling_kernels.read(x, L2_PASSES)}, 1, device)


def _buffers(nbytes: int, device: torch.device, copies: int | None = None) -> list[torch.Tensor]:
    """Copies of a float32 buffer of whole blocks, enough that none is in the L2 when it is used again."""
    count = max(nbytes // 4 // 2048, 1) * 2048
    copies = timing.copies_needed(count * 4, device) if copies is None else copies
    return [torch.ones(count, dtype=torch.float32, device=device) for _ in range(copies)]


def copy_gbs(nbytes: int, device: torch.device) -> float:
    """Rate, in GB/s read and written together, of a device copy that moves `nbytes`."""
    moved = 2 * 4 * max(nbytes // 2 // 4 // 2048, 1) * 2048
    return moved / copying(nbytes, device).seconds / 1e9


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Let float32 products use tf32, or not. Through the older switch, which keeps the newer one in step."""
    before = tf32_allowed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this is the older switch
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


@functools.cache
def product(dtype: str, shape: tuple[int, int, int], device: torch.device) -> Best:
    """The matrix product of random M×K and K×N matrices; `dtype` is a key of `DTYPES`."""
    m, n, k = shape
    generator = torch.Generator(device=device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).to(DTYPES[dtype])

    a, b, b_transposed = matrix(m, k), matrix(k, n), matrix(n, k).T
    ways: Ways = {"torch.matmul": lambda i: a @ b, "torch.matmul, transposed": lambda i: a @ b_transposed}
    with _tf32(dtype == "tf32"):
        return _best(ways, 1, device)


def _product_tflops(dtype: str, shape: tuple[int, int, int], device: torch.device) -> float:
    m, n, k = shape
    return 2 * m * n * k / product(dtype, shape, device).seconds / 1e12


def matrix_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of the best matrix product in `dtype` by PyTorch's library, over a few shapes."""
    name = dtype_name(dtype)
    return max(_product_tflops(name, shape, device) for shape in PRODUCTS[device.type])


@functools.cache
def chain(dtype: str, device: torch.device) -> Best:
    """Multiply-adds in registers, on the CUDA cores of every multiprocessor. On a GPU, with Triton."""
    from bench.measure import ceiling_kernels

    out = torch.empty(ceiling_kernels.chain_length(device), dtype=DTYPES[dtype], device=device)
    return _best({"triton": lambda i: ceiling_kernels.multiply_add(out, CHAIN_TURNS)}, 1, device)


@functools.cache
def launching(graph: bool, device: torch.device) -> Best:
    """A kernel that does nothing, launched one after the other by a CUDA graph, or by Python on a stream."""
    ways: dict[str, timing.Call] = {"torch.cuda._sleep(0)": lambda i: torch.cuda._sleep(0)}
    if kernels := _kernels(device):
        ways["triton"] = lambda i: kernels.empty()
    return _best(ways, 1, device, capture=graph)


def measure(
    device: torch.device, quick: bool, failed: Callable[[str], None], known: Container[resume.Key] = ()
) -> Iterator[Row]:
    """A row for each ceiling of a GPU but the `known`. One that fails is passed to `failed`; the others go on."""
    for make in _all(device, quick):
        if (CEILING, make.backend, "forward", make.dtype, make.shape) in known:
            continue
        try:
            yield make()
        except torch.OutOfMemoryError:
            failed(f"{make.name}: out of memory")
        except Exception as error:
            failed(f"{make.name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Ceiling:
    """One ceiling: what its row says beside the times, and how it is measured."""

    backend: str
    shape: str
    dtype: str
    run: Callable[[], Best]
    bytes: int | None = None
    flops: int | None = None
    passes: int = 1  # over the bytes, in one call

    @property
    def name(self) -> str:
        return f"{self.backend} {self.shape} {self.dtype}"

    def __call__(self) -> Row:
        best = self.run()
        times = [None if t is None else t / self.passes for t in best.times]
        q1, median, q3 = intervals.quartiles(times)
        low, high = intervals.median_interval(times)
        return Row(
            op=CEILING,
            backend=self.backend,
            level=CEILING,
            pass_="forward",
            dtype=self.dtype,
            shape=self.shape,
            options={"by": best.by},
            us=1e6 * median,
            us_q1=1e6 * q1,
            us_q3=1e6 * q3,
            us_low=None if low is None else 1e6 * low,
            us_high=None if high is None else 1e6 * high,
            rounds=sum(t is not None for t in times),
            graph=best.graph,
            bytes=self.bytes,
            flops=self.flops,
            gbs=None if self.bytes is None else self.bytes / median / 1e9,
            tflops=None if self.flops is None else self.flops / median / 1e12,
            when=datetime.now(UTC).isoformat(timespec="milliseconds"),
            **vars(best.state),
            **environment.facts(),
        )


def _all(device: torch.device, quick: bool) -> Iterator[_Ceiling]:
    sizes = QUICK_SIZES if quick else SIZES
    # A copy needs its bytes four times over: source and target, each of them twice.
    room = torch.cuda.get_device_properties(device).total_memory // 8
    for size in (s for s in sizes if s <= room):
        where = {"shape": f"{size // MIB} MiB", "dtype": "float32", "bytes": size}
        yield _Ceiling("ceiling.copy", run=functools.partial(copying, size, device), **where)
        yield _Ceiling("ceiling.read", run=functools.partial(reading, size, device), **where)
        yield _Ceiling("ceiling.write", run=functools.partial(writing, size, device), **where)
    for part in L2_PARTS:
        size = timing.l2_bytes(device) // part // MIB * MIB
        if size:
            run = functools.partial(rereading, size, device)
            yield _Ceiling("ceiling.l2", f"{size // MIB} MiB", "float32", run, bytes=size, passes=L2_PASSES)
    shapes = PRODUCTS["cuda"][:2] if quick else PRODUCTS["cuda"]
    for dtype in DTYPES:
        backend = "ceiling.cuda_core" if dtype == "float32" else "ceiling.tensor"
        for m, n, k in shapes:
            run = functools.partial(product, dtype, (m, n, k), device)
            yield _Ceiling(backend, f"{m}x{n}x{k}", dtype, run, flops=2 * m * n * k)
    kernels = _kernels(device)
    for dtype in CUDA_CORES if kernels else ():
        flops = 2 * kernels.chain_length(device) * kernels.UNROLLED * CHAIN_TURNS
        run = functools.partial(chain, dtype, device)
        yield _Ceiling("ceiling.cuda_core", CHAIN, dtype, run, flops=flops)
    yield _Ceiling("ceiling.launch", "CUDA graph", "none", functools.partial(launching, True, device))
    yield _Ceiling("ceiling.launch", "stream", "none", functools.partial(launching, False, device))


def is_product(row: Row) -> bool:
    """Whether a row has the time of a matrix product: of the operation, by any backend, or of the ceiling's."""
    by_ceiling = row.op == CEILING and re.fullmatch(r"\d+x\d+x\d+", row.shape) is not None
    return row.us is not None and row.tflops is not None and (row.op == "matmul" or by_ceiling)


def with_best_products(rows: Iterable[Row]) -> list[Row]:
    """The rows of one run, each held to the best matrix product of its dtype that the run has measured.

    While a run goes on, its rows are held to the products known by then; a later one may be faster, be it a
    library's, a peer's or ours.
    """
    rows = list(rows)
    best: dict[str, float] = {}
    for row in rows:
        known = [row.ceiling_tflops or 0.0, row.tflops if is_product(row) else 0.0]
        best[row.dtype] = max(best.get(row.dtype, 0.0), *known)
    finished = []
    for row in rows:
        if row.op != CEILING and row.us is not None and row.ceiling_tflops is not None:
            row = replace(row, ceiling_tflops=best[row.dtype])
            row.of_ceiling = row.least_us / row.us
        finished.append(row)
    return finished
