"""Send tensors around a ring of ranks while each rank computes."""

from __future__ import annotations

from collections.abc import Iterator
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


def circulate(caller: str, group: Any, part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's part with the rank that it is from, this rank's first. The next one comes while one is used.

    The arguments are those of :class:`Exchange`, and so are the errors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(size):
        coming = Exchange(caller, group, part) if step + 1 < size else None
        yield (rank - step) % size, part
        if coming is not None:
            part = coming.wait()


def check_group(caller: str, group: Any = None) -> None:
    """Raise RuntimeError unless there is a process group, ValueError unless this process belongs to `group`."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{caller}: torch.distributed.init_process_group() must be called first, on every rank")
    if group is None:
        return
    outsider = group == dist.GroupMember.NON_GROUP_MEMBER
    if not outsider and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{caller}: argument `group` must be a process group or None, got {type(group).__name__}")
    if outsider or dist.get_rank(group) < 0:
        raise ValueError(f"{caller}: this process, rank {dist.get_rank()}, does not belong to argument `group`")
