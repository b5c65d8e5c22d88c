"""Attention under ``torch.use_deterministic_algorithms``: the same bits in every run, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd
from kernel_ladder.semantics.deterministic import REFUSAL
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import Results, evaluate
from kernel_ladder.testing.samples import make_grad, make_inputs, on_absent_gpu
from torch_ref import attention_builtin
from xla_impl.attention import fused

from ..conftest import DEVICE, every_variant, needs_gpu, skip_unless_it_runs, variant_id

OPS = ("attention", "attention_varlen")
OURS = [v for v in every_variant("cuda", "triton") if v.op in OPS]
PYTORCHS = [v for v in every_variant("torch") if v.op in OPS]
RUNS = 5


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """PyTorch's flag in the block. PyTorch then fills memory that it gives to kernels with NaN, too."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def case(variant: Variant, d: int, is_causal: bool, heads_kv: int = 2) -> Case:
    """Several tiles of keys, whose blocks run beside each other, add to the gradient of one tile of queries."""
    options = {"is_causal": is_causal, "scale": None, "enable_gqa": heads_kv != 4}
    if variant.op == "attention":
        queries = 2 if variant.name.endswith("split_kv") else 900
        return Case("", ((4, 4, queries, d), *((4, heads_kv, 900, d),) * 2), options)
    kinds = {3: "offsets:0,700,701,1500", 4: "offsets:0,700,701,1500"}
    options |= {"max_seqlen_q": 800, "max_seqlen_k": 800}
    return Case("", ((1500, 4, d), *((1500, heads_kv, d),) * 2, (4,), (4,)), options, kinds=kinds)


def results(variant: Variant, of: Case) -> Results:
    inputs = make_inputs(of, torch.bfloat16, DEVICE)
    grad = make_grad(kernel_ladder.spec(variant.op), inputs, of.options)
    return evaluate(lambda *x, **o: autograd.run(variant, x, o), inputs, of.options, grad)


def results_or_error(variant: Variant, of: Case) -> Results | str:
    try:
        return results(variant, of)
    except RuntimeError as error:
        return str(error)


def same_bits(first: Results, again: Results) -> None:
    assert set(first) == set(again) == {"output", "grad 0", "grad 1", "grad 2"}
    for name in first:
        assert torch.equal(first[name], again[name]), f"{name} differs between runs"


@needs_gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("variant", OURS, ids=variant_id)
def test_kernels_give_the_same_bits_with_the_flag_and_without(variant, d, is_causal):
    """Nothing raises, and NaN in new memory reaches no result: every run has the bits of one without the flag."""
    of = case(variant, d, is_causal)
    skip_unless_it_runs(variant, as_leaves(make_inputs(of, torch.bfloat16, DEVICE)), of.options)
    first = results(variant, of)
    with deterministic():
        for _ in range(RUNS):
            same_bits(first, results(variant, of))


@needs_gpu
@pytest.mark.parametrize("variant", PYTORCHS, ids=variant_id)
def test_pytorchs_rungs_obey_the_flag_or_refuse(variant):
    """FlashAttention-2 takes another algorithm, cuDNN is refused, and cuBLAS asks for a workspace of fixed size."""
    of = case(variant, 64, is_causal=True, heads_kv=4)
    skip_unless_it_runs(variant, as_leaves(make_inputs(of, torch.bfloat16, DEVICE)), of.options)
    with deterministic():
        leaves = as_leaves(make_inputs(of, torch.bfloat16, DEVICE))
        if (reason := variant.unsupported(*leaves, **of.options)) is not None:
            assert "deterministic" in reason
            return
        first = results_or_error(variant, of)
        if isinstance(first, str):
            assert "deterministic" in first
            return
        for _ in range(RUNS):
            same_bits(first, results(variant, of))


@pytest.mark.parametrize(
    "unsupported", [attention_builtin.cudnn_unsupported, fused.unsupported], ids=["torch.cudnn", "xla.fused"]
)
def test_cudnn_is_refused_with_the_reason(monkeypatch, unsupported):
    of = Case("", ((1, 2, 64, 64),) * 3, {"is_causal": False, "scale": None, "enable_gqa": False})
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    with on_absent_gpu(of, torch.bfloat16, gradients=True) as inputs:
        assert unsupported(*inputs, **of.options) is None
        with deterministic():
            assert unsupported(*inputs, **of.options) == REFUSAL
        with deterministic(warn_only=True):
            assert unsupported(*inputs, **of.options) is None
