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
from kernel_ladder import autograd
from kernel_ladder.semantics import philox

from ..conftest import DEVICE, every_variant, needs_gpu, skip_unless_it_runs, variant_id

VARIANTS = [v for v in every_variant() if v.op == "dropout"]
CHAIN = "bias_dropout_add_layer_norm"


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


def specified_word(i: int, seed: int) -> int:
    """An element's word in plain integers, written from the specification apart from the library's."""

    def philox_4x32(c: list[int], k0: int, k1: int) -> list[int]:
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b // 2**32 ^ c[1] ^ k0, b % 2**32, a // 2**32 ^ c[3] ^ k1, a % 2**32]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        return c

    j, h = divmod(i, 8)
    halves = []
    for n in (0, 1):
        words = philox_4x32([j % 2**32, j // 2**32, n, 0], seed % 2**32, seed // 2**32)
        halves.append(words[h] // 2**16 if h < 4 else words[h - 4] % 2**16)
    return halves[0] * 2**16 + halves[1]


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 + 5, 2**63 - 1])
def test_words_are_those_of_the_specification(seed):
    for numel in (0, 1, 4, 8, 23):
        assert philox.words(numel, seed, "cpu").tolist() == [specified_word(i, seed) for i in range(numel)]


@pytest.mark.parametrize("first", [2**32 - 1, 2**32, 2**35 + 6, 2**60 - 1])
def test_words_of_calls_past_what_32_bits_hold(first):
    seed = 2**40 + 3
    drawn = philox.words_of_calls(torch.tensor([first, first + 1]), seed)
    assert drawn.view(-1).tolist() == [specified_word(i, seed) for i in range(8 * first, 8 * first + 16)]


def test_the_known_words():
    """Those of a seed, so that no change to the mask goes unseen; half by half from the known answer for zeros."""
    words = philox.words(8, 0, "cpu").tolist()
    assert [f"{word >> 16:04x}" for word in words] == ["6627", "e169", "bc57", "9b00", "e8d5", "c58d", "ac4c", "dbd8"]


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


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 2**31 + 1, 2**63 - 1])
def test_every_level_draws_the_specified_mask_in_every_layout(variant, layout, seed):
    if variant.level == "compile" and (layout, seed) != ("transposed", 0):
        pytest.skip("compiling takes seconds a case: one stands for all")
    for shape in ((3, 1024), (37, 53)):
        assert torch.equal(mask(variant, shape, seed=seed, layout=LAYOUTS[layout]), expected(shape, seed=seed))


def probability_of_ties(numel: int, seed: int) -> float:
    """A probability with whose threshold as many elements as can be share the upper half, half of them below it."""
    words = philox.words(numel, seed, "cpu")
    uppers = words >> 16
    counts = torch.bincount(uppers, minlength=2**16)
    counts[: 2**14] = counts[-(2**14) :] = 0  # rows of some hundred elements hold both outcomes
    ties = words[uppers == counts.argmax()]
    assert len(ties) > 2
    return int(ties.median()) / 2**32


def check_ties(numel: int, p: float, seed: int) -> None:
    """Unless the lower half of the threshold is zero, some ties are kept and some are not."""
    words, threshold = philox.words(numel, seed, "cpu"), philox.threshold(p)
    ties = (words >> 16 == threshold >> 16).nonzero().view(-1)
    assert len(ties) > 0
    kept = words[ties] >= threshold
    assert kept.tolist() == [specified_word(i, seed) >= threshold for i in ties.tolist()]
    assert bool(kept.all()) == (threshold % 2**16 == 0)
    assert bool(kept.any())


TIES = [
    *((dtype, "contiguous", p) for dtype in (torch.bfloat16, torch.float32) for p in (None, 0.5, 2**-17, 1 - 2**-17)),
    *((torch.bfloat16, layout, p) for layout in ("rows", "transposed") for p in (None, 2**-17)),
    *((torch.bfloat16, "contiguous", p) for p in (0.0, 0.25, 2**-40)),
]
ROWS = 1024 if DEVICE.type == "cuda" else 128  # few for the interpreter


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize(("dtype", "layout", "p"), TIES, ids=str)
def test_ties_of_upper_halves_are_decided_by_the_lower(variant, dtype, layout, p):
    if variant.level == "compile" and (dtype, layout) != (torch.float32, "contiguous"):
        pytest.skip("compiling takes seconds a case: one stands for all")
    shape = {"contiguous": (ROWS * 1031 + 5,), "rows": (ROWS, 1032), "transposed": (ROWS - 1, 1030)}[layout]
    numel, seed = math.prod(shape), 2  # of which there are ties of both outcomes at all of these
    if p is None:
        p = probability_of_ties(numel, seed)
    check_ties(numel, p, seed)
    drawn = mask(variant, shape, p, seed, lambda x: LAYOUTS[layout](x.to(dtype)))
    assert torch.equal(drawn, expected(shape, p, seed))


@pytest.mark.sampled
@pytest.mark.parametrize("variant", [v for v in every_variant() if v.op == CHAIN], ids=variant_id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(32, 256), (4, 4096), (16, 1004), (16, 1001), (1, 65536)])
def test_ties_in_the_chain_with_layer_norm(variant, dtype, rows, length):
    """Of ones dropped from, a row's mean parts those that were kept from the others."""
    if variant.level == "compile" and (dtype, length) != (torch.float32, 4096):
        pytest.skip("compiling takes seconds a case: one stands for all")
    shape = (rows * ROWS // 128, length)
    numel, seed = math.prod(shape), 11
    p = probability_of_ties(numel, seed)
    check_ties(numel, p, seed)
    x = torch.ones(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    inputs = (x, torch.zeros_like(x[0]), torch.zeros_like(x), None, None)
    options = {"p": p, "seed": seed, "eps": 1e-5}
    skip_unless_it_runs(variant, inputs, options)
    output = autograd.run(variant, inputs, options)
    assert torch.equal(output > 0, expected(shape, p, seed))
    (grad,) = torch.autograd.grad(output, x, torch.linspace(1, 2, length, device=DEVICE).to(dtype).expand(shape))
    dropped = ~expected(shape, p, seed)
    assert not grad[dropped].any()
    assert int((grad[~dropped] == 0).sum()) <= numel // 100  # a gradient may be zero here or there


@pytest.mark.sampled
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
    )
    for seed in range(3, 15):  # more than the compiler's limit of graphs for one function
        assert torch.equal(step(x, seed) != 0, expected((64,), 0.5, seed))
    torch._dynamo.reset()


@needs_gpu
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.level in ("triton", "cuda")], ids=variant_id)
def test_the_mask_past_elements_that_a_32_bit_index_holds(variant, gpu_memory):
    rows, columns = 2**16 + 1, 2**15
    gpu_memory(3 * 2 * rows * columns * 1.2)
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    skip_unless_it_runs(variant, (x,), {"p": 0.3, "seed": 7})
    kept = autograd.run(variant, (x,), {"p": 0.3, "seed": 7}) != 0
    for row in (0, rows // 2, rows - 1):
        calls = torch.arange(row * columns // 8, (row + 1) * columns // 8, device="cuda")
        words = philox.words_of_calls(calls, 7).view(-1)
        assert torch.equal(kept[row], words >= philox.threshold(0.3)), f"row {row}"
