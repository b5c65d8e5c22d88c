"""What can be profiled beside the operations of the table: one pass of a PyTorch function that takes tensors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bench.measure import timing
from bench.profile.targets import Target, name_of, parse_sizes, tensors
from bench.usage import UsageError, nearest
from kernel_ladder.spec import Case, Inputs, Options, dtype_name
from kernel_ladder.testing.samples import make_inputs


def torch_function(name: str) -> Callable[..., Any]:
    """The function of a dotted name, such as ``torch.cdist`` or ``torch.nn.functional.layer_norm``."""
    owner: Any = torch
    parts = name.split(".")
    if parts[0] != "torch":
        raise UsageError(f"unknown function {name!r}; a function is named from torch on, such as torch.cdist")
    for i, part in enumerate(parts[1:], 1):
        path = ".".join(parts[:i])
        if not hasattr(owner, part):
            try:
                importlib.import_module(f"{path}.{part}")
            except ImportError:
                public = [n for n in dir(owner) if not n.startswith("_")]
                raise UsageError(f"{path} has no {part!r}; {nearest(part, public)}".rstrip("; ")) from None
        owner = getattr(owner, part)
    if not callable(owner) or inspect.isclass(owner):
        raise UsageError(f"{name} is not a function but a {type(owner).__name__}")
    return owner


def of_function(
    name: str, shape: str | None, options: Options, passes: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[Target]:
    """Each pass of a PyTorch function of random tensors, one for each shape.

    The least bytes are those of inputs and outputs; of a backward, those of inputs, gradients in and gradients out.
    """
    function = torch_function(name)
    sizes = parse_sizes(shape) if shape is not None else None
    if sizes is None:
        raise UsageError(f"--shape of {name} must be sizes, a part for each tensor, as 4096x64,4096x64, got {shape!r}")
    inputs = tensors(make_inputs, Case(shape, sizes), dtype, device)
    try:
        with torch.no_grad():
            outputs = _floating(function(*inputs, **options))
    except Exception as error:  # a function may raise anything at bad arguments
        line = str(error).strip().partition("\n")[0]
        raise UsageError(f"{name} does not take {name_of(shape, options)}: {type(error).__name__}: {line}") from None
    for pass_ in passes:
        backward = pass_ == "backward"
        if backward and not outputs:
            raise UsageError(f"{name} has no floating-point output, so no backward")
        moved = timing.nbytes(inputs) * (2 if backward else 1) + timing.nbytes(outputs)
        yield Target(
            op=name,
            backend="torch",
            pass_=pass_,
            dtype=dtype_name(dtype),
            shape=name_of(shape, options),
            least_bytes=moved,
            input_bytes=timing.nbytes(inputs) if len(inputs) == 1 else None,
            operators=True,
            make=_function_maker(function, inputs, options, backward),
        )


def _floating(outputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point())


def _function_maker(
    function: Callable[..., Any], inputs: Inputs, options: Options, backward: bool
) -> Callable[[], Callable[[], Any]]:
    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs, **options)

    def make() -> Callable[[], Any]:
        if not backward:
            return forward
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = [x for x in _floating(function(*leaves, **options)) if x.requires_grad]
        grads = [torch.ones_like(x) for x in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)

    return make
