"""Models of transformers and of torch.nn, patched at each level, against the plain ones."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch

import kernel_ladder as kl
from kernel_ladder import models
from kernel_ladder.errors import BackendError, UnavailableError
from kernel_ladder.models import kept
from kernel_ladder.models.kinds import KINDS, Patched

from ..conftest import DEVICE, skip_unless_available

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
families = pytest.importorskip("tests.models.families")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

OPS = tuple(dict.fromkeys(op for kind in KINDS for op in kind.OPS))
#: Families that Triton's interpreter runs; between them they have every kind of module.
INTERPRETED = ("llama", "gemma3", "phi3", "gpt2", "bert")


def calls():
    for family in families.FAMILIES:
        for level in ("torch", "triton", "cuda"):
            if level != "triton" or DEVICE.type == "cuda" or family in INTERPRETED:
                yield family, level
    yield "llama", "xla"
    if DEVICE.type == "cuda":  # a C++ compiler takes most of a minute
        yield "llama", "compile"


def skip_unless_all_run(level: str) -> None:
    for op in OPS:
        skip_unless_available(op, level)


def results(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, ...]:
    """Logits, loss and all gradients in one vector."""
    model.zero_grad()
    found = model(**inputs)
    found.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return found.logits.detach(), found.loss.detach(), gradient


def in_double(inputs: dict) -> dict:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


@pytest.mark.parametrize(("family", "level"), list(calls()))
def test_family(family, level):
    """Errors against float64 within twice the plain model's, plus 2 ulp, for logits, loss and gradients."""
    skip_unless_all_run(level)
    plain, given = families.make(family, DEVICE), families.inputs(family, DEVICE)
    exact = results(copy.deepcopy(plain).double(), in_double(given))
    patched = copy.deepcopy(plain)
    report = models.patch(patched, backend=level, report=False)
    assert {e.why for e in report.left} <= {
        "gates by another function than SiLU; only its parts are replaced",
        "caps scores at 50.0 by tanh, which no rung does",
        "rotary embedding: computes cosines that do not hold each pair's angle twice",
        "loss: between hidden states and loss lies more than one product",
        "loss: the head is more than one product without bias",
        *kept.REASONS,
    }
    for name, of_plain, found, wanted in zip(
        ("logits", "loss", "gradients"), results(plain, given), results(patched, given), exact, strict=True
    ):
        error, allowed = (float((x.double() - wanted).norm() / wanted.norm()) for x in (found, of_plain))
        assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps, f"{name}: {error:.2e}, plain {allowed:.2e}"
    models.unpatch(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in plain.modules()]
    assert patched.config._attn_implementation == plain.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(patched(**given).logits, plain(**given).logits)


def generations():
    yield from ((family, "torch") for family in families.DECODERS)
    yield from (("llama", level) for level in ("triton", "cuda"))


