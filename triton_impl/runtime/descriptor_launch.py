"""Launch a kernel that takes tensor descriptors (TMA), and say why operands cannot have any.

A tensor descriptor holds the address, shape, strides and tile of a tensor. The copy engine (TMA, Hopper and later)
reads it, computes the addresses of a tile and fills what lies outside the tensor with zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_ladder import gpu
from kernel_ladder.tracing import address
from triton_impl import interpreted
from triton_impl.runtime.launch_cache import FUSED

#: Bytes on whose multiples a described tensor, and each of its rows, must start.
ALIGNMENT_BYTES = 16


def unaligned(*tensors: torch.Tensor) -> bool:
    """Whether one of the tensors does not start on 16 bytes."""
    return any(address(t) % ALIGNMENT_BYTES for t in tensors)


def without_copy_engine(tensor: torch.Tensor) -> str | None:
    """Why the GPU of a tensor has no descriptors, or None."""
    if tensor.is_cuda and gpu.visible() and gpu.of(tensor.get_device()).capability < (9, 0):
        return "the copy engine that takes tensor descriptors needs compute capability 9.0 or newer"
    return None


def without_descriptors(*tensors: torch.Tensor) -> str | None:
    """Why these tensors cannot have descriptors whatever their strides, or None."""
    if (reason := without_copy_engine(tensors[0])) is not None:
        return reason
    return "operands must start on 16 bytes for a tensor descriptor" if unaligned(*tensors) else None


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def _enter_context(tensor: torch.Tensor) -> None:
    """Make the GPU's context current in this thread: the driver encodes a descriptor in the current context."""
    # A stream under capture must not be queried; the thread that captures it has a context.
    if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(tensor.device).query()
    _thread.has_context = True


class DescriptorLaunch:
    """As :class:`triton_impl.runtime.launch_cache.Launch`, for a kernel that takes descriptors of some of its tensors.

    ``describe`` holds a descriptor for each tensor that has one, None for each that is passed as a pointer.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        describe: tuple[TensorDescriptor | None, ...],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._kernel, self._run, self._grid = kernel, kernel[(programs,)], (programs, 1, 1)
        # A cached launch must not keep the tensors of its first call alive.
        self._describe = tuple(None if d is None else _moved(d, None) for d in describe)
        self._arguments, self._options = arguments, {**FUSED, **options}
        self._aligned: dict[int, Callable[..., None]] = {}  # by device

    def __call__(self, *tensors: torch.Tensor) -> None:
        given = [t if d is None else _moved(d, t) for d, t in zip(self._describe, tensors, strict=True)]
        if not _thread.has_context:
            _enter_context(tensors[0])
        if interpreted() or any(
            d is None and t.data_ptr() % ALIGNMENT_BYTES for d, t in zip(self._describe, tensors, strict=True)
        ):
            self._run(*given, *self._arguments, **self._options)
            return
        device = triton.runtime.driver.active.get_current_device()
        run = self._aligned.get(device)
        if run is None:
            compiled = self._run(*given, *self._arguments, **self._options)
            self._aligned[device] = compiled[self._grid]
        else:
            run(*given, *self._arguments)

    def compile(self, *tensors: torch.Tensor) -> Any:
        """Compile the kernel for these tensors, as a launch would."""
        given = [t if d is None else _moved(d, t) for d, t in zip(self._describe, tensors, strict=True)]
        return self._kernel.warmup(*given, *self._arguments, grid=self._grid, **self._options)


def _moved(descriptor: TensorDescriptor, tensor: torch.Tensor | None) -> TensorDescriptor:
    """The same description of another tensor's memory. Its shape, strides and tile were checked when it was made."""
    moved = object.__new__(type(descriptor))  # Triton's class, or Gluon's
    moved.__dict__.update(descriptor.__dict__)
    moved.base = tensor
    return moved
