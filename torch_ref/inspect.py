"""What a torch rung runs: its formula, and the operators that PyTorch dispatches."""

from __future__ import annotations

import inspect as python
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_ladder import table
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection.inspect import (
    Code,
    Inspection,
    Request,
    begin,
    located,
    one_pass,
    real_inputs,
    run_device,
)
from kernel_ladder.inspection.launches import launched

CODE = ("source",)
AHEAD_OF_TIME = False


class _Operators(TorchDispatchMode):
    """Records every operator that is called, with the tensors that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, torch.Tensor)]
        shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors)
        self.calls.append(f"{func} → {shapes}" if shapes else str(func))
        return out


def _formula(variant: table.Variant) -> Callable[..., Any]:
    spec = table.spec(variant.op)
    known: dict[str, Callable[..., Any]] = {"torch.naive": spec.reference, "torch.builtin": spec.builtin}
    return known.get(variant.name, variant.forward)


def inspect(request: Request) -> Inspection:
    variant = request.variant
    if request.kernel is not None:
        raise InspectError("the torch level's kernels are PyTorch's own; `kernel` chooses among those of other levels")
    formula = _formula(variant)
    lines, first = python.getsourcelines(formula)
    source = located(python.getsourcefile(formula) or "", first)
    try:
        case, inputs = real_inputs(request, run_device())
    except InspectError as error:
        if request.case is not None:
            raise
        found = begin(request)
        found.notes.append(f"its operators are not shown: {error}")
    else:
        found = begin(request, case)
        call, recorder = one_pass(request, inputs, case), _Operators()
        with recorder:
            call()
        found.operators = recorder.calls
        if inputs[0].is_cuda:
            found.launches = launched(one_pass(request, inputs, case))
    found.source = source
    if "source" in request.code:
        found.code.append(Code(source, "python", python.cleandoc("\n" + "".join(lines)) + "\n"))
    return found
