"""T5 patched: its position bias reaches attention as an additive mask with a gradient, and its norm is an RMSNorm."""

from __future__ import annotations

import copy

import pytest
import torch

from kernel_ladder import models

from ..conftest import DEVICE, skip_unless_available

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

TOKENS = torch.arange(3, 17).view(2, 7)
#: A shorter sequence beside a longer one.
PADDING = torch.arange(14).view(2, 7) < 12


def t5() -> torch.nn.Module:
    torch.manual_seed(4)
    config = tf.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, relative_attention_num_buckets=8,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layer_norm" in name or "relative_attention_bias" in name:
                p.add_(torch.randn_like(p) * 0.5)
    return model.to(DEVICE)


def results(model: torch.nn.Module) -> list[torch.Tensor]:
    """Logits, loss, all gradients in one vector, and those of the position biases."""
    model.zero_grad()
    tokens, padding = TOKENS.to(DEVICE), PADDING.to(DEVICE)
    found = model(input_ids=tokens, attention_mask=padding, labels=tokens)
    found.loss.backward()
    gradients = {name: p.grad.flatten() for name, p in model.named_parameters()}
    biases = [x for name, x in gradients.items() if "relative_attention_bias" in name]
    assert len(biases) == 2
    return [found.logits.detach(), found.loss.detach(), torch.cat([*gradients.values()]), torch.cat(biases)]


@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
def test_t5(level):
    """Errors against float64 within twice the plain model's, plus 2 ulp."""
    skip_unless_available("attention", level)
    dtype = torch.bfloat16 if level == "cuda" else torch.float32  # its attention on tensor cores takes 16 bits
    plain = t5().to(dtype)
    exact = results(copy.deepcopy(plain).double())
    patched = copy.deepcopy(plain)
    report = models.patch(patched, backend=level, report=False)
    assert {e.kind for e in report.replaced} == {"Linear", "T5LayerNorm", "NewGELUActivation", "T5Attention"}
    if level == "triton" and DEVICE.type == "cpu":  # the interpreter takes seconds for the others
        for module in patched.modules():
            if hasattr(module, "_backend"):
                module._backend = "torch"
    for of_plain, found, wanted in zip(results(plain), results(patched), exact, strict=True):
        error, allowed = (float((x.double() - wanted).norm() / wanted.norm()) for x in (found, of_plain))
        assert error <= 2 * allowed + 2 * torch.finfo(dtype).eps


def test_generation_and_training():
    """Tokens of a cache, and the loss with PyTorch's dropout, are the plain model's."""
    plain, patched = t5(), t5()
    models.patch(patched, backend="torch", report=False)
    options = {"attention_mask": PADDING.to(DEVICE), "max_new_tokens": 5, "min_new_tokens": 5}
    assert torch.equal(*(model.generate(TOKENS.to(DEVICE), **options) for model in (plain, patched)))
    losses = []
    for model in (plain, patched):
        torch.manual_seed(0)
        losses.append(model.train()(input_ids=TOKENS.to(DEVICE), labels=TOKENS.to(DEVICE)).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "mask", [None, torch.ones(5, 5, dtype=torch.bool).tril(1), torch.linspace(-2, 2, 25).view(5, 5)],
    ids=["causal", "boolean", "added"],
)  # fmt: skip
def test_a_bias_beside_a_mask(mask):
    """It is added to a float mask, hidden by a boolean one, and cut like the keys of a static cache."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 4, n, 8, generator=generator) for n in (5, 5, 5))
    bias = torch.randn(5, 9, 4, generator=generator).permute(2, 0, 1)[None].requires_grad_()
    if mask is None:
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 4), value=9.0) for x in (key, value))
    given = bias if mask is None else bias[..., :5]
    module = torch.nn.Identity()
    found, _ = models.attention.attention_forward(module, query, key, value, mask, position_bias=given)
    added = torch.ones(5, 5, dtype=torch.bool).tril() if mask is None else mask
    if added.dtype == torch.bool:
        added = torch.zeros(5, 5).masked_fill(~added, -torch.inf)
    scores = query @ key[:, :, :5].mT * 8**-0.5 + bias[..., :5] + added
    wanted = scores.softmax(-1) @ value[:, :, :5]
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), bias, retain_graph=True)[0] for x in (found, wanted)))


@pytest.mark.parametrize(
    ("x", "weight"),
    [(a, b) for a in (torch.float32, torch.bfloat16, torch.float16) for b in (torch.float32, torch.float16)],
)
def test_the_norm_has_the_plain_ones_dtype(x, weight):
    """T5 keeps some products in float32, so its norms get float32 beside 16-bit weights."""
    norm = t5().encoder.final_layer_norm.to("cpu", weight)
    given = torch.randn(3, 32).to(x)
    wanted = norm(given)
    models.patch(norm, backend="torch", report=False)
    found = norm(given)
    assert found.dtype == wanted.dtype
    eps = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=2 * eps, atol=2 * eps)
