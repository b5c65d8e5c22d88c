"""Ring attention gives what attention over the whole sequence gives, and the same bits in two runs."""

from __future__ import annotations

import pytest
import torch

from kernel_ladder.distributed import ring_attention

from . import group, rings


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_case_at_the_torch_level(ranks, tmp_path):
    group.run(ranks, tmp_path, rings.compare_all, "torch", torch.float64, 1e-10, list(rings.CASES), 48)


def test_rungs_that_take_the_whole_log_sum_exp(tmp_path):
    group.run(2, tmp_path, rings.compare_all, "triton", torch.float32, 1e-4, ["causal", "grouped", "window-causal"], 64)


def test_a_group_is_needed():
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"ring_attention: torch\.distributed\.init_process_group\(\) must"):
        ring_attention(x, x, x)
