"""How the ranks of a group share packed sequences.

Each sequence is cut into 2n chunks for n ranks, and rank r has the chunks r and 2n − 1 − r of each: zigzag, sequence by
sequence. Zhu's ring-flash-attention (``zigzag_ring_flash_attn_varlen``) and NVIDIA's TransformerEngine (context
parallelism of packed sequences) do so for lengths that 2n divides. Here chunks may be uneven or empty. The rows left
over are dealt to the ranks in turn, from one sequence to the next, so that no rank has two rows more than another.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernel_ladder.distributed.exchange import check_group
from kernel_ladder.spec import dtype_name


class Cut(NamedTuple):
    """The chunks of all sequences. Tensors are int64, on the CPU.

    Attributes:
        begins: ``(B,)``, where each of B sequences begins in the packed tensor.
        starts: ``(B, 2n)``, where each chunk begins in its sequence.
        sizes: ``(B, 2n)``, the rows of each chunk.
        rows: the rows of each rank's part.
    """

    begins: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    rows: tuple[int, ...]

    def _of(self, chunks: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's two columns: ``(B, 2)``."""
        return chunks[:, [rank, chunks.shape[1] - 1 - rank]]

    def bounds(self, rank: int) -> torch.Tensor:
        """``(2B + 1,)``: where the two chunks of each sequence begin in a rank's part, and its end."""
        return torch.nn.functional.pad(self._of(self.sizes, rank).flatten().cumsum(0), (1, 0))

    def positions(self, rank: int) -> torch.Tensor:
        """The position of each of a rank's rows in its sequence."""
        return self._numbered(self._of(self.starts, rank), rank)

    def places(self, rank: int) -> torch.Tensor:
        """The place of each of a rank's rows in the packed tensor."""
        return self._numbered(self._of(self.starts, rank) + self.begins[:, None], rank)

    def _numbered(self, first: torch.Tensor, rank: int) -> torch.Tensor:
        """Consecutive numbers for each of a rank's chunks, from `first` on."""
        shift = first.flatten() - self.bounds(rank)[:-1]
        local = torch.arange(self.rows[rank], device="cpu")
        return shift.repeat_interleave(self._of(self.sizes, rank).flatten()) + local


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # kept for calls outside of it
def cut_of(offsets: tuple[int, ...], size: int) -> Cut:
    """The chunks for `size` ranks of the sequences between `offsets`."""
    bounds = torch.tensor(offsets, device="cpu")  # whatever the default device is
    lengths = bounds.diff()
    rest = lengths % (2 * size)
    # The rows left over go to the ranks in turn. The first that a rank gets of a sequence lengthens its first chunk.
    dealt = rest.cumsum(0) - rest
    turn = (torch.arange(size, device="cpu") - dealt[:, None]) % size
    longer = torch.cat((turn < rest[:, None], (turn + size < rest[:, None]).flip(1)), 1)
    sizes = (lengths // (2 * size))[:, None] + longer
    of_ranks = (sizes + sizes.flip(1)).sum(0)[:size]
    return Cut(bounds[:-1], sizes.cumsum(1) - sizes, sizes, tuple(of_ranks.tolist()))


def offsets_of(caller: str, cu_seqlens: Any) -> tuple[int, ...]:
    """The offsets of packed sequences as numbers. Raises what the public functions name."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{caller}: argument `cu_seqlens` must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        given = dtype_name(cu_seqlens.dtype)
        raise TypeError(f"{caller}: argument `cu_seqlens` has dtype {given}; accepted is int32")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{caller}: argument `cu_seqlens` must be a vector of at least two offsets, got shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    offsets = tuple(cu_seqlens.tolist())
    if offsets[0] != 0:
        raise ValueError(f"{caller}: argument `cu_seqlens` must begin with 0, got {offsets[0]}")
    for before, after in itertools.pairwise(offsets):
        if after < before:
            raise ValueError(
                f"{caller}: argument `cu_seqlens` must hold offsets that never fall, got {after} after {before}"
            )
    return offsets


def positions_packed(cu_seqlens: torch.Tensor, *, group: Any = None, device: Any = None) -> torch.Tensor:
    """The position of each of this rank's rows in its own sequence, for rotary embeddings, say.

    Args:
        cu_seqlens: ``(B + 1,)``, int32, as for :func:`shard_packed`.
        group: the process group; None: the default one.
        device: of the result.

    Returns:
        int64, as long as this rank's part.

    Raises:
        TypeError, ValueError: `cu_seqlens` holds no offsets, or a `group` without this process. RuntimeError: no
            process group.
    """
    check_group("positions_packed", group)
    offsets = offsets_of("positions_packed", cu_seqlens)
    return cut_of(offsets, dist.get_world_size(group)).positions(dist.get_rank(group)).to(device)


def shard_packed(x: torch.Tensor, cu_seqlens: torch.Tensor, dim: int = 0, *, group: Any = None) -> torch.Tensor:
    """This rank's part of packed sequences that every rank has whole, for :func:`ring_attention_varlen`.

    Of every sequence rank r of n has the chunks r and 2n − 1 − r of 2n, one after the other. Sequences keep their
    order. Any length will do: chunks differ by one row at most, and so do the parts of the ranks.

    Args:
        x: any shape and dtype, the same on every rank.
        cu_seqlens: ``(B + 1,)``, int32, from 0 to the rows of `x`, never decreasing: sequence b has the rows
            ``cu_seqlens[b] : cu_seqlens[b + 1]``. The host reads it, and waits for a GPU if it is there.
        dim: the dimension that is packed.
        group: the process group; None: the default one.

    Returns:
        A new contiguous tensor. Differentiable.

    Raises:
        TypeError, ValueError: `cu_seqlens` that does not fit, or a `group` without this process. RuntimeError: no
            process group.
    """
    check_group("shard_packed", group)
    offsets = offsets_of("shard_packed", cu_seqlens)
    if offsets[-1] != x.shape[dim]:
        raise ValueError(
            f"shard_packed: argument `cu_seqlens` must end with {x.shape[dim]}, the rows of `x`, got {offsets[-1]}"
        )
    places = cut_of(offsets, dist.get_world_size(group)).places(dist.get_rank(group))
    return x.index_select(dim, places.to(x.device))


def unshard_packed(x: torch.Tensor, cu_seqlens: torch.Tensor, dim: int = 0, *, group: Any = None) -> torch.Tensor:
    """The whole of packed sequences of which each rank has a part, on every rank: undoes :func:`shard_packed`.

    Args:
        x: this rank's part; off `dim` of the same shape on every rank.
        cu_seqlens: that of :func:`shard_packed`, the same on every rank.
        dim: the dimension that is packed.
        group: the process group; None: the default one. Every rank of it must call.

    Returns:
        A tensor with ``cu_seqlens[-1]`` rows along `dim`. Not differentiable.

    Raises:
        TypeError, ValueError: `cu_seqlens` that does not fit, or a `group` without this process. RuntimeError: no
            process group.
    """
    check_group("unshard_packed", group)
    offsets = offsets_of("unshard_packed", cu_seqlens)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    cut = cut_of(offsets, size)
    check_rows("unshard_packed", "x", x.shape[dim], cut, rank)
    part = padded(x.detach().movedim(dim, 0), max(cut.rows))
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part, group)
    whole = part.new_empty((offsets[-1], *part.shape[1:]))
    for owner, owned in enumerate(parts):
        whole[cut.places(owner).to(whole.device)] = owned[: cut.rows[owner]]
    return whole.movedim(0, dim)


def check_rows(caller: str, name: str, rows: int, cut: Cut, rank: int) -> None:
    """Raise ValueError unless an argument has the rows of this rank's part."""
    if rows != cut.rows[rank]:
        raise ValueError(
            f"{caller}: argument `{name}` must have {cut.rows[rank]} rows, the part of `cu_seqlens` that rank {rank} "
            f"of {len(cut.rows)} has (see shard_packed), got {rows}"
        )


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with rows of zeros up to `rows`, contiguous: messages have one length on every rank."""
    if x.shape[0] == rows:
        return x.contiguous()
    longer = x.new_zeros((rows, *x.shape[1:]))
    longer[: x.shape[0]] = x
    return longer
