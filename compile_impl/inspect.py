"""What torch.compile generates from a formula: kernels (Triton on a GPU, C++ on the CPU) and the calls of them."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from kernel_ladder import table
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


@contextmanager
def _counting() -> Iterator[list[list[tuple[Any, int]]]]:
    """Collects the scheduler's nodes, each with the bytes that it reads and writes, of every graph that is compiled."""
    from torch._inductor.graph import GraphLowering

    graphs: list[list[tuple[Any, int]]] = []
    original = GraphLowering.compile_to_module

    def counted(self: GraphLowering) -> Any:
        module = original(self)
        graphs.append([(node, node.get_read_write_buffers_sizes()) for node in self.scheduler.nodes])
        return module

    with mock.patch.object(GraphLowering, "compile_to_module", counted):
        yield graphs


def _bytes_by_kernel(nodes: list[tuple[Any, int]], body: str, kernels: list[str]) -> Counter[str]:
    """Kernel → bytes. A node's kernel is the first that is called with one of the buffers that the node writes."""
    call = re.compile(rf"\b({'|'.join(map(re.escape, kernels))})(?:\.run)?\(" if kernels else r"(?!)")
    calls = []
    for line in body.splitlines():
        if found := call.search(line) or _EXTERN.search(line):
            calls.append((found[1], set(re.findall(r"\w+", line))))
    count: Counter[str] = Counter()
    for node, size in nodes:
        written = set(node.get_buffer_names())
        count[next((name for name, words in calls if words & written), "")] += size
    return count


def _said(size: int) -> str:
    return f", {size:.4g} bytes" if size else ""


def inspect(request: Request) -> Inspection:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    device = run_device()
    case, inputs = real_inputs(request, device)
    found = begin(request, case)
    # Caches on disk are off, so that Inductor writes the code again and the time is that of a first call.
    with config.patch(force_disable_caches=True), warnings.catch_warnings(), _counting() as graphs:
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
    nodes = graphs[-1 if request.pass_ == "backward" else 0]
    sizes = _bytes_by_kernel(nodes, body, [name for name, *_ in _DEFINITION.findall(module)])
    names, count = [], 0
    for name, kind, text in _DEFINITION.findall(module):
        calls = len(re.findall(rf"\b{name}(?:\.run)?\(", body))
        if calls == 0:
            continue
        count += calls
        names.append(Kernel(name, note=f"{kind.partition('_')[0]}, called {calls}×{_said(sizes[name])}"))
        if "source" in request.code:
            language = _LANGUAGES.get(kind, "cpp")
            found.code.append(Code(name, language, text.strip("\n") + "\n"))
    extern = _EXTERN.findall(body)
    for name, calls in Counter(extern).items():
        more = f", {calls} calls" if calls > 1 else ""
        names.append(Kernel(name, note=f"from a library or PyTorch{more}{_said(sizes[name])}"))
    if nodes:
        least = table.spec(request.variant.op).bytes(case, request.dtype.itemsize, request.pass_ == "backward")
        found.counted_bytes, found.least_bytes = sizes.total(), least
        found.notes.append(f"bytes by Inductor's count: {sizes.total():.4g}; the least is {least:.4g}")
    found.kernels = keep_named(request, names)
    found.code = [code for code in found.code if code.title in {k.name for k in found.kernels}]
    found.kernel_count, found.library_count = count, len(extern)
    if "source" in request.code and request.kernel is None:
        found.code.append(Code("how they are called", "python", body))
    if device.type == "cuda":
        found.launches = launched(one_pass(request, inputs, case))
    return found
