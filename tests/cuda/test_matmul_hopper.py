"""Products on Hopper's tensor cores: which operands TMA reads, and every layout, size and batch against float64."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

import kernel_ladder
from cuda_impl.matmul import _not_for_tma
from kernel_ladder import autograd, table

from ..conftest import needs_gpu, skip_unless_it_runs

STEPS = ("wgmma", "warp_specialized", "cluster", "persistent", "stream_k", "split_k")
#: Those that take what TMA cannot read.
ANY_OPERAND = ("persistent", "stream_k", "split_k")
#: Whether each operand lies transposed.
LAYOUTS = list(itertools.product([False, True], repeat=2))
LAYOUT_NAMES = ["NN", "NT", "TN", "TT"]


def step(name: str) -> table.Variant:
    found = [v for v in table.variants("matmul", "cuda") if v.name == f"cuda.{name}"]
    return found[0] if found else pytest.skip("the extension was not built")


# ---- without a GPU -------------------------------------------------------------------------------------------------


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(100_000, dtype=dtype).as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (strided((40, 64), (64, 1)), None),
        (strided((40, 61), (64, 1)), None),
        (strided((61, 40), (1, 64)), None),
        (strided((40, 64), (64, 1), offset=8), None),
        (strided((64,), (1,)), None),
        (strided((1, 61), (7, 1)), None),
        (strided((3, 40, 64), (0, 64, 1)), None),
        (strided((3, 40, 64), (64, 192, 1)), None),
        (strided((40, 64), (64, 1), offset=4), "`input` does not begin"),
        (strided((40, 61), (61, 1)), r"`input` has strides \(61, 1\)"),
        (strided((40, 32), (64, 2)), r"`input` has strides \(64, 2\)"),
        (strided((40, 64), (0, 1)), r"`input` has strides \(0, 1\)"),
        (strided((64,), (2,)), "`input` has strides"),
        (strided((3, 40, 64), (2561, 64, 1)), "batches that begin at multiples of 16 bytes"),
        (strided((40, 60), (60, 1), dtype=torch.float32), None),
        (strided((60, 40), (1, 60), dtype=torch.float32), "tf32 along the inner dimension"),
    ],
)
def test_what_tma_cannot_read_is_said(tensor, reason):
    said = _not_for_tma(tensor, "input", -1)
    assert (said is None) == (reason is None), said
    assert reason is None or re.search(reason, said)


def test_the_last_steps_take_any_operand():
    """The level's name means its last step that supports a call: on Hopper these, elsewhere `skinny` for few rows."""
    names = [v.name for v in table.variants("matmul", "cuda") if v.name != "cuda.registers_tma"]
    if not names:
        pytest.skip("the extension was not built")
    *earlier, last = STEPS
    assert names[-len(STEPS) - 1 :] == [f"cuda.{name}" for name in (*earlier, "skinny", last)]


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def operand(
    shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool = False, pad: int = 0, offset: int = 0
) -> torch.Tensor:
    """A matrix (or batch of them) of normal values in memory whose other values are NaN."""
    *batch, rows, columns = shape
    outer, inner = (columns, rows) if transposed else (rows, columns)
    size = outer * (inner + pad)
    strides = [size]
    for length in reversed(batch[1:]):
        strides.insert(0, strides[0] * length)
    memory = torch.full((offset + size * torch.Size(batch).numel(),), torch.nan, dtype=dtype, device="cuda")
    steps = (1, inner + pad) if transposed else (inner + pad, 1)
    view = memory.as_strided(shape, (*(strides if batch else ()), *steps), offset)
    return view.copy_(torch.randn(shape, device="cuda"))


