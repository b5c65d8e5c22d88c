"""The board on which the ranks of a sweep share out its cases."""

from __future__ import annotations

import torch.distributed as dist

from bench.ranks import Board


def check() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    board = Board(shared=True)
    assert board.read("anything") is None
    taken: list = [None] * size
    dist.all_gather_object(taken, list(board.shared_out("abcdefg")))
    assert sorted(case for own in taken for case in own) == list("abcdefg"), taken
    assert not list(board.shared_out("abcdefg"))
    if rank == size - 1:
        board.write("host cost", (1.5, None))
    dist.barrier()
    assert board.read("host cost") == [1.5, None]
