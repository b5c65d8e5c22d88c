"""Tables of angles for rotary position embedding, shared by all layers that rotate alike."""

from __future__ import annotations

import weakref

import torch

#: Tables that some layer still has, by base, head dimension, positions and device.
_tables: weakref.WeakValueDictionary[tuple[float, int, int, torch.device], torch.Tensor] = weakref.WeakValueDictionary()


def table_of(theta: float, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """The angles of all positions as `freqs_cis` of :func:`kernel_ladder.rope`, rounded as Hugging Face's Llama does.

    Layers keep it as a plain attribute: a module's conversion to 16 bits would drop the imaginary parts of a buffer.
    """
    key = (theta, head_dim, positions, device)
    known = _tables.get(key)
    if known is not None:
        return known
    with torch.inference_mode(False):  # training may use the table that inference has made
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), 1.0 / theta**exponents)
        table = torch.polar(torch.ones_like(angles), angles)
    if type(table) is torch.Tensor:  # not one without memory, such as FakeTensorMode makes
        _tables[key] = table
    return table
