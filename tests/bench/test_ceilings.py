"""What a machine can do at most: how each ceiling is measured and kept, and what is held to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bench.measure import ceiling_kernels, ceilings, clocks, timing
from bench.rows import resume, store
from bench.rows.store import CEILING
from bench.show import table as bench_table
from kernel_ladder import table
from kernel_ladder.semantics import precision

from ..conftest import DEVICE, a_row, alone, needs_gpu

pytestmark = pytest.mark.xdist_group("timing")

CPU = torch.device("cpu")


@alone
def test_ceilings_are_the_best_of_several_ways():
    slow, fast = (lambda i, s=seconds: time.sleep(s) for seconds in (0.008, 0.002))
    best = ceilings._best({"slow": slow, "fast": fast}, 1, CPU)
    assert best.by == "fast"
    assert 0.002 <= best.seconds < 0.008


def test_rates_without_a_gpu():
    for measure in (ceilings.copying, ceilings.reading, ceilings.writing):
        assert measure(2**20, CPU).seconds > 0
    # 12 KiB are not a whole number of blocks: the rate is that of the bytes that were moved.
    assert ceilings.copy_gbs(12 * 2**10, CPU) == pytest.approx(
        2 * 8192 / ceilings.copying(12 * 2**10, CPU).seconds / 1e9
    )
    assert ceilings.matrix_tflops(torch.float32, CPU) > 0


def test_tf32_is_put_back():
    before = precision.tf32_allowed()
    with ceilings._tf32(not before):
        assert precision.tf32_allowed() is not before
    assert precision.tf32_allowed() is before


def h200(device):
    return SimpleNamespace(name="GPU", total_memory=141 * 2**30, L2_cache_size=60 * 2**20, multi_processor_count=132)


def test_every_ceiling_makes_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_properties", h200)
    monkeypatch.setattr(ceilings, "_kernels", lambda device: ceiling_kernels)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    state = clocks.State(1980.0, 500.0, 50.0, None)
    for name in ("copying", "reading", "writing", "rereading", "product", "chain", "launching"):
        monkeypatch.setattr(ceilings, name, lambda *a: ceilings.Best("triton", [1e-3, 2e-3, 3e-3] * 3, True, state))
    failed = []
    made = list(ceilings.measure(torch.device("cuda"), quick=False, failed=failed.append))
    assert not failed
    assert len({row.key for row in made}) == len(made)
    known = {resume.key(row) for row in made[3:]}
    again = ceilings.measure(torch.device("cuda"), quick=False, failed=failed.append, known=known)
    assert [row.backend for row in again] == ["ceiling.copy", "ceiling.read", "ceiling.write"]
    assert {(row.backend, row.dtype) for row in made} == {
        *(("ceiling." + name, "float32") for name in ("copy", "read", "write", "l2", "cuda_core")),
        *(("ceiling.tensor", dtype) for dtype in ("bfloat16", "float16", "tf32", "float64")),
        ("ceiling.cuda_core", "float64"),
        ("ceiling.launch", "none"),
    }
    for row in made:
        store.append(tmp_path / "rows.jsonl", row)
        assert (row.op, row.level, row.pass_, row.options) == (CEILING, CEILING, "forward", {"by": "triton"})
        assert row.us_low <= row.us <= row.us_high
        assert row.clock_mhz == 1980
        assert (row.gbs is not None) == (row.bytes is not None)
        assert (row.tflops is not None) == (row.flops is not None)
    assert len(store.read(tmp_path / "rows.jsonl")) == len(made)
    by_name = {(row.backend, row.shape): row for row in made}
    assert by_name["ceiling.copy", "256 MiB"].gbs == pytest.approx(2**28 / 2e-3 / 1e9, rel=1e-4)
    # A call passes over the L2's working set many times; the row is of one pass.
    l2 = by_name["ceiling.l2", "15 MiB"]
    assert l2.gbs == pytest.approx(ceilings.L2_PASSES * 15 * 2**20 / 2e-3 / 1e9, rel=1e-4)
    assert by_name["ceiling.tensor", "8192x8192x8192"].tflops == pytest.approx(2 * 8192**3 / 2e-3 / 1e12, rel=1e-4)
    text = Console(record=True, width=200)
    bench_table.show(made, text)
    assert "what" in text.export_text()


def test_a_ceiling_that_fails_costs_no_other(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such instruction\nand a long trace")

    monkeypatch.setattr(torch.cuda, "get_device_properties", h200)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ceilings, "_kernels", lambda device: None)
    for name in ("copying", "writing", "product", "launching"):
        monkeypatch.setattr(ceilings, name, lambda *a: ceilings.Best("x", [1e-3], True, clocks.State()))
    monkeypatch.setattr(ceilings, "reading", broken)
    monkeypatch.setattr(ceilings, "rereading", broken)
    failed = []
    made = {row.backend for row in ceilings.measure(torch.device("cuda"), quick=True, failed=failed.append)}
    assert made >= {"ceiling.copy", "ceiling.write", "ceiling.tensor", "ceiling.launch"}
    assert not made & {"ceiling.read", "ceiling.l2"}
    assert "ceiling.read 16 MiB float32: RuntimeError: no such instruction" in failed


def test_rows_are_held_to_the_best_product_of_their_run():
    gemm = {"op": "matmul", "us": 10.0, "bytes": 8, "flops": 10**9, "tflops": 100.0, "ceiling_gbs": 1e3}
    run = [
        a_row(**gemm, backend="torch.builtin", ceiling_tflops=90.0, of_ceiling=100 / 90),
        a_row(**{**gemm, "tflops": 120.0, "us": 10 / 1.2}, backend="peer.quack", ceiling_tflops=90.0),
        a_row(**{**gemm, "tflops": 50.0, "us": 20.0}, backend="torch.builtin", dtype="float16", ceiling_tflops=40.0),
        a_row(op="attention", us=20.0, bytes=8, flops=10**9, tflops=50.0, ceiling_gbs=1e3, ceiling_tflops=90.0),
        a_row(op="matmul", backend="cuda.naive", unsupported="only on Sundays"),
        a_row(op=CEILING, backend="ceiling.tensor", dtype="float16", shape="4096x4096x4096", us=1.0, tflops=70.0),
        a_row(op=CEILING, backend="ceiling.cuda_core", shape=ceilings.CHAIN, us=1.0, tflops=300.0),
    ]
    held = ceilings.with_best_products(run)
    assert [row.ceiling_tflops for row in held] == [120.0, 120.0, 70.0, 120.0, None, None, None]
    assert [row.of_ceiling for row in held[:4]] == [
        pytest.approx(expected) for expected in (100 / 120, 1.0, 50 / 70, 50 / 120)
    ]
    assert held[4:] == run[4:]
    assert run[0].ceiling_tflops == 90.0


needs_triton = pytest.mark.skipif(
    table.unavailable("gelu", "triton") is not None, reason=str(table.unavailable("gelu", "triton"))
)


@needs_triton
def test_the_kernels_of_the_ceilings_do_what_they_say(monkeypatch):
    if DEVICE.type != "cuda":
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1)
        )
        monkeypatch.setattr(ceiling_kernels, "PROGRAMS", 3)
    x = torch.randn(7 * ceiling_kernels.BLOCK, device=DEVICE)
    for passes in (1, 3):
        torch.testing.assert_close(ceiling_kernels.read(x, passes).sum(), passes * x.sum(), rtol=1e-4, atol=1e-3)
    assert ceiling_kernels.write(torch.zeros_like(x)).eq(1).all()
    assert ceiling_kernels.copy(torch.zeros_like(x), x).equal(x)
    out = torch.empty(2 * ceiling_kernels.CHAIN_BLOCK, dtype=torch.float64, device=DEVICE)
    first = torch.arange(ceiling_kernels.CHAIN_BLOCK, dtype=torch.float64, device=DEVICE)
    expected = 1 + (first - 1) * 0.5**ceiling_kernels.UNROLLED  # of x → x / 2 + 1/2
    torch.testing.assert_close(ceiling_kernels.multiply_add(out, 1).view(2, -1), expected.expand(2, -1))
    ceiling_kernels.empty()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_kernels_of_the_ceilings_compile_for_gpus():
    code = """
