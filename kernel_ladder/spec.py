"""What an operation is, apart from how it is computed: the contract that every variant of it meets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

#: The tensor arguments of an operation; None where an optional one is absent. The first is always a tensor.
Inputs = tuple[Any, ...]
Options = Mapping[str, Any]
#: What an operation returns, and the gradients of that.
Output = torch.Tensor | tuple[torch.Tensor, ...]

#: Every dtype that an operation accepts. A variant may take fewer and says so through ``unsupported``.
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Looked up once: every call asks for them.
_Tensor, _STRIDED = torch.Tensor, torch.strided


@dataclass(frozen=True)
class Case:
    """One call of an operation, described by data, so that tests and the benchmark make the same inputs from it.

    ``shapes`` has one entry per tensor argument, None for an optional one that is absent. ``layout``, ``values`` and
    ``kinds`` are names that :func:`kernel_ladder.testing.samples.make_inputs` knows; ``layout`` is one for all arguments or one
    for each, ``kinds`` has one for each argument that is not of the case's dtype, by its place. ``options`` are the
    keyword arguments of a variant. ``passes`` are those that the benchmark measures, of every step of the climb or,
    where `climb` is False, of each level's most optimised variant alone.
    """

    id: str
    shapes: tuple[tuple[int, ...] | None, ...]
    options: Options = field(default_factory=dict)
    layout: str | tuple[str, ...] = "contiguous"
    values: str = "normal"
    quick: bool = False
    kinds: Mapping[int, str] = field(default_factory=dict)
    passes: tuple[str, ...] = ("forward", "backward")
    climb: bool = True

    def layout_of(self, place: int) -> str:
        """The layout of the argument in a place."""
        return self.layout if isinstance(self.layout, str) else self.layout[place]

    def __str__(self) -> str:
        return self.id


def unchanged(output: Any) -> Any:
    """An output as it is."""
    return output


class Restated(NamedTuple):
    """A call in the shapes that every variant takes, where PyTorch takes others: views of the same tensors."""

    inputs: Inputs
    #: The output of the call as it was made, from that of this one.
    output: Callable[[Any], Any] = unchanged


@dataclass(frozen=True)
class ErrorCase:
    """Bad arguments, and the error that each level must raise for them.

    ``arguments`` returns ``(args, kwargs)`` for the public function; ``message`` is a regular expression.
    """

    id: str
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Spec:
    """Everything about an operation that is the same for every variant.

    Attributes:
        name: the operation's name, also the name of its module at every level.
        reference: the naive formula in plain tensor operations. The readable baseline; the oracle, when
            called on float64 inputs; and what ``torch.compile`` compiles.
        builtin: PyTorch's own function, or the same from several of them, an independent check of the formula. None
            where PyTorch has nothing that computes the same.
        check: raises the argument errors, so that they read the same at every level. Returns None, or the call that
            variants get in place of this one.
        samples: small and awkward cases for the tests.
        errors: bad arguments with the message that each must raise.
        sweep: the cases of the benchmark; those marked ``quick`` make the short sweep.
        bytes: least bytes to move for ``(case, itemsize, backward)``.
        flops: least floating-point operations for ``(case, backward)``.
        oracle: a faster formula for the float64 oracle where the naive one needs too much memory.
            A test holds it equal to ``reference``.
        yardstick: the formula whose error in the inputs' dtype sets the agreement's bound, where the naive one needs
            too much memory, or sums in a better order than a kernel may be asked to.
        parts: splits inputs and output into independent pieces, as pairs of (one index per input, output index),
            so that the oracle of a large case fits in memory.
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
    parts: Callable[[Inputs], Iterator[tuple[tuple[Any, ...], Any]]] | None = None

    @property
    def baseline(self) -> str:
        """The variant that speedups are over: PyTorch's own function, or the naive formula where it has none."""
        return "torch.naive" if self.builtin is None else "torch.builtin"

    def named(self, inputs: Inputs) -> dict[str, Any]:
        """The tensor arguments by the names that the public function takes them by, without those that are absent."""
        names = inspect.signature(self.check).parameters
        return {name: x for name, x in zip(names, inputs, strict=False) if x is not None}

    def outputs(self, inputs: Inputs, options: Options) -> tuple[torch.Tensor, ...]:
        """Each output as a tensor without data, which has its shape and dtype."""
        without_data = each(lambda x: torch.empty_like(x, device="meta"), inputs)
        return as_tuple(self.reference(*without_data, **options))

    def output_shapes(self, inputs: Inputs, options: Options) -> tuple[torch.Size, ...]:
        """The shape of each output, found without computing it."""
        return tuple(x.shape for x in self.outputs(inputs, options))


def each(function: Callable[[Any], Any], inputs: Inputs) -> Inputs:
    """`function` of every tensor, or of its shape; what is absent stays so."""
    return tuple(None if x is None else function(x) for x in inputs)


def has_gradient(x: torch.Tensor | None) -> bool:
    """Whether an argument is one that a gradient can be asked for: there, and of floating-point numbers."""
    return x is not None and x.is_floating_point()


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The tensors in another floating-point dtype; booleans and integers stay what they are."""
    return each(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def as_leaves(inputs: Inputs) -> Inputs:
    """The tensors cut off from any graph, each that can have a gradient asking for one."""
    return each(lambda x: x.detach().requires_grad_(x.is_floating_point()), inputs)


def as_tuple(output: Output) -> tuple[torch.Tensor, ...]:
    """One output or several, as several."""
    return output if isinstance(output, tuple) else (output,)


def check_tensors(
    op: str, dtypes: Sequence[torch.dtype] = DTYPES, optional: Sequence[str] = (), **tensors: object
) -> None:
    """Raise unless every argument is a tensor of an accepted dtype, and all have one dtype and one device.

    `optional` names those that may be absent, which a message then says.
    """
    # Every call of every operation comes by here: first whether all is well, and only else what is not.
    first, *others = tensors.values()
    if isinstance(first, _Tensor) and first.layout is _STRIDED and (dtype := first.dtype) in dtypes:
        device = first.device
        for x in others:
            if not isinstance(x, _Tensor) or x.dtype is not dtype or x.device != device or x.layout is not _STRIDED:
                break
        else:
            return
    _raise_for_tensors(op, dtypes, optional, tensors)


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes as a message lists them."""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _raise_for_tensors(
    op: str, dtypes: Sequence[torch.dtype], optional: Sequence[str], tensors: Mapping[str, object]
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
                f"{op}: argument `{name}` has dtype {names_of([value.dtype])}; accepted are {names_of(dtypes)}"
            )
        assert isinstance(first, torch.Tensor)
        if value.dtype != first.dtype:
            raise TypeError(
                f"{op}: arguments `{first_name}` and `{name}` must have the same dtype, "
                f"got {names_of([first.dtype])} and {names_of([value.dtype])}"
            )
        if value.device != first.device:
            raise ValueError(
                f"{op}: arguments `{first_name}` and `{name}` must be on the same device, "
                f"got {first.device} and {value.device}"
            )
