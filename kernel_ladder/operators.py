"""The operators that torch.compile sees instead of a call. Behind them, selection and rungs' host code run untraced.

``kernel_ladder::call`` replaces a public function while torch.compile traces. It is composite: PyTorch runs the Python
code below on tensors without data, and a rung is selected as in eager code. A rung that PyTorch differentiates (a
formula) leaves its plain tensor operations in the graph, for the compiler to fuse. Any other rung becomes
``kernel_ladder::forward`` and ``kernel_ladder::backward``. The compiled program calls these like a library. They use
the kernels, launch caches and tuned configurations of an eager call, at any length.

An operator takes tensors, integers and strings. A call's options, and the non-tensors that a forward pass saves, become
a string and a list of integers. The string is constant; the integers may be symbolic.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kernel_ladder import autocast, autograd, selection, table
from kernel_ladder.errors import raise_for_memory
from kernel_ladder.selection import small
from kernel_ladder.semantics.strides import aligned, as_traced
from kernel_ladder.spec import Inputs, Options, Output, as_tuple, each
from kernel_ladder.table import Variant
from kernel_ladder.tracing import PLAIN, building_graph, inferring_shapes, wants_gradient

_library = torch.library.Library("kernel_ladder", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_CALL = "Tensor?[] inputs, str options, SymInt[] integers"
_library.define(f"call(str op, str backend, str source, {_CALL}) -> Tensor[]", tags=_TAGS)
_library.define(f"forward(str op, str variant, {_CALL}, bool save) -> Tensor[]", tags=_TAGS)
_library.define(
    "backward(str op, str variant, Tensor[] grads, Tensor[] tensors, str saved, SymInt[] integers, bool[] needs)"
    " -> Tensor[]",
    tags=_TAGS,
)

# ---- values that are not tensors -----------------------------------------------------------------------------------


def _encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


class _Decoder(pickle.Unpickler):
    """Reads what :func:`_encoded` writes. A graph may come from a file, so no other class is loaded."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("builtins", "torch", "kernel_ladder", *table.LEVELS.values()):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or found is ... or (isinstance(found, type) and issubclass(found, _DATA)):
                return found
        raise pickle.UnpicklingError(f"a saved value of a call cannot hold {module}.{name}")


#: Classes that options and saved values consist of, besides numbers and strings.
_DATA = (tuple, list, torch.device)


@functools.lru_cache(4096)
def _decoded(text: str) -> Any:
    return _Decoder(io.BytesIO(base64.b64decode(text))).load()


_encoded_constant = table.untraced(_encoded)


def _without_integers(value: Any, integers: list[Any]) -> Any:
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
        return tuple([_without_integers(v, integers) for v in value])
    return value


def _with_integers(template: Any, integers: Iterator[Any]) -> Any:
    if template is ...:
        return next(integers)
    if isinstance(template, tuple):
        return tuple([_with_integers(v, integers) for v in template])
    return template


def _options(text: str, integers: Sequence[Any]) -> Options:
    left = iter(integers)
    return {name: _with_integers(value, left) for name, value in _decoded(text)}


# ---- what a forward pass saves -------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    """A forward pass's saved values, decomposed: new tensors, a description that restores all values, and integers.

    ``kept`` holds the indices of the saved inputs (first) and outputs (second). A backward pass takes these tensors in
    order, then those of ``own``, which are neither inputs nor outputs.
    """

    own: list[torch.Tensor]
    kept: tuple[tuple[int, ...], tuple[int, ...]]
    text: str
    integers: list[Any]


class _Tensor(NamedTuple):
    """The n-th tensor that a backward pass takes, or a view of its memory, whose sizes and strides are integers."""

    place: int
    view_dims: int | None
    dtype: torch.dtype | None = None  # of a view in another dtype, such as booleans viewed as bytes


class _Sequence(NamedTuple):
    kind: type
    values: tuple[Any, ...]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _same_view(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(
        x.dtype == y.dtype
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.storage_offset() == y.storage_offset()
    )


class _Tensors:
    """A list of tensors that share no memory. A view of a listed tensor is described relative to it."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.all = list(given)

    def describe(self, x: torch.Tensor, integers: list[Any]) -> _Tensor:
        """Describe `x` by a listed tensor, or append it as a new one."""
        for place, y in enumerate(self.all):
            if x is y or (_memory(x) == _memory(y) and x.numel() and _same_view(x, y)):
                return _Tensor(place, None)
        for place, y in enumerate(self.all):
            if x.numel() and _memory(x) == _memory(y):
                if x.element_size() != y.element_size():
                    x = x.clone()
                    break
                integers += [*x.shape, *x.stride(), x.storage_offset() - y.storage_offset()]
                return _Tensor(place, x.dim(), None if x.dtype == y.dtype else x.dtype)
        self.all.append(x)
        return _Tensor(len(self.all) - 1, None)


