"""Dropout's mask: Philox bit for bit, its statistics, and the same mask at every level, in every layout and pass."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernel_ladder
import triton_impl
from kernel_ladder import autograd, philox

from .conftest import DEVICE, every_variant, needs_gpu, skip_unless_it_runs, variant_id

VARIANTS = [v for v in every_variant() if v.op == "dropout"]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers(counter, key, words):
    """The vectors of philox4x32-10 in Random123's own test, ``tests/kat_vectors``."""
    as_words = lambda text: tuple(int(word, 16) for word in text.split())  # noqa: E731
    drawn = philox.philox(tuple(torch.tensor([word]) for word in as_words(counter)), as_words(key))
    assert tuple(word.item() for word in drawn) == as_words(words)


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 + 5, 2**63 - 1])
def test_words_are_those_of_the_specified_counter_and_key(seed):
    words = philox.words(23, seed, "cpu")
    assert words.shape == (23,)
    for i in (0, 3, 4, 9, 22):
        counter = tuple(torch.tensor([c]) for c in (i // 4, 0, 0, 0))
        assert words[i] == philox.philox(counter, (seed % 2**32, seed // 2**32))[i % 4]


@given(st.floats(0, 1, exclude_max=True))
def test_the_scale_is_rounded_to_float32(p):
    assert philox.scale(p) == ctypes.c_float(1 / (1 - p)).value


@given(st.floats(0, 1, exclude_max=True))
def test_the_threshold_is_exact(p):
    numerator, denominator = p.as_integer_ratio()
    assert philox.threshold(p) == numerator * 2**32 // denominator < 2**32


def mask(variant, shape, p=0.3, seed=7, layout=lambda x: x) -> torch.Tensor:
    """Which elements a variant keeps."""
    ones = layout(torch.ones(shape, device=DEVICE))
    skip_unless_it_runs(variant, (ones,), {"p": p, "seed": seed})
    return autograd.run(variant, (ones,), {"p": p, "seed": seed}) != 0


def expected(shape, p=0.3, seed=7) -> torch.Tensor:
    """Which elements the specification keeps."""
    words = philox.words(math.prod(shape), seed, DEVICE)
    return (words >= philox.threshold(p)).view(shape)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "rows": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "strided": lambda x: torch.repeat_interleave(x, 2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 2**31 + 1, 2**63 - 1])
def test_every_level_draws_the_specified_mask_in_every_layout(variant, layout, seed):
    if variant.level == "compile" and (layout, seed) != ("transposed", 0):
        pytest.skip("compiling takes seconds a case: one stands for all")
    for shape in ((3, 1024), (37, 53)):
        assert torch.equal(mask(variant, shape, seed=seed, layout=LAYOUTS[layout]), expected(shape, seed=seed))


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_has_the_outputs_mask(variant, dtype):
    x = torch.ones(37, 1032, dtype=dtype, device=DEVICE, requires_grad=True)
    options = {"p": 0.3, "seed": 2**40 + 3}
    skip_unless_it_runs(variant, (x,), options)
    output = autograd.run(variant, (x,), options)
    (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert torch.equal(grad, output), "of ones, both are the factors themselves"
    assert torch.equal(output != 0, expected(x.shape, 0.3, 2**40 + 3))


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_no_mask_is_kept(variant):
    """What the backward keeps is numbers alone."""
    if variant.backward is None:
        pytest.skip("PyTorch differentiates this variant, and keeps what it needs")
    x = torch.ones(8, 8, device=DEVICE)
    skip_unless_it_runs(variant, (x,), {"p": 0.5, "seed": 1})
    _, saved = variant.forward(x, p=0.5, seed=1)
    assert not any(isinstance(s, torch.Tensor) for s in saved)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_elements_are_dropped_with_probability_p(p):
    numel = 2**20
    kept = int(expected((numel,), p, seed=123).sum())
    # Five standard deviations of the binomial distribution: a right generator fails one seed in two million.
    assert abs(kept - (1 - p) * numel) <= 5 * math.sqrt(numel * p * (1 - p))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2**32), (5, 5 + 2**62)])
def test_masks_of_two_seeds_are_independent(first, second):
    numel = 2**20
    a, b = (expected((numel,), 0.5, seed) for seed in (first, second))
    agree = int((a == b).sum())
    assert abs(agree - numel / 2) <= 5 * math.sqrt(numel / 4)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 256, 1024])
def test_neighbours_are_independent(lag):
    numel = 2**20
    words = expected((numel,), 0.5, seed=9)
    agree = int((words[lag:] == words[:-lag]).sum())
    assert abs(agree - (numel - lag) / 2) <= 5 * math.sqrt((numel - lag) / 4)


def test_seeds_do_not_compile_anew():
    """The compile level takes the seed as a tensor."""
    x = torch.ones(64, device=DEVICE)
    kernel_ladder.dropout(x, 0.5, seed=0, backend="compile")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in (1, 2, 2**40):
        kept = kernel_ladder.dropout(x, 0.5, seed=seed, backend="compile") != 0
        assert torch.equal(kept, expected((64,), 0.5, seed))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level != "compile"], ids=variant_id)
def test_a_seed_may_change_inside_compile(variant):
    if variant.level == "triton" and triton_impl.interpreted():
        pytest.skip("the interpreter cannot be traced")
    x = torch.ones(64, device=DEVICE)
    skip_unless_it_runs(variant, (x,), {"p": 0.5, "seed": 0})
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, seed: kernel_ladder.dropout(x, 0.5, seed=seed, backend=variant.name),
        fullgraph=True,
        backend="inductor" if DEVICE.type == "cuda" else "aot_eager",
    )
    for seed in range(3, 15):  # more than the compiler's limit of graphs for one function
        assert torch.equal(step(x, seed) != 0, expected((64,), 0.5, seed))
    torch._dynamo.reset()


@needs_gpu
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level in ("triton", "cuda")], ids=variant_id)
def test_the_mask_past_elements_that_a_32_bit_index_holds(variant):
    rows, columns = 2**16 + 1, 2**15
    if torch.cuda.mem_get_info()[0] < 3 * 2 * rows * columns * 1.2:
        pytest.skip("needs two tensors of 4 GiB")
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    skip_unless_it_runs(variant, (x,), {"p": 0.3, "seed": 7})
    kept = autograd.run(variant, (x,), {"p": 0.3, "seed": 7}) != 0
    for row in (0, rows // 2, rows - 1):
        call = torch.arange(row * columns // 4, (row + 1) * columns // 4, device="cuda")
        zero = torch.zeros_like(call)
        words = torch.stack(philox.philox((call & philox.WORD, call >> 32, zero, zero), (7, 0)), -1).view(-1)
        assert torch.equal(kept[row], words >= philox.threshold(0.3)), f"row {row}"
