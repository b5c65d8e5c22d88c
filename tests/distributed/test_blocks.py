"""A block under tensor, sequence and data parallelism has the loss and gradients of one GPU."""

from __future__ import annotations

from . import blocks, group


def test_loss_and_gradients_are_those_of_one_gpu(tmp_path):
    group.run(2, tmp_path, blocks.everything)
