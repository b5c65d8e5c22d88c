"""Tensors to JAX and back without a copy, and in the order of the caller's CUDA stream.

On a CPU a contiguous tensor becomes a NumPy view, which costs a tenth of DLPack's import. On a GPU DLPack carries the
stream: JAX's stream waits for PyTorch's current one before it reads, and PyTorch's current stream waits for the result.
:class:`Order` does so once a call, with one event, where PyTorch's own export makes one for every tensor.
`python -m bench bridge` measures what all of this costs the host.

Rules that keep memory safe:

- No array outlives its call, because nothing tells JAX of a write in place.
- Every copy of an operand is launched before the first import, because the call's event is recorded there.
- Every result is exported before the call returns, because the export waits for the program that reads the inputs.
- No input is donated, because PyTorch owns it.
- JAX takes back a result's memory as soon as its tensor is gone. What it starts next must not write there before the
  current stream has read it: programs wait for their operands, :func:`_run_on_gpu` sees to the rest.

``Tensor.record_stream`` does not reach JAX's memory. So a result's tensor must outlive its readers where they run on a
stream that has never called this level, or in a thread while another thread is inside a call.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import DLDeviceType, to_dlpack

from kernel_ladder import gpu
from kernel_ladder.errors import UnsupportedError, is_for_memory
from kernel_ladder.spec import Inputs, dtype_name
from xla_impl import direct_import

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
    return _imported(_importable(x), None)


def operands(tensors: Inputs, order: Order) -> list[Any]:
    """Tensors on a GPU as arguments of one call, as :func:`to_jax` makes them, in the call's order.

    The first import records the event that JAX waits for. A copy launched after it would be read unwritten.
    """
    return [_imported(x, order) for x in [_importable(x) for x in tensors]]


def _importable(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x` as JAX takes it. Any copy is launched on the current stream."""
    if x is None:
        return None
    x = x.detach().resolve_conj()
    if x.dtype is torch.float8_e4m3fn:  # NumPy has none, nor has every DLPack: formulas read the bits of bytes
        x = x.view(torch.uint8)
    if not x.is_contiguous():  # DLPack refuses other strides, and XLA is slow with other layouts
        x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % ALIGNMENT else x


def _imported(x: torch.Tensor | None, order: Order | None) -> Any:
    if x is None:
        return None
    if x.device.type == "cpu" and _numpy_arrays_stay_on_cpu():
        if x.dtype is torch.bfloat16:  # which NumPy has not
            return x.view(torch.int16).numpy().view(_bfloat16())
        return x.numpy()
    if x.numel() == 0:
        with jax().default_device(_device(x.device)):
            return jax().numpy.zeros(tuple(x.shape), dtype=dtype_name(x.dtype))
    return jax().dlpack.from_dlpack(x) if order is None else _import(x.device)(Operand(x, order))


@functools.cache
def _import(device: torch.device) -> direct_import.Import:
    """How arrays of a GPU are imported there."""
    return direct_import.find(_device(device), device, jax().dlpack.from_dlpack, lambda x: Operand(x, Order(device)))


def _device(device: torch.device) -> Any:
    found = jax().devices(device.type)
    return found[0 if device.index is None else device.index]


def to_torch(x: Any, device: torch.device, order: Order | None = None) -> torch.Tensor:
    """An array as a tensor of the same memory. Waits for it: on a CPU the caller, on a GPU the stream of `order`."""
    if 0 in x.shape:
        return torch.empty(tuple(x.shape), dtype=getattr(torch, str(x.dtype)), device=device)
    # The array's own export, because that of torch.from_dlpack() first asks for the device and the stream.
    return torch.from_dlpack(x.__dlpack__() if order is None else x.__dlpack__(stream=order.pointer))


@functools.cache
def _external(pointer: int, device: torch.device) -> torch.cuda.Stream:
    """A stream that JAX owns, by its address."""
    return torch.cuda.ExternalStream(pointer, device)


class _Events(threading.local):
    """An event for each GPU. A thread's own, because another thread's record would replace what it waits for."""

    def __init__(self) -> None:
        self.of: dict[torch.device, torch.cuda.Event] = {}


