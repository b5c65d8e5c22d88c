"""``kernel_ladder.nn``: PyTorch's arguments, names, numbers and habits, and a backend that is checked when set."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import kernel_ladder as kl
from kernel_ladder import nn
from kernel_ladder.errors import BackendError
from torch_ref.attention import MAX_HEAD_DIM

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
        (lambda: nn.GroupedQueryAttention(9, 4), "`num_heads` must divide `embed_dim` unless `head_dim` is given, got"),
        (lambda: nn.GroupedQueryAttention(8, 0), "`num_heads` must be 1 or more, got 0"),
        (lambda: nn.GroupedQueryAttention(16, -4), "`num_heads` must be 1 or more, got -4"),
        (lambda: nn.GroupedQueryAttention(16, 4, 0), "`num_kv_heads` must be 1 or more, got 0"),
        (lambda: nn.GroupedQueryAttention(16, 4, head_dim=0), "`head_dim` must be 1 or more, got 0"),
        (lambda: nn.GroupedQueryAttention(16, 4, head_dim=257), "`head_dim` must give heads at most 256 wide, got 257"),
        (lambda: nn.GroupedQueryAttention(16, 4, window_size=-2), "`window_size` must be -1 or more, got -2"),
        (lambda: nn.MultiheadAttention(9, 4), "`num_heads` must divide `embed_dim`, got 4 and 9"),
        (lambda: nn.MultiheadAttention(1024, 2), "`num_heads` must give heads at most 256 wide, got 512"),
        (lambda: nn.GELU("tanhh"), "GELU: argument `approximate` must be 'none' or 'tanh', got 'tanhh'"),
        (lambda: nn.CrossEntropy(reduction="max"), "CrossEntropy: argument `reduction` must be .*, got 'max'"),
        (lambda: nn.CrossEntropy(z_loss=-1), "`z_loss` must be at least 0 and finite, got -1"),
        (lambda: nn.CrossEntropy(label_smoothing=3.0), "`label_smoothing` must be from 0 to 1, got 3.0"),
        (lambda: nn.RMSNorm(8, eps=float("inf")), "RMSNorm: argument `eps` must be finite, got inf"),
        (lambda: nn.LayerNorm(()), r"LayerNorm: argument `normalized_shape` must be one size or more, .*, got \(\)"),
        (lambda: nn.RMSNorm([8, -1]), r"`normalized_shape` must be one size or more, of at least 0, got \(8, -1\)"),
        (lambda: nn.Linear(-1, 2), "Linear: argument `in_features` must be 0 or more, got -1"),
        (lambda: nn.KVCache(1, 2, 0, 4), "KVCache: argument `max_length` must be 1 or more, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_wrong()
    assert nn.attention.MAX_HEAD_DIM == MAX_HEAD_DIM


def test_arguments_of_a_wrong_type():
    for make_wrong, message in [
        (lambda: nn.GroupedQueryAttention(16, 4.0), "`num_heads` must be an int, got float"),
        (lambda: nn.GroupedQueryAttention(16, 4, rope_theta="1e4"), "`rope_theta` must be a number or None, got str"),
        (lambda: nn.GroupedQueryAttention(16, 4, max_position_embeddings=8.5), "`max_position_embeddings` must be an"),
        (lambda: nn.GroupedQueryAttention(16, 4, window_size=1.5), "`window_size` must be an int or None, got float"),
        (lambda: nn.MultiheadAttention(16, 4, kdim=8.0), "`kdim` must be an int or None, got float"),
        (lambda: nn.CrossEntropy(z_loss="a"), "CrossEntropy: argument `z_loss` must be a number, got str"),
        (lambda: nn.CrossEntropy(ignore_index=None), "`ignore_index` must be an int, got NoneType"),
        (lambda: nn.Dropout("a"), "Dropout: argument `p` must be a number, got str"),
        (lambda: nn.LayerNorm(8, eps=None), "LayerNorm: argument `eps` must be a number, got NoneType"),
        (lambda: nn.RMSNorm("ab"), "`normalized_shape` must be an int or a sequence of ints, got 'ab'"),
        (lambda: nn.SwigluMLP(8, 16.0), "SwigluMLP: argument `hidden_features` must be an int, got float"),
        (lambda: nn.GeluMLP(8, 16, "8"), "GeluMLP: argument `out_features` must be an int, got str"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "`dtype` is complex64; accepted are float16, .* and None"),
        (lambda: nn.KVCache(1, 2, 8, 4.0), "KVCache: argument `head_dim` must be an int, got float"),
        (lambda: nn.KVCache(1, 2, 8, 4, dtype=torch.int32), "KVCache: argument `dtype` is int32; accepted are"),
    ]:
        with pytest.raises(TypeError, match=message):
            make_wrong()


def test_numbers_of_numpy_are_taken():
    numpy = pytest.importorskip("numpy")
    eight, half = numpy.int64(8), numpy.float32(0.5)
    modules = nn.RMSNorm(eight, eps=half), nn.GroupedQueryAttention(eight, numpy.int32(2)), nn.Dropout(half)
    x = torch.randn(1, 3, 8)
    assert all(module(x).shape == x.shape for module in modules)
    assert "z_loss=0.5" in repr(nn.CrossEntropy(z_loss=half))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_norm_of_inputs_of_another_dtype(dtype):
    """As PyTorch's, whose result has the input's dtype."""
    plain, ours = (make(8, dtype=torch.bfloat16) for make in (torch.nn.RMSNorm, nn.RMSNorm))
    torch.nn.init.normal_(plain.weight, 1.0, 0.5)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(3, 8).to(dtype)
    torch.testing.assert_close(ours(x), plain(x))


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


@pytest.mark.parametrize("queries", [1, 4])
def test_a_mask_of_each_head_without_a_batch(queries):
    plain, ours = (make(32, 4) for make in (torch.nn.MultiheadAttention, nn.MultiheadAttention))
    ours.load_state_dict(plain.state_dict())
    q, kv = torch.randn(queries, 32), torch.randn(5, 32)
    added = torch.randn(4, queries, 5)
    for mask in (added, added > 1):
        expected = plain(q, kv, kv, attn_mask=mask, average_attn_weights=False)
        found = ours(q, kv, kv, attn_mask=mask, average_attn_weights=False)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        alone, _ = ours(q, kv, kv, attn_mask=mask, need_weights=False)
        assert torch.equal(alone, found[0])


def test_masks_that_multihead_attention_does_not_take():
    """Integers, which PyTorch refuses too, would be added to the scores."""
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.zeros(2, 5, 16)
    for mask, shape in (("attn_mask", (5, 5)), ("key_padding_mask", (2, 5))):
        for dtype in (torch.int64, torch.uint8):
            with pytest.raises(
                TypeError, match=f"`{mask}` has dtype {dtype}; accepted are bool and".replace("torch.", "")
            ):
                layer(x, x, x, **{mask: torch.ones(shape, dtype=dtype)})
        with pytest.raises(TypeError, match=rf"`{mask}` must be a torch\.Tensor or None, got list"):
            layer(x, x, x, **{mask: [True]})


def test_shapes_that_multihead_attention_does_not_take():
    layer, first = (nn.MultiheadAttention(16, 4, kdim=8, vdim=12, batch_first=b) for b in (True, False))
    q, k, v = torch.zeros(2, 5, 16), torch.zeros(2, 3, 8), torch.zeros(2, 3, 12)
    hidden = torch.zeros(2, 4, dtype=torch.bool)
    for make_wrong, message in (
        (lambda: layer(q[None], k, v), "`query` must have shape (B, S, E) = (B, S, 16) or (S, E), got (1, 2, 5, 16)"),
        (lambda: first(k, k, v), "`query` must have shape (S, B, E) = (S, B, 16) or (S, E), got (2, 3, 8)"),
        (lambda: layer(q, k[:1], v), "`key` must have shape (B, S, E) = (2, S, 8), got (1, 3, 8)"),
        (lambda: first(q, k, v), "`key` must have shape (S, B, E) = (S, 5, 8), got (2, 3, 8)"),
        (lambda: layer(q[0], k, v), "`key` must have shape (S, E) = (S, 8), got (2, 3, 8)"),
        (lambda: layer(q, k, v[:, :2]), "`value` must have shape (B, S, E) = (2, 3, 12), got (2, 2, 12)"),
        (lambda: layer(q, k, v, hidden), "`key_padding_mask` must have shape (B, S_k) = (2, 3), got (2, 4)"),
        (lambda: layer(q[0], k[0], v[0], hidden), "`key_padding_mask` must have shape (S_k,) = (3,), got (2, 4)"),
        (lambda: layer(q, k, v, attn_mask=hidden), "`attn_mask` must have shape (S_q, S_k) = (5, 3), got (2, 4)"),
        (
            lambda: layer(q, k, v, attn_mask=torch.zeros(2, 5, 3)),
            "`attn_mask` must have shape (B · num_heads, S_q, S_k) = (8, 5, 3) or (S_q, S_k), got (2, 5, 3)",
        ),
        (
            lambda: layer(q[0], k[0], v[0], attn_mask=torch.zeros(8, 5, 3)),
            "`attn_mask` must have shape (num_heads, S_q, S_k) = (4, 5, 3) or (S_q, S_k), got (8, 5, 3)",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"MultiheadAttention: argument {message}")):
            make_wrong()


@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize("masked", [False, True])
def test_checks_of_shapes_stand_in_a_graph(masked):
    """Without masks, one graph serves every length but the first."""
    layer, graphs = nn.MultiheadAttention(16, 4, batch_first=True, backend="torch"), CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for length in (5,) if masked else range(5, 9):
        x, padding = torch.randn(2, length, 16), torch.arange(length) >= torch.tensor([[length], [3]])
        causal = torch.ones(length, length).triu(1) > 0
        given = {"key_padding_mask": padding, "attn_mask": causal} if masked else {}
        torch.testing.assert_close(compiled(x, x, x, **given), layer(x, x, x, **given))
    assert graphs.frame_count <= 2


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


@pytest.mark.parametrize("rope_theta", [None, 1e4])
def test_shapes_that_a_cache_and_its_layer_do_not_take(rope_theta):
    layer = nn.GroupedQueryAttention(16, 4, 2, rope_theta=rope_theta)
    cache, key = layer.new_cache(2, 8), torch.ones(2, 2, 3, 4)
    for make_wrong, message in (
        (lambda: layer(torch.ones(3, 16)), "`x` must have shape (B, S, E) = (B, S, 16), got (3, 16)"),
        (lambda: layer(torch.ones(1, 3, 8)), "`x` must have shape (B, S, E) = (B, S, 16), got (1, 3, 8)"),
        (
            lambda: layer(torch.ones(1, 3, 16), cache),
            "`key` must have shape (B, H_kv, S, D) = (2, 2, S, 4), got (1, 2,",
        ),
        (
            lambda: cache.update(key[:, :1], key),
            "`key` must have shape (B, H_kv, S, D) = (2, 2, S, 4), got (2, 1, 3, 4)",
        ),
        (
            lambda: cache.update(key, key[:, :, :2]),
            "`value` must have shape (B, H_kv, S, D) = (2, 2, 3, 4), got (2, 2, 2,",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_wrong()
    with pytest.raises(TypeError, match=r"`key` must be a torch\.Tensor, got list"):
        cache.update([key], key)
    assert cache.length == 0
    assert not cache.keys.any()


def test_a_cache_that_is_reset_in_training():
    """The autograd graph of the tokens before is gone; the memory stays."""
    layer, x = nn.GroupedQueryAttention(16, 4, 2, rope_theta=1e4, backend="torch"), torch.randn(1, 3, 16)
    contiguous, pages = layer.new_cache(1, 8), layer.new_paged_cache(4, 4)
    for cache in (contiguous, pages):
        memory, gradients = (cache.keys.data_ptr(), cache.values.data_ptr()), []
        for _ in range(2):
            if cache is pages:
                cache.add()
            gradients.append(torch.autograd.grad(layer(x, cache).square().sum(), layer.k_proj.weight)[0])
            cache.reset()
        torch.testing.assert_close(*gradients)
        assert (cache.keys.data_ptr(), cache.values.data_ptr()) == memory
        assert not cache.keys.requires_grad
    keys = contiguous.keys
    with torch.no_grad():
        layer(x, contiguous)
    contiguous.reset()
    assert contiguous.keys is keys, "a CUDA graph may hold it"


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
