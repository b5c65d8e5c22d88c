"""GroupedQueryAttention that rotates beside Hugging Face's Llama: prompts, decoding, sequences of unequal lengths."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kernel_ladder import nn
from kernel_ladder.errors import BackendError

from ..conftest import DEVICE, skip_unless_available

tf = pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process

WIDTH, HEADS, KV_HEADS, POSITIONS = 64, 4, 2, 40
LENGTHS = (7, 3, 5)
NEW = 4


def llama() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Hugging Face's attention layer with random weights, and what computes its cosines and sines."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=POSITIONS
    )
    config._attn_implementation = "sdpa"
    layer, embedding = modeling_llama.LlamaAttention(config, layer_idx=0), modeling_llama.LlamaRotaryEmbedding(config)
    return layer.to(DEVICE).eval(), embedding.to(DEVICE)


def ours(like: torch.nn.Module, level: str) -> nn.GroupedQueryAttention:
    layer = nn.GroupedQueryAttention(
        WIDTH, HEADS, KV_HEADS, rope_theta=10000.0, max_position_embeddings=POSITIONS, device=DEVICE, backend=level
    )
    layer.load_state_dict(like.state_dict(), strict=True)
    return layer


def by_hugging_face(layer: torch.nn.Module, embedding: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1], device=x.device)[None]
    return layer(x, position_embeddings=embedding(x, places), attention_mask=None)[0]


def tokens(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def skip_unless_runs(level: str) -> None:
    for op in (*nn.GroupedQueryAttention.OPS, "rope", "attention_paged"):
        skip_unless_available(op, level)


#: Of float32 whose products run in tf32 at the triton level; the rounding of one operand.
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
TF32 = 2.0**-11


@pytest.mark.parametrize("level", ["torch", "triton"])
def test_a_prompt_and_its_gradients(level):
    skip_unless_runs(level)
    plain, embedding = llama()
    layer, x = ours(plain, level), torch.cat([tokens(9, 1), tokens(9, 2)]).requires_grad_()
    expected, found = by_hugging_face(plain, embedding, x), layer(x)
    torch.testing.assert_close(found, expected, **CLOSE)
    wanted = torch.autograd.grad(expected.sum(), (x, *plain.parameters()))
    for a, e in zip(torch.autograd.grad(found.sum(), (x, *layer.parameters())), wanted, strict=True):
        assert (a - e).norm() <= 20 * TF32 * e.norm()  # a chain of five products, of rounded operands


@pytest.mark.parametrize("level", ["torch", "triton"])
@torch.no_grad()
def test_decoding_with_a_cache(level):
    skip_unless_runs(level)
    plain, embedding = llama()
    layer, x = ours(plain, level), tokens(7 + NEW)
    cache = layer.new_cache(1, 7 + NEW)
    found = [layer(x[:, :7], cache), *(layer(x[:, i : i + 1], cache) for i in range(7, 7 + NEW))]
    torch.testing.assert_close(torch.cat(found, 1), by_hugging_face(plain, embedding, x), **CLOSE)


@pytest.mark.parametrize("level", ["torch", "triton"])
@torch.no_grad()
def test_sequences_of_unequal_lengths_in_pages(level):
    """Each gets what it would get alone, wherever the others stand."""
    skip_unless_runs(level)
    plain, embedding = llama()
    layer, cache = ours(plain, level), nn.PagedKVCache(12, 4, KV_HEADS, WIDTH // HEADS, DEVICE)
    texts = [tokens(n + NEW, seed) for seed, n in enumerate(LENGTHS)]
    names = [cache.add() for _ in LENGTHS]
    found = [[layer(text[:, :n], cache, sequences=[name])] for text, n, name in zip(texts, LENGTHS, names, strict=True)]
    assert cache.lengths().tolist() == list(LENGTHS)
    order = [2, 0, 1]  # of the batch: another one than that in which they were added
    for step in range(NEW):
        x = torch.cat([texts[i][:, LENGTHS[i] + step : LENGTHS[i] + step + 1] for i in order])
        y = layer(x, cache, sequences=[names[i] for i in order])
        for place, i in enumerate(order):
            found[i].append(y[place : place + 1])
    for parts, text in zip(found, texts, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), by_hugging_face(plain, embedding, text), **CLOSE)


def test_the_table_goes_where_the_weights_go():
    plain, embedding = llama()
    layer, x = ours(plain, "torch"), tokens(5)
    assert "rope_theta=10000.0" in repr(layer)
    assert list(layer.state_dict()) == list(plain.state_dict())
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
        assert other._freqs_cis is layer._freqs_cis, "layers that rotate alike share a table"
    error = (layer.bfloat16()(x.bfloat16()).float() - expected).norm() / expected.norm()
    rounded = by_hugging_face(plain.bfloat16(), embedding.bfloat16(), x.bfloat16()).float()
    assert error <= 2 * (rounded - expected).norm() / expected.norm()
    empty = layer.to("meta").to_empty(device=DEVICE)
    empty.load_state_dict(plain.state_dict())
    assert torch.equal(empty.float()(x), ours(plain, "torch")(x))
    meta = nn.GroupedQueryAttention(
        WIDTH, HEADS, KV_HEADS, rope_theta=1e4, max_position_embeddings=POSITIONS, device="meta", backend="torch"
    )
    meta.load_state_dict(plain.float().state_dict(), assign=True)
    assert torch.equal(meta(x), ours(plain, "torch")(x))


def test_what_it_does_not_take():
    make, x = nn.GroupedQueryAttention, torch.zeros(1, 3, 8)
    for wrong, message in (
        (lambda: make(8, 2, rope_theta=0.0), "`rope_theta` must be above 0 and finite, got 0"),
        (lambda: make(8, 2, rope_theta=1e4, max_position_embeddings=0), "`max_position_embeddings` must be 1 or more"),
        (lambda: make(6, 2, rope_theta=1e4), "`head_dim` must be even to be rotated, got 3"),
        (lambda: make(8, 2, rope_theta=1e4, max_position_embeddings=2)(x), "3 tokens of a sequence do not fit in"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    layer = make(8, 2, rope_theta=1e4, max_position_embeddings=4)
    cache = layer.new_paged_cache(4, 4)
    one = cache.add()
    layer(x, cache)
    with pytest.raises(ValueError, match="6 tokens of a sequence do not fit in the 4 positions"):
        layer(x, cache)
    with pytest.raises(ValueError, match=r"\(1, 2, S, 4\) for B sequences, got \(2, 2, 1, 4\)"):
        layer(torch.zeros(2, 1, 8), cache)
    assert cache.length(one) == 3
    with pytest.raises(BackendError, match=r"rope: unknown `backend` 'torch\.builtin'"):
        make(8, 2, rope_theta=1e4, backend="torch.builtin")
    assert make(8, 2, backend="torch.builtin").backend == "torch.builtin"
