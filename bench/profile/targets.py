"""What can be profiled: one pass of one variant of an operation, on inputs that the command line describes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kernel_ladder
from bench.measure import candidates, timing
from bench.measure.cases import shrink
from bench.measure.correctness import one_line
from bench.usage import UsageError, known, nearest
from kernel_ladder import table
from kernel_ladder.spec import Case, Inputs, Options, Spec, as_leaves, dtype_name
from kernel_ladder.table import LEVELS, Variant
from kernel_ladder.testing.samples import empty_inputs, make_grad, make_inputs

#: Sizes that stand for the shapes of all inputs, by operation and how many there are.
SHORTHAND: dict[tuple[str, int], Callable[..., tuple[tuple[int, ...], ...]]] = {
    ("matmul", 3): lambda m, n, k: ((m, k), (k, n)),
    ("linear", 3): lambda m, n, k: ((m, k), (n, k), (n,)),
    ("bias_gelu", 2): lambda m, n: ((m, n), (n,)),
    ("cross_entropy", 2): lambda m, n: ((m, n), (m,)),
    ("linear_cross_entropy", 3): lambda n, k, c: ((n, k), (c, k), (n,)),
    ("rope", 4): lambda b, h, s, d: ((b, h, s, d), (s, d // 2)),
    ("swiglu", 2): lambda m, n: ((m, n), (m, n)),
    ("attention", 4): lambda b, h, s, d: ((b, h, s, d),) * 3,
}
SIZES = re.compile(r"\d+(x\d+)*")


@dataclass(frozen=True)
class Target:
    """One call to look into, or why it cannot be. ``make`` sets up what it needs and returns it."""

    op: str
    backend: str
    pass_: str
    dtype: str
    shape: str
    least_bytes: int | None = None
    input_bytes: int | None = None  # of its one input; None where there are several
    operators: bool = False  # it runs as operators of PyTorch, whose operands can be counted
    make: Callable[[], Callable[[], Any]] | None = None
    reason: str | None = None
    broken: bool = False  # the reason is an error that the call raised

    def __str__(self) -> str:
        return f"{self.op} {self.backend} {self.pass_}, {self.dtype}, {self.shape}"


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """``name=value`` each: the value is a Python literal, or else the text itself."""
    options: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise UsageError(f"--option must be name=value, such as approximate=tanh, got {text!r}")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def parse_sizes(text: str) -> tuple[tuple[int, ...], ...] | None:
    """``64x32,32x16`` as ((64, 32), (32, 16)); None for anything else."""
    parts = text.replace(" ", "").split(",")
    if not all(SIZES.fullmatch(part) for part in parts):
        return None
    return tuple(tuple(int(n) for n in part.split("x")) for part in parts)


def backends_of(op: str) -> list[str]:
    """Names of levels and variants."""
    return [*LEVELS, *(v.name for v in table.variants(op))]


def variants_of(op: str, backends: Sequence[str]) -> list[Variant]:
    """The variants that `backends` (levels and variants; none for all) name, in the order of the climb."""
    climb = table.variants(op)
    names = backends_of(op)
    wanted = {known("backend", backend, names) for backend in backends} or set(LEVELS)
    found = [v for v in climb if v.name in wanted or v.level in wanted]
    if not found:  # a level that could not be loaded has no variant to show
        reasons = (f"{level}: {table.unavailable(op, level) or 'no variant yet'}" for level in sorted(wanted))
        raise UsageError(f"{op} has nothing to profile; {'; '.join(reasons)}")
    return found


def absent(op: str, backends: Sequence[str], case: Case, passes: Sequence[str], dtype: torch.dtype) -> list[Target]:
    """A target with its reason for each level of `backends` (none for all) that could not be loaded at all."""
    levels = [level for level in LEVELS if level in backends or not backends]
    reasons = {level: table.unavailable(op, level) for level in levels if not table.variants(op, level)}
    name = dtype_name(dtype)
    return [
        Target(op, level, pass_, name, case.id, reason=reason)
        for pass_ in passes
        for level, reason in reasons.items()
        if reason is not None
    ]


def case_of(op: str, shape: str | None, options: Options, dtype: torch.dtype, device: torch.device) -> Case:
    """The case that `shape` names: by its id, or by sizes. None: the first quick one, shrunk where there is no GPU.

    Raises:
        UsageError: no such case, sizes that do not parse, or arguments that the operation does not take.
    """
    spec = kernel_ladder.spec(op)
    tensors, defaults = _parameters(op)
    for name in options:
        if name not in defaults:
            raise UsageError(f"unknown option {name!r} of {op}; {nearest(name, list(defaults))}{_accepted(defaults)}")
    cases = [*spec.sweep, *spec.samples]
    if shape is None:
        case = next((c for c in spec.sweep if c.quick), spec.sweep[0])
        case = case if device.type == "cuda" else shrink(case, spec)
    else:
        by_id = (c for c in cases if c.id == shape)
        case = next(by_id, None) or Case(
            shape, _shapes_of(op, shape, tensors, cases), defaults, kinds=spec.sweep[0].kinds
        )
    case = dataclasses.replace(case, options={**case.options, **options})
    _check(spec, case, defaults, dtype)
    # Sizes and options that make up a case go by its name, as in the rows of a sweep.
    for other in cases:
        described = (other.shapes, other.layout, other.values, other.kinds, {**defaults, **other.options})
        if described == (case.shapes, case.layout, case.values, case.kinds, {**defaults, **case.options}):
            return dataclasses.replace(case, id=other.id)
    return dataclasses.replace(case, id=name_of(case.id, options))


def _parameters(op: str) -> tuple[list[str], dict[str, Any]]:
    """Names of the public function's tensors, and its options with their defaults."""
    arguments = inspect.signature(kernel_ladder.spec(op).check).parameters.values()
    tensors = [p.name for p in arguments if p.kind is p.POSITIONAL_OR_KEYWORD]
    known = {p.name for p in arguments if p.kind is p.KEYWORD_ONLY}
    options = [p for p in inspect.signature(getattr(kernel_ladder, op)).parameters.values() if p.name in known]
    usual = kernel_ladder.spec(op).sweep[0].options  # for an option that has no default
    # A seed has a default for calls that drop nothing.
    return tensors, {p.name: usual[p.name] if p.default is p.empty or p.name == "seed" else p.default for p in options}


