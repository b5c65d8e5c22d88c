"""Copies into the next rank's memory, on CPUs: receive buffers in files that all ranks map."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from kernel_ladder.distributed import peer_copy


class SharedBuffer:
    """As :class:`peer_copy.ReceiveBuffer`, but a copy is done when it returns, and a barrier holds the host."""

    half = 2**18

    def __init__(self, folder: str, use: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.own, self.next = (
            torch.from_file(str(Path(folder, f"{use}-{r}")), shared=True, size=2 * self.half, dtype=torch.uint8)
            for r in (rank, (rank + 1) % size)
        )
        dist.barrier()

    def begin(self) -> None:
        dist.barrier()

    def copying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        dist.barrier()


def by_copies(folder: str, check: Callable[..., None], arguments: tuple) -> None:
    """Run a check with hops as copies."""
    buffers: dict[str, SharedBuffer] = {}

    def buffer(caller: str, group: object, device: torch.device, use: str, size: int) -> SharedBuffer:
        assert size <= SharedBuffer.half
        if use not in buffers:
            buffers[use] = SharedBuffer(folder, use)
        return buffers[use]

    with mock.patch.multiple(peer_copy, usable=lambda *_: True, _buffer=buffer):
        check(*arguments)
    assert buffers, "no hop went by copies"
