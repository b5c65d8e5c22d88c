"""Every Triton kernel compiles for Ampere and Hopper, whether or not there is a GPU here."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_ladder

CAPABILITIES = (80, 90)


def entries(op: str) -> list:
    return getattr(importlib.import_module(f"triton_impl.{op}"), "AOT", [])


def compile_all(op: str) -> None:
    """Print, for each capability and entry of an operation, what its compiled code is like. Runs in its own process."""
    from triton_impl.aot import compile_entry, local_memory

    for capability in CAPABILITIES:
        for e in entries(op):
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


@functools.cache
def compiled(op: str) -> list[dict]:
    """The facts that :func:`compile_all` prints, from a process where kernels are compiled, not interpreted."""
    command = [sys.executable, "-c", f"from tests.test_aot import compile_all; compile_all({op!r})"]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    facts = [json.loads(line.removeprefix("AOT ")) for line in run.stdout.splitlines() if line.startswith("AOT ")]
    if len(facts) < len(CAPABILITIES) * len(entries(op)):
        facts.append({"error": run.stderr[-4000:]})
    return facts


def parameters():
    for op in kernel_ladder.OPS:
        for c, capability in enumerate(CAPABILITIES):
            for index, e in enumerate(entries(op)):
                blocks = "x".join(str(v) for k, v in e.constexprs.items() if k.startswith("BLOCK"))
                dtype = next(t for t in e.signature.values() if t.startswith("*"))[1:]
                ident = f"{e.kernel.__name__.strip('_')}-{dtype}-{blocks}-{index}-sm{capability}"
                yield pytest.param(op, c * len(entries(op)) + index, capability, e, id=ident)


@pytest.mark.parametrize(("op", "index", "capability", "e"), list(parameters()))
def test_compiles(op, index, capability, e):
    facts = compiled(op)
    assert len(facts) > index, "an earlier kernel did not compile"
    found = facts[index]
    assert "error" not in found, found["error"]
    assert found["cubin"] > 0
    assert found["target"].startswith(f"sm_{capability}")
    if capability == 90:  # tuned for Hopper; an Ampere that has fewer choices may spill
        assert found["local"] == 0, "registers spill to local memory"
    if any(t.startswith("tensordesc") for t in e.signature.values()) and capability == 90:
        assert found["tma"] > 0
        assert found["wgmma"] > 0
    if "PRECISION" in e.constexprs:  # a matrix product: on tensor cores, save for float32 that must stay float32
        operands = {t for name, t in e.signature.items() if name != "partials_ptr"}
        tensor_cores = "*fp32" not in operands or e.constexprs["PRECISION"] == "tf32"
        # Rows that wgmma takes: either side's in a product, which can be turned about; in attention the queries', or
        # the keys' where their gradients are summed, from scores that stand turned.
        sides = ["BLOCK_M", "BLOCK_N"]
        if op.startswith("attention"):
            sides = ["BLOCK_N"] if "key_value" in e.kernel.__name__ else ["BLOCK_M"]
        rows = [e.constexprs[side] for side in sides]
        wide = max(rows) >= 64
        assert (found["wgmma"] > 0) == (tensor_cores and wide and capability == 90)
        assert (found["mma"] > 0) == (tensor_cores and not (wide and capability == 90))


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_every_module_lists_kernels(op):
    assert entries(op), f"triton_impl/{op}.py has no AOT list"