_events = _Events()


class Order:
    """The order of a call on a GPU: after the work of PyTorch's current stream, before what that stream does next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = torch.cuda.current_stream(device)
        address = self.current.cuda_stream
        #: The current stream as DLPack names it; 1 is the default stream.
        self.pointer = address if address else 1
        self._event: torch.cuda.Event | None = None
        self._waiting: set[int | None] = {self.pointer, -1}  # -1 asks for no order

    def before(self, stream: int | None) -> None:
        """Let JAX's `stream` wait for the current one. JAX takes several in turn; each waits once."""
        if stream in self._waiting:
            return
        self._waiting.add(stream)
        if self._event is None:
            self._event = _events.of.get(self.device)
            if self._event is None:
                self._event = _events.of[self.device] = torch.cuda.Event()
            self._event.record(self.current)
        default = stream is None or stream == 1
        waits = torch.cuda.default_stream(self.device) if default else _external(stream, self.device)
        waits.wait_event(self._event)

    def hold(self) -> None:
        """Let the host wait for the current stream where no import has let JAX do so: each operand is empty."""
        if self._event is None:
            self.current.synchronize()


class Operand:
    """A tensor as JAX imports it: DLPack's protocol, with the order of the call."""

    def __init__(self, x: torch.Tensor, order: Order) -> None:
        self.x, self.order = x, order

    def __dlpack_device__(self) -> tuple[DLDeviceType, int]:
        return DLDeviceType.kDLCUDA, self.x.get_device()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.order.before(stream)
        return to_dlpack(self.x)


#: For each GPU, the streams whose calls have received results.
_streams: dict[torch.device, set[torch.cuda.Stream]] = {}


def follow_other_streams(device: torch.device, current: torch.cuda.Stream) -> None:
    """Let the current stream wait for the other streams that have received results from JAX on this GPU.

    JAX takes back the memory of a result as soon as its tensor is gone, though kernels on the tensor's stream may still
    read it. The next program may write there. It waits for the current stream, and so for those kernels as well.

    A stream without pending work reads nothing, and is not waited for. A program that has used all 32 streams of
    PyTorch's pool would else record and await 32 events a call.
    """
    known = _streams.get(device)
    if known is None:
        known = _streams.setdefault(device, set())
    if current not in known:
        known.add(current)
    if len(known) > 1:
        for other in tuple(known):
            if other != current and not other.query():
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
        return _run_on_gpu(program, device, tensors, *more)
    with wide(*tensors):
        arrays = [to_jax(x) for x in tensors]
        # `arrays` stay until the results are exported: their memory must not be given to others before that.
        return tuple([to_torch(y, device) for y in program(*arrays, *more)])


#: What has been called on a GPU: a program, the device, shapes and dtypes. JAX compiles for any other call.
_called: set[tuple[Any, ...]] = set()


def _run_on_gpu(
    program: Callable[..., Any], device: torch.device, tensors: Inputs, *more: dict[str, np.ndarray]
) -> tuple[torch.Tensor, ...]:
    """:func:`_run`, where JAX does two things without waiting for the current stream.

    It compiles: XLA times candidates on memory of dropped results, which pending kernels may still read. So the host
    waits before a first call. And it copies NumPy's arrays into such memory as well. So PyTorch copies them.
    """
    if gpu.capturing():
        raise UnsupportedError(CAPTURED)
    order = Order(device)
    follow_other_streams(device, order.current)
    signature = (program, device, *[None if x is None else (x.shape, x.dtype) for x in tensors])
    if signature not in _called:
        order.current.synchronize()
    with wide(*tensors):
        # The copies are asynchronous: CUDA stages pageable memory before it returns.
        copied = [torch.from_numpy(x).to(device, non_blocking=True) for named in more for x in named.values()]
        arrays = operands((*tensors, *copied), order)
        order.hold()
        values = iter(arrays[len(tensors) :])
        found = program(*arrays[: len(tensors)], *[{name: next(values) for name in named} for named in more])
        _called.add(signature)
        # `arrays` stay until the results are exported, as in `_run`.
        return tuple([to_torch(y, device, order) for y in found])
