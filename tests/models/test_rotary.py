"""Rotary embedding of patched Hugging Face models: by rope where it computes the same, else as before."""

from __future__ import annotations

import copy
import functools
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from kernel_ladder import models, ops
from kernel_ladder.models import rotary

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
families = pytest.importorskip("tests.models.families")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

ROTATING = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3")


def calls_of_rope(model: torch.nn.Module, **given: torch.Tensor) -> int:
    with torch.no_grad(), mock.patch.object(ops, "rope", wraps=ops.rope) as rope:
        model(**given)
    return rope.call_count


@pytest.mark.parametrize("family", ROTATING)
def test_queries_and_keys_of_every_family(family):
    model = families.make(family)
    report = models.patch(model, backend="torch", report=False)
    assert sum("rope" in entry.why for entry in report.replaced) == 1
    assert not any("rotary" in entry.why for entry in report.left)
    assert calls_of_rope(model, **families.inputs(family)) == 2
    models.unpatch(model)
    assert calls_of_rope(model, **families.inputs(family)) == 0


def test_other_models_of_the_same_file_keep_theirs():
    model, other = families.make("llama"), families.make("llama")
    models.patch(model, backend="torch", report=False)
    assert calls_of_rope(other, **families.inputs("llama")) == 0
    assert not isinstance(other.model.layers[0].self_attn, rotary.Rotary)


def test_layers_share_a_table():
    torch.manual_seed(0)
    config = {**families.GROUPED, "num_hidden_layers": 3}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**config)).eval()
    models.patch(model, backend="torch", report=False)
    with torch.no_grad(), mock.patch.object(torch, "complex", wraps=torch.complex) as made:
        model(**families.inputs("llama"))
    assert made.call_count == 1


def test_a_compiled_graph_leaves_the_complex_table_to_one_operator():
    """Inductor has no code for complex tensors on a GPU, and copies those of PyTorch's operators that it lays out."""
    model, graphs = families.make("llama"), []
    models.patch(model, backend="torch", report=False)

    def keep(graph, given):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(**families.inputs("llama"))
    (graph,) = graphs
    made = [n for n in graph.graph.nodes if isinstance(x := n.meta.get("val"), torch.Tensor) and x.is_complex()]
    assert [n.target for n in made if n.op == "call_function"][:1] == [torch.ops.kernel_ladder.rotary_table.default]
    assert not any(n.target is torch.ops.aten.complex.default for n in made)


def test_places_that_differ_by_sequence_are_rotated_as_before():
    """A batch with a padded prompt, whose cosines differ from row to row; and float64, of which there is no table."""
    model = families.make("llama")
    tokens = families.inputs("llama")["input_ids"]
    given = {"input_ids": tokens, "position_ids": torch.stack([torch.arange(6), torch.arange(6) + 3])}
    with torch.no_grad():
        expected = model(**given).logits
    models.patch(model, backend="torch", report=False)
    assert calls_of_rope(model, **given) == 0
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, expected)
    assert calls_of_rope(copy.deepcopy(model).double(), input_ids=tokens) == 0


def test_bad_arguments_fail_as_before():
    rotate = rotary.rotation(modeling_llama.apply_rotary_pos_emb, "torch")
    q, cos = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'position'"):
        rotate(q, q, cos, cos, position=3)
    by_head = [x.transpose(1, 2) for x in rotate(q, q, cos, cos)]
    for x, y in zip(by_head, rotate(*[q.transpose(1, 2)] * 2, cos, cos, unsqueeze_dim=2), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("what", ["neighbours", "cosines"])
def test_what_rope_does_not_compute_is_left(monkeypatch, what):
    model, given = families.make("llama"), families.inputs("llama")
    if what == "neighbours":

        def of_neighbours(q, k, cos, sin, unsqueeze_dim=1):
            def turned(x):
                return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

            cos, sin = (x.unsqueeze(unsqueeze_dim) for x in (cos, sin))
            return q * cos + turned(q) * sin, k * cos + turned(k) * sin

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", of_neighbours)
        why = "rotates its queries and keys by another function than rope"
    else:
        of_model = type(model.model.rotary_emb).forward

        def halves_apart(self, x, position_ids):
            cos, sin = of_model(self, x, position_ids)
            return cos + torch.arange(cos.shape[-1]), sin

        monkeypatch.setattr(type(model.model.rotary_emb), "forward", halves_apart)
        why = "computes cosines that do not hold each pair's angle twice"
    with torch.no_grad():
        expected = model(**given).logits
    report = models.patch(model, backend="torch", report=False)
    assert [e.why for e in report.left if "rotary" in e.why] == [f"rotary embedding: {why}"]
    assert calls_of_rope(model, **given) == 0
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, expected)


def test_decorators_stay_around_the_copy():
    """Those that hold the function in a closure run as before; one that hides it is left."""
    said = []

    def decorated(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            said.append(function.__name__)
            return function(*args, **kwargs)

        return inner

    @decorated
    def forward(x):
        return apply_rotary_pos_emb(x)

    made = rotary._with_global(forward, rotary.FUNCTION, lambda original: lambda x: original(x) + 1)
    assert (forward(1), made(1), said) == (10, 11, ["forward", "forward"])
    hidden = functools.wraps(forward)(lambda x: x)
    assert rotary._with_global(hidden, rotary.FUNCTION, lambda original: original) is None
    assert rotary._with_global(len, rotary.FUNCTION, lambda original: original) is None


def apply_rotary_pos_emb(x):
    return 10 * x
