"""Attention to keys in pages: dense keys, bits that do not depend on the batch, wrong tables, and no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernel_ladder as kl
from kernel_ladder import table
from kernel_ladder.spec import Case
from kernel_ladder.testing.samples import make_inputs

from ..conftest import (
    DEVICE,
    captured,
    every_variant,
    needs_gpu,
    skip_unless_available,
    skip_unless_it_runs,
    variant_id,
)

OP = "attention_paged"
LEVELS = ("torch", "triton", "cuda")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
#: Of results of rungs that round weights and sum in other orders.
CLOSE = {"rtol": 2e-2, "atol": 1e-2} if DEVICE.type == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
VARIANTS = [v for v in every_variant() if v.op == OP]


def call(
    lengths: tuple[int, ...], page_size: int = 16, heads: tuple[int, int] = (4, 2), rows: int = 1, columns: int = 0
) -> list[torch.Tensor]:
    """The tensors of a call on sequences of these lengths."""
    batch = len(lengths)
    columns = columns or -(-max(lengths) // page_size)
    cache = batch * columns, page_size, heads[1], 32
    shapes = (batch, heads[0], rows, 32), cache, cache, (batch, columns), (batch,)
    kinds = {3: "pages@1", 4: "lengths:" + ",".join(map(str, lengths))}
    return list(make_inputs(Case("", shapes, kinds=kinds), DTYPE, DEVICE))


def attend(tensors: list[torch.Tensor], backend: str, **options: Any) -> Any:
    return kl.attention_paged(*tensors, **{"enable_gqa": True, "is_causal": True, **options}, backend=backend)


def dense(tensors: list[torch.Tensor], b: int) -> tuple[torch.Tensor, ...]:
    """Query, keys and values of one sequence for :func:`kernel_ladder.attention`."""
    query, *caches, block_table, lengths = tensors
    pages, length = block_table[b].long(), int(lengths[b])
    return query[b : b + 1], *(x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in caches)


@pytest.mark.parametrize("level", LEVELS)
def test_is_attention_to_the_same_keys_without_pages(level):
    skip_unless_available(OP, level)
    tensors = call((70, 5, 300), rows=2)
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf], device=DEVICE)
    for options in ({}, {"window_size": (40, 0)}, {"is_causal": False}, {"scale": 0.5}, {"sinks": sinks}):
        found, lse = attend(tensors, level, return_lse=True, **options)
        for b in range(3):
            of_dense = {"is_causal": "lower_right", "enable_gqa": True, "return_lse": True, **options}
            expected, expected_lse = kl.attention(*dense(tensors, b), **of_dense, backend="torch.naive")
            torch.testing.assert_close(found[b : b + 1], expected, **CLOSE)
            torch.testing.assert_close(lse[b : b + 1], expected_lse, **CLOSE)


#: Without a GPU compiling takes seconds; the formula is that of torch.naive on a GPU.
EAGER = [v for v in VARIANTS if v.level != "compile" or DEVICE.type == "cuda"]


@pytest.mark.parametrize("variant", EAGER, ids=variant_id)
def test_what_a_page_held_before_is_not_read(variant):
    """Rows past the keys, keys before every window, and pages of no sequence hold NaN."""
    tensors = call((21, 40), page_size=8, columns=6)
    options = {"is_causal": True, "scale": None, "enable_gqa": True, "window_size": (10, 0)}
    skip_unless_it_runs(variant, tuple(tensors), options)
    expected = kl.attention_paged(*tensors, **options, backend=variant.name)
    _, keys, values, block_table, lengths = tensors
    seen = torch.zeros(keys.shape[:2], dtype=torch.bool, device=DEVICE)
    for pages, length in zip(block_table.long(), lengths.tolist(), strict=True):
        for place in range(length - 11, length):
            seen[pages[place // 8], place % 8] = True
    tensors[1:3] = (x.masked_fill(~seen[..., None, None], torch.nan) for x in (keys, values))
    found = kl.attention_paged(*tensors, **options, backend=variant.name)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def sequence(tensors: list[torch.Tensor], chosen: list[int], columns: int) -> list[torch.Tensor]:
    """The call of some of the sequences, in another order, with a table of another width."""
    query, keys, values, block_table, lengths = tensors
    block_table = torch.nn.functional.pad(block_table, (0, columns))[:, :columns]
    return [query[chosen], keys, values, block_table[chosen], lengths[chosen]]


@pytest.mark.parametrize("level", LEVELS)
def test_batch_invariant(level):
    """The same bits alone, in a batch, at other places of it, among many, and under a wider table."""
    skip_unless_available(OP, level)
    tensors = call((300, 33, 520), page_size=64, rows=2)
    batch = attend(tensors, level, batch_invariant=True, return_lse=True)
    # Other calls would have one split for each of so many sequences, and several for one.
    for chosen, columns in (([2, 0, 1], 9), ([0], 5), ([0], 40), ([1], 1), ([*[1] * 16, 2], 9)):
        found = attend(sequence(tensors, chosen, columns), level, batch_invariant=True, return_lse=True)
        for one, other in zip(found, batch, strict=True):
            assert torch.equal(one, other[chosen])
    # What other calls give is as near to it as the order of sums allows.
    torch.testing.assert_close(batch[0], attend(tensors, level), **CLOSE)


def test_long_sequences_have_longer_splits_instead_of_more(monkeypatch):
    skip_unless_available(OP, "triton")
    from triton_impl import attention_paged

    monkeypatch.setattr(attention_paged, "INVARIANT_SPLITS", 2)
    tensors = call((1200,), page_size=256, heads=(1, 1))
    found = attend(tensors, "triton", batch_invariant=True)
    many = sequence(tensors, [0, 0], 50)
    assert torch.equal(attend(many, "triton", batch_invariant=True), found[[0, 0]])
    torch.testing.assert_close(found, attend(tensors, "torch"), **CLOSE)


def test_who_cannot_be_invariant_says_so():
    tensors = call((5,))
    for level in ("compile", "xla"):
        skip_unless_available(OP, level)
        with pytest.raises(kl.UnsupportedError, match="`batch_invariant` needs torch, triton or cuda"):
            attend(tensors, level, batch_invariant=True)
    traced = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="whose length the host must be able to read"):
        traced(tensors, "torch.naive", batch_invariant=True)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level in ("triton", "cuda")], ids=variant_id)
def test_a_gradient_is_refused(variant):
    tensors = call((5, 9))
    skip_unless_it_runs(variant, tuple(tensors), {})
    for place in range(3):
        given = [x.clone().requires_grad_() if i == place else x for i, x in enumerate(tensors)]
        with pytest.raises(kl.UnsupportedError, match="it is for inference and has no gradient; call it under torch"):
            attend(given, variant.name)
        with torch.no_grad():
            assert not attend(given, variant.name).requires_grad
    options = {"is_causal": True, "scale": None, "enable_gqa": True}
    _, saved = variant.forward(*tensors, **options)
    with pytest.raises(RuntimeError, match=rf"{OP}: {variant.name} is for inference and has no gradient"):
        variant.backward(saved, tensors[0], (True, False, False, False, False))


#: Tables and lengths that do not fit, of two sequences and six pages of eight.
WRONG = {
    "pages": ([[5, 6, -1], [2**31 - 1, -(2**31), 3]], [24, 17]),
    "lengths": ([[0, 1, 2], [3, 4, 5]], [2**31 - 1, -5]),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("variant", EAGER, ids=variant_id)
def test_wrong_tables_read_nothing_outside_of_the_cache(variant, kind):
    """What the host does not check is clamped: the result is that of the clamped table."""
    query, keys, values, *_ = call((24, 24), page_size=8)
    numbers, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in WRONG[kind])
    options = {"is_causal": True, "scale": None, "enable_gqa": True}
    skip_unless_it_runs(variant, (query, keys, values, numbers, lengths), options)
    # The cache lies between memory of NaN.
    caches = []
    for x in (keys, values):
        around = torch.full((18, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
        around[6:12] = x
        caches.append(around[6:12])
    found, _ = variant.forward(query, *caches, numbers, lengths, **options)
    expected, _ = variant.forward(query, keys, values, numbers.clamp(0, 5), lengths.clamp(0, 24), **options)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_tables_that_a_program_is_traced_with_are_not_constants():
    skip_unless_available(OP, "triton")
    traced = torch.compile(lambda *x: attend(list(x), "triton"), backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ((20, 3), (33, 1, 7)):
        tensors = call(lengths)
        torch.testing.assert_close(traced(*tensors), attend(tensors, "torch"), **CLOSE)


@needs_gpu
@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_lengths_grow_in_a_cuda_graph(level):
    """Decoding as it is run: one graph, whose lengths and table change in place."""
    skip_unless_available(OP, level)
    tensors = call((300, 40), columns=40)
    attend(tensors, level)
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        found = attend(tensors, level)
    for step in (1, 2, 250):
        tensors[4] += step
        tensors[3].copy_(tensors[3].flip(1))
        graph.replay()
        torch.testing.assert_close(found, attend(tensors, "torch"), **CLOSE)


def test_the_bound_is_that_of_sums_of_one_key_after_another():
    """In float32. PyTorch adds up a vector's product in parts, whose error is that of shorter sums."""
    tensors = [x.float() if x.is_floating_point() else x for x in call((300,), page_size=16, heads=(1, 1))]
    query, key_cache, value_cache, table, _ = tensors
    keys, values = (x[table[0].long()].flatten(0, 1)[:300, 0] for x in (key_cache, value_cache))
    scores, output = torch.zeros(300, device=DEVICE), torch.zeros(keys.shape[1], device=DEVICE)
    for d in range(keys.shape[1]):
        scores.addcmul_(query[0, 0, 0, d] * keys.shape[1] ** -0.5, keys[:, d])
    exp = torch.exp(scores - scores.max())
    weights = exp / exp.sum(-1, keepdim=True)
    for weight, value in zip(weights, values, strict=True):
        output.addcmul_(weight, value)
    options = {"is_causal": True, "scale": None, "enable_gqa": False}
    assert kl.spec("attention_paged").yardstick(*tensors, **options)[0, 0, 0].equal(output)


