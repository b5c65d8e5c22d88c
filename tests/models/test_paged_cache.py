"""A paged key-value cache: greedy generation, sequences that come and go, and pages that run out."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_ladder import gpu, nn

from ..conftest import DEVICE, needs_gpu, skip_unless_available

VOCABULARY, WIDTH, LAYERS = 37, 32, 2
NEW_TOKENS = 7


class Model(torch.nn.Module):
    """A language model with random weights. Positions are embedded, so that the order of tokens matters."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(64, WIDTH)
        self.norms = torch.nn.ModuleList(nn.RMSNorm(WIDTH, backend="torch") for _ in range(LAYERS))
        self.attention = torch.nn.ModuleList(
            nn.GroupedQueryAttention(WIDTH, 4, 2, window_size=9 if i else None, backend=backend) for i in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, backend="torch")

    def forward(self, tokens: torch.Tensor, start: int = 0, caches: list | None = None, **of_cache) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[start : start + tokens.shape[1]]
        for i, (norm, attention) in enumerate(zip(self.norms, self.attention, strict=True)):
            x = x + attention(norm(x), None if caches is None else caches[i], **of_cache)
        return self.head(x)


def make_model(backend: str | None = None) -> Model:
    torch.manual_seed(3)
    model = Model(backend)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.to(DEVICE).eval()


def prompts(length: int = 7) -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, length), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def generate(model: Model, tokens: torch.Tensor, caches: list | None = None) -> torch.Tensor:
    """The most likely tokens, one after the other; without caches each step begins anew."""
    step = tokens
    for _ in range(NEW_TOKENS):
        logits = model(step, tokens.shape[1] - step.shape[1], caches)
        chosen = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, chosen], 1)
        step = tokens if caches is None else chosen
    return tokens


def paged(model: Model, sequences: int, num_pages: int = 40, page_size: int = 4) -> list:
    caches = [layer.new_paged_cache(num_pages, page_size) for layer in model.attention]
    for cache in caches:
        for _ in range(sequences):
            cache.add()
    return caches


@needs_gpu  # the cuda level takes 16 bits alone, in which another level may choose another token
@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
@torch.no_grad()
def test_logits_in_16_bits_are_those_without_a_cache(level):
    skip_unless_available("attention_paged", level)
    text = generate(make_model("torch"), prompts())
    expected = make_model("torch")(text)
    model = make_model(level).bfloat16()
    caches = paged(model, 3)
    found = [model(text[:, :7], 0, caches)]
    found += [model(text[:, i : i + 1], i, caches) for i in range(7, text.shape[1])]
    error = (torch.cat(found, 1).float() - expected).norm() / expected.norm()
    rounded = (make_model("torch").bfloat16()(text).float() - expected).norm() / expected.norm()
    assert error <= 2 * rounded


@pytest.mark.parametrize("level", ["torch", "triton"])
@torch.no_grad()
def test_greedy_generation_is_that_of_other_caches(level):
    for op in (*nn.GroupedQueryAttention.OPS, "attention_paged"):
        skip_unless_available(op, level)
    plain = generate(make_model("torch"), prompts())
    assert len({tuple(row) for row in plain[:, 7:].tolist()}) == 3, "three different texts"
    model = make_model(level)
    assert torch.equal(generate(model, prompts(), paged(model, 3)), plain)
    if level != "triton" or DEVICE.type == "cuda":  # the interpreter takes seconds for each
        contiguous = [layer.new_cache(3, 32) for layer in model.attention]
        assert torch.equal(generate(model, prompts(), contiguous), plain)


@torch.no_grad()
def test_a_sequence_goes_on_where_others_begin_and_end():
    model = make_model("torch")
    alone = generate(model, prompts()[:1], paged(model, 1))
    caches = paged(model, 2)
    free = caches[0].free_pages

    def step(tokens: torch.Tensor, start: int, sequences: list[int]) -> torch.Tensor:
        return model(tokens, start, caches, sequences=sequences, batch_invariant=True)[:, -1:].argmax(-1)

    text = step(prompts()[:2], 0, [1, 2])
    found = [text[:1]]
    for place in range(7, 7 + NEW_TOKENS - 1):
        if place == 10:  # the second ends, and a third one takes its pages
            for cache in caches:
                cache.free(2)
                assert cache.add() == 3
            step(prompts()[2:, :5], 0, [3])
        text = step(text, place, [1, 2]) if place < 10 else step(text[:1], place, [1])
        found.append(text[:1])
    assert torch.equal(torch.cat([prompts()[:1], *found], 1), alone)
    for cache in caches:
        assert cache.sequences == (1, 3)
        assert (cache.length(1), cache.length(3)) == (7 + NEW_TOKENS - 1, 5)
        cache.reset()
        assert (cache.sequences, cache.free_pages) == ((), free)


