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

    part = 2**18
    views = peer_copy.ReceiveBuffer.views

    def __init__(self, folder: str, use: str, parts: int) -> None:
        self._memory = [
            torch.from_file(str(Path(folder, f"{use}-{rank}")), shared=True, size=parts * self.part, dtype=torch.uint8)
            for rank in range(dist.get_world_size())
        ]
        self._views: dict = {}
        self._signals: list[dist.Work] = []
        dist.barrier()

    def begin(self) -> None:
        dist.barrier()

    def copying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        dist.barrier()

    def wait_for_copies(self) -> None:
        for signal in self._signals:
            signal.wait()
        self._signals.clear()

    def signal(self, rank: int) -> None:
        self._signals.append(dist.isend(torch.zeros(1), rank))

    def wait_for_signal(self, rank: int) -> None:
        dist.recv(torch.zeros(1), rank)


def by_copies(folder: str, check: Callable[..., None], arguments: tuple) -> None:
    """Run a check with hops as copies."""
    buffers: dict[str, SharedBuffer] = {}

    def buffer(caller: str, group: object, device: torch.device, use: str, size: int, parts: int) -> SharedBuffer:
        assert size <= SharedBuffer.part
        if use not in buffers:
            buffers[use] = SharedBuffer(folder, use, parts)
        return buffers[use]

    with mock.patch.multiple(peer_copy, usable=lambda *_: True, _buffer=buffer):
        check(*arguments)
    assert buffers, "no hop went by copies"
