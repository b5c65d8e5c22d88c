"""`python -m bench profile`: operators and their bytes, kernels and their names, shapes, and ncu's output."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter

import pytest
import torch

import kernel_ladder
from bench.__main__ import main
from bench.measure import timing
from bench.profile import chain, kernels, targets
from bench.usage import UsageError
from kernel_ladder import table
from kernel_ladder.spec import Case
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, alone, needs_extension, needs_gpu

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
        (["gelu", "--backend", ","], "--backend: no name in ','; known are torch, compile, xla, triton, cuda, torch."),
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


# ---- on a GPU


@needs_gpu
@needs_extension
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
@pytest.mark.parametrize(
    "backend", [pytest.param("cuda.vectorized", marks=needs_extension), "triton.fused", "torch.builtin"]
)
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
