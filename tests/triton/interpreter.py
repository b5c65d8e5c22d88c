"""Triton's interpreter without work that it does over and over to no effect: most of its time, and none of its results.

What a kernel computes is left to Triton. All of this is about Triton's own internals, so each part stands aside where a
version of it has none of what it is about.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def without_overflow_checks() -> None:
    """Integer sums are not made again in 64 bits, to assert what is not asserted where nothing is debugged."""
    options = interpreter.interpreter_builder.options
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def with_dtypes_remembered() -> None:
    """NumPy's dtype of a Triton type is looked up in a table that is not made anew for it."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype.scalar)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def patched_once_a_launch() -> None:
    """The language's functions are replaced when a kernel starts, not again at every function that it calls."""
    patch = interpreter._patch_lang
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    scopes: dict[frozenset, Any] = {}

    @functools.cache
    def builtins(module: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(module) if core.is_builtin(member)]

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(module):
            interpreter._patch_attr(module, name, member, builder, scope)

    class Launch(interpreter._LangPatchScope):
        """What a kernel's launch replaced, and functions that it called which see the language by another name."""

        def restore(self) -> None:
            while scopes:
                scopes.popitem()[1].undo()

        def undo(self) -> None:
            super().restore()

    @functools.cache
    def languages(function: Any) -> frozenset:
        return frozenset(x.__name__ for x in function.__globals__.values() if x is interpreter.tl or x is core)

    def patch_lang(function: Any) -> Any:
        seen = languages(function)
        if seen not in scopes:
            scopes[seen] = patch(function)
        return scopes[seen]

    interpreter._LangPatchScope = Launch
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang


def with_types_remembered() -> None:
    """A block's type is made once, and so is what a tensor has of its type: there are few types, and many tensors."""
    blocks: dict[tuple, Any] = {}
    describe, initialise = core.block_type.__init__, core.tensor.__init__

    def block(cls: Any, element: Any, shape: Any) -> Any:
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        if any(type(size) is not int for size in sizes):
            return object.__new__(cls)
        key = (element.name, getattr(element, "address_space", None), sizes)
        if key not in blocks:
            made = object.__new__(cls)
            describe(made, element, shape)
            blocks[key] = made
        return blocks[key]

    def describe_once(self: Any, element: Any, shape: Any) -> None:
        if not self.__dict__:
            describe(self, element, shape)

    def of_type(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            initialise(self, handle, type)
            type._of_tensors = {name: x for name, x in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known, handle=handle)

    core.block_type.__new__ = block
    core.block_type.__init__ = describe_once
    core.tensor.__init__ = of_type


def reduced_in_blocks() -> None:
    """A reduction by a function of the kernel's own combines neighbours by whole blocks, not by one element at a time.

    As on a GPU, its order is that of a tree: n elements of a row are combined in log₂ n calls. Neighbours stay
    neighbours, so the function need not commute.
    """
    one_by_one = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self: Any, input: tuple[Any, ...]) -> list[Any]:
        shape = input[0].handle.data.shape
        if self.axis is None or shape[self.axis] & (shape[self.axis] - 1):
            return one_by_one(self, input)
        blocks = tuple(self.to_tensor(np.moveaxis(x.handle.data, self.axis, -1), x.dtype) for x in input)
        while blocks[0].handle.data.shape[-1] > 1:
            even, odd = ([self.to_tensor(x.handle.data[..., i::2], x.dtype) for x in blocks] for i in (0, 1))
            combined = self.combine_fn.fn(*even, *odd)
            blocks = combined if isinstance(combined, tuple) else (combined,)
        of_rows = [x.handle.data[..., 0] for x in blocks]
        kept = [np.expand_dims(x, self.axis) if self.keep_dims else x for x in of_rows]
        return [self.to_tensor(x, of.dtype) for x, of in zip(kept, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def hasten() -> None:
    """All of it, once."""
    reduced_in_blocks()
    with_types_remembered()
    without_overflow_checks()
    with_dtypes_remembered()
    patched_once_a_launch()