@needs_gpu
def test_many_long_sequences_are_as_exact_as_the_formula_in_float32(gpu_memory):
    """So many that none would have more than one split, which adds up 4096 keys one after another."""
    gpu_memory(12 * 2**30)
    tensors = [x.float() if x.is_floating_point() else x for x in call((4096,) * 80, page_size=16, heads=(32, 8))]
    expected = attend([x.double() if x.is_floating_point() else x for x in tensors], "torch")
    off = {level: (attend(tensors, level) - expected).abs().max().item() for level in ("torch", "triton")}
    assert off["triton"] <= 2 * off["torch"], off


@needs_gpu
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.parametrize("heads", [(8, 1), (32, 8)])
def test_pages_of_any_size_on_a_gpu(page_size, heads):
    """Long sequences of several splits, and new tokens that fill several tiles of rows."""
    for rows in (1, 13):
        tensors = call((3000, 1, 517, 64), page_size=page_size, heads=heads, rows=rows)
        expected = attend([x.double() if x.is_floating_point() else x for x in tensors], "torch")
        for variant in table.variants(OP):
            if variant.level in ("triton", "cuda") and not table.unavailable(OP, variant.level):
                for batch_invariant in (False, True):
                    found = attend(tensors, variant.name, batch_invariant=batch_invariant)
                    torch.testing.assert_close(found.double(), expected, **CLOSE)
