"""Attention on Hopper's tensor cores: which calls each step takes, and many tiles of every shape against float64."""

from __future__ import annotations

import math
import re
from unittest import mock

import pytest
import torch

import kernel_ladder
from cuda_impl import attention
from kernel_ladder import autograd, table
from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

STEPS = ("cuda.wgmma", "cuda.warp_specialized", "cuda.pingpong", "cuda.persistent")
ALL = (*STEPS, "triton.warp_specialized")


def step(name: str) -> table.Variant:
    found = [v for v in table.variants("attention") if v.name == name]
    return found[0] if found else pytest.skip(f"{name} is not installed")


# ---- without a GPU -------------------------------------------------------------------------------------------------


def operands(d: int = 64, d_v: int = 64, batch: tuple[int, ...] = (2,), layout: str = "contiguous") -> tuple:
    def operand(size: int) -> torch.Tensor:
        if layout == "bshd":
            return torch.empty(*batch, 100, 4, size, dtype=torch.bfloat16).transpose(-2, -3)
        offset = 4 if layout == "offset" else 0
        shape = (*batch, 4, 100, size)
        return torch.empty(math.prod(shape) + offset, dtype=torch.bfloat16)[offset:].view(shape)

    return operand(d), operand(d), operand(d_v)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (operands(), None),
        (operands(d=8, d_v=128), None),
        (operands(layout="bshd"), None),
        (operands(layout="offset"), "those of `query` do not"),
        (operands(d=60), "multiples of 8, got 60 and 64"),
        (operands(d=136), "takes head dimensions up to 128, got 136"),
        (operands(d=192, d_v=128), "takes head dimensions up to 128, got 192"),
        (operands(d_v=256), "takes head dimensions up to 128, got 256"),
        (operands(batch=()), "takes 4 dimensions"),
        ((*operands(), torch.ones(100, 100, dtype=torch.bool)), "no mask in memory"),
    ],
)
def test_what_a_step_does_not_take_is_said(inputs, reason):
    with mock.patch.object(attention, "_runs_hopper_steps", return_value=True):
        said = attention.hopper_unsupported("pingpong", 128)(*inputs)
    assert (said is None) == (reason is None), said
    assert reason is None or re.search(reason, said)


def _reason(*inputs: torch.Tensor) -> str | None:
    return attention.hopper_unsupported("persistent", 256)(*inputs)


def test_persistent_takes_192_and_128(monkeypatch):
    monkeypatch.setattr(attention, "_runs_hopper_steps", lambda device, dtype: True)
    assert _reason(*operands(d=192, d_v=128)) is None


def test_memory_that_does_not_begin_on_16_bytes_is_not_for_tma(monkeypatch):
    whole = torch.zeros(1024 + 8, dtype=torch.bfloat16)
    off = torch.from_dlpack(whole[4 : 4 + 1024]).view(1, 2, 32, 16)
    if off.storage_offset() != 0 or off.data_ptr() % 16 == 0:
        pytest.skip("this PyTorch tells where foreign memory begins by its offset, or has moved it")
    fine = torch.zeros(1, 2, 32, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "_runs_hopper_steps", lambda device, dtype: True)
    assert _reason(fine, fine, fine) is None
    assert "those of `key` do not" in _reason(fine, off, fine)


def test_the_gradient_of_the_output_is_copied_where_tma_cannot_read_it():
    grad = torch.randn(2, 4, 100, 64, dtype=torch.bfloat16)
    expanded, off = grad[:1, :1, :1].expand(2, 4, 100, 64), grad.flatten()[4 : 4 + 1024].view(1, 1, 16, 64)
    for name in attention.HOPPER_BACKWARD:
        assert attention._read_by_kernels(name, grad) is grad
        assert attention._read_by_kernels(name, grad.transpose(1, 2)).data_ptr() == grad.data_ptr()
        for x in (expanded, off):
            read = attention._read_by_kernels(name, x)
            assert torch.equal(read, x)
            assert attention.read_by_tma(read)
    assert attention._read_by_kernels("flash", expanded) is expanded


