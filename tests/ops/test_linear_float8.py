"""Float8 products: quantization, promotion of sums, refused gradients, and what each GPU takes."""

from __future__ import annotations

import pytest
import torch

import cuda_impl
import kernel_ladder as kl
from kernel_ladder import gpu, selection, table
from kernel_ladder.selection.linear_float8 import tiled_where_thin
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs, on_absent_gpu
from torch_ref.linear_float8 import builtin, naive, on_tensor_cores
from torch_ref.linear_float8_samples import cases

from ..conftest import DEVICE, every_variant, skip_unless_it_runs, typical_case, variant_id

OP = "linear_float8"
#: What "auto" takes on Hopper where cuBLAS refuses a call and TMA reads its rows, if the extension was built.
FOR_ALIGNED_ROWS = "cuda.persistent" if "persistent" in cuda_impl.climb(OP) else None
FLOAT8 = torch.float8_e4m3fn
KINDS = typical_case(OP).kinds


def rungs() -> list[table.Variant]:
    return [v for v in every_variant() if v.op == OP]


# ---- quantization --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_quantized_values_are_near(per_row, dtype):
    x = (torch.randn(3, 5, 40, device=DEVICE) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None]).to(dtype)
    quantized, scale = kl.quantize_float8(x, per_row)
    assert quantized.dtype is FLOAT8
    assert quantized.shape == x.shape
    assert scale.dtype is torch.float32
    assert scale.shape == ((3, 5, 1) if per_row else ())
    # Half a unit in the last of four digits; below the normal numbers, half of the smallest one.
    allowed = torch.maximum(x.float().abs() * 2.0**-4, scale * 2.0**-10) * 1.0001
    assert ((quantized.float() * scale - x.float()).abs() <= allowed).all()
    top = quantized.float().abs().amax(-1 if per_row else None)
    assert (top == 448).all()


def test_quantized_rows_of_zeros_and_of_what_is_no_number():
    x = torch.ones(5, 4, device=DEVICE)
    x[0], x[1, 2], x[2, 0] = 0, torch.nan, -torch.inf
    x[3] = torch.finfo(torch.float32).smallest_normal / 2**20  # subnormal
    quantized, scale = kl.quantize_float8(x)
    back = quantized.float() * scale
    assert scale[0] == 1
    assert (back[0] == 0).all()
    assert back[1:3].isnan().all()
    assert (scale[3:] >= torch.finfo(torch.float32).smallest_normal).all()
    torch.testing.assert_close(back[4], x[4])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (7,), ()])
def test_quantized_shapes(shape):
    per_row = shape != ()
    quantized, scale = kl.quantize_float8(torch.ones(shape, device=DEVICE).requires_grad_(), per_row)
    assert quantized.shape == shape
    assert scale.shape == ((*shape[:-1], 1) if per_row else ())
    assert not quantized.requires_grad
    assert not scale.requires_grad
    assert (quantized.float() * scale == 1).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, r"quantize_float8: argument `x` must be a torch\.Tensor, got list"),
        ((torch.ones(2).int(),), TypeError, r"`x` has dtype int32; accepted are float16, bfloat16, float32"),
        ((torch.ones(2, 2), 1), TypeError, r"`per_row` must be a bool, got int"),
        ((torch.ones(()),), ValueError, r"`per_row` must be False for a tensor of no dimension"),
    ],
)
def test_quantization_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        kl.quantize_float8(*arguments)


def test_a_layer_in_five_lines():
    x, w, b = (torch.randn(shape, device=DEVICE) for shape in ((2, 33, 256), (48, 256), (48,)))
    weight, weight_scale = kl.quantize_float8(w)
    input, input_scale = kl.quantize_float8(x)
    y = kl.linear_float8(input, weight, input_scale, weight_scale, b)
    expected = torch.nn.functional.linear(x, w, b)
    assert y.dtype is torch.bfloat16
    assert y.shape == expected.shape
    # Each product errs by at most 2⁻⁴ + 2⁻⁴ of itself, in either direction: their sum by far less of its norm.
    assert (y.float() - expected).norm() < 2.0**-4 * expected.norm()


# ---- sums ----------------------------------------------------------------------------------------------------------


def test_the_formula_is_pytorchs_product():
    """One scale for each tensor, which every version of PyTorch takes on the CPU as well."""
    inputs = make_inputs(next(c for c in cases() if c.id == "aligned"), torch.float32, "cpu")
    found = builtin(*inputs, out_dtype=torch.float32)
    torch.testing.assert_close(naive(*inputs, out_dtype=torch.float32), found, rtol=1e-5, atol=1e-4)


