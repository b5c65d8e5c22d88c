"""Counters of `python -m bench profile`: ncu's output, what is asked of it, files and tables of counters."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.__main__ import main
from bench.measure import environment, timing
from bench.profile import command as profile
from bench.profile import counters, ncu, rungs, tables, targets
from bench.rows.store import ResultsError
from bench.show import readme
from kernel_ladder import table

from ..conftest import DEVICE, alone, needs_extension, needs_gpu

# ---- Nsight Compute

HEADING = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
HEADING += ["Block Size", "Grid Size", "Device", "CC"]
MEASURED = {
    "gpu__time_duration.sum": ("ns", "30,000", "10000"),
    "dram__bytes_read.sum": ("byte", "2,000,000", "1000"),
    "dram__bytes_write.sum": ("Mbyte", "1.5", "0"),
    "lts__t_bytes.sum": ("byte", "5000000", "3000"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "40", "0"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("%", "20.5", "10"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "50", "90"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "75", "100"),
    "launch__registers_per_thread": ("register/thread", "168", "32"),
    "launch__shared_mem_per_block_static": ("byte/block", "1024", "0"),
    "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "65.536", "0"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "7", "0"),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": ("byte", "0", "0"),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": ("byte", "n/a", "n/a"),
    ncu.STALL_METRIC.format("long_scoreboard"): ("inst", "6", "1"),
    ncu.STALL_METRIC.format("wait"): ("inst", "3", "1"),
    ncu.STALL_METRIC.format("selected"): ("inst", "1", "2"),
}
KERNELS = ["void kl::(anonymous namespace)::matmul_kernel<__nv_bfloat16, 128>(float *, const float *)", "_gelu_kernel"]


def csv_of(metrics=MEASURED) -> str:
    """What ``ncu --csv --page raw`` writes: its own lines, a heading, the units, a row a kernel."""
    lines = ["==PROF== Connected to process 4711 (/usr/bin/python3)", '==PROF== Profiling "matmul_kernel": 0%....100%']
    lines.append(",".join(f'"{name}"' for name in [*HEADING, *metrics]))
    lines.append(",".join(f'"{unit}"' for unit in [*[""] * len(HEADING), *(m[0] for m in metrics.values())]))
    for i, name in enumerate(KERNELS):
        fixed = [str(i), "4711", "python3", "127.0.0.1", name, "1", "7", "(128, 1, 1)", f"({i + 5}, 2, 1)", "0", "9.0"]
        lines.append(",".join(f'"{value}"' for value in [*fixed, *(m[1 + i] for m in metrics.values())]))
    return "\n".join([*lines, "==PROF== Disconnected from process 4711", ""])


WANTED = {**ncu.COUNTERS, **{f"stall {reason}": (ncu.STALL_METRIC.format(reason),) for reason in ncu.STALLS}}


def test_counters_of_ncus_csv():
    first, second = (ncu._counters(row, WANTED) for row in ncu.parse(csv_of()))
    assert first["short"] == "matmul_kernel"
    assert (first["grid"], first["block"]) == ([5, 2, 1], [128, 1, 1])
    assert first["us"] == 30
    assert first["dram_bytes"] == 3_500_000
    assert first["shared_bytes"] == 1024 + 65536
    assert first["registers"] == 168
    assert first["stalls"] == {"long_scoreboard": 60, "selected": 10, "wait": 30}
    assert "local_bytes" not in first, "half of a sum is not to be had"
    assert second["name"] == second["short"] == "_gelu_kernel"
    assert second["dram_bytes"] == 1000


def test_csv_without_units_or_rows():
    lines = csv_of().splitlines()
    without = "\n".join([*lines[:3], *lines[4:]])
    assert [row["Kernel Name"][0] for row in ncu.parse(without)] == KERNELS
    assert ncu.parse("==WARNING== No kernels were profiled.") == []
    assert ncu.parse("\n".join(lines[:4])) == []


def test_totals_of_a_call():
    found = ncu.totals([ncu._counters(row, WANTED) for row in ncu.parse(csv_of())], 1_000_000)
    assert found["us"] == 40
    assert found["dram_bytes"] == 3_501_000
    assert found["least_bytes"] == 1_000_000
    assert found["tensor_pipe_pct"] == pytest.approx(40 * 0.75)
    assert found["occupancy_pct"] == pytest.approx(50 * 0.75 + 90 * 0.25)
    assert found["registers"] == 168
    assert found["bank_conflicts"] == 7
    assert found["local_bytes"] is None
    assert found["top_stalls"] == pytest.approx({"long_scoreboard": 60 * 0.75 + 25 * 0.25, "wait": 30 * 0.75 + 25 / 4})
    assert "selected" not in found["top_stalls"]


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """An ``ncu`` first on the PATH that keeps its arguments, complains of unknown metrics, and writes a log."""

    def install(log: str, unknown: tuple[str, ...] = (), stderr: str = "", code: int = 0) -> Path:
        script = tmp_path / "ncu"
        calls = tmp_path / "calls.jsonl"
        script.write_text(
            f"#!{sys.executable}\n"
            "import json, sys\n"
            "if '--version' in sys.argv:\n"
            "    print('NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880)')\n"
            "    sys.exit()\n"
            f"open({str(calls)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
            "option = lambda name: sys.argv[sys.argv.index(name) + 1]\n"
            f"missing = [m for m in option('--metrics').split(',') if m in {unknown!r}]\n"
            f"text = {log!r}\n"
            "if missing:\n"
            "    base, _, rest = missing[0].partition('.')\n"
            "    text = '==ERROR== Failed to find metric regex:^' + base + r'\\.' + rest + '$\\n'\n"
            "open(option('--log-file'), 'w').write(text)\n"
            f"sys.stderr.write({stderr!r})\n"
            f"sys.exit(1 if missing else {code})\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return calls

    return install


def test_ncu_is_asked_for_one_cold_call(fake_ncu):
    calls = fake_ncu(csv_of())
    counted = ncu.count(["profile", "gelu", "--one-call"])
    assert [kernel["short"] for kernel in counted.kernels] == ["matmul_kernel", "_gelu_kernel"]
    assert counted.version == "2025.3.1.0"
    (argv,) = map(json.loads, calls.read_text().splitlines())
    options = dict(itertools.pairwise(argv))
    assert options["--clock-control"] == "none"
    assert options["--cache-control"] == "all"
    assert options["--profile-from-start"] == "off"
    assert argv[-5:] == ["-m", "bench", "profile", "gelu", "--one-call"]
    # What is asked for and not in the output is said.
    assert "stall gmma is not to be had on this GPU" in counted.notes
    assert not any("stall wait" in note for note in counted.notes)


def test_an_unknown_metric_costs_only_itself(fake_ncu):
    gmma = ncu.STALL_METRIC.format("gmma")
    known = {name: value for name, value in MEASURED.items() if name != "dram__bytes_read.sum"}
    known["dram__bytes_op_read.sum"] = ("byte", "123", "4")
    calls = fake_ncu(csv_of(known), unknown=(gmma, "dram__bytes_read.sum"))
    counted = ncu.count(["profile", "gelu", "--one-call"])
    assert counted.kernels[0]["dram_read_bytes"] == 123, "another name of the counter is tried"
    assert "this ncu does not know stall gmma" in counted.notes
    assert len(calls.read_text().splitlines()) == 3


def test_no_permission_to_count(fake_ncu):
    fake_ncu(
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
    )
    with pytest.raises(ncu.NcuError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        ncu.count(["profile", "gelu", "--one-call"])


def test_a_call_without_counters_says_why(fake_ncu):
    fake_ncu("==WARNING== No kernels were profiled.\n")
    with pytest.raises(ncu.CallError, match="the call launches no kernel"):
        ncu.count(["profile", "gelu", "--one-call"])
    fake_ncu("==ERROR== The application returned an error code (1).\n", stderr="RuntimeError: misaligned\n", code=1)
    with pytest.raises(ncu.CallError, match=r"error code \(1\)\.; RuntimeError: misaligned"):
        ncu.count(["profile", "gelu", "--one-call"])


@pytest.fixture
def as_on_a_gpu(monkeypatch, tmp_path):
    """The command's view of a machine with a GPU, as far as ``--ncu`` goes: the calls are made by others."""
    shape = {"pass_": "forward", "dtype": "bfloat16", "shape": "64x64 none", "least_bytes": 1000}
    given = [
        targets.Target("gelu", "cuda.naive", **shape),
        targets.Target("gelu", "triton.fused", **shape, reason="no"),
    ]
    monkeypatch.setattr(environment, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(profile, "_targets", lambda args, device: iter(given))
    path = tmp_path / "gpu.profile.jsonl"
    monkeypatch.setattr(counters, "results_file", lambda: path)
    return path


def test_counting_shows_and_saves(fake_ncu, as_on_a_gpu, capsys):
    calls = fake_ncu(csv_of())
    argv = ["profile", "gelu", "--shape", "64x64", "--option", "approximate=none", "--ncu", "--save"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "gelu cuda.naive forward, bfloat16, 64x64 none" in text
    assert f"1 rows are in {as_on_a_gpu}" in text
    (row,) = counters.read(as_on_a_gpu)
    assert row["counters"]["us"] == 40
    assert [kernel["short"] for kernel in row["kernels"]] == ["matmul_kernel", "_gelu_kernel"]
    # The process under ncu makes this very call.
    command = json.loads(calls.read_text())
    again = profile._parser().parse_args(command[command.index("profile") + 1 :])
    assert (again.op, again.backend, again.shape) == ("gelu", ["cuda.naive"], "64x64")
    assert (again.option, again.dtype, again.pass_) == (["approximate=none"], "bfloat16", "forward")
    assert again.one_call


def test_a_call_that_fails_under_ncu(fake_ncu, as_on_a_gpu, capsys):
    fake_ncu("==ERROR== The application returned an error code (1).\n", stderr="RuntimeError: misaligned\n", code=1)
    assert main(["profile", "gelu", "--ncu", "--save"]) == 1
    assert "gelu cuda.naive forward, bfloat16, 64x64 none: ncu gave no counters" in capsys.readouterr().err
    assert not as_on_a_gpu.exists()


# ---- every rung of an operation in one process


def _said(backend: str, **changes) -> str:
    call = {"op": "gelu", "backend": backend, "pass_": "forward", "dtype": "bfloat16", "shape": "64x64 none"}
    return json.dumps({**call, "least_bytes": 1000, "reason": None, "marked": True, **changes}) + "\n"


def _log_of(*names: str, said: str) -> str:
    heading, units, first, _ = (line for line in csv_of().splitlines() if line.startswith('"'))
    return "\n".join([said, heading, units, *(first.replace(f'"{KERNELS[0]}"', f'"{name}"') for name in names), ""])


def test_kernels_between_marks_are_of_one_call(fake_ncu, as_on_a_gpu, capsys):
    said = _said("triton.fused", marked=False, reason="not here") + _said("cuda.naive") + _said("cuda.vectorized")
    calls = fake_ncu(_log_of("before", rungs.MARK, "one", rungs.MARK, "two", "three", said=said))
    assert main(["counters", "--op", "gelu", "--pass", "forward"]) == 0
    found = {row["backend"]: [kernel["name"] for kernel in row["kernels"]] for row in counters.read(as_on_a_gpu)}
    assert found == {"cuda.naive": ["one"], "cuda.vectorized": ["two", "three"]}
    text = capsys.readouterr().out
    assert "gelu: 2 calls counted, 1 refused" in text
    assert "triton.fused forward: not here" in text
    command = json.loads(calls.read_text())
    assert command[command.index("counters") :] == ["counters", "--op", "gelu", "--pass", "forward", "--calls"]


@pytest.mark.parametrize(
    ("names", "said", "message"),
    [
        ([rungs.MARK, "one"], _said("cuda.naive") + _said("cuda.vectorized"), "ncu counted 1 calls of 2"),
        ([rungs.MARK], _said("cuda.naive"), "the call launches no kernel"),
        ([rungs.MARK, "one"], _said("cuda.naive", reason="RuntimeError: no"), "RuntimeError: no"),
        ([], "", "ncu counted 0 calls of 0"),
    ],
)
def test_a_call_without_its_kernels_is_told(fake_ncu, as_on_a_gpu, capsys, names, said, message):
    fake_ncu(_log_of(*names, said=said))
    assert main(["counters", "--op", "gelu"]) == 1
    assert message in capsys.readouterr().err


def test_a_rung_is_called_where_its_card_shows_it():
    def case_of(name: str, refuses=lambda *inputs, **options: None, pass_="forward", op="matmul"):
        rung = next(v for v in table.variants(op) if v.name == name)
        return rungs.call_of(dataclasses.replace(rung, unsupported=refuses), pass_, torch.device("meta"))

    assert case_of("triton.split_k")[0].id == "16x8192x8192", "its prediction's shape"
    assert case_of("triton.tiled")[0].id == "4096x4096x4096", "the last quick case"
    assert case_of("triton.tiled", lambda a, b: None if a.dtype == torch.float32 else "no")[1] == torch.float32
    assert case_of("triton.tiled", lambda a, b: "no") is None

    def refuses_gradients(a, b):
        return "no backward" if a.requires_grad else None

    assert case_of("triton.tiled", refuses_gradients) is not None
    assert case_of("triton.tiled", refuses_gradients, "backward") is None

    def taken(*inputs, **options):
        return None

    first, second = (case_of("triton.chunked", taken, p, "linear_cross_entropy")[0] for p in ("forward", "backward"))
    assert "forward" in first.passes
    assert "backward" in second.passes


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU")
def test_counters_without_a_gpu(capsys):
    assert main(["counters", "--op", "gelu"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    assert main(["counters", "--op", "gelo"]) == 2
    assert "gelu" in capsys.readouterr().err


def test_rungs_without_kernels_of_their_own_are_counted_where_they_are_named():
    def called(*backends: str) -> list[str]:
        return [target.backend for target in rungs.calls("gelu", backends, ["forward"], torch.device("cpu"))]

    assert called("torch.naive", "triton.fused") == ["torch.naive", "triton.fused"]
    assert called("torch", "triton") == ["triton.fused"], "a level stands for the kernels that somebody wrote"


@needs_gpu
@needs_extension
def test_the_calls_are_made_and_told(capsys):
    device = torch.device("cuda")
    rungs.make_calls(rungs.calls("gelu", ["cuda.naive", "triton.fused"], ["forward", "backward"], device), device)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert [(line["backend"], line["pass_"]) for line in told] == [
        (rung, pass_) for rung in ("triton.fused", "cuda.naive") for pass_ in ("forward", "backward")
    ]
    assert all(line["marked"] and line["reason"] is None for line in told)


def test_no_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu.os, "access", lambda *_: False)
    with pytest.raises(ncu.NcuError, match="--ncu needs Nsight Compute"):
        ncu.find()


def _row(**changes) -> dict:
    target = targets.Target("gelu", "cuda.naive", "forward", "bfloat16", "16384x4096 none", least_bytes=1000)
    counted = ncu.Counted([ncu._counters(row, WANTED) for row in ncu.parse(csv_of())], [], "2025.3")
    return {**counters.make(target, counted), **changes}


def test_saved_counters_supersede_those_of_the_same_call(tmp_path):
    path = tmp_path / "results" / "gpu.profile.jsonl"
    first, other, again = _row(), _row(backend="cuda.vectorized"), _row(commit="new")
    for row in (first, other, again):
        counters.save(path, row)
    found = counters.read(path)
    assert found == [other, again]
    assert {"op", "backend", "pass", "dtype", "shape", "gpu", "when", "commit", "versions"} <= set(found[0])
    assert found[0]["counters"]["dram_bytes"] == 3_501_000
    assert list(found[0]["counters"]["top_stalls"]) == ["long_scoreboard", "wait"]


@pytest.mark.parametrize(("line", "message"), [('{"op": "gelu"', "not a whole JSON object"), ('{"op": 1}', "it lacks")])
def test_a_broken_file_of_counters(tmp_path, line, message):
    path = tmp_path / "gpu.profile.jsonl"
    path.write_text(f"{json.dumps(_row())}\n{line}\n")
    with pytest.raises(ResultsError, match=rf"gpu\.profile\.jsonl:2: .*{message}"):
        counters.read(path)


def test_counters_are_no_rows_of_a_sweep(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    monkeypatch.setattr(environment, "PUBLISHED", folder)
    folder.mkdir()
    (folder / "gpu.jsonl").touch()
    (folder / "gpu.profile.jsonl").touch()
    assert readme.default_results() == [folder / "gpu.jsonl"]


def test_the_table_of_counters(capsys):
    tables.show_counters(_row(), ["stall gmma is not to be had"], Console(width=250), full_names=False)
    text = capsys.readouterr().out
    cells = (
        "matmul_kernel",
        "2 MB",
        "1.5 MB",
        "30 µs",
        "40.0 %",
        "168",
        "66.6 kB",
        "long_scoreboard 60 %",
        "wait 30 %",
    )
    for cell in (*cells, "—"):
        assert cell in text
    assert "DRAM moved 3.5 MB, 3.5e+03 times the least, 1 kB." in text
    assert "stall gmma is not to be had" in text


@alone
@needs_gpu
@needs_extension
def test_counters_of_the_gpu(capsys, tmp_path, monkeypatch):
    try:
        ncu.find()
    except ncu.NcuError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(counters, "results_file", lambda: tmp_path / "gpu.profile.jsonl")
    argv = ["gelu", "--backend", "cuda.vectorized", "--shape", "8192x16384", "--dtype", "bf16", "--ncu", "--save"]
    code = main(["profile", *argv, "--json"])
    captured = capsys.readouterr()
    if code == 2 and "ERR_NVGPUCTRPERM" in captured.err:
        pytest.skip(captured.err)
    assert code == 0, captured.err
    (found,) = json.loads(captured.out)
    (kernel,) = found["kernels"]
    counted = found["counters"]
    assert "gelu" in kernel["short"], kernel["name"]
    # Cold caches: all of the input comes from memory, and at most an L2 of the output stays behind.
    least = counted["least_bytes"]
    assert least - timing.l2_bytes(DEVICE) <= counted["dram_bytes"] <= 1.1 * least
    assert counted["l2_bytes"] >= 0.9 * least
    assert 0 < counted["occupancy_pct"] <= counted["theoretical_occupancy_pct"] <= 100
    assert 0 < counted["registers"] <= 255
    assert counted["local_bytes"] == 0
    assert counted["top_stalls"]
    assert counters.read(tmp_path / "gpu.profile.jsonl") == [found]
