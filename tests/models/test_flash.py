"""This package's attention in PyTorch's registry of flash attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kernel_ladder
from kernel_ladder.models import register_flash_attention
from kernel_ladder.models.flash import LEVELS, NAME, Flash

from ..conftest import DEVICE, needs_gpu, skip_unless_available

#: Heads of query and key, lengths, whether causal, and whether tensors are views of (B, S, H, D).
CALLS = [
    (4, 4, 33, 33, True, False),
    (4, 2, 20, 50, True, True),
    (2, 1, 17, 40, False, True),
]


def _inputs(heads: int, of_key: int, seqlen_q: int, seqlen_k: int, transposed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(heads, seqlen_q), (of_key, seqlen_k), (of_key, seqlen_k)]
    if transposed:
        return [torch.randn(2, n, h, 32, device=DEVICE).bfloat16().transpose(1, 2) for h, n in sizes]
    return [torch.randn(2, h, n, 32, device=DEVICE).bfloat16() for h, n in sizes]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("heads", "of_key", "seqlen_q", "seqlen_k", "causal", "transposed"), CALLS)
def test_the_operators_agree(level, heads, of_key, seqlen_q, seqlen_k, causal, transposed):
    skip_unless_available("attention", level)
    inputs = _inputs(heads, of_key, seqlen_q, seqlen_k, transposed)
    flash = Flash(level)
    output, lse, *_, seed, offset, _ = flash.forward(*inputs, 0.0, causal)
    grad = torch.randn_like(output)
    more = (None, None, seqlen_q, seqlen_k, 0.0, causal, seed, offset)
    found = flash.backward(grad, *inputs, output, lse, *more)
    exact = [x.double().requires_grad_() for x in inputs]
    expected, exact_lse = kernel_ladder.attention(
        *exact, is_causal="lower_right" if causal else False, enable_gqa=heads != of_key, return_lse=True,
        backend="torch.naive",
    )  # fmt: skip
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for mine, its, x in zip(found, wanted, inputs, strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=0, atol=0.05)
        assert mine.stride() == torch.empty_like(x).stride()
    assert output.stride() == torch.empty_like(inputs[0]).stride()


def test_bad_use():
    with pytest.raises(kernel_ladder.BackendError, match="backend must be 'cuda', 'triton' or one of their rungs, got"):
        register_flash_attention("torch.flash")
    with pytest.raises(kernel_ladder.BackendError, match="flush"):
        register_flash_attention("triton.flush")
    q = torch.zeros(1, 1, 4, 32, device=DEVICE, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=r"dropout_p=0 and return_debug_mask=False, got 0\.5 and False"):
        Flash("triton").forward(q, q, q, 0.5)


@needs_gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pytorchs_attention_runs_it_while_it_is_active(level, compiled):
    skip_unless_available("attention", level)
    from torch.nn import attention

    leaves = [x.requires_grad_() for x in _inputs(4, 4, 65, 65, True)]

    def run(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def results(call):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            output = call(*leaves)
            return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]

    theirs = results(run)
    assert register_flash_attention(level) == NAME
    assert NAME in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl(NAME)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ours = results(torch.compile(run, fullgraph=True) if compiled else run)
        kernels = " ".join(event.name for event in profile.events())
        assert "flash_fwd" not in kernels, "PyTorch's own kernel"
        assert kernels
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0.05)
            assert mine.stride() == its.stride()
        with pytest.raises(kernel_ladder.UnsupportedError, match="is this package's while"):
            kernel_ladder.attention(*leaves, is_causal=True, backend="torch.flash")
    finally:
        attention.restore_flash_attention_impl()
    for again, its in zip(results(run), theirs, strict=True):
        assert torch.equal(again, its)
