"""Copies into another rank's symmetric memory by copy engines, in which no SM takes part.

A persistent kernel has a block on every SM. While NCCL's kernel of a hop holds some of them, the blocks of these SMs
wait, and the persistent kernel takes up to twice its time. A copy engine leaves all SMs to it.

:class:`PeerCopies` sends around a ring, and a rank needs room for two parts. :class:`DirectCopies` sends to every rank
what it needs, so that no copy waits for another, and a rank needs room for n − 1 parts.

Source: ``torch.distributed._symmetric_memory``, whose ``_pipelined_multi_all_gather_and_consume`` reads directly.
NVLink multicast is not used.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

#: Alignment of a tensor in a receive buffer, in bytes: that of CUDA's allocations.
ALIGNMENT = 256
#: Sizes of receive buffers are multiples of it, in bytes: the granularity of CUDA's virtual memory.
GRANULARITY = 2 << 20
#: Channels of a buffer's signal pads: barriers of all ranks, and signals between two.
BARRIERS, SIGNALS = 0, 1
#: Views that a buffer remembers.
MOST_VIEWS = 256
#: Tensors of a part, in order: first byte, end, dtype, shape.
Places = tuple[tuple[int, int, torch.dtype, torch.Size], ...]
#: Read by torch whenever ranks map each other's memory.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before


class ReceiveBuffer:
    """Symmetric memory in equal parts, into which other ranks copy. Making one is collective.

    Args:
        group: the process group.
        device: this rank's GPU.
        part: bytes of a part, the same on every rank.
        parts: how many there are.

    Raises:
        RuntimeError: the GPUs cannot map each other's memory.
    """

    def __init__(self, group: Any, device: torch.device, part: int, parts: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.part, self.parts, self._device = part, parts, device
        # Views of it enter autograd later, which refuses tensors made in inference mode.
        with torch.inference_mode(False), _without_multicast(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 no longer needs it, 2.11 does
            symmetric.enable_symm_mem_for_group(group.group_name)
            # An allocation of its own, with signal pads of its own: `symmetric.empty` may share one between buffers.
            size = (parts * part,)
            own = symmetric._SymmetricMemory.empty_strided_p2p(size, (1,), torch.uint8, device)
            self._handle = symmetric.rendezvous(own, group.group_name)
            self._memory = [
                own if rank == group.rank() else self._handle.get_buffer(rank, size, torch.uint8)
                for rank in range(group.size())
            ]
            self._stream = torch.cuda.Stream(device)
        self._timeout_ms = _timeout_ms(group, device)
        self._used_on: Any = None  # the stream of the last call
        self._views: dict[Any, tuple[torch.Tensor, ...]] = {}

    def views(self, rank: int, part: int, places: Places) -> tuple[torch.Tensor, ...]:
        """Tensors in a part of a rank's buffer."""
        key = rank, part, places
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False), torch.no_grad():
                memory = self._memory[rank][part * self.part :]
                found = tuple([memory[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in places])
            self._views[key] = found
        return found

    def begin(self) -> None:
        """Wait on the current stream until no rank reads its buffer any more, for a call that ends before the next."""
        current = torch.cuda.current_stream(self._device)
        # A call on another stream may still read. Before a capture, which may not wait for it, torch synchronizes.
        if self._used_on not in (None, current) and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self._used_on)
        self._used_on = current
        self._barrier()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What the block copies waits for the current stream, which goes on beside it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def wait_for_copies(self) -> None:
        """Let the current stream wait for this rank's copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Let the current stream wait for this rank's copies, and for all ranks to have come as far."""
        self.wait_for_copies()
        self._barrier()

    def signal(self, rank: int) -> None:
        """Tell a rank that what this stream did before has been done. It waits while the rank has not seen the last."""
        self._handle.put_signal(rank, SIGNALS, self._timeout_ms)

    def wait_for_signal(self, rank: int) -> None:
        """Let the current stream wait for a rank's signal."""
        self._handle.wait_signal(rank, SIGNALS, self._timeout_ms)

    def _barrier(self) -> None:
        """Let the current stream wait for that of every rank. One barrier is in flight at a time, on one channel."""
        self._handle.barrier(BARRIERS, self._timeout_ms)


