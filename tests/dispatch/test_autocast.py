"""``torch.autocast``: each operation follows PyTorch's own policy, at every level, eager and inside torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_ladder as kl
from kernel_ladder import autocast
from kernel_ladder.spec import as_tuple

from ..conftest import DEVICE, OWN_DTYPES, skip_unless_available

LOW = torch.bfloat16
#: Levels that run eagerly without a compilation a call, and the rung that is PyTorch's own formula.
LEVELS = ("torch.naive", "torch", "triton", "cuda")


def _row(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).sin().view(shape)


X, Y, SQUARE, VECTOR = _row(6, 16), _row(6, 16) + 0.5, _row(16, 16), _row(16) + 2
HEADS = _row(2, 2, 8, 16)
LABELS = torch.tensor([0, 5, -100, 15, 3, 7])
OFFSETS = torch.tensor([0, 8], dtype=torch.int32)
TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)


def _varlen(q, k, v, *offsets):
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)


def _paged(q, k, v, table, lengths):
    k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _dropped(x):
    """F.dropout falls through autocast to elementwise products; this one has our mask."""
    return x * kl.dropout(torch.ones_like(x), 0.5, seed=1, backend="torch.naive")


def _chain(x, bias, residual, weight, norm_bias):
    return F.layer_norm(residual + _dropped(x + bias), (16,), weight, norm_bias)


def _add_norm(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, (16,), weight), total


#: Of each operation: arguments, its call, and the same by PyTorch's functions.
CALLS: dict[str, tuple[tuple[torch.Tensor, ...], Callable, Callable]] = {
    "gelu": ((X,), kl.gelu, F.gelu),
    "softmax": ((X,), kl.softmax, lambda x: torch.softmax(x, -1)),
    "matmul": ((X, SQUARE), kl.matmul, torch.matmul),
    "attention": ((HEADS, HEADS + 1, HEADS * 2), kl.attention, F.scaled_dot_product_attention),
    "attention_varlen": ((HEADS[0].transpose(0, 1),) * 3 + (OFFSETS,) * 2, kl.attention_varlen, _varlen),
    "attention_paged": (
        (HEADS, HEADS.view(4, 4, 2, 16), HEADS.view(4, 4, 2, 16), TABLE, torch.tensor([8, 8], dtype=torch.int32)),
        kl.attention_paged,
        _paged,
    ),
    "add": ((X, Y), kl.add, torch.add),
    "sum": ((X,), kl.sum, torch.sum),
    "layer_norm": (
        (X, VECTOR, VECTOR),
        lambda x, *p, **o: kl.layer_norm(x, (16,), *p, **o),
        lambda x, *p: F.layer_norm(x, (16,), *p),
    ),
    "rms_norm": ((X, VECTOR), lambda x, w, **o: kl.rms_norm(x, (16,), w, **o), lambda x, w: F.rms_norm(x, (16,), w)),
    "dropout": ((X,), lambda x, **o: kl.dropout(x, 0.5, seed=1, **o), _dropped),
    "bias_gelu": ((X, VECTOR), kl.bias_gelu, lambda x, b: F.gelu(x + b)),
    "rope": (
        (HEADS, torch.polar(torch.ones(8, 8), torch.arange(64.0).view(8, 8))),
        kl.rope,
        lambda x, table: kl.rope(x.float(), table, backend="torch.naive").to(x.dtype),
    ),
    "cross_entropy": ((X, LABELS), kl.cross_entropy, F.cross_entropy),
    "linear_cross_entropy": (
        (X, SQUARE, LABELS),
        kl.linear_cross_entropy,
        lambda x, w, labels: F.cross_entropy(F.linear(x, w), labels),
    ),
    "swiglu": ((X, Y), kl.swiglu, lambda g, u: F.silu(g) * u),
    "add_rms_norm": ((X, Y, VECTOR), kl.add_rms_norm, _add_norm),
    "bias_dropout_add_layer_norm": (
        (X, VECTOR, Y, VECTOR, VECTOR),
        lambda *x, **o: kl.bias_dropout_add_layer_norm(*x, p=0.5, seed=1, **o),
        _chain,
    ),
    "linear_float8": (
        (X.to(torch.float8_e4m3fn), SQUARE.to(torch.float8_e4m3fn), torch.tensor(0.5), torch.tensor(2.0)),
        lambda *x, **o: kl.linear_float8(*x, out_dtype=torch.float32, **o),
        lambda *x: kl.linear_float8(*x, out_dtype=torch.float32, backend="torch.naive"),
    ),
    "linear": ((X, SQUARE, VECTOR), lambda *x, **o: kl.linear(*x, "gelu", **o), lambda *x: F.gelu(F.linear(*x))),
}  # fmt: skip

#: Which floating-point arguments are 16-bit already: none, the first, all, or all but the parameters of a norm.
MIXES = ("float32", "first", "all", "activations")


def arguments(op: str, mix: str, device: torch.device | str = DEVICE) -> tuple[torch.Tensor, ...]:
    def narrow(place: int) -> bool:
        parameter = op.endswith("norm") and place >= {"add_rms_norm": 2, "bias_dropout_add_layer_norm": 3}.get(op, 1)
        return mix == "all" or (mix == "first" and place == 0) or (mix == "activations" and not parameter)

    given = CALLS[op][0]
    if op in OWN_DTYPES:
        return tuple(x.to(device, copy=True) for x in given)
    return tuple(
        x.to(device, LOW if narrow(i) else x.dtype, copy=True) if x.is_floating_point() else x.to(device)
        for i, x in enumerate(given)
    )


def dtypes_of(output) -> list[torch.dtype]:
    return [x.dtype for x in as_tuple(output)]


def every_call():
    return [(op, mix) for op in CALLS for mix in MIXES if len(CALLS[op][0]) > 1 or mix in ("float32", "all")]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("op", CALLS)
def test_as_pytorch(op, level):
    """Dtypes and values of PyTorch's functions under the autocast of this device."""
    skip_unless_available(op, level.partition(".")[0])
    _, call, plain = CALLS[op]
    for mix in MIXES if len(CALLS[op][0]) > 1 else ("float32", "all"):
        given = arguments(op, mix)
        with torch.autocast(DEVICE.type, LOW):
            found, expected = call(*given, backend=level), plain(*given)
        assert dtypes_of(found) == dtypes_of(expected), mix
        for ours, theirs in zip(as_tuple(found), as_tuple(expected), strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.03, atol=0.05)


