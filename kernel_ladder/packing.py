"""A call's options and the values that its forward pass saves, as the strings and integers of an operator.

An operator of a graph (:mod:`kernel_ladder.operators`) takes tensors, integers and strings. A template of everything
else is a string, and constant; the integers may be symbols of torch.compile.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kernel_ladder import table
from kernel_ladder.spec import Inputs, Options

# ---- values that are not tensors -----------------------------------------------------------------------------------


def encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


class _Decoder(pickle.Unpickler):
    """Reads what :func:`encoded` writes. A graph may come from a file, so no other class is loaded."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("builtins", "torch", "kernel_ladder", *table.LEVELS.values()):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or found is ... or (isinstance(found, type) and issubclass(found, _DATA)):
                return found
        raise pickle.UnpicklingError(f"a saved value of a call cannot hold {module}.{name}")


#: Classes that options and saved values consist of, besides numbers and strings.
_DATA = (tuple, list, torch.device)


@functools.lru_cache(4096)
def decoded(text: str) -> Any:
    return _Decoder(io.BytesIO(base64.b64decode(text))).load()


encoded_constant = table.untraced(encoded)


def without_integers(value: Any, integers: list[Any]) -> Any:
    """An option with every integer replaced by an ellipsis and appended to `integers`; a float of a graph is a number.

    torch.compile traces a float that changes, or that follows from a shape, as a symbol. Written out, it is a number,
    on which a guard is made. ``float(value)`` would stay a symbol.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, int):
        integers.append(value)
        return ...
    if isinstance(value, tuple):
        return tuple([without_integers(v, integers) for v in value])
    return value


def _with_integers(template: Any, integers: Iterator[Any]) -> Any:
    if template is ...:
        return next(integers)
    if isinstance(template, tuple):
        return tuple([_with_integers(v, integers) for v in template])
    return template


def options_of(text: str, integers: Sequence[Any]) -> Options:
    numbers = all(type(n) is int for n in integers)  # as a compiled program has them, at every step the same
    return {**(_with_numbers(text, tuple(integers)) if numbers else _decoded_with(text, integers))}


def _decoded_with(text: str, integers: Sequence[Any]) -> Options:
    left = iter(integers)
    return {name: _with_integers(value, left) for name, value in decoded(text)}


_with_numbers = functools.lru_cache(4096)(_decoded_with)


# ---- what a forward pass saves -------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A forward pass's saved values, decomposed: new tensors, a description that restores all values, and integers.

    ``kept`` holds the indices of the saved inputs (first) and outputs (second). A backward pass takes these tensors in
    order, then those of ``own``, which are neither inputs nor outputs.
    """

    own: list[torch.Tensor]
    kept: tuple[tuple[int, ...], tuple[int, ...]]
    text: str
    integers: list[Any]


class TensorPlace(NamedTuple):
    """The n-th tensor that a backward pass takes, or a view of its memory, whose sizes and strides are integers."""

    place: int
    view_dims: int | None
    dtype: torch.dtype | None = None  # of a view in another dtype, such as booleans viewed as bytes


class SequenceOf(NamedTuple):
    kind: type
    values: tuple[Any, ...]


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _same_view(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(
        x.dtype == y.dtype
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.storage_offset() == y.storage_offset()
    )


class Tensors:
    """A list of tensors that share no memory. A view of a listed tensor is described relative to it."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.all = list(given)

    def describe(self, x: torch.Tensor, integers: list[Any]) -> TensorPlace:
        """Describe `x` by a listed tensor, or append it as a new one."""
        for place, y in enumerate(self.all):
            if x is y or (memory_of(x) == memory_of(y) and x.numel() and _same_view(x, y)):
                return TensorPlace(place, None)
        for place, y in enumerate(self.all):
            if x.numel() and memory_of(x) == memory_of(y):
                if x.element_size() != y.element_size():
                    x = x.clone()
                    break
                integers += [*x.shape, *x.stride(), x.storage_offset() - y.storage_offset()]
                return TensorPlace(place, x.dim(), None if x.dtype == y.dtype else x.dtype)
        self.all.append(x)
        return TensorPlace(len(self.all) - 1, None)


def own_tensors(values: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors among `values` that :meth:`Tensors.describe` would append, in order, without descriptions."""
    sizes = {memory_of(x): x.element_size() for x in given if x.numel()}
    found: list[torch.Tensor] = []
    for x in tensors_in(values):
        size = sizes.get(memory_of(x)) if x.numel() else None
        if size == x.element_size() or any(x is y for y in (*given, *found)):
            continue
        if size is not None:
            x = x.clone()
        found.append(x)
        if x.numel():
            sizes[memory_of(x)] = x.element_size()
    return found


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _described(value: Any, tensors: Tensors, integers: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensors.describe(value, integers)
    if isinstance(value, (tuple, list)):
        return SequenceOf(type(value), tuple([_described(v, tensors, integers) for v in value]))
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        integers.append(value)
        return ...
    return float(value) if isinstance(value, torch.SymFloat) else value


def restored(described: Any, tensors: Sequence[torch.Tensor], integers: Iterator[Any]) -> Any:
    if described is ...:
        return next(integers)
    if isinstance(described, TensorPlace):
        x = tensors[described.place]
        if described.view_dims is None:
            return x
        x = x if described.dtype is None else x.view(described.dtype)
        shape = [next(integers) for _ in range(described.view_dims)]
        stride = [next(integers) for _ in range(described.view_dims)]
        return x.as_strided(shape, stride, x.storage_offset() + next(integers))
    if isinstance(described, SequenceOf):
        values = [restored(v, tensors, integers) for v in described.values]
        return described.kind(*values) if hasattr(described.kind, "_fields") else described.kind(values)
    return described


def taken_apart(inputs: Inputs, outputs: Sequence[torch.Tensor], saved: tuple[Any, ...]) -> Saved:
    given = [x for x in inputs if x is not None]
    tensors, integers = Tensors([*given, *outputs]), list[Any]()
    described = [_described(value, tensors, integers) for value in saved]
    used = sorted(place for place in _places(described) if place < len(given) + len(outputs))
    order = [*used, *range(len(given) + len(outputs), len(tensors.all))]
    renumbered = _renumbered(tuple(described), {place: i for i, place in enumerate(order)})
    kept_inputs = tuple(p for p in used if p < len(given))
    kept_outputs = tuple(p - len(given) for p in used if p >= len(given))
    own = tensors.all[len(given) + len(outputs) :]
    return Saved(own, (kept_inputs, kept_outputs), encoded(renumbered), integers)


def _places(described: Any) -> set[int]:
    if isinstance(described, TensorPlace):
        return {described.place}
    if isinstance(described, SequenceOf):
        return set().union(*(_places(v) for v in described.values))
    return set().union(*(_places(v) for v in described)) if isinstance(described, list) else set()


def _renumbered(described: Any, places: dict[int, int]) -> Any:
    if isinstance(described, TensorPlace):
        return described._replace(place=places[described.place])
    if isinstance(described, SequenceOf):
        return described._replace(values=tuple([_renumbered(v, places) for v in described.values]))
    return tuple([_renumbered(v, places) for v in described]) if type(described) is tuple else described
