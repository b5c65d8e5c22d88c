"""Rungs from formulas in JAX: ``formula(jax, *arrays, **options)`` returns an array or a tuple of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernel_ladder import gpu, table
from kernel_ladder.spec import Output, as_tuple, has_gradient
from kernel_ladder.tracing import shapes_only
from kernel_ladder.transforms import transforms_active
from xla_impl import bridge

Arrays = tuple[Any, ...]
#: Options that are arguments of a program: another value compiles nothing.
TRACED = ("seed",)
#: Options that no formula reads, because the tensors say it.
UNREAD = ("max_seqlen_q", "max_seqlen_k")


def unsupported(*inputs: torch.Tensor | None, **options: object) -> str | None:
    """What every rung of this level asks of its inputs."""
    first = inputs[0]
    assert first is not None
    if transforms_active():
        return "torch.func (vmap, grad, jvp and so on) follows PyTorch's own operators alone; use backend='torch'"
    if first.device.type not in ("cpu", "cuda"):
        return f"JAX takes CPU and CUDA tensors, got {first.device.type}"
    if first.device.type not in bridge.platforms():
        return (
            f"this JAX has no {first.device.type} device; `pip install kernel_ladder[xla-cuda13]` installs its plugin"
        )
    if first.is_cuda and gpu.capturing():
        return bridge.CAPTURED
    return None


def takes_all(*inputs: torch.Tensor | None, **options: Any) -> str | None:
    return None


def words(seed: int) -> np.ndarray:
    """A seed as two 32-bit words, the lower first."""
    return np.array((seed & 0xFFFFFFFF, seed >> 32), np.uint32)


class Programs:
    """A formula's compiled programs, by pass and options. JAX itself tells shapes and dtypes apart."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        self.formula = formula
        #: Whether the formula has an option `platform`, "cpu" or "cuda".
        self.asks_platform = "platform" in inspect.signature(formula).parameters
        self._known: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def split(self, options: dict[str, Any], input: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options that a program is compiled for, and those that are its arguments."""
        static = {name: value for name, value in options.items() if name not in TRACED and name not in UNREAD}
        if self.asks_platform:
            static["platform"] = input.device.type
        return static, {name: words(options[name]) for name in TRACED if name in options}

    def _compiled(self, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = bridge.jax().jit(make())
        return found

    def forward(self, static: dict[str, Any]) -> Callable[..., Any]:
        """``program(*inputs, traced)``, which returns a tuple of outputs."""

        def make() -> Callable[..., Any]:
            jax, formula = bridge.jax(), self.formula
            return lambda *arrays: _as_tuple(formula(jax, *arrays[:-1], **static, **arrays[-1]))

        return self._compiled(("forward", *static.items()), make)

    def backward(self, static: dict[str, Any], count: int, wanted: tuple[int, ...]) -> Callable[..., Any]:
        """``program(*inputs, *grads, traced)``: the gradients of the `wanted` among `count` inputs."""

        def make() -> Callable[..., Any]:
            jax, formula = bridge.jax(), self.formula

            def gradients(*arrays: Any) -> Arrays:
                inputs, grads, traced = arrays[:count], arrays[count:-1], arrays[-1]

                def of_wanted(*some: Any) -> Arrays:
                    every = list(inputs)
                    for place, x in zip(wanted, some, strict=True):
                        every[place] = x
                    return _as_tuple(formula(jax, *every, **static, **traced))

                _, pullback = jax.vjp(of_wanted, *(inputs[i] for i in wanted))
                return tuple(pullback(grads))

            return gradients

        return self._compiled(("backward", count, wanted, *static.items()), make)


#: The programs of every rung, by operation and rung, for inspection.
PROGRAMS: dict[tuple[str, str], Programs] = {}


def _as_tuple(found: Any) -> Arrays:
    return found if isinstance(found, tuple) else (found,)


def _one_or_all(outputs: tuple[torch.Tensor, ...]) -> Output:
    return outputs[0] if len(outputs) == 1 else outputs


def _dense(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _without_data(op: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Output:
    """Results of the shapes and dtypes that the naive formula gives."""
    return _one_or_all(tuple(map(_dense, as_tuple(table.spec(op).reference(*inputs, **options)))))


def register(
    op: str,
    formula: Callable[..., Any],
    *,
    name: str = "xla.jit",
    also_unsupported: Callable[..., str | None] = takes_all,
    self_adjoint: bool = False,
) -> None:
    """Add a formula as a rung, differentiated by ``jax.vjp``.

    The forward pass saves the inputs. The backward pass computes the formula again, inside one compiled program for the
    gradients that are wanted. Residuals of ``jax.vjp`` would take up to ten times the inputs' memory.

    Args:
        op: the operation.
        formula: ``formula(jax, *arrays, **options)``; the option `seed` is an array of two 32-bit words.
        name: the rung.
        also_unsupported: why the rung does not take some inputs that the level takes, or None.
        self_adjoint: the formula of the output's gradient is the gradient of its one input, so no tensor is saved.
    """
    programs = PROGRAMS[op, name] = Programs(formula)

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Output, tuple[Any, ...]]:
        saved = (*(() if self_adjoint else inputs), tuple(options.items()))
        if shapes_only():
            return _without_data(op, inputs, options), saved
        static, traced = programs.split(options, inputs[0])
        return _one_or_all(bridge.run(programs.forward(static), inputs, traced)), saved

    def backward(saved: tuple[Any, ...], grad: Any, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
        *inputs, options = saved
        if self_adjoint:
            return (forward(grad, **dict(options))[0],)  # type: ignore[return-value]
        wanted = tuple(i for i, x in enumerate(inputs) if needs[i] and has_gradient(x))
        if shapes_only():
            return tuple(_dense(x) if i in wanted else None for i, x in enumerate(inputs))
        static, traced = programs.split(dict(options), inputs[0])
        program = programs.backward(static, len(inputs), wanted)
        made = dict(zip(wanted, bridge.run(program, (*inputs, *as_tuple(grad)), traced), strict=True))
        return tuple(made.get(i) for i in range(len(inputs)))

    def refused(*inputs: torch.Tensor | None, **options: Any) -> str | None:
        return unsupported(*inputs) or also_unsupported(*inputs, **options)

    forward.__doc__ = formula.__doc__
    table.register(op, name, forward=forward, backward=backward, unsupported=refused)