def test_an_output_whose_rows_are_not_dense_is_copied_for_the_backward():
    output = torch.randn(2, 4, 100, 64, dtype=torch.bfloat16)
    saved = (None, None, None, output.transpose(2, 3), "lse", None)
    assert attention._with_readable_output("flash", saved) is saved
    for name in attention.HOPPER_BACKWARD:
        for readable in (output, output.transpose(1, 2)):
            assert attention._with_readable_output(name, (None, None, None, readable, "lse"))[3] is readable
        found = attention._with_readable_output(name, saved)
        assert found[3].is_contiguous()
        assert torch.equal(found[3], saved[3])
        assert found[4:] == saved[4:]


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ((2, 4, 100, 64), (0, 1, 2, 3), (12800, 3200, 32, 1)),
        ((2, 100, 4, 64), (0, 2, 1, 3), (12800, 32, 128, 1)),  # heads lie inside rows, as those of a layer's product
        ((2, 100, 1, 64), (0, 2, 1, 3), (3200, 3200, 32, 1)),
        ((100, 4, 64), (1, 0, 2), (32, 128, 1)),
        ((2, 3, 100, 4, 64), (0, 1, 3, 2, 4), (38400, 12800, 32, 128, 1)),
        ((100, 2, 4, 64), (1, 2, 0, 3), (12800, 32, 128, 1)),
    ],
)
def test_results_are_ordered_as_the_operand(shape, order, expected):
    assert attention.ordered_like(torch.empty(shape).permute(order), 32).stride() == expected


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["cuda.naive", "cuda.flash", *ALL, "triton.flash"])
def test_results_of_a_layer_are_read_by_the_next_without_a_copy(name, compiled):
    inputs = [x.cuda().normal_().requires_grad_() for x in operands(layout="bshd")]
    skip_unless_it_runs(step(name), tuple(inputs))

    def run(*x: torch.Tensor) -> torch.Tensor:
        return kernel_ladder.attention(*x, is_causal=True, backend=name)

    output = (torch.compile(run) if compiled else run)(*inputs)
    assert output.stride() == inputs[0].stride()
    grads = torch.autograd.grad(output, inputs, torch.randn_like(output))
    assert [x.stride() for x in grads] == [x.stride() for x in inputs]
    expected = kernel_ladder.attention(*inputs, is_causal=True, backend="torch.builtin")
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


def test_the_default_is_the_last_step():
    """After it comes `split_kv`, which takes few queries only."""
    names = [v.name for v in table.variants("attention", "cuda")]
    if not names:
        pytest.skip("the extension was not built")
    assert names[-len(STEPS) - 1 :] == [*STEPS, "cuda.split_kv"]


# ---- on a GPU ------------------------------------------------------------------------------------------------------

BANDS = {
    "full": {"is_causal": False},
    "causal": {"is_causal": True},
    "lower-right": {"is_causal": LOWER_RIGHT},
    "window": {"is_causal": False, "window_size": (300, 20)},
}


@needs_gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(
    ("d", "d_v", "dtype"),
    [
        (64, 64, torch.bfloat16),
        (128, 128, torch.bfloat16),
        (128, 128, torch.float16),
        (96, 96, torch.bfloat16),
        (160, 160, torch.bfloat16),
        (256, 256, torch.bfloat16),
        (40, 72, torch.bfloat16),
        (200, 8, torch.float16),
    ],
    ids=str,
)
def test_many_tiles(name, band, d, d_v, dtype, request):
    """More tiles than a GPU has room for at once, of lengths that no tile divides, in both orders of memory."""
    spec, variant = kernel_ladder.spec("attention"), step(name)
    alike = (d, dtype) in ((128, torch.bfloat16), (200, torch.float16))
    if variant.level == "triton" and alike and not request.config.getoption("--every-case"):
        pytest.skip("takes ten seconds to compile, as the dtype or width beside it does; --every-case runs it")
    lengths = [(700, 1100, "bshd"), (1300, 600, "contiguous"), (1, 4097, "contiguous")]
    if d == 64:  # three consumer warpgroups a tile, more tiles than SMs
        lengths += [(1500, 3300, "bshd"), (500, 3300, "contiguous")]
    for seqlen_q, seqlen_k, layout in lengths:
        options = {"scale": None, "enable_gqa": True, "return_lse": True, **BANDS[band]}
        shapes = ((6, 12, seqlen_q, d), (6, 4, seqlen_k, d), (6, 4, seqlen_k, d_v))
        inputs = make_inputs(Case("", shapes, options, layout=layout), dtype, DEVICE)
        skip_unless_it_runs(variant, inputs, options)
        result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, options)
        assert result.agrees, f"{shapes}: {result}"


