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

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kernel_ladder import autocast, autograd, selection, table
from kernel_ladder.errors import raise_for_memory
from kernel_ladder.packing import (
    Saved,
    Tensors,
    decoded,
    encoded_constant,
    memory_of,
    options_of,
    own_tensors,
    restored,
    taken_apart,
    tensors_in,
    without_integers,
)
from kernel_ladder.selection import small
from kernel_ladder.semantics.strides import aligned, as_traced
from kernel_ladder.spec import Inputs, Output, as_tuple, each
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

# ---- the operators -------------------------------------------------------------------------------------------------


class _Last(threading.local):
    """The descriptions that this thread's latest operator made besides the tensors that it returned.

    They are needed only while a graph is built. A compiled program holds them as constants.
    """

    asked = False
    saved: Saved | None = None
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
    if not all(x is None or _is_as_traced(x) for x in inputs):
        inputs = each(as_traced, inputs)
        off = any(x is not None and x.data_ptr() % 16 for x in inputs)
        if off and _variant(op, variant).unsupported(*inputs, **options_of(options, integers)) is not None:
            inputs = each(aligned, inputs)
    return op, variant, inputs, options, integers, save


def _is_as_traced(x: torch.Tensor) -> bool:
    """Whether a tensor begins on 16 bytes and has no lazy sign, as most do."""
    return not (x.data_ptr() % 16 or x.is_neg())


def _gradient_in_memory(op: str, variant: str, grads: Inputs, tensors: Inputs, *others: Any) -> tuple:
    """A backward pass's arguments as its kernels read them. What was saved may be an input that was copied."""
    if not all(x is None or _is_as_traced(x) for x in (*grads, *tensors)):
        grads, tensors = each(as_traced, grads), each(aligned, each(torch.resolve_neg, tensors))
    return op, variant, grads, tensors, *others


def _are_apart(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]) -> bool:
    """Whether no result shares memory with another or with what was given, as nearly always."""
    seen = {memory_of(x) for x in given if x is not None}
    count = len(seen)
    seen.update([memory_of(x) for x in results])
    return len(seen) == count + len(results)


def _without_aliases(tensors: Sequence[torch.Tensor], *others: torch.Tensor | None) -> list[torch.Tensor]:
    """An operator's results, cloned where one shares memory with another or with an argument."""
    seen, results = {memory_of(x) for x in others if x is not None and x.numel()}, []
    for x in tensors:
        if x.numel() and memory_of(x) in seen:
            x = x.clone()
        seen.add(memory_of(x))
        results.append(x)
    return results


def _forward(
    op: str, variant_name: str, inputs: Inputs, options: str, integers: Sequence[Any], save: bool
) -> list[torch.Tensor]:
    variant, named = _variant(op, variant_name), options_of(options, integers)
    if not save:
        outputs = as_tuple(variant.output(*inputs, **named))
        return list(outputs) if _are_apart(outputs, inputs) else _without_aliases(outputs, *inputs)
    output, saved = variant.forward(*inputs, **named)
    outputs = as_tuple(output)
    if not _last.asked:
        listed = {id(x) for x in (*inputs, *outputs)}
        results = [*outputs, *(x for x in tensors_in(saved) if id(x) not in listed)]
        if _are_apart(results, inputs):
            return results
    if any(x.numel() and memory_of(x) == memory_of(y) for x in outputs for y in inputs if y is not None):
        outputs = tuple(_without_aliases(outputs, *inputs))
    if not _last.asked:
        return [*outputs, *own_tensors(saved, [*(x for x in inputs if x is not None), *outputs])]
    _last.saved = taken_apart(inputs, outputs, saved)
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
    values = tuple([restored(v, tensors, left) for v in decoded(saved)])
    gradients = autograd.gradients(_variant(op, variant), values, tuple(grads), tuple(needs))
    wanted = [x if need else None for x, need in zip(gradients, needs, strict=True)]
    if not _last.asked:
        results = [x for x in wanted if x is not None]
        return results if _are_apart(results, grads) else own_tensors(wanted, grads)
    found, numbers = Tensors(grads), list[Any]()
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
        return None, None, *(restored(x, tensors, left) for x in described)


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
    named = options_of(options, integers)
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
    template = tuple([(name, without_integers(value, integers)) for name, value in options.items()])
    outputs = torch.ops.kernel_ladder.call(
        op, table.asked_for(op, backend), table.source_of(backend), list(inputs), encoded_constant(template), integers
    )
    return _one_or_all(outputs)
