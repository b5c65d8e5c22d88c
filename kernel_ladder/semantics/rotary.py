"""Rotary embedding's table of angles, as kernels read it."""

from __future__ import annotations

import torch


def check_offset(offset: int, rows: int, positions: int) -> None:
    """Raise unless `rows` positions from `offset` on are in a table of so many."""
    if offset < 0 or offset + rows > positions:
        raise ValueError(
            f"rope: argument `offset` must leave {rows} of {positions} positions of `freqs_cis`, got {offset}"
        )


def angles_from(freqs_cis: torch.Tensor, offset: int, rows: int) -> torch.Tensor:
    """Cosine and sine of so many positions from `offset` on, ``(rows, pairs, 2)``, float32, dense.

    Inside torch.compile the offset changes after the call was checked, so it is checked again: it protects memory.
    """
    check_offset(offset, rows, freqs_cis.shape[0])
    return torch.view_as_real(freqs_cis.resolve_conj().contiguous()).narrow(0, offset, rows)
