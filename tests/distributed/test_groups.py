"""Calls on several GPUs give what one GPU gives, in groups of two, four and eight processes on the CPU.

DTensors in every placement; blocks under tensor, sequence and data parallelism; ring attention; products beside their
communication.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from kernel_ladder import table
from kernel_ladder.distributed import all_gather_matmul, matmul_reduce_scatter, ring_attention, ring_attention_varlen
from kernel_ladder.distributed.sharding import RULES
from kernel_ladder.spec import Case
from kernel_ladder.table import OPS

from ..conftest import DEVICE, INFERENCE, differentiable_ops, elements, plain_cases, typical_case
from . import blocks, boards, packed, patched, products, rings, sharded, shared_memory
from .group import Check, run

#: Whether the triton level takes CPU tensors, as the groups' are. It compiles for a GPU where there is one.
INTERPRETED = table.unavailable("add", "triton") is None and DEVICE.type == "cpu"


#: Functions of query, key and value, each with a shape that these may have.
RINGS = {ring_attention: (1, 1, 4, 8), ring_attention_varlen: (4, 1, 8)}


#: Samples with tensors that the typical one lacks.
ALSO = {"rope": ("offsets",)}


def cases(op: str) -> list[Case]:
    """The typical sample, small samples with other numbers of dimensions, and those with further tensors."""
    chosen = {tuple(len(s) for s in typical_case(op, 3000).shapes): typical_case(op, 3000)}
    for case in sorted(plain_cases(op), key=elements):
        if elements(case) > 40 and None not in case.shapes:
            chosen.setdefault(tuple(len(s) for s in case.shapes), case)
    return [*list(chosen.values())[:3], *(case for case in plain_cases(op) if case.id in ALSO.get(op, ()))]


def calls_on_dtensors() -> list[Check]:
    checks = []
    for op in differentiable_ops():
        for i, case in enumerate(cases(op)):
            call = op, "torch", case, torch.float64, 4 if i else 24, 1e-9
            checks.append(Check(f"{op} on DTensors, {case.id}", sharded.compare, call))
        if INTERPRETED and op not in INFERENCE:
            call = op, "triton", typical_case(op, 3000), torch.float32, 2, 1e-4
            checks.append(Check(f"{op} on DTensors at the triton level", sharded.compare, call))
    levels = ("torch", "triton") if INTERPRETED else ("torch",)
    return [*checks, *(Check(f"float8 at the {level} level", sharded.check_float8, (level,)) for level in levels)]


def in_rings(backend: str, dtype: torch.dtype, tolerance: float, names: list[str], rows: int) -> list[Check]:
    return [
        Check(f"ring attention, {name}, {backend}", rings.compare, (name, backend, dtype, tolerance, rows))
        for name in names
    ]


def in_packed_rings(backend: str, dtype: torch.dtype, tolerance: float, names: list[str]) -> list[Check]:
    return [
        Check(
            f"ring attention of packed sequences, {name}, {backend}", packed.compare, (name, backend, dtype, tolerance)
        )
        for name in names
    ]


def by_copies(folder: Path) -> list[Check]:
    """Hops as copies into the next rank's memory, as between GPUs."""
    double = torch.float64, 1e-10
    checks = [
        *((rings.compare, (name, "torch", *double, 48)) for name in ("causal", "value-width", "window")),
        (packed.compare, ("uneven-causal", "torch", *double)),
        (products.compare, ("torch", *double)),
    ]
    return [
        Check(f"{check.__module__} by copies", shared_memory.by_copies, (str(folder), check, arguments))
        for check, arguments in checks
    ]


