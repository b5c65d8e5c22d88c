"""Dropped attention weights of patched models in training: by a fused rung with seeds of its own, else by PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch

import kernel_ladder as kl
from kernel_ladder import models
from kernel_ladder.models import dropping
from kernel_ladder.models.kinds import Patched
from kernel_ladder.semantics import weight_dropout

from ..conftest import DEVICE, skip_unless_available

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
families = pytest.importorskip("tests.models.families")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

LEVELS = ("triton", "cuda")
OPTIONS = {"is_causal": False, "scale": None, "enable_gqa": False, "dropout_p": 0.5, "seed": 0}
SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0])


def training(family: str) -> torch.nn.Module:
    """A model that drops attention weights alone."""
    model = families.make(family, DEVICE).train()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "attn_dropout" not in name and "attention.self" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.25
    return model


def results(model: torch.nn.Module, family: str) -> list[torch.Tensor]:
    """The loss and all gradients of one step, with the same seeds in every call."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(**families.inputs(family, DEVICE)).loss
    loss.backward()
    return [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def is_near(found: torch.Tensor, formula: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the error against float64 is within twice that of the formula in the same dtype, plus 2 ulp."""
    error, allowed = (float((x.double() - exact).norm() / exact.norm()) for x in (found, formula))
    return error <= 2 * allowed + 2 * torch.finfo(formula.dtype).eps


@pytest.fixture
def calls(monkeypatch):
    """The dropout_p, seed and backend of every call of attention."""
    seen, attention = [], kl.ops.attention

    def spy(*inputs, **options):
        seen.append(((*inputs, 0.0)[4], options.get("seed"), options["backend"]))
        return attention(*inputs, **options)

    monkeypatch.setattr(kl.ops, "attention", spy)
    return seen


# Without gpt-oss in 16 bits, which cuda.flash takes alone: there a rounding may give a token other experts.
@pytest.mark.parametrize(
    ("level", "family", "p"),
    [
        ("triton", "gpt2", 0.1),
        ("triton", "bert", 0.1),
        ("triton", "gpt_oss", 0.25),
        ("cuda", "gpt2", 0.1),
        ("cuda", "bert", 0.1),
    ],
)
def test_a_fused_rung_drops_weights_in_training(level, family, p, calls):
    """Loss and gradients are those of the formula with the same seeds, which is asked for by its name."""
    skip_unless_available("attention", level)
    model = training(family).to(torch.bfloat16 if level == "cuda" else torch.float32)
    formula = copy.deepcopy(model)
    report = models.patch(model, backend=level, report=False)
    models.patch(formula, backend="torch.naive", report=False)
    exact = copy.deepcopy(formula).double()
    why = {e.why for e in report.replaced if e.kind.endswith("Attention")}
    assert any(f"in training it drops weights with probability {p} by {level}.flash" in each for each in why)
    for module in (*model.modules(), *formula.modules(), *exact.modules()):
        if isinstance(module, Patched):  # all but attention
            module._backend = "torch"
    found, of_formula, wanted = (results(each, family) for each in (model, formula, exact))
    assert all(map(is_near, found, of_formula, wanted))
    count = len(calls) // 3
    assert [call[0] for call in calls] == [p] * len(calls)
    assert [call[2] for call in calls] == [f"{level}.flash"] * count + ["torch.naive"] * 2 * count
    seeds = [call[1] for call in calls]
    assert seeds == seeds[:count] * 3
    assert len(set(seeds)) == count > 0
    with torch.no_grad():
        model.eval()(**families.inputs(family, DEVICE))
    assert calls[3 * count :] == [(0.0, None, level)] * count


@pytest.mark.parametrize("level", ["torch", "compile", "xla"])
def test_a_formula_leaves_dropped_weights_to_pytorch(level, calls):
    """The report says so, and with PyTorch's generator the loss is the plain model's."""
    skip_unless_available("attention", level)
    model = training("gpt2")
    if level != "torch":  # its compiler would take seconds for the other modules
        assert dropping.rungs(level) == []
        return
    plain = results(model, "gpt2")
    report = models.patch(model, backend=level, report=False)
    (entry,) = [e for e in report.replaced if e.kind == "GPT2Attention"]
    assert entry.why == "attention; in training PyTorch's, which drops weights with probability 0.1"
    for found, wanted in zip(results(model, "gpt2"), plain, strict=True):
        torch.testing.assert_close(found, wanted)
    assert not calls


@pytest.mark.parametrize("level", LEVELS)
def test_an_encoder_of_torch_nn_drops_weights_in_training(level, calls):
    """Beside padding, whose mask PyTorch makes one of numbers that are added to scores."""
    skip_unless_available("attention", level)
    dtype = torch.bfloat16 if level == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 48, 0.1, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(DEVICE, dtype)
    report = models.patch(model, backend=level, report=False)
    (entry,) = [e for e in report.replaced if e.kind == "MultiheadAttention"]
    assert f"in training it drops weights with probability 0.1 by {level}.flash" in entry.why
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=DEVICE)
    x = torch.randn(2, 5, 32, device=DEVICE, dtype=dtype)
    model(x, src_key_padding_mask=padding).float().square().sum().backward()
    ((p, seed, backend),) = calls
    assert (p, backend) == (0.1, f"{level}.flash")
    assert seed is not None
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def operands(kv_heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]


MASKS = {
    "causal": None,
    "boolean": torch.ones(5, 5, dtype=torch.bool).tril(1),
    "added": torch.linspace(-1, 1, 20).view(4, 1, 5),
    "window": models.attention.CausalWindow(2, (2, 1, 5, 5), "cpu"),
}


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_function_takes_every_mask_and_sinks(mask, sinks, monkeypatch):
    """With so small a probability that it drops nothing, it gives what the kernels give without dropout."""
    module = torch.nn.Identity()
    module.__dict__[models.attention.BACKEND] = "torch"
    query, key, value = operands(2)
    wanted, _ = models.attention.attention_forward(module, query, key, value, MASKS[mask], s_aux=sinks)
    monkeypatch.setattr(dropping.ops, "attention", None)  # not called
    found, _ = models.attention.attention_forward(module, query, key, value, MASKS[mask], dropout=1e-12, s_aux=sinks)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_mask_is_dropouts(level, sinks, monkeypatch):
    """Weights are multiplied by the factors of dropout's mask, beside a window and sinks."""
    skip_unless_available("attention", level)
    dtype = torch.bfloat16 if level == "cuda" else torch.float32
    monkeypatch.setattr(dropping, "draw_seed", lambda: 7)
    query, key, value = (x.to(DEVICE, dtype) for x in operands())
    sinks = None if sinks is None else sinks.to(DEVICE)
    window = models.attention.CausalWindow(2, (2, 1, 5, 5), DEVICE)
    module = torch.nn.Identity()
    found, formula = [], []
    for backend, kept in ((level, found), ("torch.naive", formula)):
        module.__dict__[models.attention.BACKEND] = backend
        kept += models.attention.attention_forward(module, query, key, value, window, dropout=0.5, s_aux=sinks)
    scores = (query.double() @ key.double().mT * 8**-0.5).masked_fill(~window.tensor(), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(2, 4, 5, 1)), -1)
    weights = scores.softmax(-1)[..., :5] * weight_dropout.factors((2, 4, 5, 5), 0.5, 7, query.device)
    assert is_near(found[0], formula[0], (weights @ value.double()).transpose(1, 2))


def test_the_choice_does_not_depend_on_the_grad_mode():
    """A checkpoint runs a block without gradients first. A rung that refuses the mask's gradient must not run there."""
    skip_unless_available("attention", "triton")
    query, key, value = (x.to(DEVICE) for x in operands())
    bias = MASKS["added"].to(DEVICE).expand(1, 4, 5, 5)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert dropping._rung_of(query, key, value, bias, OPTIONS, True, "triton") is None
            assert dropping._rung_of(query, key, value, bias, OPTIONS, False, "triton") == "triton.flash"
            assert dropping._rung_of(query, key, value, None, OPTIONS, False, "triton") == "triton.flash"
            assert dropping._rung_of(query, key, value, None, OPTIONS, False, "torch") is None
            assert dropping._rung_of(query, key, value, None, OPTIONS, False, "torch.naive") == "torch.naive"
            assert dropping._rung_of(query, key, value, None, {**OPTIONS, "dropout_p": 1.0}, False, "triton") is None


def test_what_is_reported(monkeypatch):
    """On a CPU "auto" is PyTorch's function. A rung by its own name is that rung or none."""
    monkeypatch.setattr(dropping.gpu, "count", lambda: 0)
    assert dropping.by(0.1, "auto") == "PyTorch's, which drops weights with probability 0.1"
    assert dropping.rungs("torch.naive") == ["torch.naive"]
    assert dropping.rungs("triton.naive") == []


def test_a_captured_step_drops_weights_by_pytorch(monkeypatch):
    """A CUDA graph would repeat one seed in all of its runs."""
    skip_unless_available("attention", "triton")
    given = *(x.to(DEVICE) for x in operands()), None, OPTIONS, False, "triton"
    assert dropping._rung_of(*given) == "triton.flash"
    monkeypatch.setattr(dropping.gpu, "capturing", lambda: True)
    assert dropping._rung_of(*given) is None


def test_a_compiled_step_drops_weights_by_pytorch():
    """A seed cannot be drawn in a graph."""
    skip_unless_available("attention", "triton")
    torch._dynamo.reset()
    model = training("gpt2")
    models.patch(model, backend="triton", report=False)
    module, (query, key, value) = model.transformer.h[0].attn, operands()

    def attend() -> torch.Tensor:
        return models.attention.attention_forward(module, query, key, value, None, dropout=0.5)[0]

    torch.manual_seed(1)
    found = torch.compile(attend, backend="eager", fullgraph=True)()
    torch.manual_seed(1)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, None, 0.5, True)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    torch._dynamo.reset()
