"""The spec of an operation: everything about it that is the same for every rung."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

#: The tensor arguments of an operation; None for an absent optional one. The first is always a tensor.
Inputs = tuple[Any, ...]
Options = Mapping[str, Any]
#: The result of an operation, or the gradients of its result.
Output = torch.Tensor | tuple[torch.Tensor, ...]

#: The passes of a call, by the names that rows, samples and commands give them.
PASSES = ("forward", "backward")
#: How the name ends of a case whose row of the backward pass holds the forward pass too.
TOGETHER = "both passes"

#: Every dtype that an operation accepts. A rung may take fewer, and says so through ``unsupported``.
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Those beside which parameters may be float32, where an operation says so.
NARROW_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

# Module globals, because every call reads them.
_Tensor, _STRIDED = torch.Tensor, torch.strided


@dataclass(frozen=True)
class Case:
    """One call of an operation, described by data, so that tests and the benchmark make the same inputs from it.

    Attributes:
        id: the case's name, which states sizes and options.
        shapes: one shape per tensor argument, None for an absent optional one.
        options: the keyword arguments of a rung.
        layout: one memory layout for all arguments, or one for each. Layouts, values and kinds are named in
            :func:`kernel_ladder.testing.samples.make_inputs`.
        values: the distribution of the values.
        quick: whether the short sweep measures the case.
        kinds: the kind of each argument that does not have the case's dtype, by the argument's index.
        passes: the passes that the benchmark measures.
        climb: whether it measures every rung, or only the one that each level's name stands for.
        together: whether its backward pass is measured with the forward pass before it, in one time. So rungs that
            compute gradients in the forward pass compare with those that do not. The id ends in :data:`TOGETHER`.
    """

    id: str
    shapes: tuple[tuple[int, ...] | None, ...]
    options: Options = field(default_factory=dict)
    layout: str | tuple[str, ...] = "contiguous"
    values: str = "normal"
    quick: bool = False
    kinds: Mapping[int, str] = field(default_factory=dict)
    passes: tuple[str, ...] = PASSES
    climb: bool = True
    together: bool = False

    def layout_of(self, place: int) -> str:
        """The layout of the argument at an index."""
        return self.layout if isinstance(self.layout, str) else self.layout[place]

    def __str__(self) -> str:
        return self.id


def unchanged(output: Any) -> Any:
    """Return the output unchanged."""
    return output


class Restated(NamedTuple):
    """A call in the shapes that every rung takes, where PyTorch accepts further ones: views of the same tensors."""

    inputs: Inputs
    #: Maps this call's output to the output of the original call.
    output: Callable[[Any], Any] = unchanged


@dataclass(frozen=True)
class ErrorCase:
    """Bad arguments, and the error that every level must raise for them.

    ``arguments`` returns ``(args, kwargs)`` for the public function; ``message`` is a regular expression.
    """

    id: str
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    error: type[Exception]
    message: str

    @classmethod
    def of(cls, id: str, error: type[Exception], message: str, *arguments: Any, **options: Any) -> ErrorCase:
        """Bad arguments that can be shared by all tests, because no call changes them."""
        return cls(id, lambda: (arguments, options), error, message)


@dataclass(frozen=True)
class Spec:
    """Everything about an operation that is the same for every rung.

    Attributes:
        name: the operation's name, also the name of its module at every level.
        reference: the naive formula in plain tensor operations. It is the readable baseline, the oracle when called on
            float64 inputs, and what ``torch.compile`` compiles.
        builtin: PyTorch's own function, or several of them combined: an independent check of the formula. None if
            PyTorch has no function that computes the same.
        check: raises the argument errors, so that they are the same at every level. Returns None, or the call that
            rungs get instead of this one.
        samples: small and awkward cases for the tests.
        errors: bad arguments, each with the message that it must raise.
        sweep: the cases of the benchmark; those marked ``quick`` make the short sweep.
        bytes: the least bytes to move for ``(case, itemsize, backward)``.
        flops: the least floating-point operations for ``(case, backward)``.
        oracle: a formula for the float64 oracle, if the naive one needs too much memory. A test checks that it equals
            ``reference``.
        yardstick: the formula whose error in the inputs' dtype sets the bound of the agreement check. It replaces the
            naive formula if that needs too much memory, or sums in a better order than a kernel must.
        parts: splits inputs and output into independent parts, so that the oracle of a large case fits in memory. Each
            part is a pair (one index per input, output index).
    """

    name: str
    reference: Callable[..., Output]
    builtin: Callable[..., Output] | None
    check: Callable[..., Restated | None]
    samples: Sequence[Case]
    errors: Sequence[ErrorCase]
    sweep: Sequence[Case]
    bytes: Callable[[Case, int, bool], int]
    flops: Callable[[Case, bool], int]
    oracle: Callable[..., Output] | None = None
    yardstick: Callable[..., Output] | None = None
    parts: Callable[[Inputs, Options], Iterator[tuple[tuple[Any, ...], Any]]] | None = None

    @property
    def baseline(self) -> str:
        """The rung that speedups are relative to: PyTorch's own function, or the naive formula if there is none."""
        return "torch.naive" if self.builtin is None else "torch.builtin"

    def named(self, inputs: Inputs) -> dict[str, Any]:
        """The tensor arguments that are present, by their names in the public function."""
        names = inspect.signature(self.check).parameters
        return {name: x for name, x in zip(names, inputs, strict=False) if x is not None}

    def outputs(self, inputs: Inputs, options: Options) -> tuple[torch.Tensor, ...]:
        """Each output as a tensor of its shape and dtype, without data."""
        without_data = each(lambda x: torch.empty_like(x, device="meta"), inputs)
        return as_tuple(self.reference(*without_data, **options))

    def output_shapes(self, inputs: Inputs, options: Options) -> tuple[torch.Size, ...]:
        """The shape of each output, without computing it."""
        return tuple(x.shape for x in self.outputs(inputs, options))