def summed(k: int) -> tuple[torch.Tensor, ...]:
    """Operands whose sums grow with every product, and have digits enough to lose some."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=generator).add(0.5).to(FLOAT8) for shape in ((4, k), (8, k)))
    return a, b, torch.tensor(1.0), torch.tensor(1.0), None


@pytest.mark.parametrize("k", [0, 1, 31, 33, 128, 1000])
def test_the_model_of_tensor_cores_errs_as_much_as_they_may(k):
    inputs = summed(k)
    exact = naive(*(x if x is None else x.double() for x in inputs), out_dtype=torch.float64)
    error = (on_tensor_cores(*inputs, out_dtype=torch.float32) - exact).abs()
    # An instruction cuts 33 terms, and their sum, of at most the size of 128 products.
    most = 34 * 2.0**-13 * 128 * 1.5**2 * -(-k // 32) if k else 0
    assert (error <= most).all()
    if k >= 128:
        assert error.max() > 2.0**-22 * exact.abs().max(), "it drops digits that float32 has"


def test_sums_that_are_not_promoted_are_rejected():
    """What a kernel would compute that left all of its sums to Hopper's tensor cores."""
    spec = kl.spec(OP)
    inputs, options = summed(8192), {"out_dtype": torch.float32}

    def never_promoted(*inputs, **options):
        return on_tensor_cores(*inputs, **options, promoted_every=8192)

    assert agreement(spec, on_tensor_cores, inputs, options).agrees
    assert agreement(spec, naive, inputs, options).agrees
    assert not agreement(spec, never_promoted, inputs, options).agrees


@pytest.mark.parametrize("variant", rungs(), ids=variant_id)
@pytest.mark.parametrize("cancels", [False, True])
def test_the_largest_numbers(variant, cancels):
    """Sums of the largest products, past the range of float16, or of none at all where they cancel."""
    if variant.level == "compile" and DEVICE.type == "cpu":
        pytest.skip("a C++ compiler takes seconds; torch.naive is its formula")
    k, scale = 192, torch.tensor(1.0, device=DEVICE)
    a = torch.full((16, k), 448.0, device=DEVICE)
    if cancels:
        a[:, ::2] *= -1
    b = torch.full((16, k), 448.0, device=DEVICE)
    inputs = (a.to(FLOAT8), b.to(FLOAT8), scale, scale, None)
    skip_unless_it_runs(variant, inputs, {"out_dtype": torch.bfloat16})
    output = kl.linear_float8(*inputs, backend=variant.name)
    assert (output == (0.0 if cancels else (k * 448**2 * scale).bfloat16())).all()


@pytest.mark.parametrize("variant", rungs(), ids=variant_id)
def test_vectors_that_begin_anywhere(variant):
    """Scales per row and a bias that begin one element past a multiple of 16 bytes, in a rung's first call."""
    if variant.level == "compile" and DEVICE.type == "cpu":
        pytest.skip("a C++ compiler takes seconds; torch.naive is its formula")
    case = Case("", ((48, 64), (32, 64), (48, 1), (32, 1), (32,)), kinds=KINDS)
    *inputs, bias = make_inputs(case, torch.bfloat16, DEVICE)
    later = tuple(
        torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() < 64 else x for x in (*inputs, bias)
    )
    options = {"out_dtype": torch.bfloat16}
    skip_unless_it_runs(variant, later, options)
    found = agreement(kl.spec(OP), lambda *x, **of: kl.linear_float8(*x, **of, backend=variant.name), later, options)
    assert found.agrees, str(found)


