"""`python -m bench profile`: operators and their bytes, kernels and their names, shapes, and ncu's output."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import stat
import statistics
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console

import kernel_ladder
from bench.__main__ import main
from bench.measure import environment, timing
from bench.profile import chain, counters, kernels, ncu, tables, targets
from bench.profile import command as profile
from bench.rows.store import ResultsError
from bench.show import readme
from bench.usage import UsageError
from kernel_ladder import table
from kernel_ladder.spec import Case
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, alone, needs_gpu

F32 = torch.float32


def moved(call) -> int:
    return sum(step.bytes for step in chain.record(call))


def profiled(capsys, *argv: str) -> list[dict]:
    """What the command prints as JSON."""
    assert main(["profile", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- the chain of operators


@pytest.mark.parametrize(
    ("op", "options", "tensors"),
    [
        # Tensors of the input's size, an operator a bracket:
        # ½x (2), x/√2 (2), erf (2), 1 + erf (2), product (3)
        ("gelu", {"approximate": "none"}, 11),
        # x² (2), clamp (2), 0.044715 x (2), · x² (3), x + (3), · √(2/π) (2), ½x (2), tanh (2), 1 + (2), product (3)
        ("gelu", {"approximate": "tanh"}, 23),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_naive_gelu(op, options, tensors, dtype):
    (x,) = make_inputs(Case("", ((64, 100),)), dtype, DEVICE)
    naive = kernel_ladder.spec(op).reference
    with torch.no_grad():
        steps = chain.record(lambda: naive(x, **options))
    if dtype == torch.float32:
        expected, accesses = tensors, tensors
    else:  # in float32, twice as wide, between two conversions that read and write a tensor of either
        expected, accesses = 2 * tensors + 2 * 3, tensors + 2 * 2
    assert sum(step.bytes for step in steps) == expected * x.numel() * dtype.itemsize
    assert sum(len(step.read) + len(step.written) for step in steps) == accesses


def test_bytes_of_naive_softmax():
    m, n = 48, 200
    (x,) = make_inputs(Case("", ((m, n),)), F32, DEVICE)
    with torch.no_grad():
        steps = chain.record(lambda: kernel_ladder.spec("softmax").reference(x, dim=-1))
    assert [step.name for step in steps] == [
        *("aten.amax.default", "aten.sub.Tensor", "aten.exp.default", "aten.sum.dim_IntList", "aten.div.Tensor"),
    ]
    # Each pass over the matrix beside a column of rows' maxima or sums.
    assert [step.bytes for step in steps] == [4 * k for k in (m * n + m, 2 * m * n + m, 2 * m * n, m * n + m)] + [
        4 * (2 * m * n + m)
    ]


def test_bytes_of_a_backward():
    (x,) = make_inputs(Case("", ((64, 100),)), F32, DEVICE)
    x.requires_grad_()
    spec = kernel_ladder.spec("gelu")
    fused, naive = spec.builtin(x), spec.reference(x)
    grad = torch.ones_like(x)
    one = x.numel() * 4
    # Input and output's gradient in, gradient out.
    assert moved(lambda: torch.autograd.grad(fused, x, grad, retain_graph=True)) == 3 * one
    # The product's two factors (3 + 3); erf's slope 2/√π · exp(−x²) · grad: square, minus, exp, factor (2 each) and
    # product (3); x/√2 and ½x (2 each); their sum (3).
    assert moved(lambda: torch.autograd.grad(naive, x, grad, retain_graph=True)) == 24 * one


def test_what_moves_and_what_does_not():
    x = torch.ones(6, 10, device=DEVICE)
    one = 6 * 10 * 4
    assert moved(lambda: x.t()[2:].unsqueeze(0).expand(5, -1, -1)) == 0
    assert moved(lambda: x.view(60)[10:]) == 0
    assert moved(lambda: torch.empty_like(x)) == 0
    assert moved(lambda: torch.zeros_like(x)) == one
    assert moved(lambda: x.t().contiguous()) == 2 * one
    assert moved(lambda: x.to(torch.bfloat16)) == one + one // 2
    assert moved(lambda: x.clone().mul_(2)) == 2 * one + 2 * one
    assert moved(lambda: x * x) == 2 * one, "a tensor given twice is read once"
    assert moved(lambda: x[:1].expand(6, 10) + x) == 40 + 2 * one, "an expanded row is one row in memory"
    out = torch.empty_like(x)
    assert moved(lambda: torch.abs(x, out=out)) == 2 * one
    assert moved(lambda: out.copy_(x)) == 2 * one


def test_a_composite_operator_is_taken_apart(capsys):
    n, d = 64, 8
    (found,) = profiled(capsys, "torch.cdist", "--shape", f"{n}x{d},{n}x{d}", "--dtype", "float32")
    names = Counter(step["name"].split(".")[1] for step in found["operators"])
    assert names == {"pow": 2, "sum": 2, "fill_": 2, "mul": 1, "cat": 2, "mm": 1, "clamp_min_": 1, "sqrt_": 1}
    squares = 2 * (2 * n * d + n * d + n)  # squared and summed by rows
    padded = 2 * n + 2 * n * d + 2 * (n * d + 2 * n + n * (d + 2))  # columns of ones; −2x; [−2x, x², 1], [y, 1, y²]
    distances = 2 * n * (d + 2) + n * n + 2 * n * n + 2 * n * n  # the product; clamp and root in place
    assert found["operand_bytes"] == 4 * (squares + padded + distances)
    assert found["least_bytes"] == 4 * (2 * n * d + n * n)


# ---- the command


def test_a_number_that_stands_for_a_tensor_is_no_operand():
    words = torch.arange(8)
    for call in (lambda: words & 7, lambda: words ^ 7, lambda: words * 7, lambda: words >> 1):
        (step,) = chain.record(call)
        assert (step.read, step.written) == ([64], [64])


@alone  # beside other processes times are long, and a column of names is left out for them
def test_naive_and_builtin_side_by_side(capsys):
    argv = ["profile", "softmax", "--backend", "torch", "--shape", "64x128", "--dtype", "float32", "--pass", "both"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "softmax torch.naive forward, float32, 64x128" in text
    assert "8.03 times the input where 2 would do" in text
    assert "aten.amax.default" in text
    for title in ("softmax forward, float32, 64x128", "softmax backward, float32, 64x128"):
        assert title in text
    assert ("no GPU is visible" in text) == (DEVICE.type == "cpu")


def test_json_has_every_kernel(capsys):
    (found,) = profiled(capsys, "gelu", "--backend", "torch.naive", "--shape", "32x100", "--dtype", "fp32")
    assert {"op": "gelu", "backend": "torch.naive", "pass": "forward", "dtype": "float32"}.items() <= found.items()
    assert found["device"] == DEVICE.type
    assert found["operand_bytes"] == 11 * 32 * 100 * 4
    assert found["least_bytes"] == 2 * 32 * 100 * 4
    assert [step["bytes"] for step in found["kernels"]] == [2 * 12800, 2 * 12800, 2 * 12800, 2 * 12800, 3 * 12800]
    assert all(kernel["us"] > 0 for kernel in found["kernels"])
    assert found["span_us"] > 0


def test_a_sweeps_case_by_its_id_or_sizes(capsys):
    (by_id,) = profiled(capsys, "softmax", "--backend", "torch.builtin", "--shape", "dim0", "--dtype", "float32")
    (by_sizes,) = profiled(
        capsys,
        *("softmax", "--backend", "torch.builtin", "--shape", "67x33", "--option", "dim=0", "--dtype", "float32"),
    )
    assert by_id["shape"] == by_sizes["shape"] == "dim0"


def test_a_trace_for_each_backend(tmp_path, capsys):
    argv = ["profile", "gelu", "--backend", "torch", "--shape", "8x16", "--trace", str(tmp_path / "trace.json")]
    assert main(argv) == 0
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["trace.torch.builtin.forward.json", "trace.torch.naive.forward.json"]
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        assert sum(e.get("name") == kernels.CALL and e["cat"] == "user_annotation" for e in events) >= 1
        assert any(e.get("cat") == "cpu_op" and e["name"].startswith("aten::") for e in events)


def test_what_cannot_run_is_shown_with_its_reason(capsys):
    argv = ["profile", "gelu", "--backend", "torch.builtin,cuda", "--shape", "8x16"]
    assert main(argv) == 0
    reason = table.unavailable("gelu", "cuda")
    assert reason is None or reason in capsys.readouterr().out


def test_a_broken_variant_costs_only_itself(monkeypatch, capsys):
    table.variants("gelu", "torch")
    climb = table._variants["gelu", "torch"]

    def broken(input, **options):
        raise RuntimeError("no such kernel image")

    monkeypatch.setitem(climb, "torch.naive", dataclasses.replace(climb["torch.naive"], forward=broken))
    assert main(["profile", "gelu", "--backend", "torch", "--shape", "8x16"]) == 1
    text = capsys.readouterr().out
    assert "raised RuntimeError: no such kernel image" in text
    assert "gelu torch.builtin forward" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gelo"], "unknown operation 'gelo'; did you mean 'gelu'?"),
        (["gelu", "--backend", "torch.naiv"], "unknown backend 'torch.naiv'; did you mean 'torch.naive'"),
        (["gelu", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["gelu", "--dtype", ""], "unknown dtype ''"),
        (["gelu", "--backend", ","], "--backend: no name in ','; known are torch, compile, triton, cuda, torch.naive"),
        (["gelu", "--pass", "sideways"], "unknown pass 'sideways'"),
        (["gelu", "--shape", "4by4"], "--shape '4by4' is neither a case nor sizes; accepted are sizes of input"),
        (["gelu", "--shape", "4by4"], "'16384x4096 none'"),
        (["matmul", "--shape", "4x4"], "is 1 of the 2 shapes needed; accepted are sizes of input, other, written"),
        (["matmul", "--shape", "4x5,4x5"], "matmul: the last dimension of `input` must equal"),
        (["gelu", "--option", "approximat=tanh"], "unknown option 'approximat' of gelu; did you mean 'approximate'?"),
        (["gelu", "--option", "approximate=erf"], "argument `approximate` must be 'none' or 'tanh', got 'erf'"),
        (["gelu", "--option", "tanh"], "--option must be name=value, such as approximate=tanh, got 'tanh'"),
        (["matmul", "--option", "dim=1"], "unknown option 'dim' of matmul; It has none"),
        (["torch.cdits", "--shape", "4x4"], "torch has no 'cdits'; did you mean 'cdist'"),
        (["torch.nn.functional.gelo", "--shape", "4x4"], "torch.nn.functional has no 'gelo'; did you mean 'gelu'"),
        (["numpy.dot", "--shape", "4x4"], "a function is named from torch on"),
        (["torch.float32", "--shape", "4x4"], "torch.float32 is not a function but a dtype"),
        (["torch.cdist"], "--shape of torch.cdist must be sizes, a part for each tensor"),
        (["torch.cdist", "--shape", "4x4"], "torch.cdist does not take 4x4: TypeError"),
        (["torch.cdist", "--shape", "4x4,4x5"], "torch.cdist does not take 4x4,4x5: RuntimeError"),
        (["torch.cdist", "--shape", "4x4,4x4", "--backend", "cuda"], "torch.cdist has none"),
        (["gelu", "--shape", f"{10**11}x{10**11}"], "its tensors cannot be made: RuntimeError: Storage size"),
        (["gelu", "--shape", f"{10**30}x2"], "its tensors cannot be made: TypeError: empty(): argument 'size'"),
        (["gelu", "--shape", f"{10**9}x{10**8}"], "its tensors cannot be made: "),  # an address space has no room
        (["torch.sin", "--shape", f"{10**11}x{10**11}"], "its tensors cannot be made: RuntimeError: Storage size"),
        (["gelu", "--save"], "--save keeps what --ncu reads"),
        (["gelu", "--trace", "/no/such/folder/trace.json"], "there is no folder /no/such/folder"),
        (["gelu", "--trace", "/proc/trace.json"], "/proc/trace.json: cannot be written: "),
        (["gelu", "--trace", "/tmp"], "/tmp: cannot be written: Is a directory"),
    ],
)
def test_bad_command_lines(argv, message, capsys):
    assert main(["profile", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is visible")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gelu", "--ncu"], "no GPU is visible"),
        (["gelu", "--one-call"], "no GPU is visible"),
        (["gelu", "--backend", "cuda"], "nothing to profile; cuda"),
    ],
)
def test_without_a_gpu(argv, message, capsys):
    assert main(["profile", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "shape", "shapes"),
    [
        ("gelu", "3x5x7", ((3, 5, 7),)),
        ("gelu", "7", ((7,),)),
        ("dropout", "3x5", ((3, 5),)),
        ("bias_gelu", "3x5", ((3, 5), (5,))),
        ("bias_gelu", "2x3x5,5", ((2, 3, 5), (5,))),
        ("swiglu", "3x5", ((3, 5), (3, 5))),
        ("linear", "3x5x4", ((3, 4), (5, 4), (5,))),
        ("matmul", "3x4,4x5", ((3, 4), (4, 5))),
        ("matmul", "3x5x4", ((3, 4), (4, 5))),
        ("matmul", "7x3x4, 7x4x5", ((7, 3, 4), (7, 4, 5))),
        ("attention", "1x2x16x8", ((1, 2, 16, 8),) * 3),
        ("attention", "1x2x16x8,1x2x32x8,1x2x32x4", ((1, 2, 16, 8), (1, 2, 32, 8), (1, 2, 32, 4))),
    ],
)
def test_sizes(op, shape, shapes):
    assert targets.case_of(op, shape, {}, F32, DEVICE).shapes == shapes


def test_sizes_of_a_case_go_by_its_name():
    case = kernel_ladder.spec("gelu").sweep[0]
    sizes = "x".join(map(str, case.shapes[0]))
    assert targets.case_of("gelu", sizes, {}, F32, DEVICE).id == case.id
    assert targets.case_of("gelu", sizes, {"approximate": "tanh"}, F32, DEVICE).id == f"{sizes} tanh"
    assert targets.case_of("gelu", "3x5", {"approximate": "tanh"}, F32, DEVICE).id == "3x5 approximate=tanh"


def test_options_are_literals_or_text():
    given = ["a=1", "b=0.5", "c=True", "d=tanh", "e=(2, 3)", "f=None", "g='x'", "h=a=b"]
    assert targets.parse_options(given) == {
        **{"a": 1, "b": 0.5, "c": True, "d": "tanh", "e": (2, 3), "f": None, "g": "x", "h": "a=b"}
    }
    with pytest.raises(UsageError, match="name=value"):
        targets.parse_options(["=3"])


# ---- names and traces


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_gelu_kernel", "_gelu_kernel"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("void kl::(anonymous namespace)::gelu_kernel<__nv_bfloat16, true>(__nv_bfloat16*, long)", "gelu_kernel"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
            "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, std::array<char*, 3ul>)",
            "vectorized_elementwise_kernel<MulFunctor>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(at::TensorIteratorBase&)"
            "::{lambda()#2}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel<exp_kernel_cuda>",
        ),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(Params<int>)", "gemvx::kernel"),
    ],
)
def test_short_names(name, short):
    assert kernels.short_name(name) == short


def _trace(*kernel_runs: list[tuple[str, float]]) -> dict:
    """A trace of calls that each launch kernels of these names and times, and of a launch outside any call."""
    events: list[dict] = []
    for run, launched in enumerate([*kernel_runs, [("stray", 1.0)]]):
        start = 1000.0 * run
        if run < len(kernel_runs):
            events.append({"cat": "user_annotation", "name": kernels.CALL, "ts": start, "dur": 100.0, "tid": 1})
        for i, (name, us) in enumerate(launched):
            at = {"correlation": 100 * run + i}
            launch = {"cat": "cuda_driver" if i else "cuda_runtime", "name": "launch", "ts": start + i, "dur": 1.0}
            kernel = {"cat": "kernel", "name": name, "ts": start + 200 + 20 * i, "dur": us}
            grid = {"grid": [i + 1, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0}
            events += [{**launch, "args": at}, {**kernel, "args": {**at, **grid}}]
    return {"traceEvents": events}


def test_kernels_of_a_trace():
    trace = _trace([("a", 5.0), ("b", 7.0)], [("a", 6.0), ("b", 9.0)], [("a", 10.0), ("b", 8.0)], [("other", 1.0)])
    windows = kernels._ranges(trace, kernels.CALL)
    found, span = kernels._medians([kernels._launched(trace["traceEvents"], window) for window in windows])
    assert [(k.name, k.us, k.grid) for k in found] == [("a", 6.0, (1, 1, 1)), ("b", 8.0, (2, 1, 1))]
    assert {(k.block, k.registers) for k in found} == {((128, 1, 1), 32)}
    assert span == 28.0, "from the first's start to the last's end, 20 µs later"
    assert kernels.Profile("cuda", found, span, 1.0, None).gap_us == 14.0


def test_operators_are_given_to_their_kernels():
    def two() -> list[kernels.Kernel]:
        return [kernels.Kernel("a", 1.0), kernels.Kernel("b", 1.0), kernels.Kernel("c", 1.0)]

    steps = [chain.Step("aten.sum", [8], [4], 0, 1.0, ["a", "b"]), chain.Step("aten.exp", [4], [4], 1, 1.0, ["c"])]
    found = two()
    kernels._join(found, steps)
    assert [(k.operator, k.bytes) for k in found] == [("aten.sum", 12), ("aten.sum", None), ("aten.exp", 8)]
    found = two()
    kernels._join(found, steps[:1])
    assert {k.operator for k in found} == {None}, "what does not match is not guessed"


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


# ---- on a GPU


@needs_gpu
def test_one_kernel_of_the_vectorized_variant(capsys):
    (found,) = profiled(capsys, "gelu", "--backend", "cuda.vectorized", "--shape", "4096x4096", "--dtype", "bf16")
    (kernel,) = found["kernels"]
    assert "gelu" in kernel["short"], kernel["name"]
    assert math.prod(kernel["grid"]) > 1
    assert math.prod(kernel["block"]) >= 32
    assert kernel["operator"] == "kernel_ladder.gelu.vectorized"
    assert kernel["bytes"] == found["least_bytes"] == 2 * 4096 * 4096 * 2
    assert found["host_us"] > 0


@needs_gpu
def test_a_kernel_for_each_operator_of_the_naive_formula(capsys):
    (found,) = profiled(capsys, "gelu", "--backend", "torch.naive", "--shape", "4096x4096", "--dtype", "bf16")
    assert [kernel["operator"] for kernel in found["kernels"]] == [step["name"] for step in found["operators"]]
    assert len(found["kernels"]) == 7  # five, between two conversions


@needs_gpu
def test_the_naive_backwards_kernels_have_their_operators(capsys):
    argv = ["softmax", "--backend", "torch.naive", "--shape", "4096x1024", "--dtype", "bf16", "--pass", "backward"]
    (found,) = profiled(capsys, *argv)
    assert all(kernel["operator"] for kernel in found["kernels"])
    assert sum(kernel["bytes"] or 0 for kernel in found["kernels"]) == found["operand_bytes"]


@alone
@needs_gpu
@pytest.mark.parametrize("backend", ["cuda.vectorized", "triton.fused", "torch.builtin"])
def test_device_time_is_the_harnesss(backend):
    spec = kernel_ladder.spec("gelu")
    case = next(case for case in spec.sweep if case.shapes == ((8192, 16384),))
    variant = next(v for v in table.variants("gelu") if v.name == backend)
    (target,) = targets.of_operation([variant], case, ["forward"], torch.bfloat16, DEVICE)
    call = target.make()
    found = kernels.profile(call, False, DEVICE)
    with timing.side_stream(DEVICE):
        launch = timing.prepare(lambda i: call(), 1, DEVICE)
        seconds = statistics.median(timing.sample([launch])[0].seconds for _ in range(5))
    assert found.device_us == pytest.approx(1e6 * seconds, rel=0.15)


@alone
@needs_gpu
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
