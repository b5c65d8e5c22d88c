"""Compile kernels ahead of time, for a GPU that need not be here: what cannot compile shows without one."""

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
from triton_impl.runtime.launch_cache import LaunchCache
from triton_impl.runtime.persistent_launch import PersistentLaunch

#: What compilers call the types of an entry's pointers.
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Entry(NamedTuple):
    """One specialisation of a kernel; a module that has kernels lists some that matter as ``AOT``."""

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
    """An entry with pointers to `dtype` ("bf16", "fp16", "fp32") and 32-bit integers for all that is not constant.

    `types` names what some arguments are instead.
    """
    constexprs = {**constexprs, **(config.kwargs if config else {}), **pdl.never(kernel)}
    signature = {
        name: "constexpr" if name in constexprs else f"*{dtype}" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    } | dict(types or {})
    names = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    options = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    return Entry(kernel, signature, constexprs, options)


def compile_entry(e: Entry, capability: int) -> Any:
    """The compiled kernel, pointers and integers taken to be multiples of 16, as in well-aligned calls."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, t in enumerate(e.signature.values())
        if t not in ("constexpr", "fp32") and not t.startswith("tensordesc")
    }
    of = GluonASTSource if e.kernel.is_gluon() else ASTSource
    constexprs = {**e.constexprs, **dict.fromkeys(pdl.never(e.kernel), capability >= 90)}
    source = of(e.kernel, e.signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=e.options)


def local_memory(cubin: bytes) -> int:
    """Bytes of local memory a thread: what did not fit in registers."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        dump = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    line = next(line for line in dump.splitlines() if "REG:" in line)
    resources = dict(field.split(":") for field in line.split())
    return int(resources["STACK"]) + int(resources["LOCAL"])


class Call(NamedTuple):
    """A kernel that would have been launched: its function, what it was compiled to, and its grid."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]


class _AbsentDriver:
    """What Triton asks of a driver to compile for a GPU that is not there."""

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
    """Stands for a compiled kernel where the host code would launch it once more, or ask how it was compiled."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


@contextmanager
def traced(capability: int, shared_limit: int) -> Iterator[list[Call]]:
    """In the block, launches compile for `capability` and are written down, in order, instead of being made.

    So the host code of a variant, called with tensors on the device "meta", tells which kernels it would launch on such
    a GPU, specialised and configured as there. A kernel that needs more than `shared_limit` bytes of shared memory is
    refused, as the GPU would.
    """
    calls: list[Call] = []
    compile_or_launch = triton.JITFunction.run

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> _NotLaunched:
        compiled = compile_or_launch(kernel, *arguments, grid=grid, warmup=True, **named)
        if compiled.metadata.shared > shared_limit:
            raise triton.OutOfResources(compiled.metadata.shared, shared_limit, "shared memory")
        if not warmup:
            if callable(grid):
                grid = grid({**dict(zip(kernel.arg_names, arguments, strict=False)), **named})
            calls.append(Call(kernel, compiled, tuple(grid)))
        return _NotLaunched(compiled.metadata)

    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_AbsentDriver(capability))
    try:
        with (
            mock.patch.object(triton.JITFunction, "run", run),
            # LaunchCache remembered before are of the GPU that is here, and would be made; and those of this block are
            # none that can be made after it.
            mock.patch.object(LaunchCache, "get", return_value=None),
            mock.patch.object(LaunchCache, "remember"),
            # Whatever GPUs are here.
            mock.patch.object(pdl, "possible", return_value=capability >= 90),
            mock.patch.object(requirements, "traced_for", capability),
            mock.patch.object(PersistentLaunch, "_held", lambda staying, *of: staying.programs),
        ):
            yield calls
    finally:
        driver._active = before