@pytest.mark.parametrize("variant", [v for v in rungs() if v.level in ("torch", "triton")], ids=variant_id)
@pytest.mark.parametrize("far", ["input", "weight"])
def test_strides_beyond_32_bits(variant, far, gpu_memory):
    """The last row of an operand lies 2³¹ elements past its first. On a CPU that is address space alone."""
    if DEVICE.type == "cuda":
        gpu_memory(3 * 2**30)
    inputs = list(make_inputs(Case("", ((3, 32), (16, 32), (), (), None), kinds=KINDS), torch.float32, DEVICE))
    place = ("input", "weight").index(far)
    rows, step = inputs[place].shape[0], -(-(2**31) // (inputs[place].shape[0] - 1)) // 16 * 16 + 16
    memory = torch.empty((rows - 1) * step + 32, dtype=torch.uint8, device=DEVICE).view(FLOAT8)
    moved = memory.as_strided(inputs[place].shape, (step, 1)).copy_(inputs[place])
    of_call = tuple(moved if i == place else x for i, x in enumerate(inputs))
    options = {"out_dtype": torch.float32}
    skip_unless_it_runs(variant, of_call, options)
    found = agreement(kl.spec(OP), lambda *x, **of: kl.linear_float8(*x, **of, backend=variant.name), of_call, options)
    assert found.agrees, str(found)


# ---- what is taken -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", rungs(), ids=variant_id)
def test_a_gradient_is_refused(variant):
    case = Case("", ((16, 32), (16, 32), (), (), (16,)), {"out_dtype": torch.float32}, kinds=KINDS)
    *inputs, bias = make_inputs(case, torch.float32, DEVICE)
    with torch.no_grad():
        skip_unless_it_runs(variant, (*inputs, bias), case.options)
    bias.requires_grad_()
    with pytest.raises(kl.UnsupportedError, match=r"float8 products are for inference .* under torch\.no_grad\(\)"):
        kl.linear_float8(*inputs, bias, out_dtype=torch.float32, backend=variant.name)
    if variant.level == "compile" and DEVICE.type == "cpu":
        return  # test_agreement.py compiles it
    with torch.no_grad():
        output = kl.linear_float8(*inputs, bias, out_dtype=torch.float32, backend=variant.name)
    assert not output.requires_grad


def taken(gpu_name: str, m: int, n: int, k: int, **more) -> tuple[str, dict[str, str]]:
    """The rung that "auto" takes on a GPU, and why others were passed over."""
    options = {"out_dtype": more.pop("out_dtype", torch.bfloat16)}
    shapes = ((m, k), (n, k), (m, 1), (n, 1), (n,) if more.pop("bias", False) else None)
    case = Case("", shapes, options, kinds=KINDS, **more)
    with gpu.pretend(gpu_name), on_absent_gpu(case, torch.bfloat16, gradients=False) as inputs:
        tried = selection.explain(OP, "auto", inputs, options)
    return tried[-1][0], dict(tried[:-1])


@pytest.mark.skipif(table.unavailable(OP, "triton") is not None, reason="Triton is unavailable")
@pytest.mark.parametrize(
    ("call", "expected", "reason"),
    [
        (("H100", 64, 128, 256), "torch.builtin", None),
        (("H100", 65, 127, 256), FOR_ALIGNED_ROWS or "triton.persistent", "multiples of 16, got 127 and 256"),
        (("H100", 63, 127, 256), FOR_ALIGNED_ROWS or "triton.tiled", "multiples of 16, got 127 and 256"),
        (("H100", 63, 128, 255), "triton.tiled", "multiples of 16, got 128 and 255"),
        (("L4", 64, 128, 256), "torch.builtin", None),
        (("L4", 64, 128, 255), "torch.naive", "need compute capability 9.x or 10.x, L4 has 8.9"),
        (("RTX 5090", 64, 128, 255), "torch.naive", "need compute capability 9.x or 10.x, RTX 5090 has 12.0"),
        (("A100", 64, 128, 256), "torch.naive", "compute capability 8.9 or later, A100 has 8.0"),
    ],
)
def test_auto_on_a_gpu(call, expected, reason):
    found, passed_over = taken(*call)
    assert found == expected
    assert reason is None or any(reason in each for each in passed_over.values()), passed_over


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"out_dtype": torch.float16}, "gives bfloat16 alone with scales per row, got float16"),
        ({"out_dtype": torch.float32}, "gives bfloat16 alone with scales per row, got float32"),
    ],
)
def test_what_pytorchs_product_does_not_take(more, reason):
    _, passed_over = taken("H100", 64, 128, 256, **more)
    assert reason in passed_over["torch.builtin"]


@pytest.mark.parametrize(
    ("rows", "outputs", "names"), [((2, 32), 4096, True), ((65,), 4096, False), ((512,), 64, True)]
)
def test_few_rows_have_tiles_of_their_own(rows, outputs, names):
    input, weight = (torch.empty(*shape, 32, device="meta") for shape in (rows, (outputs,)))
    assert tiled_where_thin((input, weight), {}) == (("triton.tiled",) if names else ())
