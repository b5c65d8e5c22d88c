"""Memory around every tensor that tells of loads and stores outside of it.

Inputs stand between bands of NaN, so that a load without a mask brings NaN into the result. Tensors that the code under
test makes with torch.empty and the like stand between bands too, and are filled with a NaN of its own. What is still
there afterwards was never written; a band that has changed was written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Elements before and after a tensor. A multiple of 16 bytes, so that alignment stays.
BAND = 1 << 16

#: Patterns of NaN by the size of an element: of bands round inputs, of bands round outputs, and of what waits to be
#: written. A CPU's arithmetic passes a NaN's bits on, so that inputs' bands must differ from outputs'.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_BAND_BITS = {2: 0x7FED, 4: 0x7FC0ABCD, 8: 0x7FF8ABCDABCDABCD}
_EDGE_BITS = {2: 0x7FE5, 4: 0x7FC0FACE, 8: 0x7FF8FACEFACEFACE}
_FRESH_BITS = {2: 0x7FDB, 4: 0x7FC0BEEF, 8: 0x7FF8BEEFBEEFBEEF}

_EMPTY = {
    torch.empty,
    torch.empty_like,
    torch.Tensor.new_empty,
    torch.empty_strided,
    torch.Tensor.new_empty_strided,
}
_ZEROS = {torch.zeros, torch.zeros_like, torch.Tensor.new_zeros}


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same values between bands; `x` itself where it is not contiguous or not of floating-point numbers."""
    if not _can_guard(x):
        return x
    _, inner = _between_bands(x, _BAND_BITS)
    inner.copy_(x)
    return inner


def _can_guard(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_contiguous() and x.numel() > 0


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_INTEGERS[x.element_size()])


def _between_bands(x: torch.Tensor, bits: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh memory for a tensor like `x`: all of it, and the tensor's own part."""
    whole = torch.empty(x.numel() + 2 * BAND, dtype=x.dtype, device=x.device)
    _bits(whole).fill_(bits[x.element_size()])
    return whole, whole[BAND : BAND + x.numel()].view(x.shape)


def unwritten(x: torch.Tensor) -> torch.Tensor:
    """Where a tensor made under :class:`Guards` was never written, as a boolean tensor."""
    if not (x.is_floating_point() and x.element_size() in _INTEGERS and x.is_contiguous()):
        return torch.zeros_like(x, dtype=torch.bool)
    return _bits(x) == _FRESH_BITS[x.element_size()]


class Guards(TorchFunctionMode):
    """While it is entered, new tensors of floating-point numbers stand between bands."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[torch.Tensor, torch.Size]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (func not in _EMPTY and func not in _ZEROS) or not _can_guard(made):
            return made
        whole, inner = _between_bands(made, _EDGE_BITS)
        self._made.append((whole, made.shape))
        if func in _ZEROS:
            return inner.zero_()
        _bits(inner).fill_(_FRESH_BITS[made.element_size()])
        return inner

    def overrun(self) -> str | None:
        """What was written outside of a tensor, as a sentence, or None."""
        for whole, shape in self._made:
            changed = _bits(whole) != _EDGE_BITS[whole.element_size()]
            before, after = changed[:BAND].sum().item(), changed[-BAND:].sum().item()
            if after:
                return f"{after} elements were written past the end of a tensor of shape {tuple(shape)}"
            if before:
                return f"{before} elements were written before the start of a tensor of shape {tuple(shape)}"
        return None
