"""A linear layer on Hopper's tensor cores: every form, layout and size, and what is kept, against float64."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.errors import UnsupportedError
from kernel_ladder.selection import matmul as selection
from kernel_ladder.semantics.linear_shapes import ACTIVATIONS

from ..conftest import needs_gpu, skip_unless_it_runs

FORMS = [None, *ACTIVATIONS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def persistent(tf32) -> table.Variant:
    found = [v for v in table.variants("linear", "cuda") if v.name == "cuda.persistent"]
    if not found:
        pytest.skip("the extension was not built")
    skip_unless_it_runs(found[0], operands(8, 8, 8), {"activation": None})
    return found[0]


@pytest.fixture
def split_k() -> table.Variant:
    found = [v for v in table.variants("linear", "cuda") if v.name == "cuda.split_k"]
    if not found:
        pytest.skip("the extension was not built")
    skip_unless_it_runs(found[0], operands(8, 8, 8), {"activation": None})
    return found[0]


def matrix(
    rows: int, columns: int, dtype: torch.dtype, *, transposed: bool = False, pad: int = 0, offset: int = 0
) -> torch.Tensor:
    """Normal values in memory whose other values are NaN."""
    outer, inner = (columns, rows) if transposed else (rows, columns)
    memory = torch.full((offset + outer * (inner + pad),), torch.nan, dtype=dtype, device="cuda")
    steps = (1, inner + pad) if transposed else (inner + pad, 1)
    return memory.as_strided((rows, columns), steps, offset).copy_(torch.randn(rows, columns, device="cuda"))


def operands(
    m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, **of_weight: int | bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return matrix(m, k, dtype), matrix(n, k, dtype, **of_weight), torch.randn(n, device="cuda").to(dtype)


def assert_close(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, k: int) -> None:
    """The rounding of the output, subnormal or not, and that of a float32 sum and of tf32 operands.

    `size` is the sum of the magnitudes of what was added up; GELU's slope is below 1.13.
    """
    of = torch.finfo(got.dtype)
    operands = 2.0**-10 if got.dtype is torch.float32 else 0.0
    bound = (exact.abs() + of.smallest_normal) * of.eps + 1.13 * size * (operands + (k + 1) * 2.0**-24)
    worst = ((got.double() - exact).abs() / bound).nan_to_num(nan=torch.inf).max().item() if got.numel() else 0.0
    assert got.shape == exact.shape
    assert worst <= 1, f"{worst} of the bound, {tuple(got.shape)} {got.dtype}"


def check(
    variant: table.Variant,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    rows: slice = slice(None),
) -> None:
    options = {"activation": activation}
    skip_unless_it_runs(variant, (input, weight, bias), options)
    output, saved = variant.forward(input, weight, bias, **options)
    of_rows, k = input[rows].double(), input.shape[-1]
    product, size = of_rows @ weight.double().T, of_rows.abs() @ weight.double().abs().T
    if activation is not None:
        assert_close(saved[3][rows], product, size, k)
    if bias is not None:
        product, size = product + bias.double(), size + bias.double().abs()
    exact = product if activation is None else F.gelu(product, approximate=ACTIVATIONS[activation])
    assert_close(output[rows], exact, size, k)
    assert torch.equal(variant.output(input, weight, bias, **options), output), "with and without what is kept"


SIZES = [
    (1, 1, 1),
    (8, 8, 8),
    (128, 256, 64),
    (136, 264, 72),
    (120, 248, 192),  # fewer k-tiles than stages: the warpgroups do not go apart
    (17, 4096, 1024),
    (4096, 24, 512),
    (640, 1280, 328),
    (2048, 2056, 200),
    (4104, 4096, 320),  # several turns of the GPU
    (1152, 4352, 4096),  # a last turn that is shared out
]


@needs_gpu
@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_and_size(persistent, dtype, transposed, activation):
    for m, n, k in SIZES:
        pad = -(n if transposed else k) % (16 // dtype.itemsize)
        input, weight, bias = operands(m, n, k, dtype, transposed=transposed, pad=pad)
        check(persistent, input, weight, bias, activation)
        check(persistent, input, weight, None, activation)


#: Tiles that `split_k` has for a linear layer.
TILES = [tile[:2] for tile in selection.TILES if not tile.pair]


@needs_gpu
@pytest.mark.parametrize("activation", FORMS)
@pytest.mark.parametrize("splits", selection.SPLITS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_tile_and_number_of_splits(split_k, dtype, tile, splits, activation, monkeypatch):
    """Whole tiles, ragged ones, columns that no store of 16 bytes fits, one row, and several waves."""
    plan = selection.Plan("cuda.split_k", *tile, splits, False)
    monkeypatch.setattr(selection, "plan", lambda input, other: plan)
    for m, n, k in [(128, 192, 512), (777, 776, 1032), (200, 333, 520), (1, 4096, 2048), (2048, 2056, 584)]:
        input, weight, bias = operands(m, n, k, dtype)
        check(split_k, input, weight, bias, activation)
        check(split_k, input, weight, None, activation)


@needs_gpu
def test_split_k_takes_batches_and_any_bias_and_gives_the_same_bits(split_k):
    input = matrix(6 * 65, 512, torch.bfloat16).view(6, 65, 512)[:, 1:]  # rows that do not fold
    _, weight, _ = operands(1, 523, 512)
    values = torch.randn(3 * 523 + 5, device="cuda").bfloat16()
    for step, offset in [(1, 1), (2, 0), (3, 5), (0, 7)]:
        bias = values.as_strided((523,), (step,), offset)
        outputs = [split_k.output(input, weight, bias, activation="gelu") for _ in range(2)]
        assert torch.equal(*outputs)
        expected = split_k.output(input.reshape(-1, 512), weight, bias, activation="gelu").view(6, 64, 523)
        assert torch.equal(outputs[0], expected)
        check(split_k, input.reshape(-1, 512), weight, bias, "gelu")


@needs_gpu
def test_split_k_says_what_it_does_not_take(split_k):
    input, weight, bias = operands(64, 64, 64)
    for bad, said in [
        ((input.float(), weight.float(), bias.float()), "takes float16 and bfloat16"),
        ((input, weight.T.contiguous().T, bias), "rows are dense"),
        ((input[:, :60], weight[:, 4:], bias), "multiples of 16 bytes"),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            kernel_ladder.linear(*bad, backend="cuda.split_k")


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(itertools.product([False, True], repeat=2)), ids=["KK", "KN", "MK", "MN"])
def test_operands_off_the_grid_of_tma(persistent, layout, dtype):
    """Few products, which are loaded as they lie, and enough for a copy."""
    for offset, (m, n, k) in enumerate([(1, 1, 1), (127, 255, 63), (515, 1031, 517), (1025, 775, 1030)]):
        input = matrix(m, k, dtype, transposed=layout[0], offset=offset)
        weight = matrix(n, k, dtype, transposed=layout[1], pad=offset, offset=3)
        check(persistent, input, weight, torch.randn(n, device="cuda").to(dtype), "gelu")


@needs_gpu
def test_a_bias_of_any_stride_and_beginning(persistent):
    input, weight, _ = operands(300, 523, 256)
    values = torch.randn(3 * 523 + 5, device="cuda").bfloat16()
    for step, offset in [(1, 1), (2, 0), (3, 5), (0, 7)]:
        check(persistent, input, weight, values.as_strided((523,), (step,), offset), "gelu_tanh")


@needs_gpu
@pytest.mark.parametrize("activation", FORMS)
def test_copies_take_64_mib_at_most(persistent, activation):
    """Products are then made in parts, each with its columns' bias; what is kept lies as the output does."""
    x, w, b = operands(3001, 5003, 9001)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = kernel_ladder.linear(x, w, b, activation=activation, backend="cuda.persistent")
    beyond = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    assert beyond <= (64 + 18) * 2**20  # with a workspace where tiles are shared out
    check(persistent, x, w, b, activation)


