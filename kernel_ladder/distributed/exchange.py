"""Send a tensor to the next rank of a ring while this rank computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """One hop: `outgoing` goes to the next rank of the group, the previous rank's tensor of the same shape comes.

    Args:
        caller: the function that messages name.
        group: the process group; None: the default one.
        outgoing: contiguous, of the same shape and dtype on every rank, and unchanged until :meth:`wait` returns.
    """

    def __init__(self, caller: str, group: Any, outgoing: torch.Tensor) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        following, before = ((rank + hop) % size for hop in (1, -1))
        if group is not None:
            following, before = dist.get_global_rank(group, following), dist.get_global_rank(group, before)
        self._incoming = torch.empty_like(outgoing)
        self._outgoing = outgoing  # alive until it is sent
        self._message = f"{caller}: rank {rank} of {size} lost a neighbour (rank {before} or {following})"
        operations = [
            dist.P2POp(dist.isend, outgoing, following, group),
            dist.P2POp(dist.irecv, self._incoming, before, group),
        ]
        try:
            self._works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise RuntimeError(f"{self._message}: {error}") from error

    def wait(self) -> torch.Tensor:
        """The previous rank's tensor. On a GPU the current stream waits for it, not the host.

        Raises:
            RuntimeError: a neighbour is gone, or did not answer within the group's timeout.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self._message}: {error}") from error
        return self._incoming


def check_group(caller: str) -> None:
    """Raise RuntimeError unless there is a process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{caller}: torch.distributed.init_process_group() must be called first, on every rank")