@torch.no_grad()
def test_a_cache_takes_what_autocast_makes():
    """Keys and values in bfloat16 beside memory in float32."""
    torch.manual_seed(4)
    layer = nn.GroupedQueryAttention(32, 4, 2, rope_theta=1e4, device=DEVICE, backend="torch")
    x = torch.randn(2, 9, 32, device=DEVICE)
    expected, pages, contiguous = layer(x), layer.new_paged_cache(8, 4), layer.new_cache(2, 9)
    assert (pages.add(), pages.add()) == (1, 2)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found, other = (torch.cat([layer(part, cache) for part in x.split(5, 1)], 1) for cache in (pages, contiguous))
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 2 * (other - expected).norm()


@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize("of", ["pages", "contiguous"])
@pytest.mark.parametrize(
    "level", ["torch", "auto", pytest.param("triton", marks=needs_gpu), pytest.param("cuda", marks=needs_gpu)]
)
@torch.no_grad()
def test_decoding_compiles_twice(level, of):
    """Once for the first token, and once for any number of tokens before it, without a graph break."""
    if level != "auto":
        skip_unless_available("attention", level)
    width, dtype = (256, torch.bfloat16) if DEVICE.type == "cuda" else (32, torch.float32)
    layer = nn.GroupedQueryAttention(width, 4, 2, rope_theta=1e4, device=DEVICE, dtype=dtype, backend=level)
    x, graphs = torch.randn(2, 12, width, device=DEVICE, dtype=dtype), CompileCounter()
    cache = layer.new_cache(2, 12) if of == "contiguous" else layer.new_paged_cache(12, 2)
    if of == "pages":
        assert (cache.add(), cache.add()) == (1, 2)
    found = [layer(x[:, :5], cache)]

    @torch.compile(fullgraph=True, backend=graphs)
    def step(x, cache, places):
        return layer(x, cache, places=places)

    for i in range(5, 12):
        found.append(step(x[:, i : i + 1], cache, cache.reserve(1) if of == "pages" else None))
    assert graphs.frame_count <= 2
    close = {"rtol": 0.02, "atol": 0.01} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(torch.cat(found, 1), layer(x), **close)


@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch is built for the CPU: no tensors of a GPU")
@pytest.mark.parametrize("backend", ["torch", "auto"])
@torch.no_grad()
def test_a_full_cache_compiles_no_more_on_a_gpu(backend):
    """Its views are contiguous, which no rung may ask of them in a graph. The GPU and its tensors are pretended."""
    layer, graphs = nn.GroupedQueryAttention(32, 4, 2, device="meta", backend=backend), CompileCounter()

    with gpu.pretend("H100"), FakeTensorMode(allow_non_fake_inputs=True):
        layer.to_empty(device="cuda")
        x, cache = torch.empty(2, 12, 32, device="cuda"), layer.new_cache(2, 12)
        step = torch.compile(lambda x, cache: layer(x, cache), fullgraph=True, backend=graphs)
        for i in range(12):
            step(x[:, i : i + 1], cache)
    assert graphs.frame_count <= 3  # an empty cache, one token, any number of them


def test_pages_run_out_and_come_back():
    cache = nn.PagedKVCache(3, 4, 2, 8)
    one, two = cache.add(), cache.add()
    x = torch.randn(1, 2, 7, 8)
    table, lengths = cache.update(x, x + 1, [one])
    assert table.shape == (1, 2)
    assert (lengths.tolist(), cache.free_pages) == ([7], 1)
    stored = cache.keys[table[0].long()].flatten(0, 1)[:7]
    torch.testing.assert_close(stored, x[0].transpose(0, 1), rtol=0, atol=0)
    before = cache.keys.clone()
    with pytest.raises(ValueError, match=r"2 more tokens of 2 sequences need 2 pages, and 1 of 3 are free: free a seq"):
        cache.update(*(torch.randn(2, 2, 2, 8),) * 2)
    assert torch.equal(cache.keys, before)
    assert (cache.length(one), cache.length(two), cache.free_pages) == (7, 0, 1)
    cache.free(one)
    table, lengths = cache.update(*(torch.randn(1, 2, 12, 8),) * 2, [two])
    assert sorted(table[0].tolist()) == [0, 1, 2]
    assert lengths.tolist() == [12]