def assert_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, rounded: bool = True) -> None:
    """The rounding of the output, subnormal or not, that of a float32 sum, and, `rounded`, that of tf32 operands."""
    exact = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    operands = 2.0**-10 if a.dtype is torch.float32 and rounded else 0.0
    of = torch.finfo(c.dtype)
    bound = (exact.abs() + of.smallest_normal) * of.eps + size * (operands + a.shape[-1] * 2.0**-24)
    worst = ((c.double() - exact).abs() / bound).nan_to_num(nan=torch.inf).max().item() if c.numel() else 0.0
    assert c.shape == exact.shape
    assert worst <= 1, f"{worst} of the bound, {tuple(a.shape)} {a.stride()} x {tuple(b.shape)} {b.stride()} {a.dtype}"


def check(name: str, a: torch.Tensor, b: torch.Tensor, *, rounded: bool = True) -> None:
    variant = step(name)
    skip_unless_it_runs(variant, (a, b), {})
    with torch.no_grad():
        assert_product(a, b, autograd.run(variant, (a, b), {}), rounded=rounded)


SIZES = [
    (1, 1, 1),
    (8, 8, 8),
    (128, 256, 64),
    (128, 256, 512),  # one tile, split by eight
    (136, 264, 72),
    (120, 248, 56),
    (16, 1024, 2048),
    (1024, 16, 2048),
    (1, 512, 512),
    (640, 1280, 328),
    (2048, 2056, 200),
    (4104, 4096, 128),  # more tiles than one turn of the GPU
]


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_layout_and_size(name, layout, dtype):
    for m, n, k in SIZES:
        a = operand((m, k), dtype, transposed=layout[0], pad=-(m if layout[0] else k) % 8)
        b = operand((k, n), dtype, transposed=layout[1], pad=-(k if layout[1] else n) % 8 + 8)
        check(name, a, b)


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_float32_on_cuda_cores(layout):
    """Not rounded to tf32; by TMA where it reads both operands, of which one lies along m or n or is worth a copy."""
    sizes = [(65, 65, 1), (128, 128, 32), (129, 131, 33), (200, 1000, 5), (300, 70, 129), (130, 4097, 95)]
    more = [(64, 4096, 512), (1024, 1000, 1024), (2048, 2056, 300), (523, 3001, 1003), (4104, 4096, 97)]
    for m, n, k in sizes + more:
        a = operand((m, k), torch.float32, transposed=layout[0], pad=-(m if layout[0] else k) % 4)
        b = operand((k, n), torch.float32, transposed=layout[1], pad=-(k if layout[1] else n) % 4 + 4)
        check_on_cuda_cores(a, b)


def check_on_cuda_cores(a: torch.Tensor, b: torch.Tensor) -> None:
    check("registers", a, b, rounded=False)
    if step("registers_tma").unsupported(a, b) is None:
        check("registers_tma", a, b, rounded=False)


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_float32_batches_on_cuda_cores(layout):
    for a_batch, b_batch in [((5,), (5,)), ((5,), ()), ((), (5,)), ((2, 3), (3,))]:
        a = operand((*a_batch, 130, 72), torch.float32, transposed=layout[0], pad=2 if layout[0] else 0)
        b = operand((*b_batch, 72, 264), torch.float32, transposed=layout[1])
        check_on_cuda_cores(a, b)
    for a_batch, b_batch in [((5,), (5,)), ((9,), ()), ((), (9,))]:  # large enough for copies
        a = operand((*a_batch, 520, 1000), torch.float32, transposed=layout[0])
        check_on_cuda_cores(a, operand((*b_batch, 1000, 530), torch.float32, transposed=layout[1], pad=2))


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", ["registers", "registers_tma"])
def test_float32_on_cuda_cores_gives_the_same_bits(name, layout):
    a = operand((2048, 1024), torch.float32, transposed=layout[0])
    b = operand((1024, 2048), torch.float32, transposed=layout[1])
    skip_unless_it_runs(step(name), (a, b), {})
    first = kernel_ladder.matmul(a, b, backend=f"cuda.{name}")
    for _ in range(20):
        assert torch.equal(first, kernel_ladder.matmul(a, b, backend=f"cuda.{name}"))


