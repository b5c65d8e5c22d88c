"""CUDA C++ level: the Python face of ``csrc``. Loads the extension and registers its operators' variants."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch


@functools.cache
def extension() -> ModuleType | None:
    """The compiled module, or None where it was not built."""
    if importlib.util.find_spec("kernel_ladder._C") is None:
        return None
    return importlib.import_module("kernel_ladder._C")


@functools.cache
def unavailable() -> str | None:
    """Why CUDA variants cannot run here, or None."""
    if extension() is None:
        return "the extension kernel_ladder._C was not built; install nvcc, then run `pip install -e .` again"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible"
    return None


def climb(op: str) -> list[str]:
    """The variants of an operation in the order of the climb, as the schema table in ``csrc/bindings.cpp`` has them."""
    module = extension()
    return [] if module is None else module.variants().get(op, [])


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """What every CUDA kernel of this package asks of its inputs."""
    if not inputs[0].is_cuda:
        return f"CUDA kernels take CUDA tensors, got {inputs[0].device.type}"
    if inputs[0].dtype == torch.float64:
        return "float64 is supported at the torch and compile levels only"
    return None
