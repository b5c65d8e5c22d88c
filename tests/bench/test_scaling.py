"""What several GPUs do together: the script on two processes without a GPU, its rows, its paper model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.measure.environment import ROOT
from bench.rows import store
from bench.scaling import check, model, products, ring
from bench.scaling.__main__ import main
from bench.scaling.rows import (
    BY_MESSAGES,
    COMMUNICATION,
    ON_DTENSORS,
    ONE_GPU,
    OURS,
    PRODUCT,
    SYMMETRIC,
    UNFUSED,
    UNPATCHED,
    ScalingRow,
    latest,
    read,
)
from bench.scaling.run import shares
from bench.show import scaling

MACHINE = model.Machine(link=100e9, memory=1e12)
RING = {"batch": 1, "heads": 16, "heads_kv": 16, "length": 2**16, "width": 128, "itemsize": 2}


def run_dry(ranks: int, out: Path, *options: str) -> tuple[str, list[ScalingRow]]:
    """Output of rank 0 and rows of a dry run in so many processes."""
    command = [sys.executable, "-m", "bench.scaling", "--dry-run", "--backend", "torch", "--out", str(out), *options]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What torchrun sets; it would import PyTorch once more itself.
    group = {
        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    alike = {**os.environ, **group, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**alike, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in processes]
    codes = [process.returncode for process in processes]
    assert not any(codes), "\n".join([f"exit codes {codes}", *(errors[-3000:] for _, errors in said)])
    return said[0][0], read(out)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Output and rows of a dry run of all benchmarks."""
    return run_dry(2, tmp_path_factory.mktemp("scaling") / "rows.jsonl")


@pytest.mark.slow
def test_a_dry_run_on_eight_ranks(tmp_path):
    _, rows = run_dry(8, tmp_path / "rows.jsonl")
    assert [row.wrong for row in rows if row.wrong] == []
    assert {row.gpus for row in rows if row.role != ONE_GPU} == {8}
    timed = {row.op for row in rows if row.us is not None and row.role == OURS}
    products_timed = {"all_gather_matmul", "matmul_reduce_scatter"}
    rings = {"ring_attention", "ring_attention_varlen"}
    assert timed == {*products_timed, *rings, "tensor_parallel_block", "fsdp_step"}