@needs_gpu
@pytest.mark.parametrize("name", ["thread_tile", "vectorized", "double_buffered"])
def test_teaching_rungs_take_the_plain_case(name):
    for m, n, k in [(128, 128, 8), (256, 384, 16), (1024, 640, 1000)]:
        check(name, operand((m, k), torch.float32), operand((k, n), torch.float32), rounded=False)
    reasons = [
        step(name).unsupported(*operands)
        for operands in [
            (operand((130, 64), torch.float32), operand((64, 128), torch.float32)),
            (operand((128, 64), torch.float32), operand((64, 128), torch.float32, transposed=True)),
            (operand((128, 64), torch.bfloat16), operand((64, 128), torch.bfloat16)),
        ]
    ]
    assert None not in reasons


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_small_grids(layout):
    """On an H200: every tile that split_k has, whole and with its K in 2, 4 and 8 parts."""
    sizes = [(512, 512, 512), (1024, 1024, 1024), (1280, 1280, 512), (1536, 1536, 512), (512, 512, 8192)]
    for m, n, k in [*sizes, (128, 4096, 4096), (64, 64, 8192), (256, 264, 8192), (128, 768, 16384)]:
        a = operand((m, k), torch.bfloat16, transposed=layout[0])
        check("split_k", a, operand((k, n), torch.bfloat16, transposed=layout[1]))


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        # Boxes no higher than the operand; rows along memory that are copied, and such as are too many or too short.
        (8, [(1, 4096, 4096), (7, 4104, 4099), (16, 4096, 8192), (24, 2056, 8192), (32, 4096, 4100), (33, 4096, 4096)]),
        (8, [(16, 8192, 2048)]),
        # Two tiles side by side share their rows of A: of one panel and of two, and with one tile too many.
        (0, [(128, 8192, 8192), (100, 8200, 4096), (70, 8136, 4104), (128, 7000, 9000)]),
    ],
    ids=["few", "few of a short k", "a hundred"],
)
def test_few_rows(layout, dtype, more, sizes):
    for m, n, k in sizes:
        a = operand((m, k), dtype, transposed=layout[0], pad=-(m if layout[0] else k) % 8 + more)
        check("split_k", a, operand((k, n), dtype, transposed=layout[1], pad=-(k if layout[1] else n) % 8))


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (129, 257, 65), (100, 300, 100), (640, 1280, 328)])
def test_tf32_along_k(name, sizes, tf32):
    m, n, k = sizes
    check(name, operand((m, k), torch.float32, pad=-k % 4), operand((k, n), torch.float32, transposed=True, pad=-k % 4))


@needs_gpu
@pytest.mark.parametrize("name", ANY_OPERAND)
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_operands_off_the_grid_of_tma(name, layout, dtype, tf32):
    for (m, n, k), offset in zip([(1, 1, 1), (127, 255, 63), (131, 259, 67), (515, 1031, 517)], range(4), strict=True):
        a = operand((m, k), dtype, transposed=layout[0], offset=offset)
        b = operand((k, n), dtype, transposed=layout[1], pad=offset, offset=3)
        check(name, a, b)


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_products_of_rows_that_begin_anywhere(layout, dtype, tf32):
    """Large enough to be worth a copy: every leading dimension and first element modulo eight, of either operand."""
    for step, offset in itertools.product(range(8), range(8)):
        m, n, k = 1024 + offset, 775 + step, 704 + step
        a = operand((m, k), dtype, transposed=layout[0], pad=offset, offset=step)
        b = operand((k, n), dtype, transposed=layout[1], pad=step, offset=offset)
        check("persistent", a, b)