@needs_gpu
@pytest.mark.parametrize("band", ["full", "lower-right", "window"])
@pytest.mark.parametrize(
    ("d", "d_v", "dtype"), [(64, 64, torch.float16), (128, 72, torch.bfloat16), (256, 256, torch.bfloat16)]
)
def test_runs_of_keys(band, d, d_v, dtype):
    """`split_kv` with one run a head, runs that are a cluster of two, four and eight, and more than a cluster has."""
    spec, variant = kernel_ladder.spec("attention"), step("cuda.split_kv")
    for batch, heads, heads_kv, seqlen_q, seqlen_k in [
        (70, 8, 2, 1, 300),
        (16, 16, 4, 4, 4100),
        (15, 32, 2, 1, 5000),
        (2, 16, 8, 7, 9001),
        (1, 5, 1, 3, 20000),
    ]:
        options = {"scale": None, "enable_gqa": True, "return_lse": True, **BANDS[band]}
        shapes = ((batch, heads, seqlen_q, d), (batch, heads_kv, seqlen_k, d), (batch, heads_kv, seqlen_k, d_v))
        inputs = make_inputs(Case("", shapes, options), dtype, DEVICE)
        skip_unless_it_runs(variant, inputs, options)
        result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, options)
        assert result.agrees, f"{shapes}: {result}"
        first = variant.forward(*inputs, **options)[0]
        torch.testing.assert_close(variant.forward(*inputs, **options)[0], first, rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("name", ALL)
def test_steps_repeat_in_every_bit(name):
    """A hundred times: whoever reads a tile before it has landed, or after it was overwritten, does not."""
    inputs = make_inputs(Case("", ((4, 8, 1500, 128),) * 3), torch.bfloat16, DEVICE)
    variant = step(name)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "scale": None, "enable_gqa": False}
        skip_unless_it_runs(variant, inputs, options)
        first = variant.forward(*inputs, **options)[0]
        for _ in range(100):
            torch.testing.assert_close(variant.forward(*inputs, **options)[0], first, rtol=0, atol=0)


OWN_BACKWARD = ("cuda.wgmma", "cuda.warp_specialized")


def _backward_agrees(variant: table.Variant, shapes: tuple, dtype: torch.dtype, band: dict, layout: str) -> None:
    options = {"scale": None, "enable_gqa": True, "return_lse": True, **band}
    inputs = make_inputs(Case("", shapes, options, layout=layout), dtype, DEVICE)
    skip_unless_it_runs(variant, inputs, options)
    sizes = (*shapes[0][:-1], shapes[2][-1])
    grad = (torch.randn(sizes, device=DEVICE).to(dtype), torch.randn(sizes[:-1], device=DEVICE))
    run = lambda *x, **o: autograd.run(variant, x, o)  # noqa: E731
    result = agreement(kernel_ladder.spec("attention"), run, inputs, options, grad)
    assert result.agrees, f"{shapes}: {result}"


@needs_gpu
@pytest.mark.parametrize("name", OWN_BACKWARD)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(
    ("d", "d_v", "dtype"),
    [(64, 64, torch.bfloat16), (128, 128, torch.bfloat16), (128, 128, torch.float16), (40, 72, torch.bfloat16)],
    ids=str,
)
def test_backward_at_the_edges_of_tiles(name, band, d, d_v, dtype):
    """Lengths around tiles of 64 and 128 rows, few and many steps, heads that share keys."""
    for seqlen_q, seqlen_k in [(1, 1), (127, 127), (128, 128), (129, 129), (255, 255), (1, 300), (300, 1), (129, 700)]:
        shapes = ((2, 6, seqlen_q, d), (2, 2, seqlen_k, d), (2, 2, seqlen_k, d_v))
        _backward_agrees(step(name), shapes, dtype, BANDS[band], "bshd")


