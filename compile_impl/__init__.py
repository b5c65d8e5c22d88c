"""The compile level: `torch.compile` on what a user would write, and on the formulas of ``torch_ref``.

formula          the naive formula, where a user would write something else: what the compiler makes of it is the lesson
default          PyTorch's own functions under `torch.compile`
reduce_overhead  the same, launched as a CUDA graph: no host cost for each kernel
max_autotune     the same, with more configurations of each kernel timed, and Inductor's products against cuBLAS
"""

from __future__ import annotations

import functools
import shutil
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config

from kernel_ladder import gpu, table
from kernel_ladder.errors import UnsupportedError
from kernel_ladder.semantics.strides import last_offset, near_gradients
from kernel_ladder.spec import Inputs, Output, as_tuple, each
from kernel_ladder.tracing import in_graph

#: Inductor keeps fused values in float32, also where the formula rounds. The backward pass would then recompute scores
#: in float32 and subtract their rounded maximum: wrong by factors beside large masks. This option rounds both alike.
ROUNDED = {"emulate_precision_casts": True}

#: While one thread traces, Dynamo refuses the compiled functions that other threads call.
_ONE_AT_A_TIME = threading.RLock()


class _Inductor(torch._TorchCompileInductorWrapper):
    """Inductor, with gradients that behave as those of eager calls, however often PyTorch compiles anew.

    A graph may be differentiated again: PyTorch otherwise donates what the backward pass has saved to its results. And
    gradients arrive in their outputs' layout, PyTorch's default from 2.13 on. Older ones make them contiguous, of which
    PyTorch's attention can give wrong results: torch_ref/attention_builtin.py.
    """

    def __call__(self, model_: Any, inputs_: Any, **more: Any) -> Any:
        with functorch_config.patch(donated_buffer=False, guess_tangent_strides_as_outputs=True):
            return super().__call__(model_, inputs_, **more)


@functools.cache
def unavailable() -> str | None:
    """Why torch.compile cannot be used here, or None."""
    if not torch.cuda.is_available() and not any(shutil.which(cxx) for cxx in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler where there is no GPU; put g++ or clang++ on the PATH"
    return None


def compiled(formula: Callable[..., Output], **settings: Any) -> Callable[..., tuple[Output, tuple]]:
    """Return `formula` under torch.compile, as a rung's forward. PyTorch differentiates through it.

    A ladder compares each shape at its best. So shapes, strides and options are compile-time constants, and each
    combination of them compiles once. Dynamo limits the compilations per code object, so each gets a copy of it.
    """

    def signature(inputs: Inputs, options: dict[str, Any]) -> tuple:
        tensors = each(lambda x: (x.shape, x.stride(), x.dtype, x.device, x.requires_grad), inputs)
        return tensors, tuple(options.items()), torch.is_grad_enabled()

    runs: dict[tuple, Callable[..., Output]] = {}

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Output, tuple]:
        if in_graph():  # inside a caller's torch.compile, which compiles the formula itself
            return formula(*inputs, **options), ()
        key = signature(inputs, options)
        if key not in runs:
            copy = types.FunctionType(
                formula.__code__.replace(), formula.__globals__, formula.__name__, formula.__defaults__
            )
            copy.__kwdefaults__ = formula.__kwdefaults__
            inductor = _Inductor(settings.get("mode"), settings.get("options"), False)
            runs[key] = torch.compile(copy, fullgraph=True, dynamic=False, backend=inductor)
        with _ONE_AT_A_TIME:
            output = runs[key](*inputs, **options)
        return near_gradients(_nothing_donated(output)), ()

    return forward


def _nothing_donated(output: Output) -> Output:
    """Return `output`, whose backward pass knows that no saved tensor is donated.

    PyTorch asks for that only when it compiles a backward pass whose graph is retained. Where the pass was compiled for
    a graph that is not, or came from the cache on disk, a retained one would be refused: None counts as some.
    """
    for y in as_tuple(output):
        node = y.grad_fn
        while node is not None and not hasattr(node, "_forward_cls"):  # a view of what the compiled function returns
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
        if getattr(metadata, "bw_donated_idxs", ()) is None:
            metadata.bw_donated_idxs = []
    return output


