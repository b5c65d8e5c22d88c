"""XLA level: the formulas in JAX, compiled as whole programs by XLA. JAX is an optional extra: ``kernel_ladder[xla]``.

Tensors pass by DLPack, without a copy where they are contiguous. A call compiles once for each combination of shapes,
dtypes and options. The backward pass saves the inputs, computes the forward again and differentiates it with
``jax.vjp``, in one compiled program for the gradients that are wanted.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kernel_ladder import gpu, table
from kernel_ladder.spec import Inputs, Output, has_gradient
from kernel_ladder.tracing import shapes_only
from kernel_ladder.transforms import transforms_active

#: What asks for 64 bits, which JAX otherwise converts to 32 in silence.
WIDE = (torch.float64, torch.int64)


@gpu.cached
def unavailable() -> str | None:
    """Why JAX cannot be used here, or None."""
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed; `pip install kernel_ladder[xla]` installs it"
    return None


@functools.cache
def _jax() -> Any:
    # JAX would take three quarters of a GPU's memory at its first operation.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


@functools.cache
def _platforms() -> frozenset[str]:
    """The device types that JAX has here, by PyTorch's names."""
    jax = _jax()
    found = {"cpu"}
    try:
        if jax.devices("gpu"):
            found.add("cuda")
    except RuntimeError:  # no CUDA plugin, or no GPU
        pass
    return frozenset(found)


def unsupported(*inputs: torch.Tensor | None, **options: object) -> str | None:
    """What every XLA rung asks of its inputs."""
    first = inputs[0]
    assert first is not None
    if transforms_active():
        return "torch.func (vmap, grad, jvp and so on) follows PyTorch's own operators alone; use backend='torch'"
    if first.device.type not in ("cpu", "cuda"):
        return f"JAX takes CPU and CUDA tensors, got {first.device.type}"
    if first.device.type not in _platforms():
        return f"this JAX has no {first.device.type} device; the extra `jax[cuda13]` has"
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a JAX program cannot be captured in a CUDA graph"
    return None


def _wide(inputs: Inputs) -> AbstractContextManager[Any]:
    """64-bit types switched on for a call that has some."""
    if any(x is not None and x.dtype in WIDE for x in inputs):
        return _jax().enable_x64(True)
    return nullcontext()


def _to_jax(x: torch.Tensor | None) -> Any:
    if x is None:
        return None
    x = x.detach().contiguous()  # strides that are not dense are refused, and other layouts slow
    if x.numel() == 0:
        jax = _jax()
        return jax.numpy.zeros(tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
    return _jax().dlpack.from_dlpack(x)


def _to_torch(x: Any, device: torch.device) -> torch.Tensor:
    if 0 in x.shape:
        return torch.zeros(tuple(x.shape), dtype=getattr(torch, str(x.dtype)), device=device)
    return torch.from_dlpack(x)  # waits until the program has run, on this stream


def _dense(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _like_formula(op: str, inputs: Inputs, options: dict[str, Any]) -> Output:
    """Results without data, of the shapes and dtypes that the formula gives."""
    found = table.spec(op).reference(*inputs, **options)
    return tuple(map(_dense, found)) if isinstance(found, tuple) else _dense(found)


def register(
    op: str, formula: Callable[..., Any], *, name: str = "xla.jit", refuses: Callable[..., str | None]
) -> None:
    """Add ``formula(jax, *arrays, **options)``, which returns an array or a tuple of them, as a rung."""
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def program(kind: str, options: dict[str, Any], more: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        key = (kind, tuple(options.items()), more)
        if key not in compiled:
            compiled[key] = _jax().jit(make())
        return compiled[key]

    def of(options: dict[str, Any]) -> Callable[..., Any]:
        return lambda *arrays: formula(_jax(), *arrays, **options)

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Output, tuple[Any, ...]]:
        if shapes_only():
            return _like_formula(op, inputs, options), (*inputs, options)
        device = inputs[0].device  # type: ignore[union-attr]
        with _wide(inputs):
            run = program("forward", options, (), lambda: of(options))
            found = run(*(_to_jax(x) for x in inputs))
            output: Output
            if isinstance(found, tuple):
                output = tuple(_to_torch(y, device) for y in found)
            else:
                output = _to_torch(found, device)
        return output, (*inputs, options)

    def backward(saved: tuple[Any, ...], grad: Any, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        *inputs, options = saved
        wanted = tuple(i for i, x in enumerate(inputs) if needs[i] and has_gradient(x))
        grads = grad if isinstance(grad, tuple) else (grad,)
        if shapes_only():
            return tuple(_dense(x) if i in wanted else None for i, x in enumerate(inputs))

        def make() -> Callable[..., Any]:
            jax = _jax()

            def gradients(arrays: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
                def of_wanted(*some: Any) -> Any:
                    every = list(arrays)
                    for place, x in zip(wanted, some, strict=True):
                        every[place] = x
                    found = formula(jax, *every, **options)
                    return found if isinstance(found, tuple) else (found,)

                _, pullback = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
                return pullback(cotangents)

            return gradients

        with _wide((*inputs, *grads)):
            run = program("backward", options, wanted, make)
            found = run(tuple(map(_to_jax, inputs)), tuple(map(_to_jax, grads)))
            made = {i: _to_torch(g, inputs[i].device) for i, g in zip(wanted, found, strict=True)}
        return tuple(made.get(i) for i in range(len(inputs)))

    def refused(*inputs: torch.Tensor | None, **options: Any) -> str | None:
        return unsupported(*inputs) or refuses(*inputs, **options)

    table.register(op, name, forward=forward, backward=backward, unsupported=refused)


def tanh_in_32_bits(input: torch.Tensor, *others: torch.Tensor | None, **options: Any) -> str | None:
    """Where XLA rounds the argument of tanh in float64, the gradient's error is twice what agreement allows."""
    tanh = options.get("approximate") == "tanh" or options.get("activation") == "gelu_tanh"
    return "takes float64 with the exact form alone" if tanh and input.dtype == torch.float64 else None


def takes_all(*inputs: torch.Tensor | None, **options: Any) -> str | None:
    return None