@pytest.mark.parametrize(
    ("gpus", "lengths", "expected"),
    [
        (2, (), [16, 32, 64, 128]),
        (4, (), [32, 128, 256, 512]),
        (8, (), [32, 128, 256, 512, 1024]),
        (4, (2**18,), [256]),
    ],
)
def test_lengths_and_layers(gpus, lengths, expected):
    run = SimpleNamespace(dry=False, quick=False, gpus=gpus, lengths=lengths)
    assert [of.length // 1024 for of in ring.sizes(run)] == expected
    layers = {(of.op, of.k, of.n) for of in products.sizes(run)}
    gather, scatter = products.GATHER, products.SCATTER
    assert layers >= {(gather, 8192, 28672), (scatter, 28672, 8192), (gather, 8192, 10240), (scatter, 8192, 8192)}


def test_a_dry_run_checks_and_times_everything(dry_run):
    said, rows = dry_run
    assert [row.wrong for row in rows if row.wrong] == []
    timed = {(row.op, row.role) for row in rows if row.us is not None}
    assert timed >= {
        *((op, r) for op in ("ring_attention", "ring_attention_varlen") for r in (OURS, ONE_GPU, COMMUNICATION)),
        *(("all_gather_matmul", role) for role in (OURS, PRODUCT, COMMUNICATION, UNFUSED)),
        *(("matmul_reduce_scatter", role) for role in (OURS, PRODUCT, COMMUNICATION, UNFUSED)),
        ("fsdp_step", UNPATCHED),
        ("tensor_parallel_block", ON_DTENSORS),
        *((op, role) for op in ("tensor_parallel_block", "fsdp_step") for role in (OURS, ONE_GPU)),
    }
    assert all(row.unsupported for row in rows if row.role == SYMMETRIC)
    assert {row.gpus for row in rows if row.role != ONE_GPU} == {2}
    assert {row.gpus for row in rows if row.role == ONE_GPU} == {1}
    ours = [row for row in rows if row.role == OURS and row.op != "fsdp_step"]
    unpredicted = ("ring_attention_varlen", "tensor_parallel_block")
    assert all(row.predicted_us for row in ours if row.op not in unpredicted)
    assert all(row.efficiency for row in ours if row.op in ("ring_attention", *unpredicted))
    assert not [row for row in rows if row.role == BY_MESSAGES]  # the CPU has no other way
    for op in {row.op for row in rows}:
        assert f"{op}, float32" in said


def test_rows_become_pages(dry_run, tmp_path):
    folder = tmp_path / "scaling"
    folder.mkdir()
    store.write(folder / "machine.jsonl", dry_run[1])
    machines = {tmp_path / "machine.jsonl": []}
    table = scaling.write("scaling", machines)
    assert table.count("| ours |") == 2 + 2 + 1 + 1 + 1 + 1  # passes of two rings, two products, the block, FSDP2
    steps = [line.split("|")[1:4] for line in scaling.write("scaling steps", machines).splitlines() if "hidden" in line]
    assert [(what.strip(), gpus.strip()) for _, what, gpus in steps] == [
        (OURS, "2"), (UNPATCHED, "2"), (OURS, "2"), (ON_DTENSORS, "2")
    ]  # fmt: skip
    lines = scaling.write("scaling model", machines).splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == ["GPUs", "8", "64", "1024"]


def test_rows_come_back_and_newer_ones_supersede(tmp_path):
    row = ScalingRow(
        "ring_attention", "cuda", "cuda", "forward", "bfloat16", "S1", gpus=2, us=3.0, gpu="H100", when="1"
    )
    one = ScalingRow(**{**vars(row), "role": ONE_GPU, "gpus": 1})
    newer = ScalingRow(**{**vars(row), "us": 2.0, "when": "2"})
    path = tmp_path / "rows.jsonl"
    for each in (row, one, newer):
        store.append(path, each)
    assert read(path) == [row, one, newer]
    assert latest(read(path)) == [newer, one]
    path.write_text('{"op": "gelu"}\n')
    with pytest.raises(store.ResultsError, match="not a row of several GPUs, which has 'op'"):
        read(path)


def test_shares_of_a_row():
    seconds = {(ONE_GPU, "cuda"): 8.0, (COMMUNICATION, "torch.distributed"): 2.0}
    row = ScalingRow("ring_attention", "cuda", "cuda", "forward", "bfloat16", "", gpus=4)
    shares(row, 2.5, seconds)
    assert (row.efficiency, row.hidden, row.of_product) == (0.8, 0.75, None)
    shares(row, 2.5, seconds, one_gpu_does=1 / 4)  # a batch for each GPU
    assert row.efficiency == 3.2
    seconds = {(PRODUCT, "cuda"): 4.0, (UNFUSED, "cuda"): 6.0, (COMMUNICATION, "torch.distributed"): 2.0}
    row = ScalingRow("all_gather_matmul", "cuda", "cuda", "forward", "bfloat16", "", gpus=4)
    shares(row, 5.0, seconds)
    assert (row.efficiency, row.hidden, row.of_product) == (None, 0.5, 0.8)


def test_one_gpu_needs_no_link():
    assert model.ring_attention_forward(1, MACHINE, 3.0, **RING) == 3.0
    assert model.ring_attention_backward(1, MACHINE, 3.0, **RING) == 3.0
    assert model.all_gather_matmul(1, MACHINE, 3.0, m=8192, k=8192, itemsize=2) == 3.0
    assert model.matmul_reduce_scatter(1, MACHINE, 3.0, m=8192, n=8192, itemsize=2) == 3.0


def test_a_step_takes_the_longer_of_compute_and_hop():
    part = 8192 // 4 * 8192 * 2 / 100e9  # bytes of a hop over bytes a second
    assert model.all_gather_matmul(4, MACHINE, 1.0, m=8192, k=8192, itemsize=2) == pytest.approx(1.0)
    assert model.all_gather_matmul(4, MACHINE, 0.0, m=8192, k=8192, itemsize=2) == pytest.approx(3 * part)
    add = 3 * 8192 // 4 * 8192 * 2 / 1e12
    found = model.matmul_reduce_scatter(4, MACHINE, 0.0, m=8192, n=8192, itemsize=2)
    assert found == pytest.approx(3 * (part + add))
    half = 2 * 16 * 2**15 * 128  # elements of keys and values of one of two ranks
    merge = 16 * 2**15 * 128 * 10 / 1e12
    assert model.ring_attention_forward(2, MACHINE, 4.0, **RING) == pytest.approx(2.0 + 2 * merge)
    link_bound = model.ring_attention_backward(2, model.Machine(1e6, 1e18), 0.0, **RING)
    assert link_bound == pytest.approx((half * (2 + 4) + half * 4) / 1e6)


def test_from_the_least_length_on_hops_are_hidden():
    rate = 600e12
    length = model.least_length(8, MACHINE, rate, heads=16, heads_kv=4, itemsize=2)
    rows = length / 8
    assert 2 * 16 * rows**2 * 128 / rate == pytest.approx(2 * 4 * rows * 128 * 2 / 100e9, rel=1e-3)


def test_wrong_results_are_found():
    exact = [torch.linspace(-1, 1, 64, dtype=torch.float64), torch.linspace(1, 2, 64, dtype=torch.float64)]
    naive = [x.float() for x in exact]
    assert check.hold(["y", "z"], naive, exact, naive) is None
    assert check.hold_model(["y", "z"], naive, exact, naive) is None
    wrong = [naive[0], naive[1] + 1e-3]
    assert "z: largest deviation" in check.hold(["y", "z"], wrong, exact, naive)
    assert "of z" in check.hold_model(["y", "z"], wrong, exact, naive)
    nan = [naive[0] * float("nan"), naive[1]]
    assert "y: " in check.hold(["y", "z"], nan, exact, naive)
    assert "nan of y" in check.hold_model(["y", "z"], nan, exact, naive)
    many = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lone = many.bfloat16()
    assert check.hold_model(["x"], [lone.clone()], [many], [lone]) is None
    of_lone = lone.clone()
    of_lone[many.sub(0.5).abs().argmin()] = 0  # one of many does not show in the mean
    assert "an element of x" in check.hold_model(["x"], [of_lone], [many], [lone])


@pytest.mark.parametrize(
    ("argv", "environment", "said"),
    [
        ([], {}, "start it with torchrun"),
        (["--only", "rign"], {"RANK": "0"}, "unknown benchmark 'rign'; did you mean 'ring'"),
        (
            ["--lengths", "32k,33"],
            {"RANK": "0"},
            "--lengths must be positive multiples of 4, such as 32k,128k; got '33'",
        ),
        (["--lengths", ""], {"RANK": "0"}, "got ''"),
        (["--time", "0"], {"RANK": "0"}, "--time must be a positive number of seconds, got 0.0"),
        (["--dry-run", "--timeout", "1"], {"RANK": "0"}, "rank 0: no group of 2 processes within 1 s"),
    ],
)
def test_errors(argv, environment, said, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2)
    assert said in capsys.readouterr().err
