"""How the ranks of a group share a sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LAYOUTS = ("zigzag", "contiguous")


def check_layout(caller: str, layout: object) -> None:
    """Raise ValueError unless `layout` is one of :data:`LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"{caller}: argument `layout` must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")


def chunks_of(layout: str, rank: int, size: int, length: int) -> list[tuple[int, int]]:
    """A rank's chunks, each as (its first row in the rank's part, its first row in the sequence).

    `length` is that of a rank's part.
    """
    if layout == "contiguous":
        return [(0, rank * length)]
    half = length // 2
    return [(0, rank * half), (half, (2 * size - 1 - rank) * half)]


def positions(length: int, *, group: Any = None, layout: str = "zigzag", device: Any = None) -> torch.Tensor:
    """The positions in the sequence of this rank's rows, for rotary embeddings, say.

    Args:
        length: this rank's rows.
        group: the process group; None is all ranks.
        layout: ``"zigzag"``, two chunks a rank, one from each end of the sequence; or ``"contiguous"``.
        device: of the result.

    Returns:
        int64, ``(length,)``.

    Raises:
        ValueError: an unknown layout, or an odd `length` where a rank has two chunks.
    """
    check_layout("positions", layout)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunks_of(layout, rank, size, length)
    if length % len(chunks):
        raise ValueError(f"positions: argument `length` must be even for layout={layout!r}, got {length}")
    rows = length // len(chunks)
    return torch.cat([torch.arange(first, first + rows, device=device) for _, first in chunks])


def shard_sequence(x: torch.Tensor, dim: int = -2, *, group: Any = None, layout: str = "zigzag") -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole.

    Args:
        x: any shape and dtype, the same on every rank.
        dim: the dimension that is shared.
        group: the process group; None is all ranks.
        layout: ``"zigzag"``, two chunks a rank, one from each end of the sequence; or ``"contiguous"``.

    Returns:
        A new contiguous tensor, along `dim` as long as `x` over the number of ranks.

    Raises:
        ValueError: an unknown layout, or a length of `dim` that is not a multiple of the number of chunks, twice the
            ranks for ``"zigzag"``.
    """
    check_layout("shard_sequence", layout)
    size = dist.get_world_size(group)
    chunks = size * (2 if layout == "zigzag" else 1)
    if x.shape[dim] % chunks:
        raise ValueError(
            f"shard_sequence: {x.shape[dim]} rows of argument `x` do not divide into {chunks} equal chunks, which "
            f"layout={layout!r} needs on {size} ranks"
        )
    return x.index_select(dim, positions(x.shape[dim] // size, group=group, layout=layout, device=x.device))


def unshard_sequence(x: torch.Tensor, dim: int = -2, *, group: Any = None, layout: str = "zigzag") -> torch.Tensor:
    """The whole of a tensor of which each rank has a part, on every rank: undoes :func:`shard_sequence`.

    Args:
        x: this rank's part, of the same shape and dtype on every rank.
        dim: the dimension that is shared.
        group: the process group; None is all ranks.
        layout: that of :func:`shard_sequence`.

    Returns:
        A tensor as long along `dim` as all parts together. Not differentiable.

    Raises:
        ValueError: an unknown layout.
    """
    check_layout("unshard_sequence", layout)
    size = dist.get_world_size(group)
    x = x.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x, group)
    length = x.shape[0]
    whole = x.new_empty((size * length, *x.shape[1:]))
    for rank, part in enumerate(parts):
        chunks = chunks_of(layout, rank, size, length)
        rows = length // len(chunks)
        for at, first in chunks:
            whole[first : first + rows] = part[at : at + rows]
    return whole.movedim(0, dim)