@needs_gpu
def test_rows_of_the_output_that_begin_anywhere(persistent):
    for n in (*range(256, 265), 1, 7, 63, 65):
        check(persistent, *operands(391, n, 200), "gelu")


@needs_gpu
def test_inputs_of_several_strides(persistent):
    memory = torch.randn(2, 3, 70, 72, device="cuda").bfloat16()
    for input in (memory, memory.transpose(0, 1), memory[:, :1].expand(2, 3, 70, 72), memory[:, ::2, ::3]):
        weight, bias = operands(1, 80, 72)[1:]
        check(persistent, input, weight, bias, "gelu")


@needs_gpu
@pytest.mark.parametrize("activation", FORMS)
def test_every_run_gives_the_same_bits(persistent, activation):
    for m, n, k in [(2048, 2048, 2048), (1152, 4352, 4096), (4096, 4096, 256), (2039, 2053, 515)]:
        inputs = operands(m, n, k)
        first, _ = persistent.forward(*inputs, activation=activation)
        for _ in range(20):
            again, saved = persistent.forward(*inputs, activation=activation)
            assert torch.equal(first, again)
            if activation is not None:
                assert torch.equal(saved[3], kernel_ladder.linear(*inputs[:2], backend="cuda.persistent"))


@needs_gpu
def test_more_outputs_than_a_32_bit_index_holds(persistent, gpu_memory):
    m, n = 2**16 + 8, 2**15
    gpu_memory(12 * m * n)
    for rows in (slice(0, 130), slice(m // 2 - 65, m // 2 + 65), slice(m - 130, m)):
        check(persistent, *operands(m, n, 64), "gelu", rows)


@needs_gpu
@pytest.mark.parametrize("chunk", range(20))
def test_random_shapes(persistent, chunk):
    choose = random.Random(chunk)
    torch.manual_seed(chunk)
    for _ in range(25):
        m, n, k = (choose.choice([choose.randint(1, 40), choose.randint(1, 1500)]) for _ in range(3))
        if aligned := choose.random() < 0.6:
            m, n, k = (-(-size // 8) * 8 for size in (m, n, k))
        pads = (0, 8) if aligned else range(9)
        dtype = choose.choice(DTYPES)
        input, weight = (
            matrix(x, k, dtype, transposed=choose.random() < by, pad=choose.choice(pads), offset=choose.choice(pads))
            for x, by in ((m, 0.2), (n, 0.4))
        )
        bias = torch.randn(n, device="cuda").to(dtype) if choose.random() < 0.7 else None
        check(persistent, input, weight, bias, choose.choice(FORMS))


def test_the_last_steps_take_many_rows_and_few():
    names = [v.name for v in table.variants("linear", "cuda")]
    if not names:
        pytest.skip("the extension was not built")
    assert names[-4:] == ["cuda.mma", "cuda.persistent", "cuda.split_k", "cuda.skinny"]