@needs_gpu
@pytest.mark.parametrize("name", ANY_OPERAND)
def test_many_products_of_one_unaligned_operand(name):
    aligned, unaligned = operand((1024, 1024), torch.float16), operand((1024, 1024), torch.float16, pad=1)
    check(name, aligned, unaligned)
    check(name, unaligned.T, aligned)
    check(name, aligned.T, unaligned[:, 1:])  # rows that begin anywhere in the output alone


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
def test_rows_of_the_output_that_begin_anywhere(name):
    for n in (*range(256, 265), 1, 7, 63, 65):
        check(name, operand((391, 200), torch.float16), operand((200, n), torch.float16, transposed=True))


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_many_products_of_unaligned_batches(layout):
    for m, n, k in [(520, 513, 705), (512, 512, 768)]:
        a = operand((3, m, k), torch.bfloat16, transposed=layout[0], pad=1, offset=5)
        b = operand((3, k, n), torch.bfloat16, transposed=layout[1], pad=3, offset=2)
        check("persistent", a, b)
        check("persistent", a, b[1])
        check("persistent", a[1], b)


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_unaligned_products_of_several_turns(layout):
    for m, n, k in [(4095, 4097, 259), (2039, 2053, 2063)]:
        a = operand((m, k), torch.bfloat16, transposed=layout[0])
        check("stream_k", a, operand((k, n), torch.bfloat16, transposed=layout[1]))


@needs_gpu
@pytest.mark.parametrize("name", ANY_OPERAND)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_operand_off_the_grid_of_tma(name, dtype, tf32):
    for a_offset, b_offset in [(0, 1), (1, 0)]:
        a = operand((300, 520), dtype, offset=a_offset)
        check(name, a, operand((520, 264), dtype, transposed=True, offset=b_offset))
    check(name, operand((300, 520), dtype), operand((520, 264), dtype))  # tf32: B does not run along k


