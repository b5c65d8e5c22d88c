"""What Triton makes of a variant's kernels, and which configuration was chosen.

The variant's own host code is called with tensors that have no memory, so what is compiled is what a call would launch.
For another GPU than this machine's, or without one, that happens in a process of its own, where kernels are compiled
and not interpreted; nothing can be timed there, so the first guess of each kernel's configurations is taken.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect as python
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_ladder import table
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection import architecture, cubin
from kernel_ladder.inspection.inspect import (
    ROOT,
    Choice,
    Code,
    Inspection,
    Kernel,
    Request,
    Timed,
    begin,
    default_cases,
    keep_named,
    located,
    one_pass,
    real_inputs,
    refusal_here,
    this_gpu,
)
from kernel_ladder.spec import Case, each, has_gradient
from kernel_ladder.testing.samples import empty_inputs, on_absent_gpu
from triton_impl import interpreted
from triton_impl.common.gluon import requirements
from triton_impl.linear_float8 import tiled
from triton_impl.runtime import launch_cache
from triton_impl.runtime.aot import TracedLaunch, traced

CODE = ("source", "ttgir", "ptx", "sass")
AHEAD_OF_TIME = True

#: The architecture to compile for where none is named and there is no GPU.
DEFAULT_ARCH = "sm_90"


def inspect(request: Request) -> Inspection:
    here = this_gpu()
    arch = architecture.named(request.arch or (f"sm_{here}" if here else DEFAULT_ARCH))
    if interpreted() or arch.number != here:
        return _in_a_process(request, arch)
    case, inputs = real_inputs(request, torch.device("cuda"))
    with launch_cache.recorded() as choices:
        if request.pass_ == "forward" or request.variant.backward is not None:
            call = one_pass(request, inputs, case)
            choices.clear()
            call()
    found = _trace(request, case, arch)
    shown = {kernel.name for kernel in found.kernels}
    found.choices = [_choice(choice) for choice in choices if choice.kernel.fn.__name__ in shown]
    if not launch_cache.TUNING:
        found.notes.append(f"{launch_cache.ENV_AUTOTUNE}=0: nothing is timed, the first guess is taken")
    return found


def _trace(request: Request, case: Case, arch: architecture.Architecture) -> Inspection:
    """Compile what one call would launch."""
    variant = request.variant
    found = begin(request, case)
    found.arch = arch.name
    inputs = empty_inputs(case, request.dtype, "meta")
    with traced(arch.number, arch.shared_per_block) as calls:
        if request.pass_ == "forward":
            variant.output(*inputs, **case.options)
        elif variant.backward is not None:
            output, saved = variant.forward(*inputs, **case.options)
            calls.clear()
            grad = each(torch.empty_like, output) if isinstance(output, tuple) else torch.empty_like(output)
            variant.backward(saved, grad, tuple(has_gradient(x) for x in inputs))
    with tempfile.TemporaryDirectory() as folder:
        made = [(call, _kernel(call, arch, Path(folder, f"{i}.cubin"))) for i, call in enumerate(calls)]
        found.kernels = keep_named(request, [kernel for _, kernel in made])
        for i, (call, kernel) in enumerate(made):
            if kernel in found.kernels:
                found.code += [c for c in _code(request, call, Path(folder, f"{i}.cubin")) if c not in found.code]
    found.source = found.kernels[0].source if found.kernels else None
    return found


def _kernel(call: TracedLaunch, arch: architecture.Architecture, path: Path) -> Kernel:
    metadata = call.compiled.metadata
    kernel = Kernel(
        call.kernel.fn.__name__,
        _location(call.kernel),
        dynamic_shared=metadata.shared,
        threads=metadata.num_warps * architecture.WARP,
        grid=list(call.grid),
        note=_constants(call),
    )
    path.write_bytes(call.compiled.asm["cubin"])
    (resources,) = (r for r in cubin.resources(path, arch.name) if r.symbol == metadata.name)
    kernel.registers, kernel.local, kernel.static_shared = resources.registers, resources.local, resources.shared
    kernel.fill_occupancy(arch)
    return kernel


def _constants(call: TracedLaunch) -> str:
    """What the kernel was specialised to: its constants in capitals, warps and stages."""
    values = {call.kernel.arg_names[path[0]]: value for path, value in call.compiled.src.constants.items()}
    shown = [f"{name}={value}" for name, value in values.items() if name.isupper()]
    metadata = call.compiled.metadata
    return ", ".join([*shown, f"num_warps={metadata.num_warps}", f"num_stages={metadata.num_stages}"])


def _location(kernel: Any) -> str:
    lines, first = python.getsourcelines(kernel.fn)
    offset = next(i for i, line in enumerate(lines) if line.startswith("def "))
    return located(python.getsourcefile(kernel.fn) or "", first + offset)


def _code(request: Request, call: TracedLaunch, path: Path) -> list[Code]:
    name = call.kernel.fn.__name__
    found = []
    if "source" in request.code:
        found.append(Code(_location(call.kernel), "python", python.getsource(call.kernel.fn)))
    found += [Code(name, kind, call.compiled.asm[kind]) for kind in ("ttgir", "ptx") if kind in request.code]
    if "sass" in request.code:
        found.append(Code(name, "sass", cubin.sass(path, call.compiled.metadata.name)))
    return found


def _choice(choice: launch_cache.TuningRecord) -> Choice:
    # Triton notes infinity for a configuration that did not fit.
    timed = [Timed(str(config), None if ms == float("inf") else ms * 1e3) for config, ms in choice.timings.items()]
    timed.sort(key=lambda t: (t.us is None, t.us))
    return Choice(choice.kernel.fn.__name__, str(choice.config), timed)


# ---- in a process of its own ---------------------------------------------------------------------------------------


def _in_a_process(request: Request, arch: architecture.Architecture) -> Inspection:
    case = _supported(request, arch)
    asked = {
        "op": request.variant.op,
        "variant": request.variant.name,
        "case": dataclasses.asdict(case),
        "dtype": request.dtype_name,
        "pass": request.pass_,
        "arch": arch.name,
        "code": sorted(request.code),
        "kernel": request.kernel,
    }
    answer = _compiler(arch.number).ask(asked)
    kernels = [Kernel(**each) for each in answer.pop("kernels")]
    code = [Code(**each) for each in answer.pop("code")]
    found = Inspection(**answer, kernels=kernels, code=code)
    found.notes.append("compiled ahead of time, in the first configuration of each kernel: timing needs such a GPU")
    return found


class _Compiler:
    """A process that compiles for one architecture. It stays for the next request: to begin takes it seconds."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "triton_impl.inspect"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        atexit.register(self._end)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
            except BaseException:  # an interrupt, a test's time limit: this answer would be taken for the next one's
                self._end()
                raise
            if not line:
                self._end()
                self._errors.seek(0)
                raise InspectError(self._errors.read() or "the process that compiles has ended without a word")
        answer = json.loads(line)
        if "error" in answer:
            raise InspectError(answer["error"])
        return answer

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._process.kill()
        self._process.communicate()