def _places(tensors: tuple[torch.Tensor, ...]) -> tuple[Places, int]:
    """Where tensors like these lie in a part, and its bytes."""
    places = []
    end = 0
    for x in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + x.numel() * x.element_size()
        places.append((begin, end, x.dtype, x.shape))
    return tuple(places), end


class PeerCopies:
    """Hops of tensors around the ring of a group, one at a time, by copies into the next rank's receive buffer.

    Hop s fills part s % 2. Three facts keep a part from being overwritten while it is read:

    - :meth:`ReceiveBuffer.begin` is a barrier after all reads of the call before.
    - What arrived by hop s is read by the kernels between the waits of hops s and s + 1, and by the copy of hop s + 1.
      Both precede the barrier in the wait of hop s + 1: its stream waits for that copy first.
    - Hop s + 2, the next into this part, begins after that barrier.

    The same barrier, after the copy on every rank, says that the tensors have arrived.

    Args:
        caller: the function that messages name.
        group: the process group.
        use: which of the group's receive buffers; two that are in flight at once need two.
        tensors: with the shapes and dtypes of each hop's tensors, the same on every rank.
    """

    def __init__(self, caller: str, group: Any, use: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self._rank, self._next = group.rank(), (group.rank() + 1) % group.size()
        self._places, size = _places(tensors)
        self._buffer = _buffer(caller, group, tensors[0].device, use, size, 2)
        self._outgoing: tuple[torch.Tensor, ...] = ()
        self._hop = 0
        self._buffer.begin()

    @torch.no_grad()
    def send(self, *outgoing: torch.Tensor) -> None:
        """Begin a hop, once the current stream has made `outgoing`: contiguous, and unchanged until :meth:`wait`."""
        with self._buffer.copying():
            for target, x in zip(self._buffer.views(self._next, self._hop % 2, self._places), outgoing, strict=True):
                target.copy_(x, non_blocking=True)
        self._outgoing = outgoing  # alive until they are copied

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The previous rank's tensors, for which the current stream waits: views of the receive buffer.

        They may be read, and written, until the wait of the next hop; of the last hop, until the next call.
        """
        self._buffer.finish()
        self._outgoing = ()
        arrived = self._buffer.views(self._rank, self._hop % 2, self._places)
        self._hop += 1
        return arrived


class DirectCopies:
    """One tensor from every rank to every other, by copies into a part of the receiver's buffer for each sender.

    A rank numbers its tensors 1 … n − 1: tensor i of rank r goes to rank r − i, into part i − 1. So every rank sends to
    one and receives from one at a time. No copy waits for what arrives. Two facts keep the parts whole:

    - :meth:`ReceiveBuffer.begin` is a barrier after all reads of the call before. Each part is written once a call.
    - A copy precedes its signal, on one stream, and what reads the part comes after a wait for that signal.

    Args:
        caller: the function that messages name.
        group: the process group.
        use: which of the group's receive buffers; two that are in flight at once need two.
        tensor: with the shape and dtype of each tensor, the same on every rank.
    """

    def __init__(self, caller: str, group: Any, use: str, tensor: torch.Tensor) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._places, size = _places((tensor,))
        self._buffer = _buffer(caller, group, tensor.device, use, size, self._size - 1)
        self._outgoing: list[torch.Tensor] = []
        self._buffer.begin()

    @torch.no_grad()
    def send(self, i: int, outgoing: torch.Tensor) -> None:
        """Begin to send tensor i once the current stream has made it: contiguous, unchanged until :meth:`finish`."""
        rank = (self._rank - i) % self._size
        with self._buffer.copying():
            self._buffer.views(rank, i - 1, self._places)[0].copy_(outgoing, non_blocking=True)
            self._buffer.signal(rank)
        self._outgoing.append(outgoing)  # alive until it is copied

    def wait(self, i: int) -> torch.Tensor:
        """Tensor i of rank r + i, for which the current stream waits: a view of the buffer, until the next call."""
        self._buffer.wait_for_signal((self._rank + i) % self._size)
        return self._buffer.views(self._rank, i - 1, self._places)[0]

    def wait_for_all(self) -> torch.Tensor:
        """The tensors 1 … n − 1 of the other ranks, one after another along a new first dimension."""
        for i in range(1, self._size):
            self._buffer.wait_for_signal((self._rank + i) % self._size)
        first = self._buffer.views(self._rank, 0, self._places)[0]
        apart = self._buffer.part // first.element_size()
        return first.as_strided((self._size - 1, *first.shape), (apart, *first.stride()))

    def finish(self) -> None:
        """Let the current stream wait until what this rank sent has been copied."""
        self._buffer.wait_for_copies()
        self._outgoing.clear()


#: Of each group: its receive buffers by their use and GPU, and by GPU whether there can be any.
_buffers: WeakKeyDictionary[Any, dict[tuple[str, torch.device], ReceiveBuffer]] = WeakKeyDictionary()
_usable: WeakKeyDictionary[Any, dict[torch.device, bool]] = WeakKeyDictionary()
#: CUDA graphs hold the addresses of these, so they are never freed.
_captured: set[ReceiveBuffer] = set()


def _buffer(caller: str, group: Any, device: torch.device, use: str, size: int, parts: int) -> ReceiveBuffer:
    """The receive buffer of a use, made or grown to parts of `size` bytes. Every rank must ask for the same."""
    buffers = _buffers.setdefault(group, {})
    found = buffers.get((use, device))
    if found is None or found.part < size:
        _refuse_in_capture(caller)
        if found is not None:
            # This rank's copies into another one's old buffer end here. The new one is made by all ranks together,
            # so every rank has come so far before any frees its old one.
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the buffer is no memory of PyTorch's allocator, which may hold all that is free
        part = -(-max(size, 1) // GRANULARITY) * GRANULARITY
        found = buffers[use, device] = ReceiveBuffer(group, device, part, parts)
    if torch.cuda.is_current_stream_capturing():
        _captured.add(found)
    return found


def usable(caller: str, group: Any, device: torch.device) -> bool:
    """Whether hops can go by copy engines: ranks of one host that map each other's memory.

    The ranks agree on it in the first call of each group, which is collective.
    """
    if device.type != "cuda" or group.size() == 1:
        return False
    known = _usable.setdefault(group, {})
    if device not in known:
        _refuse_in_capture(caller)
        with torch.cuda.device(device):
            known[device] = _agree(group, device)
    return known[device]


#: CUDA's word for a kernel that trapped, as one that waits for another rank does after the group's timeout.
TRAPPED = "unspecified launch failure"


def guarded(caller: str, group: Any, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``run(*args, **options)``, with an error that names the call and its group where a wait on the GPU has trapped.

    CUDA reports a trap to the first call that checks, which may be another than the one that waits.
    """
    try:
        return run(*args, **options)
    except RuntimeError as error:
        group = dist.group.WORLD if group is None else group
        buffers = _buffers.get(group)
        if TRAPPED not in str(error) or not buffers:
            raise
        _, device = next(iter(buffers))  # CUDA is not asked: each of its calls may report the trap
        raise RuntimeError(
            f"{caller}: rank {group.rank()} of {group.size()} lost another rank: a wait on {device} for its copies, of "
            f"this call or an earlier one, ended after the group's timeout of {_timeout_ms(group, device) / 1e3:g} s, "
            f"or another kernel failed; this process can use its GPU no more. CUDA: {str(error).partition(chr(10))[0]}"
        ) from error


def _refuse_in_capture(caller: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{caller}: memory shared with the other ranks cannot be made while a CUDA graph is captured; "
            "call it once before, with tensors of these shapes"
        )


def _agree(group: Any, device: torch.device) -> bool:
    def gathered(mine: Any) -> list[Any]:
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, mine, group)
        return found

    here = None
    with contextlib.suppress(ImportError, RuntimeError):
        from torch.distributed import _symmetric_memory  # noqa: F401

        here = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    places = gathered(here)
    if None in places or len({host for host, _ in places}) > 1 or len(set(places)) < len(places):
        return False
    try:
        ReceiveBuffer(group, device, GRANULARITY, 1)
        mapped = True
    except RuntimeError:
        mapped = False
    return all(gathered(mapped))


def _timeout_ms(group: Any, device: torch.device) -> int:
    """The group's timeout: after it a barrier's kernel traps."""
    timeout = getattr(group._get_backend(device).options, "_timeout", default_pg_timeout)
    return max(1, round(1e3 * timeout.total_seconds()))
