"""Inspect a rung: its kernels' registers, memory and occupancy, and the code itself.

This module holds what all levels share. Each level's package has a module ``inspect`` with the function
``inspect(request) -> Inspection``. There, ``CODE`` lists the kinds of code that the level can show, and
``AHEAD_OF_TIME`` says whether it can inspect for other GPUs than this machine's.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_ladder import autograd, selection, table
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection.architecture import Architecture, occupancy
from kernel_ladder.spec import Case, Inputs, Output, as_leaves, as_tuple, dtype_name, each, has_gradient
from kernel_ladder.testing.samples import make_inputs

#: Kinds of code. ``source`` is the code that a person, or torch.compile, wrote; ``tpu`` is StableHLO lowered for a TPU.
CODE = ("source", "hlo", "tpu", "ttgir", "ptx", "sass")

#: The note for a pass without kernels.
NO_KERNEL = "this pass has no kernel of its own: its gradients are views, made by other operations, or not given"

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Request:
    """What to inspect.

    Attributes:
        case: one of the operation's cases, or None for the first that the rung supports.
        arch: such as "sm_90a". None means this machine's GPU, else the newest that the kernels were built for.
        code: the kinds of :data:`CODE` whose text to return.
        kernel: part of the names of the kernels to return, or None for all kernels.
        chosen: why a level's name stands for the rung in this case, or None where the rung was named.
    """

    variant: table.Variant
    case: Case | None = None
    dtype: torch.dtype = torch.bfloat16
    pass_: str = "forward"
    arch: str | None = None
    code: frozenset[str] = frozenset()
    kernel: str | None = None
    chosen: str | None = None

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)


@dataclass
class Code:
    """A text in a language that highlighters know: "sass", "ptx", "ttgir", "hlo", "mlir", "python", "cpp" or "cuda"."""

    title: str
    language: str
    text: str


@dataclass
class Kernel:
    """One compiled kernel; unknown values are None.

    Memory is in bytes. ``local`` and ``registers`` are per thread, the others per block. If ``static_shared`` is None,
    ``dynamic_shared`` is all of the shared memory.
    """

    name: str
    source: str | None = None  # file:line
    registers: int | None = None
    local: int | None = None  # spills, and arrays that did not fit in registers
    static_shared: int | None = None
    dynamic_shared: int | None = None
    threads: int | None = None
    grid: list[int] | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None  # share of an SM's warps
    limited_by: list[str] = field(default_factory=list)
    note: str | None = None

    def fill_occupancy(self, arch: Architecture) -> None:
        """Compute the occupancy on an architecture, if the needed values are known."""
        if self.threads is None or self.registers is None or self.dynamic_shared is None:
            return
        found = occupancy(arch, self.threads, self.registers, (self.static_shared or 0) + self.dynamic_shared)
        self.blocks_per_sm, self.occupancy, self.limited_by = found.blocks, found.share, list(found.limited_by)


@dataclass
class Timed:
    """A configuration that an autotuner timed, in microseconds; None if it did not fit."""

    config: str
    us: float | None


@dataclass
class Choice:
    """The configuration that an autotuner chose for a kernel, and all that it timed, fastest first."""

    kernel: str
    config: str
    timed: list[Timed] = field(default_factory=list)


@dataclass
class Inspection:
    """The result of an inspection."""

    op: str
    backend: str
    pass_: str
    dtype: str
    arch: str | None = None
    shape: str | None = None
    shapes: list[list[int]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    source: str | None = None  # file:line of the variant
    chosen: str | None = None  # why a level's name stands for the variant
    kernels: list[Kernel] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)  # PyTorch operators, in the order of their calls
    launches: list[Kernel] = field(default_factory=list)  # what one call launched on this machine's GPU
    kernel_count: int | None = None  # generated kernels that one call launches
    library_count: int | None = None  # kernels of a library that one call launches
    compile_s: float | None = None
    counted_bytes: float | None = None  # that one call moves, by the compiler's count
    least_bytes: int | None = None  # that the operation must move
    code: list[Code] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {("pass" if name == "pass_" else name): value for name, value in found.items()}


def begin(request: Request, case: Case | None = None) -> Inspection:
    """An empty inspection for a request, with the case if there is one."""
    variant = request.variant
    found = Inspection(variant.op, variant.name, request.pass_, request.dtype_name)
    if case is not None:
        found.shape, found.shapes, found.options = case.id, list(each(list, case.shapes)), dict(case.options)
    return found


def code_of(level: str) -> tuple[str, ...]:
    """The kinds of code that a level can show."""
    kinds: tuple[str, ...] = importlib.import_module(f"{table.LEVELS[level]}.inspect").CODE
    return kinds


def inspect(request: Request) -> Inspection:
    """Inspect a rung.

    Raises:
        InspectError: the request names something that does not exist, or that this machine cannot inspect.
    """
    name = request.variant.level
    level = importlib.import_module(f"{table.LEVELS[name]}.inspect")
    if foreign := sorted(request.code - set(level.CODE)):
        raise InspectError(f"the {name} level has no {', '.join(foreign)} to show; it has {', '.join(level.CODE)}")
    if request.arch is not None and not level.AHEAD_OF_TIME:
        raise InspectError(f"the {name} level compiles for this machine alone; `arch` is for cuda and triton")
    found: Inspection = level.inspect(request)
    found.chosen = request.chosen
    unknown = name == "torch" and found.notes  # the note says why its operators could not be shown
    if not (found.kernels or found.operators or found.launches or found.kernel_count or unknown):
        found.notes.append(NO_KERNEL)
    return found


def select(candidates: Sequence[table.Variant], request: Request) -> Request:
    """The request with the rung that a call of its case would run, among those that a level's name stands for.

    `candidates` come most optimised first. Without a case, the level's ``DEFAULT`` is taken, else the first of them.

    Raises:
        InspectError: no candidate takes the case, or this machine cannot tell.
    """
    if len(candidates) == 1:
        return dataclasses.replace(request, variant=candidates[0])
    level = importlib.import_module(f"{table.LEVELS[candidates[0].level]}.inspect")
    if request.case is None:
        default = getattr(level, "DEFAULT", candidates[0].name)
        named = next((v for v in candidates if v.name == default), candidates[0])
        return dataclasses.replace(request, variant=named)
    refusal = getattr(level, "judge", refusal_here)(request)
    inputs = tensors(make_inputs, request.case, request.dtype, run_device())
    reasons = []
    for variant in selection.preferred_first(list(candidates), inputs, request.case.options):
        if (reason := refusal(variant)) is None:
            asked = as_leaves(inputs) if request.pass_ == "backward" else inputs
            chosen = selection.why(variant.op, variant.level, asked, request.case.options)
            return dataclasses.replace(request, variant=variant, chosen=chosen)
        reasons.append(f"{variant.name}: {reason}")
    raise InspectError(
        f"{candidates[0].op}: no variant at level {candidates[0].level!r} supports this call: {'; '.join(reasons)}"
    )


def refusal_here(request: Request) -> Callable[[table.Variant], str | None]:
    """A function that says why a rung does not take a request's case on this machine, or returns None."""
    case = request.case
    assert case is not None, "a case was asked for"
    inputs = tensors(make_inputs, case, request.dtype, run_device())
    if request.pass_ == "backward":
        inputs = as_leaves(inputs)
    return lambda variant: variant.here() or variant.unsupported(*inputs, **case.options)


