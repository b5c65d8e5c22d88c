"""Every Triton kernel compiles for Ampere and Hopper, whether or not there is a GPU here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kernel_ladder

CAPABILITIES = (80, 90)


def listed(op: str) -> list:
    return getattr(importlib.import_module(f"triton_impl.{op}"), "AOT", [])


def entries(op: str, capability: int) -> list:
    """What to compile. Tiles are tuned for Hopper: of entries that differ in those alone, Ampere takes the first."""
    if capability >= 90:
        return listed(op)
    first: dict[tuple, Any] = {}
    for e in listed(op):
        rest = tuple((k, v) for k, v in e.constexprs.items() if not k.startswith(("BLOCK", "GROUP")))
        first.setdefault((e.kernel.__name__, *e.signature.items(), *rest), e)
    return list(first.values())


def name(e) -> str:
    blocks = "x".join(str(v) for k, v in e.constexprs.items() if k.startswith("BLOCK"))
    dtype = next(t for t in e.signature.values() if t.startswith("*"))[1:]
    return f"{e.kernel.__name__.strip('_')} {dtype} {blocks} {e.options}"


def compile_all(op: str, capability: int) -> None:
    """Print, for each entry of an operation, what its compiled code is like. Runs in its own process."""
    from triton_impl.aot import compile_entry, local_memory

    for e in entries(op, capability):
        kernel = compile_entry(e, capability)
        ptx = kernel.asm["ptx"]
        facts = {
            "cubin": len(kernel.asm["cubin"]),
            "target": next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target")),
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"),
            "tma": ptx.count("cp.async.bulk.tensor"),
            "local": local_memory(kernel.asm["cubin"]),
        }
        print("AOT", json.dumps(facts), flush=True)


def compiled(op: str, capability: int) -> list[dict]:
    """The facts that :func:`compile_all` prints, from a process where kernels are compiled, not interpreted."""
    command = [sys.executable, "-c", f"from tests.test_aot import compile_all; compile_all({op!r}, {capability})"]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    facts = [json.loads(line.removeprefix("AOT ")) for line in run.stdout.splitlines() if line.startswith("AOT ")]
    expected = entries(op, capability)
    assert len(facts) == len(expected), f"{name(expected[len(facts)])} does not compile:\n{run.stderr[-4000:]}"
    return facts


def faults(op: str, e, found: dict, capability: int) -> Iterator[str]:
    """What is not as it should be in an entry's compiled code."""
    if found["cubin"] == 0 or not found["target"].startswith(f"sm_{capability}"):
        yield f"{found['cubin']} bytes for {found['target']}"
    if capability == 90 and found["local"]:  # tuned for Hopper; an Ampere that has fewer choices may spill
        yield f"{found['local']} bytes of registers spilt to local memory"
    if any(t.startswith("tensordesc") for t in e.signature.values()) and capability == 90:
        if not found["tma"]:
            yield "no TMA"
        if not found["wgmma"]:
            yield "no wgmma"
    if "PRECISION" in e.constexprs:  # a matrix product: on tensor cores, save for float32 that must stay float32
        operands = {t for argument, t in e.signature.items() if argument != "partials_ptr"}
        tensor_cores = "*fp32" not in operands or e.constexprs["PRECISION"] == "tf32"
        # Rows that wgmma takes: either side's in a product, which can be turned about; in attention the queries', or,
        # where the gradients of the keys are summed from scores that stand turned, theirs.
        sides = ["BLOCK_M", "BLOCK_N"]
        if op.startswith("attention"):
            sides = ["BLOCK_N"] if "key_value" in e.kernel.__name__ else ["BLOCK_M"]
        on_wgmma = tensor_cores and capability == 90 and max(e.constexprs[side] for side in sides) >= 64
        for instruction, wanted in (("wgmma", on_wgmma), ("mma", tensor_cores and not on_wgmma)):
            if (found[instruction] > 0) != wanted:
                yield f"{found[instruction]} {instruction}, where there should be {'some' if wanted else 'none'}"


# All of an operation's kernels in one test: a process for each would take its time to begin, and tests of one operation
# that fall to several workers would each compile them all.
@pytest.mark.parametrize("capability", CAPABILITIES, ids="sm{}".format)
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_compiles(op, capability):
    facts = compiled(op, capability)
    found = [
        f"{name(e)}: {fault}"
        for e, fact in zip(entries(op, capability), facts, strict=True)
        for fault in faults(op, e, fact, capability)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_every_module_lists_kernels(op):
    assert listed(op), f"triton_impl/{op}.py has no AOT list"
