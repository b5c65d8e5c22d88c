"""linear_cross_entropy in CUDA: products into views and onto sums, several chunks against float64, bits and memory."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

import kernel_ladder
from kernel_ladder.semantics.chunked_loss import sum_dtype
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import needs_gpu, skip_unless_available

#: Dtype, and whether float32 may be rounded to tf32.
DTYPES = [(torch.bfloat16, False), (torch.float16, False), (torch.float32, False), (torch.float32, True)]
#: Rows, features, classes.
SIZES = [(1, 1, 1), (8, 8, 8), (40, 64, 77), (65, 257, 129), (130, 520, 1003), (1024, 1032, 4104)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    found, tf32 = request.param
    if tf32:
        request.getfixturevalue("tf32")
    return found


@pytest.fixture
def chunked() -> ModuleType:
    skip_unless_available("linear_cross_entropy", "cuda")
    import cuda_impl.linear_cross_entropy

    return cuda_impl.linear_cross_entropy


def _normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _assert_close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, before: torch.Tensor | float = 0.0) -> None:
    """Within the rounding of the product and of its sum with `before`, of float32 sums, and of tf32 operands."""
    a, b, of = a.double(), b.double(), torch.finfo(got.dtype)
    product, size = a @ b, a.abs() @ b.abs()
    tf32 = got.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    exact = before + product
    operands = 2.0**-10 if tf32 else 0.0
    bound = (product.abs() + exact.abs() + of.smallest_normal) * of.eps
    bound += size * (operands + (a.shape[1] + 1) * 2.0**-24)
    worst = ((got.double() - exact).abs() / bound).nan_to_num(nan=torch.inf).max().item()
    assert worst <= 1, f"{worst} of the bound, {tuple(got.shape)} {got.dtype}"


@needs_gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_into_views(chunked, dtype, size):
    """Logits in padded rows, and the gradient of some rows of the input: nothing but the padding is written beside."""
    rows, features, classes = size
    x, weight = chunked._readable(_normal(rows, features, dtype=dtype)), _normal(classes, features, dtype=dtype)
    step = chunked._empty_logits(x, weight).stride(0)
    whole = torch.full((rows + 16, step), torch.nan, dtype=dtype, device="cuda")
    logits = whole[8:-8, :classes]
    chunked.multiply(logits, x, weight.mT)
    _assert_close(logits, x, weight.mT)
    assert whole[:8].isnan().all()
    assert whole[-8:].isnan().all()
    gradients = torch.full((rows + 32, features), torch.nan, dtype=dtype, device="cuda")
    chunked.multiply(gradients[16 : 16 + rows], logits, weight)
    _assert_close(gradients[16 : 16 + rows], logits, weight)
    assert gradients[:16].isnan().all()
    assert gradients[16 + rows :].isnan().all()


@needs_gpu
@pytest.mark.parametrize("rung", ["persistent", "stream_k"])
@pytest.mark.parametrize("size", [(65, 264, 129), (512, 512, 1001), (1, 64, 77)], ids=str)
def test_rows_that_end_off_16_bytes(chunked, rung, size):
    """TMA writes whole runs of 16 bytes: what follows a row belongs to somebody else."""
    if (reason := chunked.not_hopper(0)) is not None:
        pytest.skip(reason)
    rows, features, classes = size
    a, b = _normal(rows, features, dtype=torch.bfloat16), _normal(classes, features, dtype=torch.bfloat16).mT
    whole = torch.full((rows, -(-classes // 8) * 8 + 32), torch.nan, dtype=torch.bfloat16, device="cuda")
    output = whole[:, :classes]
    product = torch.ops.kernel_ladder.linear_cross_entropy_product.chunked
    product(a, b, output, rung, False, 0, 0, 0, False)
    _assert_close(output, a, b)
    assert whole[:, classes:].isnan().all()


@needs_gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_added(chunked, dtype, size):
    """The gradient of a weight, once and with the same bits, whatever lies in the padding of its logits."""
    rows, features, classes = size
    x, weight = chunked._readable(_normal(rows, features, dtype=dtype)), _normal(classes, features, dtype=dtype)
    logits = chunked._empty_logits(x, weight)
    logits.as_strided((rows, logits.stride(0)), (logits.stride(0), 1)).fill_(torch.nan)
    logits.copy_(_normal(rows, classes, dtype=dtype))
    before = _normal(classes, features, dtype=sum_dtype(dtype))
    first, second = before.clone(), before.clone()
    for sums in (first, second):
        chunked.add_product(sums, logits.mT, x)
    _assert_close(first, logits.mT, x, before.double())
    assert first.equal(second)


@needs_gpu
def test_operands_that_lie_otherwise(chunked, dtype):
    """Those of rows off 16 bytes, and transposed ones, are added too."""
    for a, b in (
        (_normal(70, 133, dtype=dtype), _normal(70, 61, dtype=dtype)),
        (_normal(133, 72, dtype=dtype).mT, _normal(64, 72, dtype=dtype).mT),
    ):
        sums = _normal(a.shape[1], b.shape[1], dtype=sum_dtype(dtype))
        before = sums.double()
        chunked.add_product(sums, a.mT, b)
        _assert_close(sums, a.mT, b, before)


def _case(rows: int, features: int, classes: int, layout: str = "contiguous", **options: object) -> Case:
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "wide_loss": False}
    shapes = ((rows, features), (classes, features), (rows,))
    return Case("", shapes, {**given, **options}, layout=layout, kinds={2: "some_classes@1"})


@needs_gpu
@pytest.mark.parametrize(
    "case",
    [
        _case(2100, 512, 1000),
        _case(2100, 100, 77, reduction="sum", z_loss=1e-3, wide_loss=True),  # rows of the input off 16 bytes
        _case(1300, 65, 1001, reduction="none", label_smoothing=0.1, wide_loss=True),
        _case(1300, 64, 520, layout="transposed", reduction="none"),
    ],
    ids=["mean", "sum", "none", "transposed"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_several_chunks(chunked, dtype, case):
    """Every row of a gradient, summed over chunks, within the bounds of all rungs; two runs give the same bits."""
    spec, inputs = kernel_ladder.spec("linear_cross_entropy"), make_inputs(case, dtype, "cuda")
    run = functools.partial(kernel_ladder.linear_cross_entropy, backend="cuda.chunked")
    grad = make_grad(spec, inputs, case.options)
    found = agreement(spec, run, inputs, case.options, grad)
    assert found.agrees, str(found)
    leaves = as_leaves(inputs)
    first, second = (torch.autograd.grad(run(*leaves, **case.options), leaves[:2], grad) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


@needs_gpu
@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_memory_holds_the_logits_of_one_chunk(level, gpu_memory):
    """Beside them the gradients, once, and a workspace of the products."""
    skip_unless_available("linear_cross_entropy", level)
    rows, features, classes = 2048, 512, 65536
    gpu_memory(2**30)
    x, weight = (_normal(n, features, dtype=torch.bfloat16).requires_grad_() for n in (rows, classes))
    target = torch.randint(classes, (rows,), device="cuda")

    def both_passes() -> None:
        x.grad = weight.grad = None
        kernel_ladder.linear_cross_entropy(x, weight, target, backend=f"{level}.chunked").backward()

    both_passes()
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_passes()
    gradients, logits, workspace = (rows + classes) * features * 2, 1024 * classes * 2, 2**25
    assert torch.cuda.max_memory_allocated() - before <= gradients + logits + workspace
