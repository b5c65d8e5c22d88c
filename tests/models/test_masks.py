"""Masks of patched models: a causal sliding window reaches the kernels as a window, any other pattern as a tensor."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch

import kernel_ladder as kl
from kernel_ladder import models
from kernel_ladder.models.masks import CausalWindow, build_mask

from ..conftest import DEVICE

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
families = pytest.importorskip("tests.models.families")
mu = pytest.importorskip("transformers.masking_utils")

pytestmark = pytest.mark.xdist_group("transformers")

WINDOW = mu.sliding_window_causal_mask_function(4)
CHUNKS = mu.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
PACKED = mu.and_masks(WINDOW, mu.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)))
REAL, PADDED = torch.ones(2, 6, dtype=torch.bool), torch.arange(12).view(2, 6) != 6
LONGER = torch.arange(18).view(2, 9) % 9 < 6

#: Arguments of a mask function, and what a causal window of 4 keys becomes. Lengths are (queries, keys).
CALLS = {
    "from the first token": ((6, 6), {}, CausalWindow),
    "without padding": ((6, 6), {"attention_mask": REAL}, CausalWindow),
    "a padding mask longer than the prompt": ((6, 9), {"attention_mask": LONGER}, CausalWindow),
    "places of a static cache": ((6, 9), {}, CausalWindow),
    "as long as the window": ((4, 4), {}, CausalWindow),
    "shorter than the window": ((3, 3), {}, type(None)),
    "one token sees its window": ((1, 4), {"q_offset": 9, "kv_offset": 6}, type(None)),
    "one token, no padding": ((1, 4), {"q_offset": 5, "kv_offset": 2, "attention_mask": REAL}, type(None)),
    "one token, a key before its window": ((1, 5), {"q_offset": 9, "kv_offset": 5}, torch.Tensor),
    "padding in a token's window": ((1, 4), {"q_offset": 3, "attention_mask": PADDED}, torch.Tensor),
    "padding": ((6, 6), {"attention_mask": PADDED}, torch.Tensor),
    "a padding mask that is too short": ((6, 9), {"attention_mask": REAL[:, :5]}, torch.Tensor),
    "tokens after a cache": ((3, 6), {"q_offset": 3}, torch.Tensor),
    "a static cache's length": ((6, 9), {"q_offset": torch.tensor(0)}, torch.Tensor),
    "chunks": ((6, 6), {"mask_function": CHUNKS}, torch.Tensor),
    "packed sequences": ((6, 6), {"mask_function": PACKED, "allow_is_causal_skip": False}, torch.Tensor),
    "packed sequences, unannounced": ((6, 6), {"mask_function": PACKED}, torch.Tensor),
    "another window": ((6, 6), {"mask_function": mu.sliding_window_causal_mask_function(3)}, torch.Tensor),
    "both sides": (
        (6, 6), {"mask_function": mu.sliding_window_bidirectional_mask_function(4), "allow_is_causal_skip": False},
        torch.Tensor,
    ),
    "a mask that is wanted": ((6, 6), {"allow_is_causal_skip": False}, torch.Tensor),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CALLS))
def test_a_mask_hides_what_transformers_hides(name):
    (queries, keys), options, kind = CALLS[name]
    given = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "local_size": 4,
        "mask_function": WINDOW,
        **options,
    }
    found = build_mask(**given)
    assert isinstance(found, kind)
    whole = mu.sdpa_mask(**{**given, "allow_is_causal_skip": False})
    if found is None:  # attention is causal, or of one query that sees all
        assert torch.equal(whole, torch.ones_like(whole).tril() if queries > 1 else torch.ones_like(whole))
    else:
        assert found.shape == whole.shape
        assert torch.equal(found.tensor() if kind is CausalWindow else found, whole)


def test_other_code_sees_a_tensor():
    window = CausalWindow(3, (2, 1, 5, 6), "cpu")
    window_function = mu.sliding_window_causal_mask_function(3)
    wanted = mu.sdpa_mask(2, 5, 6, mask_function=window_function, allow_is_causal_skip=False)
    assert torch.equal(window[:, :, :, :4], wanted[:, :, :, :4])
    assert torch.equal(torch.where(window, 1.0, 0.0), wanted.float())
    assert (window.ndim, window.dtype) == (4, torch.bool)
    assert torch.equal(window.to("cpu"), wanted)
    x = torch.randn(2, 1, 5, 8), *torch.randn(2, 2, 1, 6, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attention(*x, window), attention(*x, wanted))
    assert copy.deepcopy(window).size == 3


#: Configurations, arguments, and what they become in a graph, where no function of a mask can be looked at.
WINDOWED, CHUNKED = (types.SimpleNamespace(**{name: 4}) for name in ("sliding_window", "attention_chunk_size"))
IN_GRAPHS = {
    "a window": (WINDOWED, (6, 6), {}, CausalWindow),
    "as long as the window": (WINDOWED, (4, 4), {}, CausalWindow),
    "shorter than the window": (WINDOWED, (3, 3), {}, type(None)),
    "padding": (WINDOWED, (6, 6), {"attention_mask": PADDED}, torch.Tensor),
    "what may be padding": (WINDOWED, (6, 6), {"attention_mask": REAL}, torch.Tensor),
    "places of a static cache": (WINDOWED, (6, 9), {}, torch.Tensor),
    "tokens after a cache": (WINDOWED, (3, 6), {"q_offset": 3}, torch.Tensor),
    "packed sequences": (WINDOWED, (6, 6), {"mask_function": PACKED, "allow_is_causal_skip": False}, torch.Tensor),
    "chunks": (CHUNKED, (6, 6), {"mask_function": CHUNKS}, torch.Tensor),
    "another window": (WINDOWED, (6, 6), {"local_size": 3}, torch.Tensor),
}


@pytest.mark.parametrize("name", list(IN_GRAPHS))
def test_a_mask_in_a_graph_hides_what_transformers_hides(name, monkeypatch):
    config, (queries, keys), options, kind = IN_GRAPHS[name]
    lengths = {"batch_size": 2, "q_length": queries, "kv_length": keys}
    given = {**lengths, "local_size": 4, "mask_function": WINDOW, "allow_is_causal_skip": True, **options}
    whole = mu.sdpa_mask(**{**given, "allow_is_causal_skip": False})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = build_mask(**given, config=config)
    assert isinstance(found, kind)
    if found is None:
        assert torch.equal(whole, torch.ones_like(whole).tril())
    else:
        assert torch.equal(found.tensor() if kind is CausalWindow else found, whole)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 6)])
def test_an_encoder_without_padding_has_no_mask_in_a_graph(lengths, monkeypatch):
    """Padding, a window that hides tokens, and further patterns stay masks."""
    sees_all = {"mask_function": mu.bidirectional_mask_function, "allow_is_causal_skip": False}
    given = {"batch_size": 2, "q_length": lengths[0], "kv_length": lengths[1], "config": WINDOWED, **sees_all}
    assert bool(mu.sdpa_mask(**given).all())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    given["allow_is_bidirectional_skip"] = True
    assert build_mask(**given) is None
    assert build_mask(**given, local_size=7) is None
    both = {"mask_function": mu.sliding_window_bidirectional_mask_function(4)}
    for more in ({"attention_mask": REAL}, {"local_size": 4, **both}, {"allow_is_bidirectional_skip": False}):
        assert isinstance(build_mask(**{**given, **more}), torch.Tensor)


def test_a_window_on_both_sides_is_no_causal_one_in_a_graph(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    both = {"mask_function": mu.sliding_window_bidirectional_mask_function(4), "allow_is_bidirectional_skip": False}
    given = {"batch_size": 2, "q_length": 6, "kv_length": 6, "local_size": 4, "config": WINDOWED}
    assert isinstance(build_mask(**given, **both), torch.Tensor)


@pytest.fixture
def seen(monkeypatch):
    """(window, whether a mask is given, S_q, S_k) of each call of attention."""
    calls, attention = [], kl.ops.attention

    def watched(query, key, value, attn_mask=None, **options):
        calls.append((options["window_size"], attn_mask is not None, query.shape[-2], key.shape[-2]))
        return attention(query, key, value, attn_mask, **options)

    monkeypatch.setattr(kl.ops, "attention", watched)
    return calls


close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


def patched(family, device=DEVICE):
    plain = families.make(family, device)
    model = copy.deepcopy(plain)
    models.patch(model, backend="torch", report=False)
    return plain, model


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_reaches_attention(family, seen):
    plain, model = patched(family)
    tokens = families.inputs(family, DEVICE)["input_ids"]
    with torch.no_grad():
        close(model(tokens).logits, plain(tokens).logits)
        assert seen == [((3, 0), False, 6, 6)]
        padding = torch.ones_like(tokens)
        padding[1, :2] = 0
        found, wanted = (m(tokens, attention_mask=padding).logits for m in (model, plain))
        close(found[padding.bool()], wanted[padding.bool()])
        assert seen.pop() == ((-1, -1), True, 6, 6)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=DEVICE)  # two sequences of a packed batch
        found, wanted = (m(tokens, position_ids=positions, use_cache=False).logits for m in (model, plain))
        close(found, wanted)
        assert seen.pop() == ((-1, -1), True, 6, 6)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_beyond_the_window(cache, seen):
    """Greedy tokens, step by step, with no mask at all where a growing cache holds just the window."""
    plain, model = patched("mistral")
    tokens = families.inputs("mistral", DEVICE)["input_ids"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options["cache_implementation"] = cache
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
    assert seen[0] == ((3, 0), False, 6, 6)
    masked = cache == "static"
    assert [call[1:3] for call in seen[1:]] == [(masked, 1)] * 4


def test_several_tokens_after_a_cache():
    plain, model = patched("mistral")
    tokens = families.inputs("mistral", DEVICE)["input_ids"]
    with torch.no_grad():
        wanted = plain(tokens).logits[:, 3:]
        kept = model(tokens[:, :3], use_cache=True).past_key_values
        close(model(tokens[:, 3:], past_key_values=kept).logits, wanted)


def test_a_window_with_dropped_weights_and_checkpoints():
    """In training with dropout PyTorch's attention takes the window as a tensor; a checkpoint keeps it a window."""
    plain, _ = patched("mistral", "cpu")
    plain.config.attention_dropout = plain.model.layers[0].self_attn.attention_dropout = 0.25
    given, losses = families.inputs("mistral"), []
    for model in (plain, copy.deepcopy(plain)):
        if losses:
            models.patch(model, backend="torch", report=False)
            model.gradient_checkpointing_enable()
        model.train()
        torch.manual_seed(0)
        losses.append(model(**given, use_cache=False).loss)
        losses[-1].backward()
    close(losses[1], losses[0])
    close(model.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad)


