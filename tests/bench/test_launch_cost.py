"""The host's cost of a launch: kernels of many arguments are made, launched and timed."""

from __future__ import annotations

import pytest
import torch

from bench import launch_cost
from kernel_ladder import table

from ..conftest import DEVICE

if (reason := table.unavailable("gelu", "triton")) is not None:
    pytest.skip(reason, allow_module_level=True)


def test_kernels_of_many_arguments(tmp_path):
    """A kernel adds up all of its integers, of which Triton specialises none."""
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    given = launch_cost.values(80)
    assert all(value != 1 and value % 16 for value in given)
    launch_cost.made(tmp_path, 80)[(1,)](out, *given)
    assert int(out) == sum(given)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_times(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_cost, "ROUNDS", 2)
    by_triton, ours = launch_cost.measure(tmp_path, 16)
    assert ours > 0
    assert by_triton > 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is there")
def test_without_a_gpu(capsys):
    assert launch_cost.main() == 2
    assert capsys.readouterr().err == "python -m bench.launch_cost: no GPU is visible\n"
