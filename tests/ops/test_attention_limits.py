"""Attention past 65,535 batches or heads, far along strides, and beside masks that PyTorch's own kernels fault on."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.semantics.masks import LOWER_RIGHT
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.testing.samples import make_inputs
from torch_ref import attention_builtin

from ..conftest import DEVICE, needs_gpu, skip_unless_it_runs

VARIANTS = [v for v in table.variants("attention") if v.level != "compile"]
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": False}


def gradients(output: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output, leaves, torch.ones_like(output))


@needs_gpu
@pytest.mark.parametrize("shape", [(70_000, 1), (1, 70_000), (300, 300)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_many_batches_and_heads(variant, shape, gpu_memory):
    """The right answer or a refusal, where the axes of a grid end at 65,535."""
    gpu_memory(8 * 2**30)
    inputs = as_leaves(make_inputs(Case("", ((*shape, 3, 16),) * 3), torch.bfloat16, DEVICE))
    skip_unless_it_runs(variant, inputs, OPTIONS)
    output = kernel_ladder.attention(*inputs, backend=variant.name)
    found = (output, *gradients(output, inputs))
    expected = kernel_ladder.attention(*inputs, backend="torch.naive")
    for actual, wanted in zip(found, (expected, *gradients(expected, inputs)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)


@needs_gpu
@pytest.mark.parametrize("variant", table.variants("attention_varlen"), ids=lambda v: v.name)
def test_many_sequences(variant):
    sequences = 70_000
    query, key, value = make_inputs(Case("", ((sequences, 1, 16),) * 3), torch.bfloat16, DEVICE)
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)
    options = {**OPTIONS, "max_seqlen_q": 1, "max_seqlen_k": 1}
    if variant.level == "compile" or variant.name in ("torch.naive", "xla.jit"):
        pytest.skip("its matrix of scores would be of all queries with all keys")
    skip_unless_it_runs(variant, (query, key, value, offsets, offsets), options)
    # One key each: the output is its value.
    torch.testing.assert_close(variant.output(query, key, value, offsets, offsets, **options), value)


def views(keys: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Masks of (2, 2, 5, keys) in all the ways in which they lie in memory."""
    wide = torch.randn(2, 2, 5, keys + 11, device=DEVICE).to(dtype)
    return {
        "offset": wide[..., 1 : keys + 1],
        "offset-row": wide[0, 0, 0, 1 : keys + 1],
        "expanded-offset": wide[:1, :1, :1, 3 : keys + 3].expand(2, 2, 5, keys),
        "column": wide[..., 1:2],
        "number": wide[0, 0, 0, 1],
        "transposed": wide.mT.contiguous().mT[..., :keys],
        "strided": torch.randn(2, 2, 5, 2 * keys, device=DEVICE).to(dtype)[..., ::2],
        "dense": wide[..., :keys].contiguous(),
        "boolean": wide[..., 1 : keys + 1] > 0,
        "boolean-expanded": (wide[:1, :, :1, 1 : keys + 1] > 0).expand(2, 2, 5, keys),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("keys", [40, 37], ids=["aligned", "odd"])
@pytest.mark.parametrize("name", list(views(8, torch.float32)))
@pytest.mark.parametrize("backend", ["auto", "torch.builtin"])
def test_a_mask_may_lie_anywhere(backend, name, keys, dtype):
    """PyTorch's kernels end the use of the GPU on some: another call, after these, finds it alive."""
    mask = views(keys, dtype)[name]
    inputs = make_inputs(Case("", ((2, 2, 5, 16), (2, 2, keys, 16), (2, 2, keys, 16))), dtype, DEVICE)
    expected = kernel_ladder.attention(*inputs, mask, backend="torch.naive")
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(
        kernel_ladder.attention(*inputs, mask, backend=backend), expected, rtol=tolerance, atol=tolerance
    )
    if mask.dtype == torch.bool or backend == "auto":
        leaves = as_leaves(inputs)
        wanted = gradients(kernel_ladder.attention(*leaves, mask, backend="torch.naive"), leaves)
        found = gradients(kernel_ladder.attention(*leaves, mask, backend=backend), leaves)
        for actual, of_formula in zip(found, wanted, strict=True):
            torch.testing.assert_close(actual, of_formula, rtol=2 * tolerance, atol=2 * tolerance)
    assert torch.zeros(1, device=DEVICE).item() == 0


@pytest.mark.parametrize("of_query", [False, True], ids=["mask-alone", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_auto_gives_a_mask_its_gradient(dtype, of_query):
    inputs = make_inputs(Case("", ((2, 2, 5, 16), (2, 2, 37, 16), (2, 2, 37, 16), (5, 37))), dtype, DEVICE)
    leaves = as_leaves(inputs) if of_query else (*inputs[:3], inputs[3].requires_grad_())
    (found,), (expected,) = (
        gradients(kernel_ladder.attention(*leaves, backend=backend), leaves[3:]) for backend in ("auto", "torch.naive")
    )
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_rows_that_begin_off_16_bytes_are_refused(monkeypatch, offset, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    memory = torch.empty(2 * 2 * 5 * 16 + offset, dtype=torch.bfloat16)
    reason = attention_builtin.faults(*[memory[offset:].view(2, 2, 5, 16).as_subclass(OnGpu)] * 3)
    assert (reason is None) == (offset % 8 == 0)
    assert reason is None or "rows that do not start on 16 bytes, as those of `query`" in reason


@needs_gpu
@pytest.mark.parametrize("offset", [1, 8])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_rows_that_begin_off_16_bytes_inside_compile(backend, offset):
    memory = torch.randn(3, 2 * 2 * 64 * 64 + 8, device=DEVICE).bfloat16()
    inputs = [x[offset:][: 2 * 2 * 64 * 64].view(2, 2, 64, 64) for x in memory]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: kernel_ladder.attention(*x, backend=backend), fullgraph=True)
    expected = kernel_ladder.attention(*inputs, backend="torch.naive")
    torch.testing.assert_close(compiled(*inputs), expected, rtol=0.02, atol=0.02)


def in_layout(x: torch.Tensor, rows_first: bool) -> torch.Tensor:
    """`x` with heads side by side in each row, as a model has them, or contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else x.contiguous()


@pytest.mark.parametrize("variant", table.variants("attention"), ids=lambda v: v.name)
def test_gradients_change_their_layout_between_calls(variant):
    """PyTorch keeps a plan of cuDNN that was made for one layout, whatever the next call's."""
    packed = make_inputs(Case("", ((2, 65, 3, 4, 64),)), torch.bfloat16, DEVICE)[0]
    leaves = as_leaves(tuple(packed.permute(2, 0, 3, 1, 4).unbind()))
    skip_unless_it_runs(variant, leaves, OPTIONS)
    grad = make_inputs(Case("", ((2, 4, 65, 64),)), torch.bfloat16, DEVICE)[0]
    expected = torch.autograd.grad(kernel_ladder.attention(*leaves, backend="torch.naive"), leaves, grad)
    for rows_first in (False, True, False):
        output = kernel_ladder.attention(*leaves, backend=variant.name)
        found = torch.autograd.grad(output, leaves, in_layout(grad, rows_first))
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": LOWER_RIGHT}, {"window_size": (3, 0)}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_hidden_key_of_nan_stays_hidden(variant, options):
    options = {**OPTIONS, **options}
    inputs = make_inputs(Case("", ((1, 2, 16, 16),) * 3), torch.bfloat16, DEVICE)
    inputs[1][..., 9, :] = torch.nan
    skip_unless_it_runs(variant, inputs, options)
    expected = kernel_ladder.attention(*(x.double() for x in inputs), backend="torch.naive", **options)
    assert torch.equal(variant.output(*inputs, **options).isnan(), expected.isnan())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_key_of_nan_under_a_boolean_mask_stays_hidden(variant):
    if variant.name == "torch.builtin":
        pytest.skip("PyTorch adds a boolean mask as −inf, which leaves NaN; its docstring says so")
    inputs = make_inputs(Case("", ((1, 2, 16, 16),) * 3), torch.bfloat16, DEVICE)
    inputs[1][..., 9, :] = torch.nan
    mask = torch.ones(16, 16, dtype=torch.bool, device=DEVICE)
    mask[:, 9] = False
    mask[12, 9] = True
    skip_unless_it_runs(variant, (*inputs, mask), OPTIONS)
    rows = variant.output(*inputs, mask, **OPTIONS).isnan().any(-1)
    assert rows[..., 12].all()
    assert rows.sum() == 2
