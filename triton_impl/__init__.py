"""Triton level. Without a GPU the kernels run in Triton's interpreter: right, and slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder import gpu, table

# The interpreter is chosen when a kernel is decorated, so this must stand before any kernel's module is imported.
if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"

import triton

from triton_impl.runtime.interpreter import mend_bfloat16, surround_launches

#: Read once, as a constant that torch.compile can trace.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return _INTERPRETED


@gpu.cached
def multiprocessors(device: torch.device, elsewhere: int) -> int:
    """Of a GPU; `elsewhere`, where there is none to ask, so many as suit the caller."""
    if device.type != "cuda" or not gpu.visible():
        return elsewhere
    return gpu.of(torch.cuda.current_device() if device.index is None else device.index).multiprocessors


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
    surround_launches()
    mend_bfloat16()


@triton.jit
def _count(times):
    for _ in range(times):
        pass


@gpu.cached
def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if interpreted():
        try:
            _count[(1,)](2)
        except Exception as error:  # Triton 3.6's takes arrays of one element for numbers, which numpy 2.4 forbids
            import numpy

            found = f"Triton {triton.__version__}'s interpreter does not run with numpy {numpy.__version__}"
            return f"{found} ({error}); a newer Triton or numpy below 2.4 does"
    elif not gpu.visible():
        return "no GPU is visible and TRITON_INTERPRET=0 switches Triton's interpreter off"
    elif (reasons := [_too_old(index) for index in range(gpu.count())]) and None not in reasons:
        return reasons[0]
    return None


@gpu.cached
def _too_old(index: int) -> str | None:
    """Why Triton does not compile for a GPU, or None."""
    if not gpu.visible() or gpu.of(index).capability >= (8, 0):
        return None
    found = gpu.of(index)
    major, minor = found.capability
    return f"Triton compiles for compute capability 8.0 or later, {found.name} has {major}.{minor}"


def note() -> str | None:
    """What to know of this level here though it is available, or None."""
    return "interpreted on the CPU: for correctness, not for speed" if interpreted() else None


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """What every Triton kernel of this package asks of its inputs."""
    first = inputs[0]
    if first.dtype == torch.float64:
        return "float64 is supported at the torch, compile and xla levels only"
    if not first.is_cuda and not (interpreted() and first.is_cpu):
        takes = "Triton's interpreter takes CPU tensors" if interpreted() else "Triton kernels take CUDA tensors"
        return f"{takes}, got {first.device.type}"
    return _too_old(first.get_device()) if first.is_cuda else None


def register(
    op: str,
    name: str,
    *,
    forward: Callable[..., tuple[torch.Tensor, tuple]],
    inference: Callable[..., torch.Tensor] | None = None,
    **more: Any,
) -> None:
    """:func:`kernel_ladder.table.register`, for kernels that Triton launches on the current device.

    Where the tensors are on another GPU, that one is made current for the call. (For a backward, autograd does so.)
    """
    alone = None if inference is None else _on_device(inference)
    table.register(op, name, forward=_on_device(forward), inference=alone, **more)


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_device(*inputs: torch.Tensor, **options: Any) -> Any:
        device = inputs[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*inputs, **options)
        with torch.cuda.device(device):
            return function(*inputs, **options)

    on_device.__doc__ = function.__doc__
    return on_device
