"""What rope's levels agree on: positions in the table of angles, offsets of sequences, the table as kernels read it."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from kernel_ladder.spec import dtype_name
from kernel_ladder.tracing import PLAIN, shapes_only
from kernel_ladder.transforms import transforms_active

#: The offset that a call adds to those of its sequences is above the lowest of int32, as theirs are not below it.
LOWEST = -(2**31)


def check_offset(offset: int, rows: int, positions: int) -> None:
    """Raise unless `rows` positions from `offset` on are in a table of so many."""
    if offset < 0 or offset + rows > positions:
        raise ValueError(
            f"rope: argument `offset` must leave {rows} of {positions} positions of `freqs_cis`, got {offset}"
        )


def check_offsets(input: torch.Tensor, offsets: object, offset: int, positions: int) -> None:
    """Raise unless `offsets` has an integer for each sequence, whose rows `offset` more are in a table of `positions`.

    In the host's memory the integers themselves are checked. A GPU's are not read: that would wait for it.
    """
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"rope: argument `offsets` must be a torch.Tensor or None, got {type(offsets).__name__}")
    if offsets.dtype != torch.int32:
        raise TypeError(f"rope: argument `offsets` has dtype {dtype_name(offsets.dtype)}; accepted is int32")
    if offsets.device != input.device:
        raise ValueError(
            f"rope: arguments `input` and `offsets` must be on the same device, got {input.device} and {offsets.device}"
        )
    if input.dim() < 3:
        raise ValueError(
            f"rope: argument `input` must have at least three dimensions, (B, ..., S, D), beside `offsets`, "
            f"got {input.dim()}"
        )
    if offsets.shape != input.shape[:1]:
        raise ValueError(
            f"rope: argument `offsets` must have shape ({input.shape[0]},), an integer for each sequence of `input` of "
            f"shape {tuple(input.shape)}, got {tuple(offsets.shape)}"
        )
    rows = input.shape[-2]
    check_common_offset(offset, rows, positions)
    if type(offsets) not in PLAIN or offsets.device.type != "cpu" or is_compiling():
        return
    if shapes_only() or transforms_active():
        return
    first = offsets.long() + offset
    wrong = ((first < 0) | (first > positions - rows)).nonzero()
    if wrong.numel():
        sequence = int(wrong[0])
        given = f"{offset} + {int(offsets[sequence])}" if offset else str(int(offsets[sequence]))
        raise ValueError(
            f"rope: argument `offsets` must leave {rows} of {positions} positions of `freqs_cis` to each sequence, "
            f"got {given} for sequence {sequence}"
        )


def check_common_offset(offset: int, rows: int, positions: int) -> None:
    """Raise unless some `offsets` beside `offset` would be right."""
    if offset <= LOWEST or offset > positions - rows - LOWEST or rows > positions:
        raise ValueError(
            f"rope: argument `offset` must leave {rows} of {positions} positions of `freqs_cis` beside some `offsets` "
            f"of int32, got {offset}"
        )


def angles_from(freqs_cis: torch.Tensor, offset: int, rows: int) -> torch.Tensor:
    """Cosine and sine of so many positions from `offset` on, ``(rows, pairs, 2)``, float32, dense.

    Inside torch.compile the offset changes after the call was checked, so it is checked again: it protects memory.
    """
    check_offset(offset, rows, freqs_cis.shape[0])
    return all_angles(freqs_cis).narrow(0, offset, rows)


def all_angles(freqs_cis: torch.Tensor) -> torch.Tensor:
    """Cosine and sine of every position of a table, ``(positions, pairs, 2)``, float32, dense."""
    return torch.view_as_real(freqs_cis.resolve_conj().contiguous())
