"""Triton level. Without a GPU the kernels run in Triton's interpreter: right, and slow."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder import table

# The interpreter is chosen when a kernel is decorated, so this must stand before any kernel's module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton

from triton_impl.interpreter_session import in_session

#: Read once, as a constant that torch.compile can trace.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return _INTERPRETED


@functools.cache
def multiprocessors(device: torch.device, elsewhere: int) -> int:
    """Of a GPU; `elsewhere`, where there is none to ask, so many as suit the caller."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return elsewhere
    return torch.cuda.get_device_properties(device).multi_processor_count


def _interpret_standard_library() -> None:
    """Let the interpreter take ``tl.cdiv``, ``tl.zeros``, ``tl.sum`` and so on.

    They are kernels themselves, decorated when Triton is first imported. Where torch.compile has imported Triton
    before ``TRITON_INTERPRET`` was set here, they were made for the compiler.
    """
    from triton.runtime.interpreter import InterpretedFunction

    languages = [m for name, m in list(sys.modules.items()) if name.partition(".language")[0] == "triton"]
    remade: dict[int, InterpretedFunction] = {}  # by identity: hashing a kernel reads all that it calls
    for owner in [*languages, triton.language.tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, triton.JITFunction):
                setattr(owner, name, remade.setdefault(id(value), InterpretedFunction(value.fn)))


if interpreted():
    _interpret_standard_library()


@triton.jit
def _count(times):
    for _ in range(times):
        pass


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if interpreted():
        try:
            _count[(1,)](2)
        except Exception as error:  # Triton 3.6's takes arrays of one element for numbers, which numpy 2.4 forbids
            import numpy

            found = f"Triton {triton.__version__}'s interpreter does not run with numpy {numpy.__version__}"
            return f"{found} ({error}); a newer Triton or numpy below 2.4 does"
    elif not torch.cuda.is_available():
        return "no GPU is visible and TRITON_INTERPRET=0 switches Triton's interpreter off"
    return None


def note() -> str | None:
    """What to know of this level here though it is available, or None."""
    return "interpreted on the CPU: for correctness, not for speed" if interpreted() else None


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """What every Triton kernel of this package asks of its inputs."""
    first = inputs[0]
    if first.dtype == torch.float64:
        return "float64 is supported at the torch and compile levels only"
    if not first.is_cuda and not (interpreted() and first.is_cpu):
        takes = "Triton's interpreter takes CPU tensors" if interpreted() else "Triton kernels take CUDA tensors"
        return f"{takes}, got {first.device.type}"
    return None


def register(
    op: str,
    name: str,
    *,
    forward: Callable[..., tuple[torch.Tensor, tuple]],
    inference: Callable[..., torch.Tensor] | None = None,
    backward: Callable[..., tuple] | None = None,
    **more: Any,
) -> None:
    """:func:`kernel_ladder.table.register`, for kernels that Triton launches on the current device.

    Where the tensors are on another GPU, that one is made current for the call. (For a backward, autograd does so.)
    """
    if interpreted():
        forward, inference, backward = (f and in_session(f) for f in (forward, inference, backward))
    alone = None if inference is None else _on_device(inference)
    table.register(op, name, forward=_on_device(forward), inference=alone, backward=backward, **more)


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_device(*inputs: torch.Tensor, **options: Any) -> Any:
        device = inputs[0].device
        if torch.compiler.is_compiling() or device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*inputs, **options)
        with torch.cuda.device(device):
            return function(*inputs, **options)

    on_device.__doc__ = function.__doc__
    return on_device
