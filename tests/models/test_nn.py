"""``kernel_ladder.nn``: PyTorch's arguments, names, numbers and habits, and a backend that is checked when set."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import kernel_ladder as kl
from kernel_ladder import nn
from kernel_ladder.errors import BackendError

from ..conftest import DEVICE, skip_unless_available

LEVELS = ["torch", "triton", "cuda"]

#: Modules beside PyTorch's, each made by the same arguments, and the shape of an input.
PAIRS = {
    "rms_norm": (nn.RMSNorm, torch.nn.RMSNorm, (24,), {"eps": 1e-6}, (2, 5, 24)),
    "rms_norm_bare": (nn.RMSNorm, torch.nn.RMSNorm, ([3, 8],), {"elementwise_affine": False}, (5, 3, 8)),
    "layer_norm": (nn.LayerNorm, torch.nn.LayerNorm, (24,), {}, (2, 5, 24)),
    "layer_norm_no_bias": (nn.LayerNorm, torch.nn.LayerNorm, (24,), {"bias": False}, (2, 5, 24)),
    "linear": (nn.Linear, torch.nn.Linear, (24, 16), {}, (2, 5, 24)),
    "linear_no_bias": (nn.Linear, torch.nn.Linear, (24, 16, False), {}, (5, 24)),
    "gelu": (nn.GELU, torch.nn.GELU, ("tanh",), {}, (3, 7)),
    "dropout": (nn.Dropout, torch.nn.Dropout, (0.25,), {}, (3, 7)),
    "cross_entropy": (nn.CrossEntropy, torch.nn.CrossEntropyLoss, (), {"label_smoothing": 0.1}, (6, 9)),
    "attention": (nn.MultiheadAttention, torch.nn.MultiheadAttention, (32, 2), {}, (5, 2, 32)),
}
OWN = {
    "swiglu_mlp": lambda **more: nn.SwigluMLP(24, 40, **more),
    "gelu_mlp": lambda **more: nn.GeluMLP(24, 40, approximate="tanh", **more),
    "grouped": lambda **more: nn.GroupedQueryAttention(32, 4, 2, **more),
    "rotated": lambda **more: nn.GroupedQueryAttention(32, 4, 2, rope_theta=1e4, **more),
}


def make(name: str, **more):
    if name in OWN:
        return OWN[name](**more)
    cls, _, arguments, options, _ = PAIRS[name]
    return cls(*arguments, **options, **more)


def ops_of(name: str) -> tuple[str, ...]:
    return (PAIRS[name][0] if name in PAIRS else type(OWN[name]())).OPS


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in PAIRS if name not in ("dropout", "attention", "cross_entropy")])
def test_as_pytorchs_module(name, level):
    for op in ops_of(name):
        skip_unless_available(op, level)
    _, theirs, arguments, options, shape = PAIRS[name]
    plain = theirs(*arguments, **options).to(DEVICE)
    for p in plain.parameters():
        torch.nn.init.normal_(p, 1.0, 0.5)
    ours = make(name, device=DEVICE, backend=level) if name != "gelu" else make(name, backend=level)
    ours.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    expected, found = plain(x), ours(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad(expected.sin().sum(), (x, *plain.parameters()))
    for a, b in zip(torch.autograd.grad(found.sin().sum(), (x, *ours.parameters())), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_as_pytorchs(level):
    skip_unless_available("cross_entropy", level)
    x = torch.randn(6, 9, device=DEVICE, requires_grad=True)
    target = torch.tensor([0, 8, 3, 3, 1, 7], device=DEVICE)
    for options in ({}, {"ignore_index": 3, "reduction": "sum"}, {"label_smoothing": 0.1, "reduction": "none"}):
        expected = torch.nn.CrossEntropyLoss(**options)(x, target)
        found = nn.CrossEntropy(**options, backend=level)(x, target)
        torch.testing.assert_close(found, expected)
        wanted = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), wanted)
    penalized = nn.CrossEntropy(z_loss=0.5, backend=level)
    assert "z_loss=0.5, backend=" in repr(penalized)
    torch.testing.assert_close(
        penalized(x, target), torch.nn.CrossEntropyLoss()(x, target) + 0.5 * x.logsumexp(-1).square().mean()
    )


def test_a_loss_without_weights_of_classes():
    with pytest.raises(ValueError, match="CrossEntropy: argument `weight` must be None, got Tensor"):
        nn.CrossEntropy(torch.ones(3))
    with pytest.raises(ValueError, match="argument `reduce` must be None, got True"):
        nn.CrossEntropy(reduce=True)
    with pytest.raises(ValueError, match="'max'"):
        nn.CrossEntropy(reduction="max")(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize("name", [*PAIRS, *OWN])
def test_copies_and_pickles(name):
    module = make(name, backend="torch.naive")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.backend == "torch.naive"
        assert "backend='torch.naive'" in repr(other)
        assert list(other.state_dict()) == list(module.state_dict())
        for a, b in zip(other.parameters(), module.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a is not b


@pytest.mark.parametrize("name", [*PAIRS, *OWN])
def test_a_wrong_backend_fails_at_construction(name):
    with pytest.raises(BackendError, match="did you mean 'triton'"):
        make(name, backend="tritn")
    with pytest.raises(TypeError, match="argument `backend` must be a str or None, got int"):
        make(name, backend=1)
    module = make(name)
    assert module.backend is None
    with pytest.raises(BackendError, match=r"unknown `backend` 'torch\.none'"):
        module.backend = "torch.none"
    assert module.backend is None


def test_an_unavailable_backend_fails_at_construction():
    for op in nn.Linear.OPS:
        if kl.backends(op) and (reason := kl.table.unavailable(op, "cuda")):
            with pytest.raises(kl.UnavailableError, match="unavailable"):
                nn.Linear(2, 2, backend="cuda")
            assert reason


@pytest.mark.parametrize(
    "name", [n for n in (*PAIRS, *OWN) if n not in ("gelu", "dropout", "rms_norm_bare", "cross_entropy")]
)
def test_meta_device_and_reset_parameters(name):
    module = make(name, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    reset = getattr(module, "reset_parameters", None) or module._reset_parameters
    torch.manual_seed(3)
    reset()
    torch.manual_seed(3)
    fresh = make(name)
    if name != "attention":  # PyTorch's own leaves the output projection as it was there
        for a, b in zip(module.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a, b)
    assert all(p.isfinite().all() for p in fresh.parameters())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_a_fused_activation(activation):
    layer, x = nn.Linear(8, 8, activation=activation, backend="torch"), torch.randn(3, 8)
    form = "none" if activation == "gelu" else "tanh"
    plain = torch.nn.functional.gelu(torch.nn.functional.linear(x, layer.weight, layer.bias), approximate=form)
    torch.testing.assert_close(layer(x), plain)
    assert f"activation='{activation}'" in repr(layer)


def test_what_modules_do_not_take():
    for make_wrong, message in [
        (
            lambda: nn.Linear(2, 2, activation="relu"),
            "`activation` must be one of None, 'gelu', 'gelu_tanh', got 'relu'",
        ),
        (lambda: nn.Dropout(0.5, inplace=True), "`inplace` must be False, got True"),
        (lambda: nn.Dropout(1.0), "`p` must be at least 0 and less than 1, got 1.0"),
        (lambda: nn.MultiheadAttention(8, 2, dropout=0.1), "`dropout` must be 0.0, got 0.1"),
        (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "`add_zero_attn` must be False"),
        (lambda: nn.GeluMLP(8, 8, approximate="erf"), "`approximate` must be 'none' or 'tanh', got 'erf'"),
        (lambda: nn.GroupedQueryAttention(8, 4, 3), "`num_kv_heads` must divide `num_heads`, got 3 and 4"),
        (lambda: nn.GroupedQueryAttention(9, 4), "`num_heads` must divide `embed_dim`"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_wrong()


def test_dropout_follows_pytorchs_generator():
    layer, x = nn.Dropout(0.5, backend="torch"), torch.ones(50)
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert torch.equal(layer(x, seed=7), kl.dropout(x, 0.5, seed=7))
    assert layer.eval()(x) is x
    assert nn.Dropout(0.0)(x) is x
    inside = torch.compile(lambda x: layer.train()(x, seed=7), fullgraph=True, backend="aot_eager")
    assert torch.equal(inside(x), layer(x, seed=7))
    torch.manual_seed(0)
    drawn = torch.compile(lambda x: layer(x) + 1, backend="aot_eager")(x)
    assert torch.equal(drawn, first + 1)


def masks():
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    yield "none", {}
    yield "boolean", {"attn_mask": causal}
    yield "added", {"attn_mask": causal.float() * -3}
    yield "by_head", {"attn_mask": (torch.arange(5)[None, :] + torch.zeros(4, 5, 1)) * -0.1}
    yield "padding", {"key_padding_mask": padding}
    yield "both", {"key_padding_mask": padding, "attn_mask": causal}
    yield "both_kinds", {"key_padding_mask": padding, "attn_mask": causal.float() * -3}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("kind", "mask"), list(masks()), ids=lambda m: m if isinstance(m, str) else "")
def test_multihead_attention(kind, mask, batch_first):
    plain = torch.nn.MultiheadAttention(32, 2, batch_first=batch_first)
    torch.nn.init.normal_(plain.in_proj_bias)
    ours = nn.MultiheadAttention(32, 2, batch_first=batch_first, backend="torch")
    ours.load_state_dict(plain.state_dict())
    x = torch.randn((2, 5, 32) if batch_first else (5, 2, 32))
    expected = plain(x, x, x, **mask)
    found = ours(x, x, x, **mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    alone, weights = ours(x, x, x, need_weights=False, **mask)
    assert weights is None
    assert torch.equal(alone, found[0])


def test_weights_of_each_head_and_their_gradients():
    plain, ours = (make(32, 2, batch_first=True) for make in (torch.nn.MultiheadAttention, nn.MultiheadAttention))
    ours.load_state_dict(plain.state_dict())
    ours.backend = "torch"
    x = torch.randn(2, 5, 32, requires_grad=True)
    hidden = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    of_output, of_weights = torch.randn(2, 5, 32), torch.randn(2, 2, 5, 5)
    results = []
    for layer, mask in ((plain, {"attn_mask": hidden}), (ours, {"attn_mask": hidden}), (ours, {})):
        output, weights = layer(x, x, x, average_attn_weights=False, is_causal=True, **mask)
        gradients = torch.autograd.grad((output * of_output).sum() + (weights * of_weights).sum(), x)
        results.append((output, weights, *gradients))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x[0], x[0], x[0])[1], ours(x, x, x)[1][0], rtol=1e-4, atol=1e-5)
    output, weights = ours(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    assert not weights.any()
    assert torch.autograd.grad(output.sum() + weights.sum(), x)[0].isfinite().all()


def test_attention_to_another_sequence():
    plain = torch.nn.MultiheadAttention(32, 4, kdim=12, vdim=20, bias=False, batch_first=True)
    ours = nn.MultiheadAttention(32, 4, kdim=12, vdim=20, bias=False, batch_first=True, backend="torch")
    ours.load_state_dict(plain.state_dict())
    q, k, v = torch.randn(2, 3, 32), torch.randn(2, 7, 12), torch.randn(2, 7, 20)
    torch.testing.assert_close(ours(q, k, v)[0], plain(q, k, v, need_weights=False)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(q[0], k[0], v[0])[0], ours(q, k, v)[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_a_cache_gives_what_the_whole_sequence_gives(level):
    for op in nn.GroupedQueryAttention.OPS:
        skip_unless_available(op, level)
    torch.manual_seed(0)
    layer = nn.GroupedQueryAttention(64, 4, 2, device=DEVICE, backend=level)
    x = torch.randn(2, 6, 64, device=DEVICE)
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(2, 6)
        parts = [layer(x[:, :3], cache), *(layer(x[:, i : i + 1], cache) for i in range(3, 6))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-3, atol=2e-3)
        with pytest.raises(ValueError, match="7 tokens do not fit in a cache of max_length 6"):
            layer(x[:, :1], cache)
        cache.reset()
        torch.testing.assert_close(layer(x[:, :3], cache), parts[0])


@pytest.mark.parametrize("level", LEVELS)
def test_mlps(level):
    for op in ("linear", "swiglu"):
        skip_unless_available(op, level)
    x = torch.randn(3, 24, device=DEVICE)
    gated = make("swiglu_mlp", device=DEVICE, backend=level)
    g, u, d = (p.weight for p in (gated.gate_proj, gated.up_proj, gated.down_proj))
    F = torch.nn.functional
    torch.testing.assert_close(gated(x), F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d), rtol=1e-3, atol=1e-4)
    plain = make("gelu_mlp", device=DEVICE, backend=level)
    hidden = F.gelu(F.linear(x, plain.fc1.weight, plain.fc1.bias), approximate="tanh")
    torch.testing.assert_close(plain(x), F.linear(hidden, plain.fc2.weight, plain.fc2.bias), rtol=1e-3, atol=1e-4)


def test_inside_compile():
    model = torch.nn.Sequential(nn.RMSNorm(32), nn.GroupedQueryAttention(32, 4, 2, rope_theta=1e4), nn.Linear(32, 8))
    x = torch.randn(2, 5, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
