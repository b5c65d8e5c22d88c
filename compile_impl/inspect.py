"""What torch.compile generates from a formula: kernels (Triton on a GPU, C++ on the CPU) and the calls of them."""

from __future__ import annotations

import re
import time
import warnings

import torch

from kernel_ladder.inspection.inspect import (
    Code,
    Inspection,
    Kernel,
    Request,
    begin,
    keep_named,
    one_pass,
    real_inputs,
    run_device,
)
from kernel_ladder.inspection.launches import launched
from kernel_ladder.spec import Case, Inputs

CODE = ("source",)
#: The rung that the level's name stands for: later ones are modes of it for a GPU alone.
DEFAULT = "compile.default"
AHEAD_OF_TIME = False

#: A kernel's definition in the module that Inductor writes: name, language and text.
_DEFINITION = re.compile(r"^(\w+) = async_compile\.(triton|cpp\w*|cuda)\(.*?'''\n?(.*?)'''", re.MULTILINE | re.DOTALL)
_LANGUAGES = {"triton": "python", "cuda": "cuda"}
#: Calls of kernels that Inductor did not write: a library's, or those of an operator that it does not lower.
_EXTERN = re.compile(r"(?:extern_kernels|torch\.ops\.\w+)\.([\w.]+)\(")


def _graphs(request: Request, inputs: Inputs, case: Case) -> str:
    """How many graphs Dynamo makes of the rung, and why it breaks them, if it does."""
    torch._dynamo.reset()
    traced = torch._dynamo.explain(lambda *x: request.variant.forward(*x, **case.options)[0])(*inputs)
    torch._dynamo.reset()
    said = f"{traced.graph_count} graph{'s' * (traced.graph_count != 1)}, {traced.graph_break_count} graph breaks"
    reasons = [str(reason.reason).partition("\n")[0] for reason in traced.break_reasons]
    return f"{said}: {'; '.join(reasons)}" if reasons else said


def inspect(request: Request) -> Inspection:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    device = run_device()
    case, inputs = real_inputs(request, device)
    found = begin(request, case)
    # Caches on disk are off, so that Inductor writes the code again and the time is that of a first call.
    with config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*force_disable_caches")
        start = time.perf_counter()
        _, modules = run_and_get_code(lambda: one_pass(request, inputs, case)())
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.compile_s = time.perf_counter() - start
    found.notes.append(_graphs(request, inputs, case))
    # Where gradients are wanted, the forward's module is the first and the backward's the last.
    module = modules[-1] if request.pass_ == "backward" else modules[0]
    body = _DEFINITION.sub("", module)
    names, count = [], 0
    for name, kind, text in _DEFINITION.findall(module):
        calls = len(re.findall(rf"\b{name}(?:\.run)?\(", body))
        if calls == 0:
            continue
        count += calls
        names.append(Kernel(name, note=f"{kind.partition('_')[0]}, called {calls}×"))
        if "source" in request.code:
            language = _LANGUAGES.get(kind, "cpp")
            found.code.append(Code(name, language, text.strip("\n") + "\n"))
    extern = _EXTERN.findall(body)
    names += [Kernel(name, note="from a library or PyTorch") for name in extern]
    found.kernels = keep_named(request, names)
    found.code = [code for code in found.code if code.title in {k.name for k in found.kernels}]
    found.kernel_count, found.library_count = count, len(extern)
    if "source" in request.code and request.kernel is None:
        found.code.append(Code("how they are called", "python", body))
    if device.type == "cuda":
        found.launches = launched(one_pass(request, inputs, case))
    return found
