"""Rotary embedding beside products of complex numbers, which share nothing with the formula; offsets that change."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder as kl

from ..conftest import DEVICE, skip_unless_available

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