_compilers: dict[tuple[object, ...], _Compiler] = {}


def _compiler(capability: int) -> _Compiler:
    """The process for an architecture: what one has compiled for is taken for every later target."""
    chosen = {k: v for k, v in os.environ.items() if k.startswith(("TRITON_", "KERNEL_LADDER_", "PYTHONPATH"))}
    key = (capability, *sorted(chosen.items()))
    if key not in _compilers or not _compilers[key].lives:
        _compilers[key] = _Compiler(
            {
                **os.environ,
                "TRITON_INTERPRET": "0",
                launch_cache.ENV_AUTOTUNE: "0",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "PYTHONWARNINGS": "ignore",
            }
        )
    return _compilers[key]


def _supported(request: Request, arch: architecture.Architecture) -> Case:
    """The case that was asked for, or the first of the sweep, if the variant takes it; no tensor is made.

    Raises:
        InspectError: it takes none of them, or has no code for the architecture.
    """
    variant, spec = request.variant, table.spec(request.variant.op)
    if (reason := _no_code(variant, arch)) is not None:
        raise InspectError(reason)
    reasons = []
    for case in [request.case] if request.case is not None else default_cases(spec, torch.device("cuda")):
        reason = _refusal(request, variant, case, arch)
        if reason is None:
            return case
        reasons.append(reason)
    raise InspectError(f"{variant.op}: {variant.name} does not support this call: {reasons[0]}")


def _no_code(variant: table.Variant, arch: architecture.Architecture) -> str | None:
    """Why a variant's kernels cannot be compiled for an architecture, or None."""
    if variant.here is requirements.here and arch.number // 10 != 9:
        return f"{variant.op}: {variant.name} has no code for {arch.name}: its kernels are for compute capability 9.0"
    if variant.op == "linear_float8" and arch.number // 10 not in tiled.PROMOTING:
        return f"{variant.op}: {variant.name} has no code for {arch.name}: {tiled.PROMOTION_NEEDS}"
    return None


def _refusal(request: Request, variant: table.Variant, case: Case, arch: architecture.Architecture) -> str | None:
    """Why a variant would not take a case on a GPU of an architecture, or None. No tensor is made."""
    gradients = request.pass_ == "backward" and variant.backward is not None
    with on_absent_gpu(case, request.dtype, gradients=gradients) as inputs:
        return _no_code(variant, arch) or variant.unsupported(*inputs, **case.options)


def judge(request: Request) -> Callable[[table.Variant], str | None]:
    """See :func:`kernel_ladder.inspection.inspect.select`."""
    case, here = request.case, this_gpu()
    assert case is not None, "a case was asked for"
    arch = architecture.named(request.arch or (f"sm_{here}" if here else DEFAULT_ARCH))
    if not interpreted() and arch.number == here:
        return refusal_here(request)
    return lambda variant: _refusal(request, variant, case, arch)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What :func:`_in_a_process` asks for."""
    asked_case = asked["case"]
    shapes = each(tuple, asked_case["shapes"])
    # JSON knows no tuples, and options are keys.
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in asked_case["options"].items()}
    kinds = {int(place): kind for place, kind in asked_case["kinds"].items()}  # nor numbers as keys
    case = Case(**{**asked_case, "shapes": shapes, "options": options, "kinds": kinds})
    (variant,) = table.named(asked["op"], asked["variant"])
    request = Request(
        variant,
        case,
        getattr(torch, asked["dtype"]),
        asked["pass"],
        asked["arch"],
        frozenset(asked["code"]),
        asked["kernel"],
    )
    return dataclasses.asdict(_trace(request, case, architecture.named(asked["arch"])))


def _serve() -> None:
    """Answer a line of JSON with a line of JSON, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except InspectError as error:
            answer = {"error": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