def each(function: Callable[[Any], Any], inputs: Inputs) -> Inputs:
    """Apply `function` to every tensor (or shape); None stays None."""
    return tuple(None if x is None else function(x) for x in inputs)


def has_gradient(x: torch.Tensor | None) -> bool:
    """Whether an argument can have a gradient: it is present and of a floating-point dtype."""
    return x is not None and x.is_floating_point()


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The tensors in another floating-point dtype; booleans and integers stay unchanged."""
    return each(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def mixed(input: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether a parameter has another dtype than the input: float32 beside 16 bits, once the check has passed."""
    for x in parameters:  # noqa: SIM110 - every call of a norm runs this, and a generator takes twice as long
        if x is not None and x.dtype is not input.dtype:
            return True
    return False


def as_leaves(inputs: Inputs) -> Inputs:
    """The tensors detached from any graph; each that can have a gradient requires one."""
    return each(lambda x: x.detach().requires_grad_(x.is_floating_point()), inputs)


def as_tuple(output: Output) -> tuple[torch.Tensor, ...]:
    """One output or several, as a tuple."""
    return output if isinstance(output, tuple) else (output,)


def check_tensors(
    op: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
    optional: Sequence[str] = (),
    parameters: Sequence[str] = (),
    **tensors: object,
) -> None:
    """Raise unless every argument is a tensor of an accepted dtype, and all have one dtype and one device.

    `optional` names the arguments that may be None, so that the message says so. `parameters` names those that may be
    float32 beside 16-bit arguments.
    """
    # Every call of every operation runs this check. Test the good case first; find the fault only if it fails.
    first, *others = tensors.values()
    if isinstance(first, _Tensor) and first.layout is _STRIDED and (dtype := first.dtype) in dtypes:
        device = first.device
        for x in others:
            if not isinstance(x, _Tensor) or x.dtype is not dtype or x.device != device or x.layout is not _STRIDED:
                break
        else:
            return
    _check_each(op, dtypes, optional, parameters, tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes as a message lists them."""
    return ", ".join(map(dtype_name, dtypes))


def _check_each(
    op: str,
    dtypes: Sequence[torch.dtype],
    optional: Sequence[str],
    parameters: Sequence[str],
    tensors: Mapping[str, object],
) -> None:
    first_name, first = next(iter(tensors.items()))
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            absent = " or None" if name in optional else ""
            raise TypeError(f"{op}: argument `{name}` must be a torch.Tensor{absent}, got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise TypeError(f"{op}: argument `{name}` must be a dense (strided) tensor, got layout {value.layout}")
        if value.dtype not in dtypes:
            raise TypeError(
                f"{op}: argument `{name}` has dtype {dtype_name(value.dtype)}; accepted are {dtype_names(dtypes)}"
            )
        assert isinstance(first, torch.Tensor)
        narrow = first.dtype in NARROW_DTYPES
        if value.dtype != first.dtype and not (narrow and value.dtype == torch.float32 and name in parameters):
            also = f"; `{name}` may also be float32" if narrow and name in parameters else ""
            raise TypeError(
                f"{op}: arguments `{first_name}` and `{name}` must have the same dtype, "
                f"got {dtype_name(first.dtype)} and {dtype_name(value.dtype)}{also}"
            )
        if value.device != first.device:
            raise ValueError(
                f"{op}: arguments `{first_name}` and `{name}` must be on the same device, "
                f"got {first.device} and {value.device}"
            )