def keep_named(request: Request, kernels: list[Kernel]) -> list[Kernel]:
    """The kernels whose names contain ``request.kernel``."""
    if request.kernel is None:
        return kernels
    kept = [k for k in kernels if request.kernel in k.name]
    if not kept:
        names = ", ".join(dict.fromkeys(k.name for k in kernels))
        raise InspectError(f"no kernel of {request.variant.name} has {request.kernel!r} in its name; there are {names}")
    return kept


def located(path: str | Path, line: int) -> str:
    """``file:line``, with a path relative to the project's root for a file inside it."""
    path = Path(path).resolve()
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def this_gpu() -> int | None:
    """The compute capability of this machine's current GPU, 90 for 9.0, or None."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def run_device() -> torch.device:
    """The device on which rungs that need no GPU are inspected: the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors(make: Callable[..., Inputs], case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The tensors that `make` creates for a case.

    Raises:
        InspectError: they exceed the largest tensor, or memory.
    """
    try:
        return make(case, dtype, device)
    except (RuntimeError, TypeError) as error:
        said = str(error).partition("\n")[0]
        raise InspectError(f"`shape` {case.id}: its tensors cannot be made: {said}; give smaller sizes") from None


def real_inputs(request: Request, device: torch.device) -> tuple[Case, Inputs]:
    """The case to run on a device, and its tensors, which require gradients in the backward pass.

    Without a case in the request: on a GPU, the first case of the sweep that the rung supports, quick cases first. On
    the CPU, where those take minutes, the largest small sample.
    """
    variant, spec = request.variant, table.spec(request.variant.op)
    candidates = [request.case] if request.case is not None else default_cases(spec, device)
    reasons = []
    for case in candidates:
        inputs = tensors(make_inputs, case, request.dtype, device)
        differentiated = request.pass_ == "backward" and variant.backward is not None
        reason = variant.unsupported(*(as_leaves(inputs) if differentiated else inputs), **case.options)
        if reason is None:
            return case, as_leaves(inputs) if request.pass_ == "backward" else inputs
        reasons.append(reason)
    raise InspectError(f"{variant.op}: {variant.name} does not support this call: {reasons[0]}")


def default_cases(spec: Any, device: torch.device) -> list[Case]:
    """Candidate cases if none is named, in order of preference."""
    if device.type == "cuda":
        return sorted(spec.sweep, key=lambda case: not case.quick)
    plain = [case for case in spec.samples if case.values == "normal" and case.layout == "contiguous"]
    small = [case for case in plain if 0 < max(_elements(case)) <= 20_000 and min(_elements(case)) > 0]
    return sorted(small, key=lambda case: -sum(_elements(case)))


def _elements(case: Case) -> list[int]:
    return [torch.Size(shape).numel() for shape in case.shapes if shape is not None]


def one_pass(request: Request, inputs: Inputs, case: Case) -> Callable[[], object]:
    """The requested pass, ready to run once. For a backward pass, the forward has already run."""

    def forward() -> Output:
        return autograd.run(request.variant, inputs, case.options)

    if request.pass_ == "forward":
        return forward
    outputs = as_tuple(forward())
    grads = each(torch.ones_like, outputs)
    wanted = [x for x in inputs if has_gradient(x)]
    return lambda: torch.autograd.grad(outputs, wanted, grads)
