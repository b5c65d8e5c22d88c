"""Tensors to JAX and back without a copy, and in the order of the caller's CUDA stream.

On a CPU a contiguous tensor becomes a NumPy view, which costs a tenth of DLPack's import. On a GPU DLPack carries the
stream: JAX's stream waits for PyTorch's current one before it reads, and PyTorch's current stream waits for the result.

Three rules keep memory safe. No array outlives its call, because nothing tells JAX of a write in place. Every result is
exported before the call returns, because the export waits for the program that still reads the inputs. No input is
donated, because PyTorch owns it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kernel_ladder import gpu
from kernel_ladder.errors import UnsupportedError, is_for_memory
from kernel_ladder.spec import Inputs, dtype_name

CAPTURED = "JAX launches on streams of its own, which a CUDA graph cannot capture; call it outside of the graph"

#: Dtypes that JAX converts to 32 bits in silence, unless 64-bit types are switched on around the call.
WIDE = (torch.float64, torch.int64)

#: Bytes that divide the address of an argument on a GPU; XLA's kernels refuse others.
ALIGNMENT = 16


@functools.cache
def jax() -> Any:
    """The module, imported at the first call of this level."""
    # Else JAX takes three quarters of a GPU's memory at its first operation.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


@functools.cache
def platforms() -> frozenset[str]:
    """The device types on which JAX runs here, by PyTorch's names."""
    found = {"cpu"}
    try:
        if jax().devices("cuda"):
            found.add("cuda")
    except RuntimeError:  # no CUDA plugin, or no GPU
        pass
    return frozenset(found)


@functools.cache
def _numpy_arrays_stay_on_cpu() -> bool:
    """Whether a compiled function runs on the CPU where its arguments are NumPy's."""
    return str(jax().default_backend()) == "cpu"


@functools.cache
def _bfloat16() -> Any:
    import ml_dtypes  # one of JAX's requirements

    return ml_dtypes.bfloat16


def wide(*tensors: torch.Tensor | None) -> AbstractContextManager[Any]:
    """64-bit types switched on, for this thread, around a call that has some."""
    for x in tensors:
        if x is not None and x.dtype in WIDE:
            return jax().enable_x64(True)
    return nullcontext()


def to_jax(x: torch.Tensor | None) -> Any:
    """`x` as an argument of a compiled function: its own memory, or a copy where it is not contiguous or aligned."""
    if x is None:
        return None
    x = x.detach()
    if x.dtype is torch.float8_e4m3fn:  # NumPy has none, nor has every DLPack: formulas read the bits of bytes
        x = x.view(torch.uint8)
    if not x.is_contiguous():  # DLPack refuses other strides, and XLA is slow with other layouts
        x = x.contiguous()
    if x.is_cuda and x.data_ptr() % ALIGNMENT:
        x = x.clone()
    if x.device.type == "cpu" and _numpy_arrays_stay_on_cpu():
        if x.dtype is torch.bfloat16:  # which NumPy has not
            return x.view(torch.int16).numpy().view(_bfloat16())
        return x.numpy()
    if x.numel() == 0:
        with jax().default_device(_device(x.device)):
            return jax().numpy.zeros(tuple(x.shape), dtype=dtype_name(x.dtype))
    return jax().dlpack.from_dlpack(x)


def _device(device: torch.device) -> Any:
    found = jax().devices(device.type)
    return found[0 if device.index is None else device.index]


def to_torch(x: Any, device: torch.device) -> torch.Tensor:
    """An array as a tensor of the same memory. Waits for it: on a CPU the caller, on a GPU its current stream."""
    if 0 in x.shape:
        return torch.empty(tuple(x.shape), dtype=getattr(torch, str(x.dtype)), device=device)
    return torch.from_dlpack(x)


#: For each GPU, the streams whose calls have received results.
_streams: dict[torch.device, set[torch.cuda.Stream]] = {}


def follow_other_streams(device: torch.device) -> None:
    """Let the current stream wait for the other streams that have received results from JAX on this GPU.

    JAX takes back the memory of a result as soon as its tensor is gone, though kernels on the tensor's stream may still
    read it. The next program may write there. It waits for the current stream, and so for those kernels as well.
    """
    current = torch.cuda.current_stream(device)
    known = _streams.setdefault(device, set())
    known.add(current)
    if len(known) > 1:
        for other in known:
            if other != current:
                current.wait_stream(other)


def run(program: Callable[..., Any], tensors: Inputs, *more: Any) -> tuple[torch.Tensor, ...]:
    """Call a compiled function, which returns a tuple of arrays, with `tensors` and other arguments after them.

    Where JAX finds no memory, PyTorch gives back what it keeps for later, and the call is made once more.
    """
    try:
        return _run(program, tensors, *more)
    except RuntimeError as error:
        if not is_for_memory(error):
            raise
    torch.cuda.empty_cache()  # outside of the handler, whose traceback keeps the arrays
    return _run(program, tensors, *more)


def _run(program: Callable[..., Any], tensors: Inputs, *more: Any) -> tuple[torch.Tensor, ...]:
    device = tensors[0].device
    if device.type == "cuda":
        if gpu.capturing():
            raise UnsupportedError(CAPTURED)
        follow_other_streams(device)
    with wide(*tensors):
        arrays = [to_jax(x) for x in tensors]
        found = program(*arrays, *more)
        # `arrays` stay until the results are exported: their memory must not be given to others before that.
        return tuple([to_torch(y, device) for y in found])