@pytest.mark.parametrize("op", kl.OPS)
def test_every_operation_is_here(op):
    assert op in CALLS


@contextmanager
def cuda_autocast():
    """CUDA's autocast, on tensors without data where there is no GPU; ``torch.autocast`` refuses to be on there."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize(("op", "mix"), every_call())
def test_cudas_lists(op, mix):
    """Dtypes of PyTorch's functions under CUDA's autocast, whose lists other than the CPU's have norms and sums."""
    _, call, plain = CALLS[op]
    with cuda_autocast():
        given = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in arguments(op, mix, "cpu")]
        if "attention" in op or "dropout" in op or op == "rope":  # these look at the GPU, or into offsets
            assert autocast.policy(op, "cuda") == {
                "dropout": None,
                "rope": None,
                "bias_dropout_add_layer_norm": autocast.FLOAT32,
            }.get(op, autocast.LOWER)
            return
        expected = dtypes_of(plain(*given))
        assert dtypes_of(call(*given, backend="torch.naive")) == expected


def test_the_lists_of_each_device_are_pytorchs():
    assert autocast.policy("matmul", "cuda") == autocast.policy("matmul", "cpu") == autocast.LOWER
    assert autocast.policy("softmax", "cuda") == autocast.policy("layer_norm", "cuda") == autocast.FLOAT32
    assert autocast.policy("softmax", "cpu") is autocast.policy("gelu", "cuda") is None


@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("op", ["linear", "attention", "add_rms_norm", "add"])
def test_inside_compile(op, where, level):
    skip_unless_available(op, level)
    torch._dynamo.reset()
    _, call, _ = CALLS[op]
    given = [x.requires_grad_() for x in arguments(op, "float32")]
    narrow = [x.detach().to(LOW).requires_grad_() if i == 0 and op == "add" else x for i, x in enumerate(given)]

    def function(*x):
        if where == "inside":
            with torch.autocast(DEVICE.type, LOW):
                return call(*x, backend=level)
        return call(*x, backend=level)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE.type, LOW, enabled=where == "around"):
        found, expected = compiled(*narrow), function(*narrow)
    assert dtypes_of(found) == dtypes_of(expected)
    for ours, theirs in zip(as_tuple(found), as_tuple(expected), strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad([x.float().sum() for x in as_tuple(found)], narrow)
    assert [g.dtype for g in gradients] == [x.dtype for x in narrow]
    eager = torch.autograd.grad([x.float().sum() for x in as_tuple(expected)], narrow)
    for ours, theirs in zip(gradients, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_a_switch_between_calls_of_a_compiled_function():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: kl.linear(x, w, backend="torch"), fullgraph=True, backend="aot_eager")
    x, w = X.to(DEVICE), SQUARE.to(DEVICE)
    for on in (False, True, False):
        with torch.autocast(DEVICE.type, LOW, enabled=on):
            assert compiled(x, w).dtype is (LOW if on else torch.float32)


@pytest.mark.parametrize("level", ["torch.naive", "triton", "cuda"])
def test_training(level):
    """Float32 parameters get float32 gradients, from a backward pass in the block or after it."""
    skip_unless_available("linear", level.partition(".")[0])
    results = []
    for inside in (False, True):
        x, w, b = (t.to(DEVICE).requires_grad_() for t in (X.clone(), SQUARE.clone(), VECTOR.clone()))
        with torch.autocast(DEVICE.type, LOW):
            y = kl.linear(x, w, b, "gelu", backend=level)
            y = kl.rms_norm(y, (16,), b, backend=level).float().square().sum()
            if inside:
                y.backward()
        if not inside:
            y.backward()
        assert all(t.grad.dtype is torch.float32 for t in (x, w, b))
        results.append((x.grad, w.grad, b.grad))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0.02, atol=0.02)


