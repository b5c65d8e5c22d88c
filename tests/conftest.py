"""Where the tests run, and which variants and cases they choose from."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cuda_impl
import kernel_ladder
from bench.measure import cases, selection, timing
from bench.rows.store import Row
from kernel_ladder import table
from kernel_ladder.spec import Case, Inputs, Options, Output
from kernel_ladder.table import Variant

from . import linker, once_a_rung, resume, sampling, sharing

# The tests' thousand shapes would be tuned for hours. Read when the Triton level is first imported, which is later.
os.environ.setdefault("KERNEL_LADDER_AUTOTUNE", "0")
# Line tables for profilers, which Inductor asks of the C++ compiler, take it a tenth of its time. Read likewise later.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
# JAX's own allocator keeps the GPU memory that it once had, beside which other workers find too little.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
linker.choose()

if not torch.cuda.is_available() and table.unavailable("gelu", "triton") is None:
    import triton_impl

    if triton_impl.interpreted():
        from .triton import interpreter

        interpreter.hasten()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA GPU is visible")

#: For what asks for rungs of the cuda level, which an extension of other sources has not.
needs_extension = pytest.mark.skipif(
    not hasattr(cuda_impl.extension(), "architectures"), reason="kernel_ladder._C was not built from these sources"
)

#: For what needs the whole GPU: times, clocks, ceilings. ``python -m tests`` runs these first, one at a time.
alone = pytest.mark.alone
#: How a file marks a test so.
ALONE = re.compile(r"^@(pytest\.mark\.)?alone\b", re.MULTILINE)

never_runs = once_a_rung.never_runs

#: How often a test may measure until it finds what is known. Other processes on the same GPU or CPU spoil a measurement
#: now and then. Noise passes by; a harness that measures wrongly does so every time. A GPU of one's own needs one try.
#: Timing tests carry one xdist group besides: under ``--dist loadgroup`` they do not run beside each other.
TRIES = 1 if DEVICE.type == "cuda" and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1 else 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone",
        choices=("only", "without"),
        help="run only the tests marked `alone`, which need the GPU to themselves, or all others (default: all)",
    )
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run every case of the tests marked `sampled` (default: of those that a compiler makes anew, a share)",
    )
    parser.addoption(
        "--random-calls",
        type=int,
        metavar="N",
        help="draw N random calls of attention and of packed sequences, a tenth of them for Triton, N of each other "
        "operation, and N of matmul on a GPU (default: hundreds, a few, thousands)",
    )
    resume.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    resume.record(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the tests marked `alone`, only their files are imported: all of them take as long as those tests."""
    if config.getoption("--alone") != "only" or collection_path.suffix != ".py":
        return None
    return None if ALONE.search(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-case"):
        sampling.choose(config, items, DEVICE.type)
    if (chosen := config.getoption("--alone")) is not None:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[(item.get_closest_marker("alone") is not None) == (chosen == "only")].append(item)
        config.hook.pytest_deselected(items=parts[False])
        items[:] = parts[True]
    resume.leave_out(config, items)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = sharing.long_first(items, lambda item: item.get_closest_marker("slow") is not None, workers)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    once_a_rung.keep(metafunc)
    if metafunc.config.getoption("--alone") == "only":
        once_a_rung.keep_marked(metafunc, "alone")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return DEVICE


@pytest.fixture(autouse=True)
def fresh_choices() -> None:
    """What the table remembers of earlier calls is gone, for tests that change the table under it."""
    table._changed()


@pytest.fixture(autouse=True)
def no_memory_kept() -> Iterator[None]:
    """Of memory that several processes share, none keeps gigabytes that it does not use."""
    yield
    if os.environ.get("PYTEST_XDIST_WORKER") and DEVICE.type == "cuda" and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def tf32() -> Iterator[None]:
    """tf32 is allowed. pytest's monkeypatch would delete the switch at the end: the module computes it when asked."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    yield
    switch.fp32_precision = before


@pytest.fixture
def gpu_memory() -> Iterator[Callable[[float], None]]:
    """Ask for bytes of GPU memory until the test ends: it waits for other workers, or skips where there are too few."""
    with contextlib.ExitStack() as held:
        yield lambda nbytes: held.enter_context(sharing.gpu_memory(int(nbytes)))


#: GPU memory that a quick sweep of gelu needs at its real sizes, with float64 results beside its copies.
SWEEP_BYTES = 16 * sharing.GIB


@contextlib.contextmanager
def sweeping_small_cases() -> Iterator[None]:
    """Let a sweep measure the tiny cases that it has on a CPU, for tests of what it does, not of times."""
    with pytest.MonkeyPatch.context() as patch:
        of_device = cases.sweep_members
        patch.setattr(
            selection,
            "sweep_members",
            lambda spec, members, device, quick: of_device(spec, members, torch.device("cpu"), quick),
        )
        yield


@pytest.fixture
def small_sweeps() -> Iterator[None]:
    with sweeping_small_cases():
        yield


@pytest.fixture
def scratch_table() -> Iterator[None]:
    """Let a test register variants that are gone afterwards."""
    for op in kernel_ladder.OPS:
        table.variants(op)
    before = {key: dict(climb) for key, climb in table._variants.items()}
    yield
    for key, climb in table._variants.items():
        climb.clear()
        climb.update(before.get(key, {}))


def register_own_gelu() -> None:
    """gelu as ``torch.own``: forward and backward as plain functions, the path of the CUDA and Triton variants."""

    def forward(input, *, approximate):
        return torch.ops.aten.gelu(input, approximate=approximate), (approximate, input)

    def backward(saved, grad, needs):
        approximate, input = saved
        return (torch.ops.aten.gelu_backward(grad, input, approximate=approximate),)

    table.register("gelu", "torch.own", forward=forward, backward=backward)


@pytest.fixture
def forget_compiled() -> Iterator[None]:
    """Run a test without what torch.compile kept of others, and leave nothing to them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """``torch.cuda.graph``, which nothing that other tests have left in the process can break.

    Their garbage may be modules of kernels, which a capture forbids to unload. Threads of XLA ask for their streams.
    """
    gc.collect()
    with timing.without_collecting(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield


#: What the rows of a timed operation have.
TIMED = {"us": 1.25, "us_q1": 1.0, "us_q3": 1.5, "bytes": 2000, "flops": 5000, "gbs": 1.6, "tflops": 0.004}


def a_row(**fields: Any) -> Row:
    """A row of some benchmark, with what every row must have."""
    base = {"op": "gelu", "backend": "torch.naive", "level": "torch", "pass_": "forward", "dtype": "float32"}
    return Row(**{**base, "shape": "2x2", "gpu": "here", "when": "2026-01-01T00:00:00+00:00", **fields})


def every_variant(*levels: str) -> list[Variant]:
    """The variants of all operations, at these levels or at all, available or not."""
    return [v for op in kernel_ladder.OPS for v in table.variants(op) if not levels or v.level in levels]


#: Operations of inference, whose formulas have gradients and whose kernels refuse them.
INFERENCE = ("attention_paged",)
#: Operations whose every rung refuses them.
NO_GRADIENT = ("linear_float8",)
#: Operations whose arguments have dtypes of their own, whatever a sample's is.
OWN_DTYPES = ("linear_float8",)
#: Operations whose function of PyTorch takes tensors on a GPU alone.
BUILTIN_ON_GPU = ("linear_float8",)


def without_gradient(variant: Variant) -> bool:
    """Whether a variant refuses gradients."""
    return variant.op in NO_GRADIENT or (variant.op in INFERENCE and variant.level in ("triton", "cuda"))


def differentiable_ops() -> list[str]:
    """The operations of which some rung has gradients."""
    return [op for op in kernel_ladder.OPS if op not in NO_GRADIENT]


def pytorchs_own(op: str) -> str:
    """The rung that "auto" stands for on a CPU."""
    return "torch.naive" if op in BUILTIN_ON_GPU else kernel_ladder.spec(op).baseline


def variant_id(variant: Variant) -> str:
    return f"{variant.op}-{variant.name}"


def elements(case: Case) -> int:
    return sum(math.prod(shape) for shape in case.shapes if shape is not None)


def computes(case: Case) -> bool:
    """Whether there is something to compute."""
    return all(shape is None or math.prod(shape) > 0 for shape in case.shapes)


def plain_cases(op: str) -> list[Case]:
    """The samples of an operation with ordinary values in contiguous memory and something to compute."""
    return [
        case
        for case in kernel_ladder.spec(op).samples
        if case.values == "normal" and case.layout == "contiguous" and computes(case)
    ]


def typical_case(op: str, most: int = 100_000) -> Case:
    """The largest plain sample of an operation up to a size, with every argument there."""
    return max((c for c in plain_cases(op) if elements(c) <= most and None not in c.shapes), key=elements)


def public(op: str, inputs: Inputs, options: Options, **more: Any) -> Output:
    """The operation's public function on a case's inputs, each passed by its name, and options."""
    return getattr(kernel_ladder, op)(**kernel_ladder.spec(op).named(inputs), **options, **more)


def skip_unless_available(op: str, level: str) -> None:
    """Skip, with its reason, where a level is unavailable for an operation."""
    if (reason := table.unavailable(op, level)) is not None:
        pytest.skip(reason)


def skip_unless_it_runs(variant: Variant, inputs: Inputs = (), options: dict | None = None) -> None:
    """Skip, with its reason, where a variant is unavailable or does not take these inputs."""
    reason = table.unavailable(variant.op, variant.level)
    if reason is None and inputs:
        reason = variant.unsupported(*inputs, **(options or {}))
    if reason is not None:
        pytest.skip(reason)


def make_narrow(width: int) -> Console:
    """A terminal of a width, whose text can be read back."""
    return Console(record=True, width=width, force_terminal=True, highlight=False, file=io.StringIO())
