"""The loss of patched causal language models in training, which needs no logits, against the plain model's."""

from __future__ import annotations

import copy
import inspect
import pickle
from unittest import mock

import pytest
import torch

from kernel_ladder import models, ops
from kernel_ladder.errors import UnavailableError
from kernel_ladder.models import loss as loss_module
from kernel_ladder.models import patching

from ..conftest import DEVICE, skip_unless_available

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
families = pytest.importorskip("tests.models.families")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

#: Families whose loss is left, and why.
LEFT = {
    "gemma2": "loss: between hidden states and loss lies more than one product",  # it caps its logits
    "gpt_oss": "loss: between hidden states and loss lies more than one product",  # the loss of its experts' router
    "phi": "loss: the head is more than one product without bias",
}
REPLACED = [name for name in families.DECODERS if name not in LEFT]


def made(family: str) -> torch.nn.Module:
    """A model in training mode that drops nothing."""
    model = families.make(family, DEVICE).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def labelled(family: str) -> dict[str, torch.Tensor]:
    """Inputs of which some labels do not count."""
    given = families.inputs(family, DEVICE)
    labels = given["labels"].clone()
    labels[0, 2:4] = -100
    return {**given, "labels": labels}


def results(model: torch.nn.Module, given: dict, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and all gradients in one vector."""
    model.zero_grad()
    found = model(**given, **options)
    found.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return found.loss.detach(), gradient


def calls():
    yield from ((family, "torch") for family in REPLACED)
    on_gpu = DEVICE.type == "cuda"
    yield from ((family, level) for level in ("triton", "cuda") for family in (REPLACED if on_gpu else ["llama"]))


@pytest.mark.parametrize(("family", "level"), list(calls()))
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}], ids=["mean", "items"])
def test_loss_and_gradients(family, level, options):
    """Errors against float64 within twice the plain model's, plus 2 ulp."""
    skip_unless_available("linear_cross_entropy", level)
    plain, given = made(family), labelled(family)
    exact = results(copy.deepcopy(plain).double(), given, **options)
    patched = copy.deepcopy(plain)
    report = models.patch(patched, backend=level, report=False)
    assert report.replaced[0] == ("", type(plain).__name__, loss_module.CausalLoss.BY)
    assert patched(**given).logits is None
    for name, of_plain, found, wanted in zip(
        ("loss", "gradients"),
        results(plain, given, **options),
        results(patched, given, **options),
        exact,
        strict=True,
    ):
        assert found.dtype == of_plain.dtype
        error, allowed = (float((x.double() - wanted).norm() / wanted.norm()) for x in (found, of_plain))
        assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps, f"{name}: {error:.2e}, plain {allowed:.2e}"


@pytest.mark.parametrize("family", LEFT)
def test_what_is_left(family):
    model = made(family)
    report = models.patch(model, backend="torch", report=False)
    assert [entry.why for entry in report.left if entry.name == ""] == [LEFT[family]]
    assert model(**labelled(family)).logits is not None


def test_logits_where_they_are_wanted():
    """In evaluation, without labels, for some positions alone, as tuples, and with `keep_logits`."""
    plain, given = made("llama"), labelled("llama")
    patched = copy.deepcopy(plain)
    models.patch(patched, backend="torch", report=False)
    unlabelled = {"input_ids": given["input_ids"]}
    with torch.no_grad():
        for arguments in (unlabelled, {**unlabelled, "logits_to_keep": 1}, {**given, "return_dict": False}):
            found, expected = (model(**arguments) for model in (patched, plain))
            assert type(found) is type(expected)
            logits = [x[1] if isinstance(x, tuple) else x.logits for x in (found, expected)]
            torch.testing.assert_close(*logits)
        torch.testing.assert_close(patched.eval()(**given).logits, plain.eval()(**given).logits)
        models.patch(patched, backend="torch", report=False, keep_logits=True)
        torch.testing.assert_close(patched.train()(**given).logits, plain.train()(**given).logits)


@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}], ids=["mean", "items"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_loss_of_logits_reads_them_as_they_are(level, options, compiled):
    """In evaluation: a loss of float32 from 16-bit logits, and the gradients of a call that wants both."""
    skip_unless_available("linear_cross_entropy", level)
    skip_unless_available("cross_entropy", level)
    torch._dynamo.reset()
    plain, given = made("llama").eval().bfloat16(), labelled("llama")
    patched = copy.deepcopy(plain)
    models.patch(patched, backend=level, report=False)
    if compiled:
        found = torch.compile(patched, backend="aot_eager", fullgraph=True)(**given, **options, use_cache=False)
    else:
        with mock.patch.object(ops, "cross_entropy", side_effect=ops.cross_entropy) as called:
            found = patched(**given, **options, use_cache=False)
        assert [call.args[0].dtype for call in called.call_args_list] == [torch.bfloat16]
    assert found.loss.dtype == torch.float32
    assert found.logits is not None
    expected = plain(**given, **options)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2e-3, atol=2e-3)
    of_found, of_expected = (
        torch.autograd.grad(x.loss, m.lm_head.weight)[0] for x, m in ((found, patched), (expected, plain))
    )
    torch.testing.assert_close(of_found, of_expected, rtol=0.05, atol=2e-3)