def test_a_dtype_that_is_asked_for_stands():
    x = X.to(DEVICE, LOW)
    for function in (kl.softmax, kl.sum):
        with torch.autocast(DEVICE.type, LOW):
            assert function(x, dim=-1, dtype=torch.float16, backend="torch").dtype is torch.float16
            assert function(x, dim=-1, dtype=torch.float32, backend="torch").dtype is torch.float32


def test_what_is_left_alone():
    wide = X.double()
    with torch.autocast("cpu", LOW):
        assert kl.matmul(wide, wide.T, backend="torch").dtype is torch.float64
        assert kl.gelu(X.to("meta"), backend="torch.naive").dtype is torch.float32
        with pytest.raises(TypeError, match=r"`input` must be a torch\.Tensor, got list"):
            kl.gelu([1.0])
        with torch.autocast("cpu", enabled=False):
            assert kl.matmul(X, X.T, backend="torch").dtype is torch.float32
            with pytest.raises(TypeError, match="must have the same dtype, got float32 and bfloat16"):
                kl.add(X, X.to(LOW))


def test_nothing_is_converted_where_it_is_off(monkeypatch):
    def never(*arguments):
        raise AssertionError("autocast is off")

    for name in ("call", "applies_to", "converted", "off"):
        monkeypatch.setattr(autocast, name, never)
    assert kl.linear(X, SQUARE, backend="torch").dtype is torch.float32
    inside = torch.compile(lambda x: kl.gelu(x, backend="torch"), fullgraph=True, backend="aot_eager")
    assert inside(X).dtype is torch.float32


@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
def test_a_loss_inside_compile(level):
    """The first call is inside torch.compile: PyTorch's lists are asked while it traces."""
    skip_unless_available("cross_entropy", level)
    torch._dynamo.reset()
    autocast.policy.cache_clear()
    logits = torch.randn(40, 33, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.arange(40, device=DEVICE) % 33

    def loss(*x):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return kl.cross_entropy(*x, backend=level)

    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(logits, labels)
    expected = loss(logits, labels)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits) for x in (found, expected)))


@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
def test_a_loss_reads_the_logits_that_autocast_made(level):
    """They are saved as they are, and where PyTorch's loss is float32 this one is the loss of the logits in float32.

    PyTorch's rounds its log-probabilities to the logits' dtype: ``cross_entropy_loss`` names it, and autocast obeys.
    """
    skip_unless_available("cross_entropy", level)
    logits = torch.randn(40, 33, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    labels, results = torch.arange(40, device=DEVICE) % 33, []
    policy = autocast.policy("cross_entropy", DEVICE.type)
    for run in (lambda *x: kl.cross_entropy(*x, backend=level), F.cross_entropy):
        kept = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.dtype) or x, lambda x: x),
            torch.autocast(DEVICE.type, torch.bfloat16),
        ):
            loss = run(logits, labels)
        results.append((loss, *torch.autograd.grad(loss, logits), kept))
    (found, of_found, kept), (expected, of_expected, _) = results
    assert found.dtype == expected.dtype == (torch.float32 if policy else torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-5)
    exact = F.cross_entropy(logits.float(), labels).to(found.dtype)
    torch.testing.assert_close(found, exact, rtol=1e-5 if policy else 0.02, atol=1e-5)
    torch.testing.assert_close(of_found, of_expected, rtol=0.01, atol=1e-4)
    if level != "torch":
        assert torch.bfloat16 in kept