# ---- modes ---------------------------------------------------------------------------------------------------------

Reason = Callable[..., str | None]
Forward = Callable[..., tuple[Output, tuple]]
#: The mode without CUDA graphs, whose memory is `reduce_overhead`'s idea.
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


def takes_all(*inputs: torch.Tensor | None, **options: Any) -> str | None:
    return None


def _graph_unsupported(*inputs: torch.Tensor | None, **options: Any) -> str | None:
    first = inputs[0]
    assert first is not None
    if not first.is_cuda:
        return "CUDA graphs are a GPU's; on the CPU this is compile.default"
    if gpu.capturing():
        return "it launches a CUDA graph of its own, which another graph cannot capture; use compile.default there"
    return None


def _tuning_unsupported(*inputs: torch.Tensor | None, **options: Any) -> str | None:
    first = inputs[0]
    assert first is not None
    if not first.is_cuda:
        return "max-autotune chooses among GPU kernels; on the CPU this is compile.default"
    for place, x in enumerate(inputs):
        if x is not None and last_offset(x) >= 2**31:
            return f"the compiler's templates have offsets of 32 bits; input {place} reaches {last_offset(x)} elements"
    return None


class _OwnGradients(torch.autograd.Function):
    """Passes a tensor on, and copies its gradient out of the memory of a CUDA graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone()


def with_graphs(written: Callable[..., Output], **settings: Any) -> Forward:
    """Return `written` compiled with CUDA graphs, as a rung's forward.

    A graph's next launch overwrites its results. So outputs and gradients are copied out of its memory, which costs a
    read and a write of each. On large tensors that is more than the launches that a graph saves.
    """
    run = compiled(written, mode="reduce-overhead", **settings)

    def forward(*inputs: torch.Tensor | None, **options: Any) -> tuple[Output, tuple]:
        if in_graph():
            return run(*inputs, **options)
        if gpu.capturing():
            raise UnsupportedError(_graph_unsupported(*inputs) or "")
        if torch.is_grad_enabled():
            inputs = each(lambda x: _OwnGradients.apply(x) if x.requires_grad else x, inputs)
        output, saved = run(*inputs, **options)
        copies = tuple(x.clone() for x in as_tuple(output))
        return (copies if isinstance(output, tuple) else copies[0]), saved

    return forward


def register(
    op: str,
    written: Callable[..., Output],
    *,
    formula: Callable[..., Output] | None = None,
    unsupported: Reason = takes_all,
    formula_unsupported: Reason = takes_all,
    calling: Callable[[Forward], Forward] = lambda forward: forward,
    settings: dict[str, Any] | None = None,
    formula_settings: dict[str, Any] | None = None,
    formula_drops_weights: bool = False,
) -> None:
    """Add an operation's rungs.

    Args:
        op: the operation.
        written: what a user would write with PyTorch's functions.
        formula: the naive formula, where that is something else to the compiler. None adds no such rung.
        unsupported: why `written` does not take some inputs, or None; of the formula, `formula_unsupported`.
        calling: wraps each rung's forward, for arguments that must not be compile-time constants.
        settings: of ``torch.compile``; of the formula, `formula_settings`.
        formula_drops_weights: see :func:`kernel_ladder.table.register`.
    """
    settings = settings or {}
    if formula is not None:
        forward = compiled(formula, **formula_settings or {})
        table.register(
            op,
            "compile.formula",
            forward=calling(forward),
            unsupported=formula_unsupported,
            drops_weights=formula_drops_weights,
        )
    modes: dict[str, tuple[Forward, Reason]] = {
        "default": (compiled(written, **settings), takes_all),
        "reduce_overhead": (with_graphs(written, **settings), _graph_unsupported),
        "max_autotune": (compiled(written, mode=MAX_AUTOTUNE, **settings), _tuning_unsupported),
    }

    def either(of_mode: Reason) -> Reason:
        return lambda *inputs, **options: of_mode(*inputs, **options) or unsupported(*inputs, **options)

    for name, (forward, of_mode) in modes.items():
        table.register(op, f"compile.{name}", forward=calling(forward), unsupported=either(of_mode))