@needs_gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_passes_at_192_and_128(name, band, dtype):
    """Head dimensions of query and value that differ. A rung that takes 128 at most refuses, and says so."""
    for seqlen_q, seqlen_k, layout in [(129, 700, "bshd"), (700, 1100, "contiguous"), (1300, 600, "contiguous")]:
        shapes = ((2, 6, seqlen_q, 192), (2, 2, seqlen_k, 192), (2, 2, seqlen_k, 128))
        _backward_agrees(step(name), shapes, dtype, BANDS[band], layout)


@needs_gpu
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(
    ("d", "d_v", "dtype"),
    [(256, 256, torch.bfloat16), (256, 256, torch.float16), (192, 128, torch.bfloat16), (136, 200, torch.bfloat16)],
    ids=str,
)
def test_wide_backward_at_the_edges_of_tiles(band, d, d_v, dtype):
    """The backward pass of `wgmma` beyond the head dimension where its forward pass ends."""
    for seqlen_q, seqlen_k in [(63, 65), (64, 64), (129, 129), (40, 300), (300, 40), (129, 700), (700, 129)]:
        shapes = ((2, 6, seqlen_q, d), (2, 2, seqlen_k, d), (2, 2, seqlen_k, d_v))
        _backward_agrees(step("cuda.persistent"), shapes, dtype, BANDS[band], "bshd")


@needs_gpu
@pytest.mark.parametrize(
    ("name", "d"), [*((n, d) for n in OWN_BACKWARD for d in (64, 128)), *(("cuda.persistent", d) for d in (192, 256))]
)
@pytest.mark.parametrize("band", BANDS)
def test_backward_of_many_tiles(name, band, d):
    """More tiles than a GPU has room for at once, which add to one dQ."""
    for seqlen_q, seqlen_k in [(1500, 3300), (2000, 1000)]:
        shapes = ((4, 12, seqlen_q, d), (4, 4, seqlen_k, d), (4, 4, seqlen_k, d))
        _backward_agrees(step(name), shapes, torch.bfloat16, BANDS[band], "contiguous")


@needs_gpu
@pytest.mark.parametrize(
    ("name", "d"), [*((n, d) for n in OWN_BACKWARD for d in (64, 128)), *(("cuda.persistent", d) for d in (192, 256))]
)
def test_backward_repeats_in_every_bit(name, d):
    """Blocks of other heads run beside, so that the order in which blocks come to a tile of dQ changes."""
    inputs = make_inputs(Case("", ((4, 16, 1500, d), (4, 8, 1500, d), (4, 8, 1500, d))), torch.bfloat16, DEVICE)
    variant = step(name)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "scale": None, "enable_gqa": True}
        skip_unless_it_runs(variant, inputs, options)
        output, saved = variant.forward(*inputs, **options)
        grad = torch.randn(output.shape, device=DEVICE).to(output.dtype)
        first = variant.backward(saved, grad, (True,) * 3)
        for _ in range(50):
            again = variant.backward(saved, grad, (True,) * 3)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@needs_gpu
@pytest.mark.parametrize("name", OWN_BACKWARD)
def test_backward_of_an_expanded_gradient(name):
    inputs = make_inputs(Case("", ((2, 4, 300, 64),) * 3), torch.bfloat16, DEVICE)
    options = {"is_causal": True, "scale": None, "enable_gqa": False}
    skip_unless_it_runs(step(name), inputs, options)
    grad = torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(2, 4, 300, 64)
    run = lambda *x, **o: autograd.run(step(name), x, o)  # noqa: E731
    result = agreement(kernel_ladder.spec("attention"), run, inputs, options, grad)
    assert result.agrees, str(result)