def test_a_loss_that_is_set_after_patching_is_used():
    model = made("llama").eval()
    models.patch(model, backend="torch", report=False)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    found = model(**labelled("llama"))
    assert torch.equal(found.loss, found.logits.sum())
    models.unpatch(model)
    found = model(**labelled("llama"))
    assert torch.equal(found.loss, found.logits.sum())


def test_a_positional_call_and_the_names_of_arguments():
    """transformers reads the names of a forward pass's arguments, for generation and for columns of data."""
    plain, given = made("llama"), labelled("llama")
    patched = copy.deepcopy(plain)
    models.patch(patched, backend="torch", report=False)
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)
    torch.testing.assert_close(
        patched(given["input_ids"], labels=given["labels"]).loss, plain(given["input_ids"], labels=given["labels"]).loss
    )
    shifted = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(
        patched(**given, shift_labels=shifted).loss, plain(**given, shift_labels=shifted.contiguous()).loss
    )


def test_hidden_states_and_tied_weights():
    """What else a call asks for is in its output; a tied head's gradient goes to the embedding as well."""
    torch.manual_seed(0)
    plain = tf.LlamaForCausalLM(tf.LlamaConfig(**families.GROUPED, tie_word_embeddings=True)).to(DEVICE).train()
    patched, given = copy.deepcopy(plain), labelled("llama")
    models.patch(patched, backend="torch", report=False)
    assert patched.lm_head.weight is patched.model.embed_tokens.weight
    found, expected = (model(**given, output_hidden_states=True) for model in (patched, plain))
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    torch.testing.assert_close(results(patched, given), results(plain, given))


def test_copied_pickled_and_undone():
    model, given = made("llama"), labelled("llama")
    cls = type(model)
    models.patch(model, backend="torch", report=False)
    expected = model(**given).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = other(**given)
        assert found.logits is None
        assert torch.equal(found.loss, expected)
        models.unpatch(other)
        assert type(other) is cls
        assert other(**given).logits is not None


def test_inside_compile():
    torch._dynamo.reset()
    plain, given = made("llama"), labelled("llama")
    patched = copy.deepcopy(plain)
    models.patch(patched, backend="torch", report=False)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(compiled, given, use_cache=False), results(plain, given, use_cache=False))


def test_a_level_without_the_operation_leaves_the_loss(monkeypatch):
    """The level's other operations replace the model's."""
    check = patching.check_backend

    def without(ops, backend):
        if ops == loss_module.CausalLoss.OPS:
            raise UnavailableError("linear_cross_entropy: no rung")
        check(ops, backend)

    monkeypatch.setattr(patching, "check_backend", without)
    model = made("llama")
    report = models.patch(model, backend="torch", report=False)
    assert ("", "LlamaForCausalLM", "loss: linear_cross_entropy: no rung") in report.left
    assert report.replaced
    assert model(**labelled("llama")).logits is not None


def test_a_loss_of_the_users_own_stays():
    model = made("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    report = models.patch(model, backend="torch", report=False)
    assert "loss: is computed by a function of the user's" in [entry.why for entry in report.left]
    assert model(**labelled("llama")).logits is not None


def test_what_adds_to_the_loss_is_seen():
    """A mixture of experts adds its router's loss; another model scales its logits."""
    sizes = {**families.GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    mixture = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**sizes, head_dim=8, output_router_logits=True))
    scaled = tf.CohereForCausalLM(tf.CohereConfig(**families.GROUPED, logit_scale=0.5))
    for model in (mixture, scaled):
        assert loss_module.why_not(model) == loss_module.ELSE
    assert loss_module.why_not(torch.nn.Linear(2, 2)) == ""
