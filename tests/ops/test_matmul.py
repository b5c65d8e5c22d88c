"""Matrix products beside the samples: every layout, thin and long ones, what descriptors refuse, the same bits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_impl
import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.errors import UnsupportedError
from kernel_ladder.selection import matmul_parts
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, every_variant, needs_gpu, skip_unless_available, skip_unless_it_runs, variant_id

VARIANTS = [v for v in every_variant("triton", "cuda") if v.op == "matmul"]
DESCRIBED = ("triton.tma", "triton.persistent")
#: M, N, K: aligned, ragged in what need not be aligned, thin, long.
SHAPES = [(64, 72, 80), (130, 200, 136), (1, 136, 264), (16, 72, 520), (40, 16, 2056), (65, 67, 71)]
if DEVICE.type == "cuda":
    SHAPES += [
        (1, 8192, 8192),
        (16, 4096, 8192),
        (64, 8192, 4096),
        (2048, 2056, 2040),
        (512, 512, 65536),
        (1999, 2003, 2011),
    ]


def laid_out(rows: int, columns: int, along_rows: bool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    shape = (rows, columns) if along_rows else (columns, rows)
    (x,) = make_inputs(Case("", (shape,)), dtype, DEVICE, seed)
    return x if along_rows else x.mT


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_every_layout_and_the_same_bits_again(variant, dtype, layout, shape):
    m, n, k = shape
    if variant.name in ("cuda.naive", "triton.naive") and m * n * k > 2**31:
        pytest.skip("it would run for long, and larger shapes show nothing more of it")
    inputs = laid_out(m, k, layout[0] == "N", dtype, 1), laid_out(k, n, layout[1] == "N", dtype, 2)
    skip_unless_it_runs(variant, inputs)
    results = []

    def run(*x: torch.Tensor) -> torch.Tensor:
        results.append(autograd.run(variant, x, {}))
        return results[-1]

    result = agreement(kernel_ladder.spec("matmul"), run, inputs, {})
    assert result.agrees, str(result)
    for _ in range(2 if DEVICE.type == "cuda" else 1):  # interpreted, one thread does all, in one order
        assert torch.equal(run(*inputs), results[0])


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (
            lambda x: x(64, 68)[:, :65],
            lambda x: x(65, 64),
            "one stride of 1 and the other a multiple of 8, got 68 and 1",
        ),
        (
            lambda x: x(64, 128)[:, ::2],
            lambda x: x(64, 64),
            "one stride of 1 and the other a multiple of 8, got 128 and 2",
        ),
        (lambda x: x(64, 72)[:, 1:65], lambda x: x(64, 64), "must start on 16 bytes"),
        (lambda x: x(1, 64).expand(64, 64), lambda x: x(64, 64), "got 0 and 1"),
        (lambda x: x(2, 64, 3, 64).transpose(1, 2), lambda x: x(2, 3, 64, 64), "batches must lie at one stride"),
        (lambda x: x(64, 64).float(), lambda x: x(64, 64).float(), "float32 is for `tiled`"),
    ],
    ids=["pitch", "step", "start", "expanded", "batches", "float32"],
)
def test_what_a_descriptor_cannot_take_is_refused_with_its_reason(name, a, b, reason):
    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)

    inputs = a(make), b(make)
    (variant,) = (v for v in VARIANTS if v.name == name)
    skip_unless_it_runs(variant)
    with pytest.raises(UnsupportedError, match=reason):
        kernel_ladder.matmul(*inputs, backend=name)
    kernel_ladder.matmul(*inputs, backend="triton")  # the level has a step that takes them


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize(
    "batches",
    [((3, 64, 72), (3, 72, 40)), ((3, 64, 72), (72, 40)), ((64, 72), (3, 72, 41 * 8)), ((1, 72), (3, 72, 40))],
    ids=str,
)
def test_batches_of_descriptors(name, batches):
    (variant,) = (v for v in VARIANTS if v.name == name)
    a, b = make_inputs(Case("", batches), torch.bfloat16, DEVICE)
    for x, y in ((a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
        skip_unless_it_runs(variant, (x, y))
        result = agreement(kernel_ladder.spec("matmul"), lambda *t: autograd.run(variant, t, {}), (x, y), {})
        assert result.agrees, str(result)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_no_tensor_outlives_its_last_use(variant):
    """Launches are remembered; the tensors that they were first made for are not."""
    inputs = make_inputs(Case("", ((16, 104), (104, 88))), torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, inputs)
    output = autograd.run(variant, inputs, {})
    alive = [weakref.ref(x) for x in (*inputs, output)]
    del inputs, output
    gc.collect()
    assert [x() for x in alive] == [None] * 3


@settings(deadline=None, max_examples=200)
@given(
    batches=st.integers(1, 40),
    m=st.integers(1, 20_000),
    n=st.integers(1, 20_000),
    row_bytes=st.tuples(st.sampled_from([0, 256, 4096, 70_000, 1_000_000]), st.sampled_from([256, 8192, 500_000])),
    per_batch=st.tuples(st.booleans(), st.booleans()),
)
def test_parts_make_every_output_once_in_the_memory_they_may_take(batches, m, n, row_bytes, per_batch):
    """Of products whose operands are copied: each part's copies fit, and no output is left out or made twice."""
    most, sms, tile_m, tile_n = 64 * 2**20, 132, 128, 256
    along_k = max(row_bytes)
    copied = [
        {"of_batch": size * row, "of_tile": tile * row, "per_batch": own}
        for size, row, tile, own in zip((m, n), row_bytes, (tile_m, tile_n), per_batch, strict=True)
    ]
    parts = matmul_parts.parts_of(batches, m, n, along_k, *(matmul_parts.Copied(**x) for x in copied), most, sms)
    if (extension := cuda_impl.extension()) is not None:  # the selection counts on the parts that the kernels make
        of_kernels = extension.matmul_parts(
            batches, m, n, along_k, *(extension.CopiedOperand(**x) for x in copied), most=most, sms=sms
        )
        assert [tuple(part) for part in of_kernels] == parts
    fits = m * row_bytes[0] + n * row_bytes[1] <= most
    assert parts or not fits
    made = set()
    for batch, count, m0, rows, n0, columns in parts:
        copies = [rows * row_bytes[0], columns * row_bytes[1]]
        assert sum(c * (count if own else 1) for c, own in zip(copies, per_batch, strict=True)) <= most
        assert (rows, columns) == (m, n) if fits else count == 1
        if not fits:  # tiles are not split, so that starts tell what a part has
            assert m0 % tile_m == n0 % tile_n == 0
            assert m0 + rows == m or rows % tile_m == 0
            assert n0 + columns == n or columns % tile_n == 0
        for one in range(batch, batch + count):
            for i in range(m0 // tile_m, -(-(m0 + rows) // tile_m)):
                made.update((one, i, j) for j in range(n0 // tile_n, -(-(n0 + columns) // tile_n)))
    tiles = -(-m // tile_m) * -(-n // tile_n)
    assert sum(count * rows * columns for _, count, _, rows, _, columns in parts) == (batches * m * n if parts else 0)
    assert len(made) == (batches * tiles if parts else 0)
    if parts and not fits:
        _, _, _, rows, _, columns = parts[0]
        full = -(-rows // tile_m) * -(-columns // tile_n)
        assert full / (-(-full // sms) * sms) >= 0.2  # fuller than plain loads are fast


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_unaligned_operands_of_large_products_are_copied_for_descriptors(layout, monkeypatch):
    skip_unless_available("matmul", "triton")
    from triton_impl.matmul import descriptors

    spec, rung = kernel_ladder.spec("matmul"), "triton.persistent"
    (variant,) = (v for v in table.variants("matmul", "triton") if v.name == rung)
    for m, n, k in ((33, 29, 35), (17, 64, 51), (40, 33, 64)):
        made = make_inputs(Case("", ((m, k), (k, n)), {}), torch.bfloat16, DEVICE)
        inputs = tuple(x if order == "N" else x.mT.contiguous().mT for x, order in zip(made, layout, strict=True))
        monkeypatch.setattr(descriptors, "COPIED_FROM", 2**28)
        refused = variant.unsupported(*inputs)
        monkeypatch.setattr(descriptors, "COPIED_FROM", 2**10)
        skip_unless_it_runs(variant, inputs)
        assert refused is None or "multiple of 8" in refused
        grad = make_grad(spec, inputs, {})
        for _ in range(2):  # a known launch copies again
            result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, {}, grad)
            assert result.agrees, f"{m}x{n}x{k}: {result}"


@needs_gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_a_gradient_of_more_elements_than_a_32_bit_index_holds(variant, gpu_memory):
    """An expanded operand has short offsets, its gradient has not."""
    rows, columns, few = 2**16 + 1, 2**15, 16
    gpu_memory(3 * 2 * rows * columns)
    a, grad = (torch.randn(few, n, dtype=torch.bfloat16, device="cuda") for n in (rows, columns))
    b = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(rows, columns)
    skip_unless_it_runs(variant, (a, b))
    _, found = variant.backward((a, b), grad, (False, True))
    assert found.shape == b.shape
    for some in (slice(0, 64), slice(rows - 64, rows)):
        exact = a[:, some].double().mT @ grad.double()
        assert compare("gradient", found[some], exact, None).agrees