@pytest.mark.parametrize(
    ("family", "length"), [("llama", 6), ("gpt2", 6), ("mistral", 3), ("mistral", 6), ("gemma3", 6)]
)
def test_a_graph_has_no_mask_of_what_is_causal_or_a_window(family, length, seen):
    """Without a padding mask, at equal lengths."""
    torch._dynamo.reset()
    plain, model = patched(family)
    tokens = families.inputs(family, DEVICE)["input_ids"][:, :length]
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(tokens, use_cache=False).logits
        close(found, plain(tokens, use_cache=False).logits)
    window = (3, 0) if family in ("mistral", "gemma3") and length > 3 else (-1, -1)
    assert {call[:2] for call in seen} == {(window, False)}
    assert model.base_model._forward_pre_hooks
    models.unpatch(model)
    assert not model.base_model._forward_pre_hooks
    assert not model.base_model._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_a_graph_of_an_encoder_has_no_mask(family, seen):
    torch._dynamo.reset()
    plain, model = patched(family)
    given = families.inputs(family, DEVICE)
    given = {name: given[name] for name in ("input_ids", "pixel_values") if name in given}
    with torch.no_grad():
        close(torch.compile(model, backend="eager", fullgraph=True)(**given).logits, plain(**given).logits)
    assert {call[1] for call in seen} == {False}


def test_a_graph_has_the_mask_of_a_cache_and_of_padding(seen):
    torch._dynamo.reset()
    plain, model = patched("llama")
    tokens = families.inputs("llama", DEVICE)["input_ids"]
    padding = torch.ones_like(tokens)
    padding[1, :2] = 0
    call = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted, found = (m(tokens, attention_mask=padding, use_cache=False).logits for m in (plain, call))
        close(found[padding.bool()], wanted[padding.bool()])
        kept = model(tokens[:, :3], use_cache=True).past_key_values
        seen.clear()
        close(call(tokens[:, 3:], past_key_values=kept).logits, plain(tokens).logits[:, 3:])
    assert {call[1] for call in seen} == {True}


@pytest.mark.parametrize("part", ["model", "layers"])
def test_inside_compile(part):
    """A model that is compiled whole builds its mask in the graph; a compiled layer gets the window from outside."""
    torch._dynamo.reset()
    plain, model = patched("mistral")
    tokens = families.inputs("mistral", DEVICE)["input_ids"]
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    with torch.no_grad():
        wanted = plain(**given).logits
        if part == "model":
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        else:
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        close(model(**given).logits, wanted)
