"""Compile kernels ahead of time, for a GPU that need not be here: what cannot compile shows without one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton


class Entry(NamedTuple):
    """One specialisation of a kernel; a module that has kernels lists some that matter as ``AOT``."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]


def entry(kernel: Any, dtype: str, constexprs: Mapping[str, Any], config: triton.Config | None = None) -> Entry:
    """An entry with pointers to `dtype` ("bf16", "fp16", "fp32") and 32-bit integers for all that is not constant."""
    constexprs = {**constexprs, **(config.kwargs if config else {})}
    signature = {
        name: "constexpr" if name in constexprs else f"*{dtype}" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages} if config else {}
    return Entry(kernel, signature, constexprs, options)


def compile_entry(e: Entry, capability: int) -> Any:
    """The compiled kernel, pointers and integers taken to be multiples of 16, as in well-aligned calls."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(e.signature) if e.signature[name] != "constexpr"
    }
    source = ASTSource(e.kernel, e.signature, constexprs=e.constexprs, attrs=aligned)
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
