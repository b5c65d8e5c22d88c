"""Which rung of the xla level to try first. On a CPU Pallas' kernels are interpreted, and XLA's own program is taken.

On a GPU the committed rows decide (H100). XLA's softmax reads a long row more than once, Pallas' kernel once. cuDNN's
attention is the fastest, except where few keys are seen. It refuses a single query, for which Pallas' kernel does
without the matrix of scores. In float32 Pallas' products leave the tensor cores, and XLA's own program is ahead.
"""

from __future__ import annotations

from kernel_ladder.semantics.masks import NO_WINDOW
from kernel_ladder.spec import Inputs, Options
from kernel_ladder.tracing import concrete

#: The longest rows of softmax that XLA's own program takes as fast as Pallas' kernel.
JIT_SOFTMAX = 8192
#: Keys up to which Pallas' causal attention is ahead of cuDNN's.
PALLAS_CAUSAL = 512


def jit(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """XLA's own program: a library's kernel, or one that XLA writes and tunes."""
    return ("xla.jit",)


def softmax(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """XLA's own program; on a GPU Pallas' kernel for 16-bit rows of more than :data:`JIT_SOFTMAX` elements.

    Rows are those of the last dimension: Pallas' kernel transposes others in memory.
    """
    x = inputs[0]
    assert x is not None
    rows = x.is_cuda and x.element_size() == 2 and x.dim() > 0 and options["dim"] in (-1, x.dim() - 1)
    return ("xla.pallas", "xla.jit") if rows and concrete(x.shape[-1]) > JIT_SOFTMAX else ("xla.jit",)


def attention(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """On a GPU cuDNN's kernel where it takes the call, else XLA's own program.

    Pallas' kernel comes before both for one query, for a window, and for a causal mask of few keys, in 16 bits.
    """
    query, key = inputs[:2]
    assert query is not None
    assert key is not None
    if not query.is_cuda:
        return ("xla.jit",)
    one_query = concrete(query.shape[-2]) == 1
    window = tuple(options.get("window_size") or NO_WINDOW) != NO_WINDOW
    short = bool(options.get("is_causal")) and concrete(key.shape[-2]) <= PALLAS_CAUSAL
    few_keys = query.element_size() == 2 and (one_query or window or short)
    return ("xla.pallas", "xla.fused", "xla.jit") if few_keys else ("xla.fused", "xla.jit")


RULES = {("softmax", "xla"): softmax, ("matmul", "xla"): jit, ("attention", "xla"): attention}