def _accepted(defaults: Options) -> str:
    if not defaults:
        return "It has none"
    return f"Accepted are {', '.join(f'{name} (default {value!r})' for name, value in defaults.items())}"


def _shapes_of(op: str, shape: str, tensors: Sequence[str], cases: Sequence[Case]) -> tuple[tuple[int, ...], ...]:
    sizes = parse_sizes(shape)
    if sizes is not None and len(sizes) == 1 and (op, len(sizes[0])) in SHORTHAND:
        return SHORTHAND[op, len(sizes[0])](*sizes[0])
    needed = [p.name for p in inspect.signature(kernel_ladder.spec(op).check).parameters.values() if _is_needed(p)]
    if sizes is not None and len(needed) <= len(sizes) <= len(tensors):
        return sizes
    wrong = "is neither a case nor sizes" if sizes is None else f"is {len(sizes)} of the {len(needed)} shapes needed"
    form = ",".join(["16x64"] * len(needed))
    raise UsageError(
        f"--shape {shape!r} {wrong}; accepted are sizes of {', '.join(needed)}, written as {form}, "
        f"or a case: {', '.join(repr(case.id) for case in cases)}"
    )


def name_of(shape: str, options: Options) -> str:
    """A shape and what was set beside it, as one name."""
    return " ".join([shape, *(f"{name}={value}" for name, value in options.items())])


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty


def _check(spec: Spec, case: Case, defaults: Options, dtype: torch.dtype) -> None:
    inputs = tensors(empty_inputs, case, dtype, torch.device("meta"))
    try:
        spec.check(*inputs, **{**defaults, **case.options})
    except (TypeError, ValueError, IndexError) as error:
        raise UsageError(str(error)) from None


def tensors(make: Callable[..., Inputs], case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The tensors that `make` creates for a case.

    Raises:
        UsageError: it is larger than a tensor can be, or than memory.
    """
    try:
        return make(case, dtype, device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"--shape {case.id}: its tensors cannot be made: {one_line(error)}; give smaller sizes"
        ) from None


def of_operation(
    variants: Sequence[Variant], case: Case, passes: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[Target]:
    """Each pass of each variant, called as the sweep calls it, on one set of inputs."""
    spec = kernel_ladder.spec(variants[0].op)
    inputs, options = tensors(make_inputs, case, dtype, device), case.options
    for pass_ in passes:
        backward = pass_ == "backward"
        for variant in variants:
            yield Target(
                op=spec.name,
                backend=variant.name,
                pass_=pass_,
                dtype=dtype_name(dtype),
                shape=case.id,
                least_bytes=spec.bytes(case, dtype.itemsize, backward),
                input_bytes=timing.nbytes(inputs) if len(inputs) == 1 else None,
                # Nothing is compiled while a dispatch mode is active, and Triton's kernels are no operators.
                operators=variant.level in ("torch", "cuda"),
                make=_maker(spec, variant, inputs, case, backward),
                reason=table.unavailable(spec.name, variant.level)
                or variant.unsupported(*(as_leaves(inputs) if backward else inputs), **options),
            )


def _maker(spec: Spec, variant: Variant, inputs: Inputs, case: Case, backward: bool) -> Callable[[], Callable[[], Any]]:
    options = case.options

    def make() -> Callable[[], Any]:
        if not backward:
            call = candidates.forward_call(variant, candidates.Copies([inputs], None, options))
        else:
            grad = make_grad(spec, inputs, options)
            call = candidates.backward_call(variant, candidates.Copies([inputs], [grad], options, case.together))
        return lambda: call(0)

    return make
