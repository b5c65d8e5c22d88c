"""Rotary embedding beside products of complex numbers, which share nothing with the formula; offsets that change."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder as kl

from ..conftest import DEVICE, captured, needs_gpu, skip_unless_available

LEVELS = ["torch", "triton", "cuda"]


def table(positions: int, pairs: int) -> torch.Tensor:
    """Angles as in RoFormer, with base 10000."""
    frequencies = 10000.0 ** (-torch.arange(pairs) / pairs)
    angles = torch.outer(torch.arange(positions), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(DEVICE)


def by_complex_numbers(x: torch.Tensor, freqs_cis: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if not interleaved:
        x = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # neighbours become pairs
    y = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis).flatten(-2)
    return y if interleaved else y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_pair_is_a_complex_number(level, interleaved):
    skip_unless_available("rope", level)
    x, freqs_cis = torch.randn(2, 3, 7, 32, device=DEVICE), table(12, 16)
    found = kl.rope(x, freqs_cis, interleaved=interleaved, offset=5, backend=level)
    torch.testing.assert_close(found, by_complex_numbers(x, freqs_cis[5:], interleaved))
    back = kl.rope(found, freqs_cis.conj(), interleaved=interleaved, offset=5, backend=level)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("level", LEVELS)
def test_scores_depend_on_the_distance_alone(level):
    skip_unless_available("rope", level)
    q, k, freqs_cis = torch.randn(1, 32, device=DEVICE), torch.randn(1, 32, device=DEVICE), table(64, 16)

    def score(first: int, second: int) -> torch.Tensor:
        a, b = (kl.rope(x, freqs_cis, offset=n, backend=level) for x, n in ((q, first), (k, second)))
        return (a * b).sum()

    torch.testing.assert_close(score(3, 10), score(40, 47), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_an_offset_changes_without_another_compilation(level):
    skip_unless_available("rope", level)
    torch._dynamo.reset()
    count, freqs_cis, x = [0], table(40, 8), torch.randn(2, 1, 16, device=DEVICE)
    inner = torch._dynamo.lookup_backend("aot_eager")

    def counting(graph, examples):
        count[0] += 1
        return inner(graph, examples)

    compiled = torch.compile(lambda n: kl.rope(x, freqs_cis, offset=n, backend=level), backend=counting, fullgraph=True)
    for offset in (3, 17, 30, 39):
        torch.testing.assert_close(compiled(offset), kl.rope(x, freqs_cis, offset=offset, backend=level))
    assert count[0] <= 2
    with pytest.raises(Exception, match="must leave 1 of 40 positions"):
        compiled(40)


def starts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_each_sequence_stands_where_its_offset_says(level, interleaved):
    """Five heads, so that a block of heads could reach into the next sequence; beside each sequence alone."""
    skip_unless_available("rope", level)
    x, freqs_cis, own = torch.randn(3, 5, 7, 40, device=DEVICE), table(30, 16), (21, 0, 8)
    options = {"interleaved": interleaved, "backend": level}
    alone = torch.stack([kl.rope(x[b], freqs_cis, offset=n + 2, **options) for b, n in enumerate(own)])
    found = kl.rope(x.requires_grad_(), freqs_cis, starts(*own), offset=2, **options)
    torch.testing.assert_close(found, alone)
    torch.testing.assert_close(kl.rope(x, freqs_cis, starts(30, 9, 17), offset=-7, **options), alone)
    expected = kl.rope(x.detach(), freqs_cis.conj(), starts(*own), offset=2, **options)
    torch.testing.assert_close(torch.autograd.grad(found, x, x.detach())[0], expected)


def assert_nan_where_outside(found: torch.Tensor, x: torch.Tensor) -> None:
    """Of two rows of four sequences, which begin at −1, 38, 39 and far outside, in a table of 40 positions."""
    outside = found[..., :16].isnan()
    assert outside.all(-1).any(1).tolist() == [[True, False], [False, False], [False, True], [True, True]]
    assert torch.equal(outside.all(-1), outside.any(-1))
    assert torch.equal(found[..., 16:], x[..., 16:])


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_changes_without_another_compilation(level):
    """Compiled code does not read offsets: a row outside of the table becomes NaN."""
    skip_unless_available("rope", level)
    torch._dynamo.reset()
    count, freqs_cis = [0], table(40, 8)
    inner = torch._dynamo.lookup_backend("aot_eager")

    def counting(graph, examples):
        count[0] += 1
        return inner(graph, examples)

    compiled = torch.compile(lambda x, n: kl.rope(x, freqs_cis, n, backend=level), backend=counting, fullgraph=True)
    for own in ((3, 30), (38, 0, 7), (1, 2, 3, 4, 5)):
        x = torch.randn(len(own), 3, 2, 20, device=DEVICE)
        torch.testing.assert_close(compiled(x, starts(*own)), kl.rope(x, freqs_cis, starts(*own), backend=level))
    x = torch.randn(4, 3, 2, 20, device=DEVICE)
    assert_nan_where_outside(compiled(x, starts(-1, 38, 39, -(2**31))), x)
    assert count[0] <= 2


@pytest.mark.parametrize(
    ("rung", "width"),
    [
        *(("torch.naive", 20), ("compile.default", 20), ("xla.jit", 20), ("triton.fused", 20), ("triton.fused", 32)),
        *(("cuda.naive", 20), ("cuda.vectorized", 32)),
    ],
)
def test_a_row_outside_of_the_table_is_nan(rung, width):
    """The rung itself, because the host refuses such offsets where it can read them."""
    level = rung.partition(".")[0]
    skip_unless_available("rope", level)
    if level == "compile" and DEVICE.type == "cpu":
        pytest.skip("the formula is that of torch.naive, and its compilation takes seconds")
    (variant,) = (v for v in kl.table.variants("rope", level) if v.name == rung)
    x = torch.randn(4, 3, 2, width, device=DEVICE, dtype=torch.bfloat16)
    freqs_cis = table(40, 8)
    for last in (-(2**31), 2**31 - 1):
        for offset in (0, -5):
            given = starts(-1 - offset, 38 - offset, 39 - offset, last)
            options = {"interleaved": False, "offset": offset}
            if reason := variant.unsupported(x, freqs_cis, given, **options):
                pytest.skip(reason)
            assert_nan_where_outside(variant.output(x, freqs_cis, given, **options), x)


@needs_gpu
@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_a_cuda_graph_reads_offsets_anew(level):
    """As each step of a server's decoding: the same tokens' memory, at positions that have grown."""
    skip_unless_available("rope", level)
    x, freqs_cis, own = torch.randn(2, 3, 1, 32, device=DEVICE), table(40, 8), starts(3, 30)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kl.rope(x, freqs_cis, own, backend=level)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        found = kl.rope(x, freqs_cis, own, backend=level)
    for numbers in ((3, 30), (39, 0)):
        own.copy_(starts(*numbers))
        graph.replay()
        torch.testing.assert_close(found, kl.rope(x, freqs_cis, starts(*numbers), backend=level))


def test_offsets_under_transforms():
    x, freqs_cis, own = torch.randn(2, 3, 4, 5, 16), table(12, 8).cpu(), torch.tensor([[3, 0, 7], [1, 2, 6]]).int()
    one = torch.stack([kl.rope(x[i], freqs_cis, own[i], backend="torch") for i in range(2)])
    mapped = torch.vmap(lambda x, n: kl.rope(x, freqs_cis, n))(x, own)
    torch.testing.assert_close(mapped, one, rtol=0, atol=0)
    shared = torch.vmap(lambda x: kl.rope(x, freqs_cis, own[0]))(x)
    torch.testing.assert_close(shared[0], one[0], rtol=0, atol=0)
    gradient = torch.func.grad(lambda x: kl.rope(x, freqs_cis, own[0]).square().sum())(x[0])
    torch.testing.assert_close(gradient, 2 * x[0])  # a rotation keeps lengths
