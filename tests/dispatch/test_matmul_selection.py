"""The rule of `matmul` at the cuda level: known products on an H100, and plans that `split_k` takes."""

from __future__ import annotations

import random

import pytest
import torch

from kernel_ladder.selection import matmul as selection

#: Blocks at once on an H100, in clusters of 1, 2, 4 and 8.
AT_ONCE = (132, 132, 128, 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "rung"),
    [
        (16, 4096, 4096, "cuda.split_k"),
        (512, 512, 8192, "cuda.split_k"),
        (4096, 4096, 4096, "cuda.persistent"),
        (8192, 8192, 8192, "cuda.stream_k"),
    ],
)
def test_known_products(m, n, k, rung):
    assert selection.plan_of(m, n, k, 1, 1, 1, 2, False, AT_ONCE).rung == rung


def test_every_plan_is_one_that_split_k_takes():
    choose = random.Random(0)
    for _ in range(500):
        m, n, k = (choose.choice([choose.randint(1, 64), choose.randint(1, 9000)]) for _ in range(3))
        item, along_m = choose.choice([2, 4]), choose.random() < 0.5
        plan = selection.plan_of(m, n, k, 1, 1, 1, item, along_m and item == 2, AT_ONCE)
        assert (plan.rows, plan.columns, plan.pair) in [tile[:3] for tile in selection.TILES]
        assert plan.splits in selection.SPLITS
        assert plan.splits <= -(-k // (128 // item))
        assert not plan.pair or (along_m and plan.splits == 1)


def test_batches_are_counted_as_the_kernels_fold_them():
    weight = torch.empty(64, 256, dtype=torch.bfloat16)
    rows = selection.plan(torch.empty(4, 1024, 64, dtype=torch.bfloat16), weight)
    assert rows == selection.plan(torch.empty(4096, 64, dtype=torch.bfloat16), weight)
    assert rows == selection.plan(torch.empty(4, 1024, 64, dtype=torch.bfloat16), weight.expand(4, 64, 256))
    assert selection.plan(torch.empty(0, 64, dtype=torch.bfloat16), weight).rung == "cuda.split_k"
