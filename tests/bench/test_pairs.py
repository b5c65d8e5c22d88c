"""Pairs of kernels: the calls that are timed, what is made of their times, and the cache policy of a process."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from bench import pairs

from ..conftest import DEVICE
from ..processes import run_python

ROWS = 4


@pytest.mark.parametrize("pair", pairs.PAIRS)
def test_a_pair_is_its_second_kernel_after_its_first(pair):
    with torch.no_grad():
        both, first, second = pairs.calls(pair, ROWS, "torch", 2, DEVICE)
        shapes = [call(1).shape[1] for call in (both, first, second)]
        assert torch.equal(both(0), both(0))
        assert not torch.equal(both(0), both(1))
    columns, inner = (pairs.COLUMNS, pairs.INNER) if DEVICE.type == "cuda" else pairs.TINY
    assert shapes == ([inner, columns, inner] if pair == pairs.PAIRS[0] else [columns] * 3)


def test_all_are_timed_in_the_same_rounds():
    (found,) = pairs.measure(pairs.PAIRS[1], ROWS, ("torch",), DEVICE, seconds=0.02)
    assert found[:3] == (pairs.PAIRS[1], ROWS, "torch")
    assert found.speedup == 1.0
    assert min(found[3:]) > 0


def test_speedups_are_paired_and_sums_are_of_kernels_alone():
    times = {
        "torch pair": [4.0, 8.0, 4.0],
        "cuda pair": [2.0, 4.0, None],
        "cuda first": [1.0, 1.0, 1.0],
        "cuda second": [3.0, 3.0, 3.0],
    }
    found = pairs.figure(pairs.PAIRS[0], ROWS, "cuda", times)
    assert (found.speedup, found.pair_s, found.of_sum) == (2.0, 3.0, 0.75)


def test_processes_are_joined_by_medians():
    made = [pairs.Figure("a", rows, "triton", seconds, 1.0, 1.0, seconds) for rows in (1, 2) for seconds in (1.0, 3.0)]
    assert [(each.rows, each.pair_s, each.of_sum) for each in pairs.joined(made)] == [(1, 2.0, 1.0), (2, 2.0, 1.0)]
    out = io.StringIO()
    pairs.show(pairs.joined(made), Console(file=out, width=120))
    assert "2.000×" in out.getvalue()


def test_a_process_sets_the_policy_before_kernels_are_imported():
    """In a process of its own: here kernels may be imported already."""
    code = (
        "from bench import pairs; pairs.use_policy('default'); import triton_impl.gelu as gelu; "
        "print(repr(gelu.EVICTION_OF_SINGLE_USE.value)); pairs.use_policy('default')"
    )
    done = run_python(["-c", code])
    assert done.stdout.strip() == "''"
    assert "the cache policy must be set before triton_impl.gelu is imported" in done.stderr


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is there")
def test_without_a_gpu(capsys):
    assert pairs.main([]) == 2
    assert capsys.readouterr().err == "python -m bench.pairs: no GPU is visible\n"