@needs_gpu
@pytest.mark.parametrize("name", ANY_OPERAND)
def test_operands_without_a_stride_of_one(name):
    a, b = operand((300, 400), torch.bfloat16)[:, ::2], operand((400, 600), torch.bfloat16)[::2, ::3]
    check(name, a, b)
    check(name, a[:1].expand(300, 200), b[:, :1].expand(200, 200))


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
def test_batches(name):
    for a_shape, b_shape in [
        ((5, 130, 72), (5, 72, 264)),
        ((5, 130, 72), (72, 264)),
        ((130, 72), (5, 72, 264)),
        ((64, 8, 64), (64, 64, 8)),
    ]:
        check(name, operand(a_shape, torch.bfloat16), operand(b_shape, torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("name", ANY_OPERAND)
def test_batches_of_several_strides(name):
    a = operand((2, 3, 70, 72), torch.bfloat16)
    check(name, a[:, :1].expand(2, 3, 70, 72), operand((3, 72, 80), torch.bfloat16))
    check(name, a.transpose(0, 1), operand((3, 2, 72, 80), torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_copies_take_64_mib_at_most(name, layout):
    """Products are then made in parts of their rows and columns."""
    for a_batch, b_batch, m, n, k in [
        ((), (), 5003, 4999, 9001),
        ((3,), (), 3001, 3011, 9001),
        ((), (2,), 70, 4999, 9001),
        ((250,), (250,), 401, 403, 405),  # whose parts are of many batches
    ]:
        a = operand((*a_batch, m, k), torch.bfloat16, transposed=layout[0], pad=(1 - (m if layout[0] else k)) % 2)
        b = operand((*b_batch, k, n), torch.bfloat16, transposed=layout[1], pad=(1 - (k if layout[1] else n)) % 2)
        skip_unless_it_runs(step(name), (a, b), {})
        beyond = []
        for _ in range(2):  # what earlier tests have left to the garbage collector may be counted once
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            c = kernel_ladder.matmul(a, b, backend=f"cuda.{name}")
            beyond.append(torch.cuda.max_memory_allocated() - before - c.numel() * c.element_size())
        assert min(beyond) <= (64 + 18) * 2**20  # with a workspace where tiles are shared out
        assert_product(a, b, c)


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
def test_every_run_gives_the_same_bits(name):
    for m, n, k in [(2048, 2048, 2048), (512, 512, 4096), (16, 8192, 1024), (2304, 2304, 1024)]:
        a, b = operand((m, k), torch.bfloat16), operand((k, n), torch.bfloat16)
        skip_unless_it_runs(step(name), (a, b), {})
        first = kernel_ladder.matmul(a, b, backend=f"cuda.{name}")
        for _ in range(20):
            assert torch.equal(first, kernel_ladder.matmul(a, b, backend=f"cuda.{name}"))


@needs_gpu
@pytest.mark.parametrize("name", ANY_OPERAND)
def test_shared_tiles_give_the_same_bits(name):
    """With plain loads, and in stream_k, blocks share tiles and wait for each other's parts."""
    for m, n, k in [(2039, 2053, 2063), (131, 259, 8191), (1999, 1, 4099)]:
        a, b = operand((m, k), torch.bfloat16), operand((k, n), torch.bfloat16)
        skip_unless_it_runs(step(name), (a, b), {})
        first = kernel_ladder.matmul(a, b, backend=f"cuda.{name}")
        assert_product(a, b, first)
        for _ in range(20):
            assert torch.equal(first, kernel_ladder.matmul(a, b, backend=f"cuda.{name}"))


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("n", [264, 257])
def test_gradients_of_any_layout(name, n):
    """The gradient of an output of 257 columns has rows that TMA cannot read; that of a sum has strides of 0."""
    a = operand((130, 72), torch.bfloat16).requires_grad_()
    b = operand((72, n), torch.bfloat16, transposed=True).requires_grad_()
    skip_unless_it_runs(step(name), (a, b), {})
    for grad in (torch.randn(130, n, device="cuda").bfloat16(), torch.ones(1, 1, device="cuda").bfloat16()):
        grad = grad.expand(130, n)
        got = torch.autograd.grad(kernel_ladder.matmul(a, b, backend=f"cuda.{name}"), (a, b), grad)
        assert_product(grad, b.detach().T, got[0])
        assert_product(a.detach().T, grad, got[1])


@needs_gpu
@pytest.mark.parametrize("name", STEPS)
def test_more_outputs_than_a_32_bit_index_holds(name, gpu_memory):
    m, n = 2**16 + 8, 2**15
    gpu_memory(6 * m * n)
    a, b = operand((m, 64), torch.bfloat16), operand((64, n), torch.bfloat16)
    skip_unless_it_runs(step(name), (a, b), {})
    output = kernel_ladder.matmul(a, b, backend=f"cuda.{name}")
    for rows in (slice(0, 130), slice(m // 2 - 65, m // 2 + 65), slice(m - 130, m)):
        assert_product(a[rows], b, output[rows])


@needs_gpu
def test_another_tensor_at_the_same_address_has_a_description_of_its_own():
    memory = torch.randn(1 << 16, device="cuda").bfloat16()
    for rows, columns in [(64, 128), (128, 64), (64, 64), (40, 128)]:
        a = memory[: rows * columns].view(rows, columns)
        check("wgmma", a, a.T)


@needs_gpu
@pytest.mark.parametrize("chunk", range(20))
@pytest.mark.parametrize("name", STEPS)
def test_random_shapes(name, chunk, tf32):
    choose = random.Random(f"{name} {chunk}")
    torch.manual_seed(chunk)
    ran = 0
    while ran < 25:
        m, n, k = (choose.choice([choose.randint(1, 40), choose.randint(1, 1500)]) for _ in range(3))
        if aligned := choose.random() < 0.6 or name not in ANY_OPERAND:
            m, n, k = (-(-size // 8) * 8 for size in (m, n, k))
        dtype = choose.choice([torch.bfloat16, torch.float16, torch.float32])
        layout = choose.choice([(False, False), (False, True), (True, False), (True, True)])
        if dtype is torch.float32 and name not in ANY_OPERAND:
            layout = (False, True)
        pads, offsets = ((0, 8), (0, 8)) if aligned else (range(9), range(9))
        batch = choose.choice([(), (), (2,), (3,)])
        a = operand((*batch, m, k), dtype, transposed=layout[0], pad=choose.choice(pads), offset=choose.choice(offsets))
        b = operand((*batch, k, n), dtype, transposed=layout[1], pad=choose.choice(pads), offset=choose.choice(offsets))
        check(name, a, b)
        ran += 1