def test_what_a_cache_does_not_take():
    cache = nn.PagedKVCache(3, 4, 2, 8)
    one = cache.add()
    x = torch.zeros(1, 2, 1, 8)
    for wrong, message in (
        (lambda: cache.free(9), r"there is no sequence 9; there are 1"),
        (lambda: cache.update(x, x, [one, 5]), "there is no sequence 5"),
        (lambda: cache.update(x, x, [one, one]), r"`sequences` must name each sequence once, got \[1, 1\]"),
        (lambda: cache.update(x[:, :1], x), r"`key` must have shape .* \(1, 2, S, 8\) for B sequences, got \(1, 1, 1"),
        (lambda: cache.update(x, torch.zeros(1, 2, 2, 8)), r"`value` must have shape"),
        (lambda: nn.PagedKVCache(0, 4, 2, 8), "`num_pages` must be 1 or more, got 0"),
        (lambda: nn.PagedKVCache(3, 4, 2, 8, max_length=0), "`max_length` must be 1 or more, got 0"),
        (lambda: nn.PagedKVCache(3, 4, 2, -8), "`head_dim` must be 1 or more, got -8"),
        (lambda: cache.update(x[0, 0], x), r"`key` must have shape .* got \(1, 8\)"),
        (lambda: cache.reserve(-1), "`new` must be 0 or more, got -1"),
        (lambda: nn.GroupedQueryAttention(8, 2)(torch.zeros(1, 1, 8), sequences=[1]), "goes with a PagedKVCache"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    for wrong, message in (
        (lambda: nn.PagedKVCache("3", 4, 2, 8), "`num_pages` must be an int, got str"),
        (lambda: nn.PagedKVCache(3, 4, 2, 8, max_length=1.5), "`max_length` must be an int or None, got float"),
        (lambda: nn.PagedKVCache(3, 4, 2, 8, dtype=torch.int32), "PagedKVCache: argument `dtype` is int32; accepted"),
        (lambda: cache.reserve(1.5), "`new` must be an int, got float"),
        (lambda: cache.reserve(1, one), "`sequences` must be a sequence of ints or None, got int"),
        (lambda: cache.lengths(one), "`sequences` must be a sequence of ints or None, got int"),
        (lambda: cache.lengths("1"), "a sequence is an int that `add` returned, got str"),
        (lambda: cache.length([one]), "a sequence is an int that `add` returned, got list"),
        (lambda: cache.free(True), "a sequence is an int that `add` returned, got bool"),
        (lambda: cache.update([x], x), r"`key` must be a torch\.Tensor, got list"),
        (lambda: cache.write(x, x, (0,)), "`places` must be Places, which `reserve` returns, got tuple"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()
    assert (cache.length(one), cache.free_pages) == (0, 3)
    assert cache.reserve(0).rows.numel() == 0


def test_places_that_a_compiled_step_does_not_take():
    layer = nn.GroupedQueryAttention(8, 2, rope_theta=1e4, max_position_embeddings=6)
    cache = layer.new_paged_cache(3, 4)
    cache.add()
    x, places = torch.zeros(1, 1, 8), cache.reserve(1)
    with pytest.raises(ValueError, match="7 tokens of a sequence are more than `max_length`, 6"):
        cache.reserve(6)
    assert cache.length(1) == 1
    with pytest.raises(ValueError, match="`sequences` must be None where `places` is given"):
        layer(x, cache, sequences=[1], places=places)
    with pytest.raises(
        ValueError, match=r"`key` must have shape .* \(1, 2, S, 4\) for B sequences, got \(2, 2, 1, 4\)"
    ):
        layer(x.expand(2, 1, 8), cache, places=places)
    with pytest.raises(ValueError, match="`places` must hold the 2 tokens of `key`, 2 of each sequence, got 1"):
        layer(x.expand(1, 2, 8), cache, places=places)
    with pytest.raises(TypeError, match="`places` must be Places, which `reserve` returns, got tuple"):
        layer(x, cache, places=tuple(places))
    with pytest.raises(ValueError, match="`places` goes with a PagedKVCache alone"):
        layer(x, places=places)