def patched_models() -> list[Check]:
    """Each way to spread a patched Hugging Face model; none where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    calls = [
        *((name, "nothing") for name in patched.WAYS),
        *((name, "checkpoints") for name in ("FSDP2", "tensor parallelism")),
        ("FSDP2", "compile"),  # the blocks compile under tensor parallelism; on GPUs all ways do
    ]
    checks = [
        Check(f"a patched model under {name}, {around} around its layers", patched.compare, (name, "torch", around))
        for name, around in calls
    ]
    return [*checks, Check("a patched model, then shards, and undone", patched.check_order)]


PACKED = (
    Check("parts of packed sequences", packed.check_parts),
    Check("bad packed sequences", packed.check_errors),
    Check("packed sequences under autocast", packed.check_autocast),
    *in_packed_rings("torch", torch.float64, 1e-10, list(packed.CASES)),
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks(tmp_path):
    level = "triton" if INTERPRETED else "torch"
    taking_the_whole_log_sum_exp = ["causal", "grouped", "window-causal"]
    checks = [
        Check("the board of a sweep", boards.check),
        *calls_on_dtensors(),
        Check("means of rows", sharded.check_means_of_rows, ("torch",)),
        Check("bad placements", sharded.check_errors),
        Check("parts of a sequence", rings.check_parts),
        Check("bad rings, and autocast", rings.check_before_anything_is_sent),
        *([Check("collectives that are not done", sharded.check_asynchronous)] if INTERPRETED else ()),
        *in_rings("torch", torch.float64, 1e-10, list(rings.CASES), 48),
        *(in_rings("triton", torch.float32, 1e-4, taking_the_whole_log_sum_exp, 64) if INTERPRETED else ()),
        *PACKED,
        *(in_packed_rings("triton", torch.float32, 1e-4, ["uneven-causal", "grouped"]) if INTERPRETED else ()),
        Check("tensor parallelism", blocks.tensor_parallel, ("torch", False, "nothing")),
        Check("sequence parallelism, with checkpoints", blocks.tensor_parallel, ("torch", True, "checkpoint")),
        Check("sequence parallelism, compiled", blocks.tensor_parallel, (level, True, "compile")),
        Check("FSDP2", blocks.data_parallel, (level, "fsdp")),
        Check("DDP", blocks.data_parallel, ("torch", "ddp")),
        *patched_models(),
        Check("products", products.compare, ("torch", torch.float64, 1e-10)),
        Check(f"products at the {level} level", products.compare, (level, torch.float32, 1e-4)),
        *by_copies(tmp_path),
        Check("ranks that differ", products.check_ranks_that_differ),
        Check("a rank that dies", products.a_rank_that_dies),  # the last: the group is broken after it
    ]
    run(2, tmp_path, checks)


def test_four_ranks(tmp_path):
    checks = [
        Check("a mesh of two dimensions", sharded.check_mesh_of_two_dimensions),
        *in_rings("torch", torch.float64, 1e-10, list(rings.CASES), 48),
        *PACKED,
        Check("products", products.compare, ("torch", torch.float64, 1e-10)),
        *by_copies(tmp_path),
    ]
    run(4, tmp_path, checks)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_ranks(tmp_path):
    """More ranks than most dimensions of a sample have rows: shards that are uneven, or empty."""
    checks = [
        *(
            Check(f"{op} on DTensors", sharded.compare, (op, "torch", typical_case(op, 3000), torch.float64, 3, 1e-9))
            for op in differentiable_ops()
        ),
        Check("float8", sharded.check_float8, ("torch",)),
        Check("means of rows", sharded.check_means_of_rows, ("torch",)),
        *in_rings("torch", torch.float64, 1e-10, list(rings.CASES), 48),
        *PACKED,
        Check("products", products.compare, ("torch", torch.float64, 1e-10)),
    ]
    run(8, tmp_path, checks)


def test_every_operation_has_a_rule():
    assert set(RULES) == set(OPS)


@pytest.mark.parametrize("function", [*RINGS, all_gather_matmul, matmul_reduce_scatter])
def test_a_group_is_needed(function):
    x = torch.zeros(RINGS.get(function, (8, 8)))
    arguments = (x, x, x) if function in RINGS else (x, x)
    if function is ring_attention_varlen:
        arguments += (torch.tensor([0, 4], dtype=torch.int32),)
    with pytest.raises(RuntimeError, match=rf"{function.__name__}: torch\.distributed\.init_process_group\(\) must"):
        function(*arguments)