@pytest.mark.parametrize(("family", "level"), list(generations()))
def test_generation(family, level):
    """Greedy tokens of a batch with a shorter, padded prompt."""
    skip_unless_all_run(level)
    model = families.make(family, DEVICE)
    tokens = families.inputs(family, DEVICE)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    count = 2 if level == "triton" and DEVICE.type == "cpu" else 6
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, attention_mask=mask, **options)
    models.patch(model, backend=level, report=False)
    assert torch.equal(model.generate(tokens, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("level", ["compile", "triton", "cuda"])
def test_inside_compile(level):
    skip_unless_all_run(level)
    torch._dynamo.reset()
    model, given = families.make("llama", DEVICE), {"input_ids": families.inputs("llama", DEVICE)["input_ids"]}
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        models.patch(model, backend=level, report=False)
        compiler = "inductor" if DEVICE.type == "cuda" else "aot_eager"  # without a GPU it takes most of a minute
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        torch.testing.assert_close(compiled(**given, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4)


def test_checkpoints_load_into_the_plain_model(tmp_path):
    model, given = families.make("llama"), families.inputs("llama")
    models.patch(model, backend="torch", report=False)
    with torch.no_grad():
        expected = model(**given).logits
    model.save_pretrained(tmp_path)
    again = tf.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert not any(isinstance(m, Patched) for m in again.modules())
    assert again.config._attn_implementation != models.ATTENTION
    plain = families.FAMILIES["llama"]().eval()
    plain.load_state_dict(model.state_dict(), strict=True)
    for other in (again, plain):
        with torch.no_grad():
            torch.testing.assert_close(other(**given).logits, expected)


def test_a_patched_model_is_copied_and_pickled():
    model = families.make("llama")
    models.patch(model, backend="torch", report=False)
    given = families.inputs("llama")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(**given).logits, model(**given).logits)
        models.unpatch(other)
        assert not any(isinstance(m, Patched) for m in other.modules())
        assert any(isinstance(m, Patched) for m in model.modules())


def test_attention_by_name(monkeypatch):
    """attn_implementation="kernel_ladder", with the backend that each call's surroundings name."""
    config = families.FAMILIES["llama"]().config
    name = models.register_attention()
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    assert model.config._attn_implementation == "kernel_ladder"
    given = families.inputs("llama")
    seen = []
    attention = kl.ops.attention
    monkeypatch.setattr(kl.ops, "attention", lambda *x, **o: seen.append(o["backend"]) or attention(*x, **o))
    with torch.no_grad(), kl.use("torch.naive"):
        found = model(**given).logits
    assert seen == [None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(found, model(**given).logits)
    with pytest.raises(ValueError, match="argument `softcap` must be None"):
        models.attention.attention_forward(model, *[torch.ones(1, 1, 2, 4)] * 3, None, softcap=3.0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # GPT-2 does not pass output_attentions on
def test_attention_weights_are_not_left_out_in_silence(family):
    """A call that asks for them warns; a model whose configuration does keeps its own attention."""
    model, given = families.make(family), families.inputs(family)
    model.set_attn_implementation("eager")
    models.patch(model, backend="torch", report=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="`output_attentions=True` returns no attention weights"):
        assert not model(**given, output_attentions=True).attentions
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**given, output_hidden_states=True)
    models.unpatch(model)
    with torch.no_grad():
        (wanted,) = model(**given, output_attentions=True).attentions
        model.config.output_attentions = True
        report = models.patch(model, backend="torch", report=False)
        (found,) = model(**given).attentions
    assert "returns its weights, as config.output_attentions asks" in {e.why for e in report.left}
    torch.testing.assert_close(found, wanted)


def test_sinks_reach_attention(monkeypatch):
    """gpt-oss's logits of each head go to attention as its sinks."""
    model = families.make("gpt_oss")
    models.patch(model, backend="torch", report=False)
    seen, attention = [], kl.ops.attention
    monkeypatch.setattr(kl.ops, "attention", lambda *x, **o: seen.append(o["sinks"]) or attention(*x, **o))
    with torch.no_grad():
        model(**families.inputs("gpt_oss"))
    assert [id(sinks) for sinks in seen] == [id(layer.self_attn.sinks) for layer in model.model.layers]
    x = [torch.ones(1, 1, 2, 4)] * 3
    exp = torch.tensor([1, 2]) * math.exp(2)  # each query's sum: it sees one key, or two, of score 2
    weights = exp / (exp + 1)
    for sinks in (torch.zeros(1), torch.zeros(1, dtype=torch.float16)):
        output, _ = models.attention.attention_forward(model, *x, None, s_aux=sinks)
        torch.testing.assert_close(output[0, :, 0, 0], weights)  # of values that are 1, beside a sink of 0


def test_16_bits_and_float32_norms():
    model = families.make("llama").to(torch.bfloat16)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.float()
    norm = model.model.norm
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    expected = norm(x)
    assert expected.dtype is torch.float32
    report = models.patch(model.model.layers[0].mlp, backend="torch", report=False)
    assert len(report.replaced) == 4
    models.patch(norm, backend="torch", report=False)
    assert norm(x).dtype is torch.float32
    torch.testing.assert_close(norm(x), expected, rtol=0.01, atol=0.01)


def norms():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    yield torch.nn.RMSNorm
    yield tf.models.llama.modeling_llama.LlamaRMSNorm
    yield modeling.GptOssRMSNorm
    yield tf.models.gemma.modeling_gemma.GemmaRMSNorm
    yield tf.models.t5.modeling_t5.T5LayerNorm


@pytest.mark.parametrize("of_input", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of_weight", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_norms_of_inputs_of_another_dtype(of_weight, of_input):
    """They take what the plain ones take, and give the same dtype."""
    for make in norms():
        norm, x = make(16).to(of_weight), torch.randn(3, 16).to(of_input)
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
        expected = norm(x)
        models.patch(norm, backend="torch", report=False)
        found = norm(x)
        assert found.dtype is expected.dtype, make
        eps = max(torch.finfo(dtype).eps for dtype in (of_weight, of_input, torch.float32))
        torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)


def test_a_mask_of_integers_is_not_added_to_scores():
    """As PyTorch's attention, which transformers calls otherwise."""
    model, given = families.make("llama"), families.inputs("llama")["input_ids"]
    models.patch(model, backend="torch", report=False)
    length = given.shape[1]
    mask = torch.ones(given.shape[0], 1, length, length, dtype=torch.int64).tril()
    with pytest.raises(TypeError, match="argument `attention_mask` has dtype int64; accepted are bool and"):
        model(given, attention_mask=mask)


# ---- models of torch.nn ---------------------------------------------------------------------------------------------


def encoder(dropout: float = 0.0, nested: bool = False) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 48, dropout, activation="gelu", batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def test_a_block_that_returns_zeros_is_not_taken_for_another():
    """Zeros are what a gate of GELU gives as well as one of SiLU, if the last product has no weights yet."""
    model = families.make("gemma")
    torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    report = models.patch(model, backend="torch", report=False)
    assert "returns zeros on a small input" in next(e.why for e in report.left if e.kind == "GemmaMLP")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_is_replaced_does_not_depend_on_the_dtype(family, dtype):
    """In 16 bits SiLU and GELU are within a rounding of each other on small inputs, yet a model trained with either."""
    wide, narrow = families.make(family, DEVICE), families.make(family, DEVICE).to(dtype)
    weights = [p.clone() for p in narrow.parameters()]
    expected, found = (models.patch(model, backend="torch", report=False) for model in (wide, narrow))
    assert found.replaced == expected.replaced
    assert found.left == expected.left
    assert all(torch.equal(*pair) for pair in zip(weights, narrow.parameters(), strict=True))
    assert all(p.dtype == dtype for p in narrow.parameters())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
def test_an_encoder_of_torch_nn(level, training):
    skip_unless_all_run(level)
    torch.manual_seed(0)
    model = encoder().to(DEVICE).train(training)
    x = torch.randn(2, 5, 32, device=DEVICE)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=DEVICE)
    expected = model(x, src_key_padding_mask=padding)[~padding]
    report = models.patch(model, backend=level, report=False)
    assert {e.kind for e in report.replaced} == {"MultiheadAttention", "Linear", "LayerNorm"}
    found = model(x, src_key_padding_mask=padding)[~padding]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    models.unpatch(model)
    torch.testing.assert_close(model(x, src_key_padding_mask=padding)[~padding], expected)
    assert all(layer.activation_relu_or_gelu == 2 for layer in model.layers)


@torch.no_grad()
def test_an_encoder_that_would_nest_its_tensors():
    """In inference PyTorch's encoder gives its fast path nested tensors of what is not padding."""
    model, x = encoder(nested=True).eval(), torch.randn(2, 5, 32)
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    expected = model(x, src_key_padding_mask=padding)[~padding]
    models.patch(model, backend="torch", report=False)
    found = model(x, src_key_padding_mask=padding)[~padding]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    models.unpatch(model)
    assert model.use_nested_tensor
    torch.testing.assert_close(model(x, src_key_padding_mask=padding)[~padding], expected)


@pytest.mark.parametrize("need_weights", [False, True])
def test_masks_of_torch_nns_attention(need_weights):
    """One of integers is refused. One of each head needs no batch, nor more than one query."""
    layer, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(5, 32)
    given = {"need_weights": need_weights, "attn_mask": torch.randn(4, 1, 5)}
    expected, _ = layer(x[:1], x, x, **given)
    models.patch(layer, backend="torch", report=False)
    torch.testing.assert_close(layer(x[:1], x, x, **given)[0], expected, rtol=1e-4, atol=1e-5)
    for name, shape in (("attn_mask", (5, 5)), ("key_padding_mask", (5,))):
        mask = {name: torch.ones(shape, dtype=torch.int64)}
        with pytest.raises(TypeError, match=f"argument `{name}` has dtype int64; accepted are bool and floating-point"):
            layer(x, x, x, need_weights=need_weights, **mask)


def test_pytorchs_fast_path_does_not_pass_by(monkeypatch):
    model = encoder().eval()
    models.patch(model, backend="torch", report=False)
    seen = []
    linear = kl.ops.linear
    monkeypatch.setattr(kl.ops, "linear", lambda *x, **o: seen.append(1) or linear(*x, **o))
    with torch.no_grad():
        model(torch.randn(2, 5, 32))
    assert len(seen) == 8


def test_weights_and_their_dropout_are_pytorchs():
    layer = torch.nn.MultiheadAttention(32, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 32)
    torch.manual_seed(0)
    expected = layer(x, x, x)
    models.patch(layer, backend="torch", report=False)
    torch.manual_seed(0)
    for found, wanted in zip(layer(x, x, x), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    layer.eval()
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("options", [{}, {"ignore_index": 2, "label_smoothing": 0.1, "reduction": "sum"}], ids=str)
def test_a_loss_module(options, monkeypatch):
    """Labels go to cross_entropy, probabilities of classes to PyTorch's."""
    loss, logits = torch.nn.CrossEntropyLoss(**options), torch.linspace(-3, 3, 20).sin().view(4, 5)
    targets = torch.tensor([0, 2, 4, 1]), logits.softmax(1)
    if options:
        targets = targets[:1]  # PyTorch's refuses probabilities beside an ignored label
    wanted = [loss(logits, target) for target in targets]
    report = models.patch(loss, backend="torch", report=False)
    assert [e.why for e in report.replaced] == ["cross_entropy of labels"]
    seen, cross_entropy = [], kl.ops.cross_entropy
    monkeypatch.setattr(kl.ops, "cross_entropy", lambda *x, **o: seen.append(x[1]) or cross_entropy(*x, **o))
    torch.testing.assert_close([loss(logits, target) for target in targets], wanted)
    assert len(seen) == 1
    models.unpatch(loss)
    assert type(loss) is torch.nn.CrossEntropyLoss


def test_a_hook_is_not_missed():
    model, seen = families.make("phi"), []
    mlp = model.model.layers[0].mlp
    mlp.fc1.register_forward_hook(lambda *_: seen.append(1))
    report = models.patch(model, backend="torch", report=False)
    assert "PhiMLP" not in {e.kind for e in report.replaced}
    with torch.no_grad():
        model(**families.inputs("phi"))
    assert seen


def test_a_rungs_name_replaces_what_has_it():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    report = models.patch(model, backend="triton.persistent", report=False)
    assert [e.kind for e in report.replaced] == ["Linear"]
    assert "layer_norm: unknown `backend` 'triton.persistent'" in report.left[0].why


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"argument `model` must be a torch\.nn\.Module, got str"):
        models.patch("llama")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(BackendError, match="did you mean 'triton'"):
        models.patch(model, backend="tritn")
    if kl.table.unavailable("linear", "cuda"):
        with pytest.raises(UnavailableError, match="unavailable"):
            models.patch(model, backend="cuda")
    with pytest.raises(ValueError, match="nothing in Sequential can be replaced: it has no module of a known kind"):
        models.patch(torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU()))
    with pytest.raises(ValueError, match="`model`, a Sequential, is not patched"):
        models.unpatch(model)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("backend", "rows", "mixed", "gradient", "kept_by_module"),
    [
        ("auto", 3, False, False, True),
        ("auto", 2**16 + 1, False, False, False),
        ("auto", 3, True, False, False),
        ("auto", 3, False, True, False),
        ("torch", 3, False, False, False),
    ],
)
@pytest.mark.parametrize(("kind", "op"), [(torch.nn.LayerNorm, "layer_norm"), (torch.nn.RMSNorm, "rms_norm")])
def test_norms_keep_calls_that_wait_for_the_host(kind, op, backend, rows, mixed, gradient, kept_by_module, monkeypatch):
    """Of few elements, without a gradient: PyTorch's one function takes less of the host's time than a rung's call."""
    norm = kind(16, eps=1e-5)
    models.patch(torch.nn.Sequential(norm), backend=backend, report=False)
    public, called = getattr(kl, op), []
    monkeypatch.setattr(f"kernel_ladder.ops.{op}", lambda *x, **k: (called.append(op), public(*x, **k))[1])
    x = torch.randn(rows, 16, dtype=torch.bfloat16 if mixed else torch.float32, device=DEVICE, requires_grad=gradient)
    norm.to(DEVICE)
    with torch.set_grad_enabled(gradient):
        y = norm(x)
    assert bool(called) != kept_by_module
    expected = getattr(torch.nn.functional, op)(x.float(), (16,), eps=1e-5)
    torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("backend", "gradient"), [("auto", False), ("auto", True), ("torch", False)])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_token_is_rotated_and_gated_by_the_model_itself(family, backend, gradient, monkeypatch):
    """A gated block of two functions, and the rotation: less of the host's time than a call of rope and of swiglu."""
    model = families.FAMILIES[family]().to(DEVICE).eval()
    ids = torch.arange(1, 6, device=DEVICE)[None]
    with torch.no_grad():
        expected = model(ids).logits
    models.patch(model, backend=backend, report=False)
    called = set()
    for op in ("rope", "swiglu"):
        public = getattr(kl, op)
        monkeypatch.setattr(
            f"kernel_ladder.ops.{op}", lambda *x, op=op, public=public, **k: (called.add(op), public(*x, **k))[1]
        )
    with torch.set_grad_enabled(gradient):
        logits = model(ids).logits
    assert called == (set() if backend == "auto" and not gradient else {"rope", "swiglu"})
    torch.testing.assert_close(logits.detach(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_norms_that_may_keep_a_call_are_traced_without_a_guard_on_its_size(dynamic):
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.RMSNorm(16, eps=1e-5)).to(DEVICE)
    models.patch(model, backend="auto", report=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for rows in (3, 5, 7):
            x = torch.randn(rows, 16, device=DEVICE)
            torch.testing.assert_close(compiled(x), model(x))
