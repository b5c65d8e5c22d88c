"""Calls on groups of GPUs give what one GPU gives, by copy engines and by NCCL's messages.

Each file of checks is that of ``test_groups.py``; ``transports.py`` compares the two ways of a hop.
"""

from __future__ import annotations

import pytest
import torch

from kernel_ladder import table

from ..conftest import INFERENCE, alone, differentiable_ops, typical_case
from . import packed, patched, products, rings, sharded, transports
from .group import Check, run

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ROWS, WIDTH = 256, 64
#: Of a result against float64.
TOLERANCES = {torch.bfloat16: 1e-1, torch.float16: 2e-2, torch.float32: 1e-3}
#: Of attention: no rung of the cuda level takes packed sequences in float32, and every rank compiles Triton's kernels.
DTYPES = {"torch": tuple(TOLERANCES), "triton": (torch.bfloat16,), "cuda": (torch.bfloat16, torch.float16)}
#: Operations on DTensors at the triton level: by elements, by rows, with sums over ranks, with heads.
COMPILED = ("gelu", "rms_norm", "linear", "attention")
#: Cases that every level takes, in bfloat16; the first of each in the other dtypes too.
RINGS = ("causal", "full", "causal-contiguous", "grouped", "window", "window-wide", "window-causal", "window-right")
PACKED = ("uneven-causal", "full", "short-causal", "grouped-causal")


def checks_of(level: str) -> list[Check]:
    found = []
    for dtype, tolerance in TOLERANCES.items():
        name = f"{level}, {str(dtype).removeprefix('torch.')}"
        most = 0 if dtype not in DTYPES[level] else None if dtype == torch.bfloat16 else 1
        for case in RINGS[:most]:
            arguments = (case, level, dtype, tolerance, ROWS, WIDTH, "cuda")
            found.append(Check(f"ring attention, {case}, {name}", rings.compare, arguments))
        for case in PACKED[:most]:
            arguments = (case, level, dtype, tolerance, WIDTH, "cuda")
            found.append(Check(f"packed sequences, {case}, {name}", packed.compare, arguments))
        arguments = (level, dtype, tolerance, 32, "cuda")
        found.append(Check(f"products, {name}", products.compare, arguments))
    return found


@alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("level", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_by_copies_and_by_messages(ranks, level, tmp_path):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, {GPUS} are visible")
    if (reason := table.unavailable("attention", level)) is not None:
        pytest.skip(reason)
    checks = checks_of(level)
    messages = [
        Check(f"{check.name}, by messages", transports.by_messages, (check.function, *check.arguments))
        for check in checks
    ]
    first = Check("copies are possible", transports.check_usable)
    alike = [
        Check(f"{check.__name__}, {dtype}", check, (dtype, level))
        for check in (transports.check_same_bits, transports.check_results_stay)
        for dtype in DTYPES[level]
    ]
    run(ranks, tmp_path, [first, *alike, *checks, *messages], "cuda")


def calls_on_dtensors(level: str) -> list[Check]:
    """Each operation, in float32 but for packed sequences; at the triton level, where every rank compiles, some."""
    checks = []
    for op in differentiable_ops() if level == "cuda" else COMPILED:
        if op in INFERENCE or table.unavailable(op, level) is not None:
            continue
        dtype = torch.bfloat16 if op == "attention_varlen" else torch.float32
        call = op, level, typical_case(op, 3000), dtype, 12 if level == "cuda" else 4, TOLERANCES[dtype], "cuda"
        checks.append(Check(f"{op} on DTensors at the {level} level", sharded.compare, call))
    return checks


@alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", ["cuda", "triton"])
def test_dtensors(level, tmp_path):
    """Placements of each operation on two GPUs, against the call of the same level on one."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, {GPUS} are visible")
    if (reason := table.unavailable("gelu", level)) is not None:
        pytest.skip(reason)
    checks = calls_on_dtensors(level)
    assert checks
    run(2, tmp_path, checks, "cuda")


@alone
@pytest.mark.timeout(600)
def test_patched_models(tmp_path):
    """Two ranks, as many as the model has heads of keys. Its layers by the cuda level, and compiled around formulas."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, {GPUS} are visible")
    pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
    level = "torch" if table.unavailable("attention", "cuda") else "cuda"
    checks = [
        Check(f"{name}, {around}", patched.compare, (name, "torch" if around == "compile" else level, around, "cuda"))
        for around in ("nothing", "checkpoints", "compile")
        for name in patched.WAYS
    ]
    run(2, tmp_path, checks, "cuda")


@alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_streams(ranks, tmp_path):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, {GPUS} are visible")
    checks = [
        Check("copies are possible", transports.check_usable),
        Check("late ranks", transports.check_late_ranks),
        Check("two streams", transports.check_two_streams),
        Check("CUDA graphs", transports.check_graphs),  # the last: a capture that failed
    ]
    run(ranks, tmp_path, checks, "cuda")


@alone
@pytest.mark.timeout(120)
def test_a_rank_that_is_gone(tmp_path):
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, {GPUS} are visible")
    checks = [
        Check("copies are possible", transports.check_usable),
        Check("a rank that is gone", transports.check_lost_rank, (str(tmp_path),)),
    ]
    run(2, tmp_path, checks, "cuda")
    assert "use its GPU no more" in (tmp_path / "said").read_text()
