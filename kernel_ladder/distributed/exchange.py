"""Send tensors around a ring of ranks while each rank computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kernel_ladder.distributed import peer_copy
from kernel_ladder.distributed.peer_copy import DirectCopies, PeerCopies


def _neighbours(group: Any) -> tuple[int, int]:
    """The next rank of a group and the one before, as ranks of all processes."""
    rank, size = group.rank(), group.size()
    return dist.get_global_rank(group, (rank + 1) % size), dist.get_global_rank(group, (rank - 1) % size)


def lost_neighbour(caller: str, group: Any) -> str:
    """What a call says where another rank is gone."""
    following, before = _neighbours(group)
    return f"{caller}: rank {group.rank()} of {group.size()} lost a neighbour (rank {before} or {following})"


class Messages:
    """Hops of tensors around the ring of a group, one at a time, by the process group's own messages (NCCL, gloo).

    Args:
        caller: the function that error messages name.
        group: the process group.
    """

    def __init__(self, caller: str, group: Any) -> None:
        self._group = group
        self._following, self._before = _neighbours(group)
        self._lost = lost_neighbour(caller, group)
        self._works: list[Any] = []

    def send(self, *outgoing: torch.Tensor) -> None:
        """Begin a hop: `outgoing` is contiguous, of the same shapes on every rank, unchanged until :meth:`wait`."""
        self._outgoing = outgoing  # alive until they are sent
        self._incoming = tuple([torch.empty_like(x) for x in outgoing])
        operations = [dist.P2POp(dist.isend, x, self._following, self._group) for x in outgoing]
        operations += [dist.P2POp(dist.irecv, x, self._before, self._group) for x in self._incoming]
        try:
            self._works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise RuntimeError(f"{self._lost}: {error}") from error

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The previous rank's tensors. On a GPU the current stream waits for them, not the host.

        Raises:
            RuntimeError: a neighbour is gone, or did not answer within the group's timeout.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self._lost}: {error}") from error
        return self._incoming


_messages_only = False


@contextlib.contextmanager
def messages_only() -> Iterator[None]:
    """Hops inside of it are messages, whatever the GPUs can do. Enter it on every rank of a group, or on none."""
    global _messages_only
    before, _messages_only = _messages_only, True
    try:
        yield
    finally:
        _messages_only = before


def exchange(caller: str, group: Any, use: str, *tensors: torch.Tensor) -> Messages | PeerCopies:
    """Hops around the ring of a group: by copy engines where the ranks can map each other's memory, else by messages.

    Every rank of the group must call it, and then ``send`` and ``wait`` as often as the others.

    Args:
        caller: the function that error messages name.
        group: the process group; None: the default one.
        use: a name. Hops that are in flight at once need different ones.
        tensors: like those of each hop, on every rank. What arrives may be overwritten by the next call with this
            `use`.

    Raises:
        RuntimeError: a neighbour is gone; or a CUDA graph is captured before the first call with such tensors. Of
            copies, a barrier's kernel traps after the group's timeout: CUDA reports ``unspecified launch failure``, and
            this process can use its GPU no more.
    """
    group = dist.group.WORLD if group is None else group
    if _can_copy(caller, group, tensors[0]):
        return PeerCopies(caller, group, use, tensors)
    return Messages(caller, group)


def _can_copy(caller: str, group: Any, tensor: torch.Tensor) -> bool:
    return not _messages_only and not torch.compiler.is_compiling() and peer_copy.usable(caller, group, tensor.device)


def direct(caller: str, group: Any, use: str, tensor: torch.Tensor) -> DirectCopies | None:
    """Copies from every rank to every other; None where the ranks cannot map each other's memory.

    The arguments are those of :func:`exchange`, for one tensor, and so are the errors.
    """
    group = dist.group.WORLD if group is None else group
    return DirectCopies(caller, group, use, tensor) if _can_copy(caller, group, tensor) else None


def circulate(caller: str, group: Any, *part: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Every rank's part with the rank that it is from, this rank's first. The next one comes while one is used.

    The arguments are those of :func:`exchange`, and so are the errors. A part is contiguous tensors, of the same shapes
    on every rank. It is valid until the iterator goes on, so keep a copy of what is needed longer.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hops = exchange(caller, group, "parts", *part) if size > 1 else None
    for step in range(size):
        last = step + 1 == size
        if hops is not None and not last:
            hops.send(*part)
        yield (rank - step) % size, part
        if hops is not None and not last:
            part = hops.wait()


def gather(caller: str, group: Any, part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's part with the rank that it is from, this rank's first. The others come while it is used.

    The arguments are those of :func:`exchange`, and so are the errors. A part is contiguous, of the same shape on every
    rank. It is valid until the iterator goes on. Where copies are possible a rank has room for all parts.
    """
    copies = direct(caller, group, "gathered", part)
    if copies is None:
        for owner, (owned,) in circulate(caller, group, part):
            yield owner, owned
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for i in range(1, size):
        copies.send(i, part)
    yield rank, part
    for i in range(1, size):
        yield (rank + i) % size, copies.wait(i)
    copies.finish()


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
