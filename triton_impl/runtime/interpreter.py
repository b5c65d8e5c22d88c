"""What surrounds every launch in Triton's interpreter. Compiled kernels never come by here."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interpreter_session() -> Iterator[None]:
    """Surround interpreted launches.

    The interpreter computes a whole block in NumPy, masked-out lanes too, whose values are arbitrary: NumPy's warnings
    about overflow, division by zero and invalid values say nothing of a result. NumPy raises no others here, and what
    it does about them elsewhere stays.
    """
    import numpy

    with numpy.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        yield


def surround_launches() -> None:
    """Interpret one launch at a time, each in a session of its own. Another thread waits.

    The interpreter keeps what it replaces in the language, and the number of the program that it runs, in globals.
    """
    from triton.runtime.interpreter import GridExecutor

    launch, lock = GridExecutor.__call__, threading.RLock()

    @functools.wraps(launch)
    def in_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock, interpreter_session():
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = in_session


def mend_bfloat16() -> None:
    """Let the interpreter compute bfloat16 as GPUs do.

    It cuts the lower bits of float32 off: an error of up to a unit in the last place, always towards zero. Here it
    rounds to the nearest, ties to even. And it multiplies blocks by their bits, as integers; here by their numbers.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    convert = getattr(interpreter, "_convert_float", None)
    if convert is None:  # a version that converts by other means
        return
    to_nearest = interpreter._ir.ROUNDING_MODE.RTNE

    @functools.wraps(convert)
    def rounded(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if input_dtype == tl.bfloat16 and output_dtype == tl.float32:
            return numpy.asarray(input).view(numpy.uint16).astype(numpy.uint32) << numpy.uint32(16)
        if input_dtype != tl.float32 or output_dtype != tl.bfloat16 or rounding_mode not in (None, to_nearest):
            return convert(input, input_dtype, output_dtype, rounding_mode)
        values = numpy.ascontiguousarray(input, dtype=numpy.float32)
        bits = values.view(numpy.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40  # of a number that is none, whose carry would make it one
        return numpy.where(numpy.isnan(values), quiet, nearest).astype(numpy.uint16).reshape(numpy.shape(input))

    interpreter._convert_float = rounded

    multiply = interpreter.InterpreterBuilder.create_dot

    @functools.wraps(multiply)
    def of_numbers(self: Any, a: Any, b: Any, *more: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *more)

    interpreter.InterpreterBuilder.create_dot = of_numbers
