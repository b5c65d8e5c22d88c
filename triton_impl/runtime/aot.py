"""Compile kernels ahead of time for a GPU that need not be here, and trace which kernels host code would launch."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from triton_impl.common import pdl
from triton_impl.common.gluon import requirements
from triton_impl.runtime.launch_cache import FUSED, LaunchCache
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: Triton's names of the dtypes.
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Entry(NamedTuple):
    """One specialisation of a kernel. Files named ``aot_kernels.py`` list those that tests compile, as ``AOT``."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]


def entry(
    kernel: Any,
    dtype: str,
    constexprs: Mapping[str, Any],
    config: triton.Config | None = None,
    types: Mapping[str, str] | None = None,
) -> Entry:
    """An entry whose arguments are pointers to `dtype` ("bf16", "fp16", "fp32"), 32-bit integers and `constexprs`.

    `types` gives some arguments another type.
    """
    constexprs = {**constexprs, **(config.kwargs if config else {}), **pdl.constexprs(kernel, False)}
    signature = {
        name: "constexpr" if name in constexprs else f"*{dtype}" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    } | dict(types or {})
    names = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    options = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    return Entry(kernel, signature, constexprs, options)


def compile_entry(e: Entry, capability: int) -> Any:
    """The compiled kernel. Pointers and integers are multiples of 16, as in well-aligned calls."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, t in enumerate(e.signature.values())
        if t not in ("constexpr", "fp32") and not t.startswith("tensordesc")
    }
    of = GluonASTSource if e.kernel.is_gluon() else ASTSource
    constexprs = {**e.constexprs, **pdl.constexprs(e.kernel, capability >= 90)}
    source = of(e.kernel, e.signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**FUSED, **e.options})


def local_memory(cubin: bytes) -> int:
    """Bytes of local memory per thread: spilled registers and stack."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        dump = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    line = next(line for line in dump.splitlines() if "REG:" in line)
    resources = dict(field.split(":") for field in line.split())
    return int(resources["STACK"]) + int(resources["LOCAL"])


class TracedLaunch(NamedTuple):
    """A launch that was traced: the kernel, its compiled form and its grid."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]


class _AbsentDriver:
    """Answers what Triton asks of a driver, to compile for a GPU that is not here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return -self.capability  # Triton keeps compiled kernels by device: no real one has this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class _NotLaunched:
    """Stands for a compiled kernel where host code launches it again, or reads its metadata."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


@contextmanager
def traced(capability: int, shared_limit: int) -> Iterator[list[TracedLaunch]]:
    """In the block, launches compile for `capability` and are recorded in order; nothing runs.

    So the host code of a rung, called with tensors on the device "meta", shows which kernels it would launch on such a
    GPU. A kernel that needs more than `shared_limit` bytes of shared memory raises ``triton.OutOfResources``, as on
    that GPU.
    """
    calls: list[TracedLaunch] = []
    compile_or_launch = triton.JITFunction.run

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> _NotLaunched:
        compiled = compile_or_launch(kernel, *arguments, grid=grid, warmup=True, **named)
        if compiled.metadata.shared > shared_limit:
            raise triton.OutOfResources(compiled.metadata.shared, shared_limit, "shared memory")
        if not warmup:
            if callable(grid):
                grid = grid({**dict(zip(kernel.arg_names, arguments, strict=False)), **named})
            calls.append(TracedLaunch(kernel, compiled, tuple(grid)))
        return _NotLaunched(compiled.metadata)

    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_AbsentDriver(capability))
    try:
        with (
            mock.patch.object(triton.JITFunction, "run", run),
            # Launches cached before are for the GPU that is here; those of this block cannot run after it.
            mock.patch.object(LaunchCache, "get", return_value=None),
            mock.patch.object(LaunchCache, "remember"),
            # Whatever GPUs are here.
            mock.patch.object(pdl, "possible", return_value=capability >= 90),
            mock.patch.object(requirements, "traced_for", capability),
            mock.patch.object(PersistentLaunch, "_held", lambda launch, *of: launch.programs),
        ):
            yield calls
    finally:
        driver._active = before
