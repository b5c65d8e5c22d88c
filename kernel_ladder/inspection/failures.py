"""Why a compiler failed, in words: the known failures of torch.compile, Triton and XLA, each with a way out."""

from __future__ import annotations

import re
from typing import NamedTuple


class Failure(NamedTuple):
    """A kind of failure: what its message contains, what it means, and what to do."""

    pattern: str
    cause: str
    remedy: str


#: The first that matches stands.
KNOWN = (
    Failure(
        r"out of resource: shared memory|OutOfResources.*shared|Required: \d+, Hardware limit",
        "a kernel's tiles need more shared memory than a block of this GPU has",
        "give smaller tiles or fewer pipeline stages; Inductor tries other configurations with mode='max-autotune'",
    ),
    Failure(
        r"RESOURCE_EXHAUSTED|OutOfMemoryError|CUDA out of memory|could not allocate",
        "the program's buffers exceed the memory that is free",
        "free memory or give smaller sizes; PyTorch and JAX keep what each has taken: torch.cuda.empty_cache() "
        "returns PyTorch's",
    ),
    Failure(
        r"InvalidCxxCompiler|No working C\+\+ compiler|CppCompileError|C\+\+ compile error",
        "Inductor's C++ code for the CPU could not be compiled",
        "put g++ or clang++ on the PATH, or name one with CXX",
    ),
    Failure(
        r"Cannot find a working triton installation|TritonMissing",
        "Inductor writes Triton kernels for a GPU, and Triton is missing",
        "pip install triton, in the version that torch asks for",
    ),
    Failure(
        r"ptxas (?:fatal|error|died)|PTXASError|Internal Triton PTX codegen error",
        "the assembler ptxas refused a kernel, most often because it is older than the GPU",
        "set TRITON_PTXAS_PATH to the ptxas of a newer CUDA toolkit",
    ),
    Failure(
        r"GuardOnDataDependentSymNode|data-dependent|Could not guard on|DynamicOutputShapeException",
        "Python code depends on the values in a tensor, which the compiler does not know while it traces",
        "compute with torch.where or masks, or declare the bound with torch._check",
    ),
    Failure(
        r"recompile_limit|cache_size_limit|FailOnRecompileLimitHit",
        "a function was compiled for more shapes or options than Dynamo keeps",
        "pass dynamic=True, mark changing sizes with torch._dynamo.mark_dynamic, or raise "
        "torch._dynamo.config.recompile_limit",
    ),
    Failure(
        r"torch\._dynamo\.exc\.(?:Unsupported|UserError)|graph break|Graph break",
        "Dynamo met code that it cannot trace, and fullgraph=True forbids to leave the graph there",
        "move that code out of the compiled function; TORCH_LOGS=graph_breaks names the line",
    ),
    Failure(
        r"overwritten by a subsequent run|cudagraph_mark_step_begin",
        "a result lies in the memory of a CUDA graph that has been launched again",
        "copy the result with .clone() before the next call, or use mode='default'",
    ),
    Failure(
        r"BackendCompilerFailed|InductorError|LoweringException",
        "Inductor failed on a graph that Dynamo could trace",
        "try backend='aot_eager': if that works, the fault is Inductor's; TORCH_LOGS=output_code shows its code",
    ),
    Failure(
        r"Unknown backend",
        "JAX has no device of this kind: its plugin is not installed, or sees no GPU",
        "pip install kernel_ladder[xla-cuda13], or [xla-cuda12] beside a torch for CUDA 12",
    ),
    Failure(
        r"Mosaic|mosaic|Triton lowering|block shape|power of 2",
        "Pallas has no lowering of this kernel for this GPU",
        "the kernel's blocks need powers of two; xla.jit leaves the choice of kernels to XLA",
    ),
    Failure(
        r"UNIMPLEMENTED|not supported by dot_general",
        "XLA has no implementation of an instruction on this device, often of a dtype",
        "give float32 or bfloat16",
    ),
    Failure(r"INVALID_ARGUMENT|INTERNAL:", "XLA failed in one of its passes", "report it with XLA_FLAGS=--xla_dump_to"),
)


def explain(error: BaseException) -> tuple[str, str] | None:
    """Cause and way out of a compiler's failure, or None where it is not known.

    Looks at the error's class, its message, and those of the errors that caused it.
    """
    seen: set[int] = set()
    texts = []
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        texts.append(f"{type(current).__module__}.{type(current).__qualname__}: {current}")
        current = current.__cause__ or current.__context__
    for known in KNOWN:
        if any(re.search(known.pattern, text) for text in texts):
            return known.cause, known.remedy
    return None


def in_words(error: BaseException) -> list[str]:
    """Lines that tell what failed, why, and what to do."""
    first = str(error).strip().partition("\n")[0]
    lines = [f"{type(error).__name__}: {first}"]
    if (found := explain(error)) is None:
        return [*lines, "cause: not one of the known failures; the whole error follows with TORCHDYNAMO_VERBOSE=1"]
    return [*lines, f"cause: {found[0]}", f"way out: {found[1]}"]
