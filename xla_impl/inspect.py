"""What XLA makes of a rung: HLO before and after its passes, fusions, library calls, and the bytes that it counts."""

from __future__ import annotations

import inspect as python
import re
import time
from typing import Any

from kernel_ladder import table
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection.inspect import (
    Code,
    Inspection,
    Kernel,
    Request,
    begin,
    keep_named,
    located,
    one_pass,
    real_inputs,
    run_device,
)
from kernel_ladder.inspection.launches import launched
from kernel_ladder.spec import as_tuple, has_gradient
from xla_impl import bridge
from xla_impl.rung import PROGRAMS

CODE = ("source", "hlo", "tpu")
#: The rung that the level's name stands for, save for attention on a GPU.
DEFAULT = "xla.jit"
AHEAD_OF_TIME = False

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?P<kind>fusion|custom-call|dot|while|call)\(")
_KIND = re.compile(r"kind=(\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def inspect(request: Request) -> Inspection:
    variant = request.variant
    if (reason := table.unavailable(variant.op, "xla")) is not None:
        raise InspectError(f"{variant.op}: {variant.name} cannot be looked into: {reason}")
    device = run_device()
    case, inputs = real_inputs(request, device)
    found = begin(request, case)
    programs = PROGRAMS[variant.op, variant.name]
    static, traced = programs.split(dict(case.options), inputs[0])
    program, tensors = programs.forward(static), inputs
    if request.pass_ == "backward":
        grads = as_tuple(variant.forward(*inputs, **case.options)[0])
        wanted = tuple(i for i, x in enumerate(inputs) if has_gradient(x))
        program, tensors = programs.backward(static, len(inputs), wanted), (*inputs, *grads)
    with bridge.wide(*tensors), _without_cache():
        arrays = [*map(bridge.to_jax, tensors), traced]
        lowered = program.lower(*arrays)
        start = time.perf_counter()
        compiled = lowered.compile()
        found.compile_s = time.perf_counter() - start
        before, after = lowered.as_text("hlo"), compiled.as_text()
        _add_costs(found, request, case, lowered, compiled)
        tpu = _for_tpu(program, arrays) if "tpu" in request.code else None
    kernels = instructions(after)
    found.kernels = keep_named(request, kernels)
    found.kernel_count = sum(kernel.note is not None and kernel.note.startswith("fusion") for kernel in kernels)
    found.library_count = sum(kernel.note is not None and kernel.note.startswith("library") for kernel in kernels)
    _, line = python.getsourcelines(programs.formula)
    found.source = located(python.getsourcefile(programs.formula) or "", line)
    if "source" in request.code:
        found.code.append(Code(found.source, "python", python.getsource(programs.formula)))
    if "hlo" in request.code:
        found.code.append(Code("HLO before XLA's passes", "hlo", before))
        found.code.append(Code("HLO after XLA's passes", "hlo", after))
    if tpu is not None:
        found.code.append(Code("StableHLO lowered for a TPU: compiled by nothing and not run", "mlir", tpu))
    if device.type == "cuda":
        found.launches = launched(one_pass(request, inputs, case))
    return found


class _without_cache:
    """Programs are compiled anew, so that the time is that of a first call."""

    def __enter__(self) -> None:
        self._before = bridge.jax().config.jax_enable_compilation_cache
        bridge.jax().config.update("jax_enable_compilation_cache", False)

    def __exit__(self, *exception: object) -> None:
        bridge.jax().config.update("jax_enable_compilation_cache", self._before)


def instructions(hlo: str) -> list[Kernel]:
    """The instructions of the entry computation that run code of their own: fusions, library calls, products, loops."""
    entry = hlo[hlo.index("\nENTRY ") :] if "\nENTRY " in hlo else hlo
    kernels = []
    for line in entry.splitlines():
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        kind, name = found["kind"], found["name"]
        if kind == "fusion":
            kernels.append(Kernel(name, note=f"fusion, {_first(_KIND, line)}"))
        elif kind == "custom-call":
            kernels.append(Kernel(name, note=f"library, {_first(_TARGET, line)}"))
        else:
            kernels.append(Kernel(name, note=kind))
    return kernels


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else "unknown"


def _add_costs(found: Inspection, request: Request, case: Any, lowered: Any, compiled: Any) -> None:
    """Add XLA's own count of bytes before and after fusion, beside the least that the operation must move."""
    before, after = (analysis or {} for analysis in (lowered.cost_analysis(), compiled.cost_analysis()))
    found.least_bytes = table.spec(request.variant.op).bytes(case, request.dtype.itemsize, request.pass_ == "backward")
    if "bytes accessed" in after:
        found.counted_bytes = after["bytes accessed"]
        unfused = f"{before['bytes accessed']:.4g} before fusion, " if "bytes accessed" in before else ""  # CPUs alone
        found.notes.append(
            f"bytes by XLA's count: {unfused}{found.counted_bytes:.4g} after fusion; "
            f"the least is {found.least_bytes:.4g}"
        )
    memory = compiled.memory_analysis()
    if memory is not None:
        found.notes.append(
            f"memory: {memory.argument_size_in_bytes} bytes of arguments, {memory.output_size_in_bytes} of results, "
            f"{memory.temp_size_in_bytes} temporary"
        )


def _for_tpu(program: Any, arrays: list[Any]) -> str:
    """The program lowered for a TPU ahead of time, which needs no TPU.

    Raises:
        InspectError: it has no lowering for one.
    """
    import importlib

    export = importlib.import_module("jax.export")
    try:
        return str(export.export(program, platforms=["tpu"])(*arrays).mlir_module())
    except Exception as error:  # whatever a primitive without a rule for TPUs raises
        said = str(error).partition("\n")[0]
        why = said or "a Pallas kernel for Triton has no rule for it; xla.jit has"
        raise InspectError(f"`tpu`: this program cannot be lowered for a TPU: {why}") from None