from bench.measure.ceiling_kernels import AOT
from triton_impl.runtime.aot import compile_entry, local_memory
for capability in (80, 90):
    for entry in AOT:
        compiled = compile_entry(entry, capability)
        ptx = compiled.asm["ptx"]
        facts = local_memory(compiled.asm["cubin"]), ptx.count("ld.global.cg.v4"), ptx.count("fma.rn")
        print(entry.kernel.__name__, *facts)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 2 * len(ceiling_kernels.AOT)
    for name, spilled, past_l1, multiply_adds in lines:
        assert spilled == "0"
        if name == "_read_kernel":
            assert int(past_l1) > 0
        if name == "_multiply_add_kernel":  # nothing is folded away
            assert int(multiply_adds) == ceiling_kernels.UNROLLED * ceiling_kernels.CHAIN_BLOCK // 128


@alone
@needs_gpu
def test_ceilings_stand_in_the_order_that_physics_gives_them():
    def rate(best, nbytes):
        return nbytes / best.seconds / 1e9

    copy = rate(ceilings.copying(2**30, DEVICE), 2**30)
    assert rate(ceilings.reading(2**30, DEVICE), 2**30) > 0.8 * copy
    assert rate(ceilings.writing(2**30, DEVICE), 2**30) > 0.5 * copy
    warm = timing.l2_bytes(DEVICE) // 8
    assert rate(ceilings.rereading(warm, DEVICE), ceilings.L2_PASSES * warm) > copy
    graph, stream = (ceilings.launching(graph, DEVICE).seconds for graph in (True, False))
    assert 1e-7 < graph < stream < 1e-4