def _own(values: Sequence[Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors among `values` that :meth:`_Tensors.describe` would append, in order, without descriptions."""
    sizes = {_memory(x): x.element_size() for x in given if x.numel()}
    found: list[torch.Tensor] = []
    for x in _tensors_in(values):
        size = sizes.get(_memory(x)) if x.numel() else None
        if size == x.element_size() or any(x is y for y in (*given, *found)):
            continue
        if size is not None:
            x = x.clone()
        found.append(x)
        if x.numel():
            sizes[_memory(x)] = x.element_size()
    return found


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


def _described(value: Any, tensors: _Tensors, integers: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensors.describe(value, integers)
    if isinstance(value, (tuple, list)):
        return _Sequence(type(value), tuple([_described(v, tensors, integers) for v in value]))
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        integers.append(value)
        return ...
    return float(value) if isinstance(value, torch.SymFloat) else value


def _restored(described: Any, tensors: Sequence[torch.Tensor], integers: Iterator[Any]) -> Any:
    if described is ...:
        return next(integers)
    if isinstance(described, _Tensor):
        x = tensors[described.place]
        if described.view_dims is None:
            return x
        x = x if described.dtype is None else x.view(described.dtype)
        shape = [next(integers) for _ in range(described.view_dims)]
        stride = [next(integers) for _ in range(described.view_dims)]
        return x.as_strided(shape, stride, x.storage_offset() + next(integers))
    if isinstance(described, _Sequence):
        values = [_restored(v, tensors, integers) for v in described.values]
        return described.kind(*values) if hasattr(described.kind, "_fields") else described.kind(values)
    return described


def _taken_apart(inputs: Inputs, outputs: Sequence[torch.Tensor], saved: tuple[Any, ...]) -> _Saved:
    given = [x for x in inputs if x is not None]
    tensors, integers = _Tensors([*given, *outputs]), list[Any]()
    described = [_described(value, tensors, integers) for value in saved]
    used = sorted(place for place in _places(described) if place < len(given) + len(outputs))
    order = [*used, *range(len(given) + len(outputs), len(tensors.all))]
    renumbered = _renumbered(tuple(described), {place: i for i, place in enumerate(order)})
    kept_inputs = tuple(p for p in used if p < len(given))
    kept_outputs = tuple(p - len(given) for p in used if p >= len(given))
    own = tensors.all[len(given) + len(outputs) :]
    return _Saved(own, (kept_inputs, kept_outputs), _encoded(renumbered), integers)


def _places(described: Any) -> set[int]:
    if isinstance(described, _Tensor):
        return {described.place}
    if isinstance(described, _Sequence):
        return set().union(*(_places(v) for v in described.values))
    return set().union(*(_places(v) for v in described)) if isinstance(described, list) else set()


def _renumbered(described: Any, places: dict[int, int]) -> Any:
    if isinstance(described, _Tensor):
        return described._replace(place=places[described.place])
    if isinstance(described, _Sequence):
        return described._replace(values=tuple([_renumbered(v, places) for v in described.values]))
    return tuple([_renumbered(v, places) for v in described]) if type(described) is tuple else described


# ---- the operators -------------------------------------------------------------------------------------------------


class _Last(threading.local):
    """The descriptions that this thread's latest operator made besides the tensors that it returned.

    They are needed only while a graph is built. A compiled program holds them as constants.
    """

    asked = False
    saved: _Saved | None = None
    gradients: tuple[Any, list[Any]] | None = None


_last = _Last()


@contextmanager
def _asking() -> Iterator[None]:
    _last.asked, _last.saved, _last.gradients = True, None, None
    try:
        yield
    finally:
        _last.asked = False


def _variant(op: str, name: str) -> Variant:
    level = name.partition(".")[0]
    found = table._variants.get((op, level), {}).get(name)
    return found or next(v for v in table.variants(op, level) if v.name == name)


def _call_in_memory(op: str, variant: str, inputs: Inputs, options: str, integers: Sequence[Any], save: bool) -> tuple:
    """A forward pass's arguments as its kernels read them.

    The variant was chosen without addresses. Where it refuses those that the inputs have, they are copied to others.
    """
    inputs = each(as_traced, inputs)
    off = any(x is not None and x.data_ptr() % 16 for x in inputs)
    if off and _variant(op, variant).unsupported(*inputs, **_options(options, integers)) is not None:
        inputs = each(aligned, inputs)
    return op, variant, inputs, options, integers, save


def _gradient_in_memory(op: str, variant: str, grads: Inputs, tensors: Inputs, *others: Any) -> tuple:
    """A backward pass's arguments as its kernels read them. What was saved may be an input that was copied."""
    return op, variant, each(as_traced, grads), each(aligned, each(torch.resolve_neg, tensors)), *others


def _without_aliases(tensors: Sequence[torch.Tensor], *others: torch.Tensor | None) -> list[torch.Tensor]:
    """An operator's results, cloned where one shares memory with another or with an argument."""
    seen, results = {_memory(x) for x in others if x is not None and x.numel()}, []
    for x in tensors:
        if x.numel() and _memory(x) in seen:
            x = x.clone()
        seen.add(_memory(x))
        results.append(x)
    return results


def _forward(
    op: str, variant_name: str, inputs: Inputs, options: str, integers: Sequence[Any], save: bool
) -> list[torch.Tensor]:
    variant, named = _variant(op, variant_name), _options(options, integers)
    if not save:
        return _without_aliases(as_tuple(variant.output(*inputs, **named)), *inputs)
    output, saved = variant.forward(*inputs, **named)
    outputs = as_tuple(output)
    if any(x.numel() and _memory(x) == _memory(y) for x in outputs for y in inputs if y is not None):
        outputs = tuple(_without_aliases(outputs, *inputs))
    if not _last.asked:
        return [*outputs, *_own(saved, [*(x for x in inputs if x is not None), *outputs])]
    _last.saved = _taken_apart(inputs, outputs, saved)
    return [*outputs, *_last.saved.own]


def _backward(
    op: str,
    variant: str,
    grads: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    saved: str,
    integers: Sequence[Any],
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    if wants_gradient(*grads, *tensors):
        raise RuntimeError(autograd.once_only(op, variant))
    left = iter(integers)
    values = tuple([_restored(v, tensors, left) for v in _decoded(saved)])
    gradients = autograd.gradients(_variant(op, variant), values, tuple(grads), tuple(needs))
    wanted = [x if need else None for x, need in zip(gradients, needs, strict=True)]
    if not _last.asked:
        return _own(wanted, grads)
    found, numbers = _Tensors(grads), list[Any]()
    described = [None if x is None else found.describe(x, numbers) for x in wanted]
    _last.gradients = described, numbers
    return found.all[len(grads) :]


def _register(name: str, run: Callable[..., list[torch.Tensor]], in_memory: Callable[..., tuple]) -> None:
    def real(*arguments: Any) -> list[torch.Tensor]:
        prepared = in_memory(*arguments)
        try:
            return run(*prepared)
        except RuntimeError as error:
            raise_for_memory(error)
            raise

    def shapes(*arguments: Any) -> list[torch.Tensor]:
        with inferring_shapes():
            return run(*arguments)

    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_ladder::{name}", shapes, lib=_library)


_register("forward", _forward, _call_in_memory)
_register("backward", _backward, _gradient_in_memory)


# ---- autograd ------------------------------------------------------------------------------------------------------


class _Traced(torch.autograd.Function):
    """A rung's two operators as one differentiable node of a traced graph."""

    @staticmethod
    def forward(ctx: Any, variant: Variant, call: tuple[Any, ...], *inputs: torch.Tensor | None) -> Any:
        with _asking():
            results = torch.ops.kernel_ladder.forward(variant.op, variant.name, inputs, *call, True)
        saved = _last.saved
        assert saved is not None
        outputs, own = results[: len(results) - len(saved.own)], results[len(results) - len(saved.own) :]
        given = [x for x in inputs if x is not None]
        kept = [given[i] for i in saved.kept[0]] + [outputs[i] for i in saved.kept[1]]
        ctx.save_for_backward(*kept, *own)
        ctx.variant, ctx.text, ctx.integers = variant, saved.text, saved.integers
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        variant, needs = ctx.variant, ctx.needs_input_grad[2:]
        with _asking():
            fresh = torch.ops.kernel_ladder.backward(
                variant.op, variant.name, list(grads), list(ctx.saved_tensors), ctx.text, ctx.integers, list(needs)
            )
        assert _last.gradients is not None
        described, numbers = _last.gradients
        left, tensors = iter(numbers), [*grads, *fresh]
        return None, None, *(_restored(x, tensors, left) for x in described)


# Calls go past autograd to the function below it, which refuses to be differentiated. A function here would cost every
# training step of a compiled model 8 us an operation, to decide the same (CPU).
_library.impl("backward", torch.library.fallthrough_kernel, "Autograd")


#: Options that may change between calls of one compiled program. Any other integer is a compile-time constant.
_CHANGING = ("seed", "offset", "max_seqlen_q", "max_seqlen_k")


def _hinted(value: Any) -> Any:
    """An option with symbols replaced by the traced call's integers, because checks do not take symbols."""
    if isinstance(value, tuple):
        return tuple([_hinted(v) for v in value])
    return value.node.hint if isinstance(value, torch.SymInt) and value.node.has_hint() else value


def _fixed_widths(op: str, inputs: Inputs) -> Inputs:
    """Inputs whose row length and number of heads are compile-time constants: kernels are compiled for these."""
    heads = {"attention": -3, "attention_varlen": -2, "attention_paged": -3}.get(op)

    def fixed(x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        symbols = [d for d in (-1, heads) if d and len(shape) >= -d and isinstance(shape[d], torch.SymInt)]
        for dim in symbols:
            shape[dim] = int(shape[dim])
        return x.expand(shape) if symbols else x

    # No kernel is compiled for a number of sequences, or of pages, which the tensors from these places on have.
    last = {"attention_paged": 3, "rope": 2}.get(op, len(inputs))
    return (*each(fixed, inputs[:last]), *inputs[last:])


def _constant(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([_constant(v) for v in value])
    return int(value) if isinstance(value, torch.SymInt) else value


def _is_real(x: Any) -> bool:
    return x is None or type(x) in PLAIN


def _called(
    op: str, backend: str, source: str, inputs: Inputs, options: str, integers: Sequence[Any]
) -> list[torch.Tensor]:
    """A call on tensors without data, as torch.compile traces it, or on real tensors if the backend compiles nothing.

    `source` says where the backend's name comes from, if not from the call.
    """
    inputs = tuple(inputs)
    if autocast.is_on():

        def run(given: Inputs) -> Output:
            return _one_or_all(_called(op, backend, source, given, options, integers))

        return list(as_tuple(autocast.call(run, op, inputs)))
    named = _options(options, integers)
    restated = table.spec(op).check(*inputs, **{name: _hinted(value) for name, value in named.items()})
    if restated is not None:
        outputs = _called(op, backend, source, restated.inputs, options, integers)
        return list(as_tuple(restated.output(_one_or_all(outputs))))
    named = {name: value if name in _CHANGING else _constant(value) for name, value in named.items()}
    inputs = _fixed_widths(op, inputs)
    variant = None if (real := all(map(_is_real, inputs))) else small.left_to_compiler(op, backend, inputs, named)
    variant = variant or selection.choose(op, backend, inputs, named, False, source)
    if real:
        return list(as_tuple(autograd.run(variant, inputs, named)))
    if variant.backward is None:
        with building_graph():
            return list(as_tuple(autograd.run(variant, inputs, named)))
    call = options, list(integers)
    if wants_gradient(*inputs):
        return list(_Traced.apply(variant, call, *inputs))
    return torch.ops.kernel_ladder.forward(op, variant.name, inputs, *call, False)


def _one_or_all(outputs: Sequence[torch.Tensor]) -> Output:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


_library.impl("call", _called, "CompositeImplicitAutograd")


def call(op: str, backend: str | None, inputs: Inputs, options: dict[str, Any]) -> Output:
    """A public function's call while torch.compile traces it."""
    for x in inputs:
        if x is not None and not isinstance(x, torch.Tensor):  # raise our error, not the operator's
            table.spec(op).check(*inputs, **options)
    integers: list[Any] = []
    template = tuple([(name, _without_integers(value, integers)) for name, value in options.items()])
    outputs = torch.ops.kernel_ladder.call(
        op, table.asked_for(op, backend), table.source_of(backend), list(inputs), _encoded_constant(template), integers
    )
    return _one_or_all(outputs)
