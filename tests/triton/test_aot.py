"""Every Triton kernel compiles for Ampere and Hopper, whether or not there is a GPU here."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import triton
from triton.experimental.gluon._runtime import GluonJITFunction

import kernel_ladder

CAPABILITIES = (80, 90)


def listed(op: str) -> list:
    """An operation's entries: in ``aot_kernels.py`` of its folder, or, for one of a single file, of the level's."""
    module = importlib.import_module(f"triton_impl.{op}")
    if not hasattr(module, "__path__"):
        in_one_file = importlib.import_module("triton_impl.aot_kernels").AOT
        return in_one_file.get(op) or getattr(module, "AOT", [])
    if importlib.util.find_spec(f"triton_impl.{op}.aot_kernels") is None:
        return getattr(module, "AOT", [])
    return importlib.import_module(f"triton_impl.{op}.aot_kernels").AOT


def takes_descriptors(e) -> bool:
    return any(t.startswith("tensordesc") for t in e.signature.values())


def in_float8(e) -> bool:
    return "*fp8e4nv" in e.signature.values()


def for_hopper_alone(e) -> bool:
    return takes_descriptors(e) or in_float8(e) or isinstance(e.kernel, GluonJITFunction)


def entries(op: str, capability: int) -> list:
    """What to compile: for Hopper a kernel's first and last entry, for Ampere the first.

    Kernels that take tensor descriptors or float8, or are in Gluon, are for Hopper alone.
    """
    hopper = capability >= 90
    kinds: dict[str, list] = {}
    for e in listed(op):
        if hopper or not for_hopper_alone(e):
            kinds.setdefault(e.kernel.__name__, []).append(e)
    return [e for each in kinds.values() for e in ([each[0], each[-1]] if hopper and len(each) > 1 else each[:1])]


def name(e) -> str:
    blocks = "x".join(str(v) for k, v in e.constexprs.items() if k.startswith("BLOCK"))
    dtype = next(t for t in e.signature.values() if t.startswith("*"))[1:]
    return f"{e.kernel.__name__.strip('_')} {dtype} {blocks} {e.options}"


def facts(op: str, index: int, capability: int) -> dict:
    """What the compiled code of an operation's entry is like. Runs where kernels are compiled, not interpreted."""
    from triton_impl.runtime.aot import compile_entry, local_memory

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as that of Triton 3.9, of a default that changes
        kernel = compile_entry(entries(op, capability)[index], capability)
    ptx = kernel.asm["ptx"]
    return {
        "cubin": len(kernel.asm["cubin"]),
        "target": next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target")),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "float8": ptx.count(".e4m3.e4m3"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "local": local_memory(kernel.asm["cubin"]),
        "waits": ptx.find("griddepcontrol.wait"),
        "touches": min(at for at in (ptx.find("ld.global"), ptx.find("st.global"), len(ptx)) if at >= 0),
    }


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process where kernels are compiled, not interpreted; one, since importing takes as long as several kernels."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        patch.setenv("TRITON_INTERPRET", "0")
        pool.submit(os.getpid).result()  # it has begun, with this environment
        patch.undo()
        yield pool


#: Bytes that Triton spills before 3.9, whose own compiler has no need to.
OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
SPILT_BY_OLD_TRITON = {"_key_value_kernel": 8, "sum_partials_kernel": 8, "_sum_strided_kernel": 4096}


def spilt_by_old_triton(name: str) -> int:
    """The bytes that the compiler here may spill of a kernel by itself."""
    return SPILT_BY_OLD_TRITON.get(name, 0) if OLD_TRITON else 0


def faults(op: str, e, found: dict, capability: int) -> Iterator[str]:
    """What is not as it should be in an entry's compiled code."""
    if found["cubin"] == 0 or not found["target"].startswith(f"sm_{capability}"):
        yield f"{found['cubin']} bytes for {found['target']}"
    # Configurations are for Hopper; on an Ampere, which has fewer, kernels may spill. Consumer warps of a persistent
    # kernel may spill where their tile lies, once a tile of queries.
    allowed = 64 if "CONSUMERS" in e.constexprs else spilt_by_old_triton(e.kernel.__name__)
    if capability == 90 and found["local"] > allowed:
        yield f"{found['local']} bytes of registers spilt to local memory"
    if "USE_PDL" in e.kernel.arg_names and capability >= 90:
        if not 0 <= found["waits"] < found["touches"]:
            yield "does not wait for the kernel before it, or touches memory first"
    elif found["waits"] >= 0:
        yield "waits for the kernel before it, but is not launched early"
    if any("fp8e4nv" in t for t in e.signature.values()) and found["float8"] != found["wgmma"]:
        yield f"{found['wgmma']} wgmma, of which {found['float8']} take float8"
    if takes_descriptors(e):
        if not found["tma"]:
            yield "no TMA"
        if not found["wgmma"]:
            yield "no wgmma"
    if "PRECISION" in e.constexprs:  # a matrix product: on tensor cores, save for float32 that must stay float32
        beside = ("partials_ptr", "input_scale_ptr", "weight_scale_ptr")
        operands = {t for argument, t in e.signature.items() if argument not in beside}
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


@pytest.mark.sampled(level="triton")
@pytest.mark.parametrize("capability", CAPABILITIES, ids="sm{}".format)
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_compiles(op, capability, compiler):
    found = []
    for index, e in enumerate(entries(op, capability)):
        try:
            fact = compiler.submit(facts, op, index, capability).result()
        except Exception as error:
            pytest.fail(f"{name(e)} does not compile:\n{error}")
        found += [f"{name(e)}: {fault}" for fault in faults(op, e, fact, capability)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_every_module_lists_kernels(op):
    assert listed(op), f"triton_impl has no AOT list of {op}"
