"""What is chosen and refused on GPUs that are not here: their limits are pretended, on tensors without memory."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch

import cuda_impl
import kernel_ladder
from cuda_impl import built_for
from kernel_ladder import autograd, gpu, selection, table
from kernel_ladder.selection import tables
from kernel_ladder.spec import Case, Output, as_leaves
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs, on_absent_gpu

from ..conftest import DEVICE, differentiable_ops, needs_extension, needs_gpu, typical_case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Steps that show an idea, or take everything, and are far from the fastest: the first of each ladder, and those that
#: read rows several times.
SLOW = {
    *(f"cuda.{step}" for step in ("naive", "block", "coalesced", "online")),
    *("torch.naive", "triton.naive", "triton.online"),
}

#: Levels that ``auto`` tries before their compilers.
FAST_LEVELS = ("torch", "triton", "cuda")
#: Operations whose last rung has the name of another's early one.
LAST = {"cross_entropy": {"cuda.online", "triton.online"}}


def chosen(op: str, case: Case, dtype: torch.dtype, *, gradient: bool) -> tuple[str | None, dict[str, str | None]]:
    """What ``auto`` takes, None for nothing, and the reason of every variant that does not take the call."""
    with on_absent_gpu(case, dtype, gradients=gradient) as inputs:
        options = {**case.options}
        try:
            found = selection.resolve(op, "auto", inputs, options).name
        except kernel_ladder.UnsupportedError:
            found = None
        refused = {}
        for variant in table.variants(op):
            reason = table.unavailable(op, variant.level) or variant.unsupported(*inputs, **options)
            if reason is not None:
                refused[variant.name] = reason
        return found, refused


@needs_extension
@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("op", kernel_ladder.OPS)
@pytest.mark.parametrize("name", gpu.KNOWN)
def test_auto_takes_no_slow_step_where_another_takes_the_call(name, op, gradient, built_everywhere):
    with gpu.pretend(name):
        for case in kernel_ladder.spec(op).sweep:
            for dtype in DTYPES:
                found, refused = chosen(op, case, dtype, gradient=gradient)
                slow = SLOW - LAST.get(op, set())
                others = {v.name for v in table.variants(op) if v.level in FAST_LEVELS} - slow - refused.keys()
                assert found in others or not others, (case.id, dtype, found, others)
                assert all(isinstance(reason, str) and reason for reason in refused.values())
                assert found not in refused


@needs_extension
@pytest.mark.parametrize(
    ("op", "shapes", "options", "gradient", "expected"),
    [
        ("layer_norm", ((64, 16384), (16384,), (16384,)), {"normalized_shape": (16384,), "eps": 1e-5}, False, "cuda"),
        ("layer_norm", ((64, 16384), (16384,), (16384,)), {"normalized_shape": (16384,), "eps": 1e-5}, True, "torch"),
        ("layer_norm", ((64, 4096), (4096,), (4096,)), {"normalized_shape": (4096,), "eps": 1e-5}, True, "cuda"),
        ("softmax", ((64, 32768),), {"dim": -1}, False, "cuda"),
        ("softmax", ((64, 32768),), {"dim": -1}, True, "triton"),
        ("softmax", ((64, 65536),), {"dim": -1}, False, "torch"),
    ],
)
def test_a_call_asks_for_the_memory_of_its_own_passes(op, shapes, options, gradient, expected, built_everywhere):
    """On 99 KiB a block: the backward pass counts where it is wanted."""
    with gpu.pretend("A10"):
        found, _ = chosen(op, Case("", shapes, options), torch.bfloat16, gradient=gradient)
    assert found.partition(".")[0] == expected, found


@needs_extension
@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
def test_many_logits_are_chunked_and_the_reason_is_told(gradient, built_everywhere):
    case = kernel_ladder.spec("linear_cross_entropy").sweep[0]
    with gpu.pretend("H100"), on_absent_gpu(case, torch.bfloat16, gradients=gradient) as inputs:
        assert selection.resolve("linear_cross_entropy", "auto", inputs, case.options).name == "triton.chunked"
        told = selection.why("linear_cross_entropy", "auto", inputs, case.options)
        assert "rule: Prefers ``triton.chunked`` for many 16-bit logits on Hopper" in told


ATTENTION = {"is_causal": True, "scale": None, "enable_gqa": False, "return_lse": False}


@needs_extension
@pytest.mark.parametrize("name", ["A10", "L4", "RTX 5090"])
@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_windowed_attention_in_99_kib(name, head_dim, gradient, built_everywhere):
    case = Case("", ((1, 4, 512, head_dim),) * 3, {**ATTENTION, "window_size": (64, 0)})
    with gpu.pretend(name):
        found, refused = chosen("attention", case, torch.bfloat16, gradient=gradient)
    assert "cuda.flash" not in refused
    assert found == "cuda.flash"


@needs_extension
@pytest.mark.parametrize(
    ("q", "k", "gradient", "options", "expected"),
    [
        ((4, 16, 2048, 128), (4, 16, 2048, 128), False, {"is_causal": True}, "cuda.persistent"),
        ((4, 16, 2048, 128), (4, 16, 2048, 128), True, {"is_causal": True}, "cuda.persistent"),
        ((32, 16, 512, 64), (32, 16, 512, 64), False, {"is_causal": True}, "cuda.wgmma"),
        ((4, 32, 4096, 64), (4, 32, 4096, 64), False, {"is_causal": True}, "cuda.persistent"),
        ((1, 12, 4096, 64), (1, 12, 4096, 64), False, {"is_causal": True}, "cuda.persistent"),  # few tiles
        ((1, 12, 777, 64), (1, 12, 777, 64), False, {"is_causal": True}, "cuda.wgmma"),
        ((4, 16, 16384, 64), (4, 16, 16384, 64), True, {"is_causal": False}, "torch.builtin"),
        ((4, 32, 4096, 128), (4, 8, 4096, 128), False, {"is_causal": True, "enable_gqa": True}, "cuda.persistent"),
        ((4, 32, 4096, 128), (4, 8, 4096, 128), True, {"is_causal": True, "enable_gqa": True}, "cuda.persistent"),
        ((4, 16, 2048, 96), (4, 16, 2048, 96), False, {"is_causal": True}, "cuda.persistent"),
        ((4, 16, 2048, 96), (4, 16, 2048, 96), True, {"is_causal": True}, "cuda.persistent"),
        ((4, 8, 2048, 256), (4, 8, 2048, 256), True, {"is_causal": True}, "cuda.persistent"),
        ((8, 8, 1024, 256), (8, 8, 1024, 256), True, {"is_causal": True}, "torch.builtin"),
        ((4, 8, 2048, 192), (4, 8, 2048, 192), True, {"is_causal": True}, "cuda.persistent"),
        ((4, 8, 2048, 136), (4, 8, 2048, 136), True, {"is_causal": True}, "torch.builtin"),
        ((4, 16, 1, 128), (4, 16, 4096, 128), False, {"is_causal": False}, "cuda.split_kv"),
        ((4, 16, 1, 128), (4, 16, 4096, 128), True, {"is_causal": False}, "torch.builtin"),
    ],
)
def test_auto_on_hopper_takes_the_level_that_is_ahead_in_attention(q, k, gradient, options, expected, built_everywhere):
    case = Case("", (q, k, k), {"is_causal": False, "scale": None, "enable_gqa": False, **options})
    with gpu.pretend("H100"), tables.without():
        found, refused = chosen("attention", case, torch.bfloat16, gradient=gradient)
    assert found == expected, refused


@needs_extension
@pytest.mark.parametrize(
    ("length", "d", "d_v", "gradient", "is_causal", "expected"),
    [
        (4096, 192, 128, False, True, "cuda.persistent"),
        (1024, 192, 128, False, True, "torch.builtin"),
        (4096, 192, 128, True, False, "cuda.persistent"),
        (4096, 192, 128, True, True, "torch.builtin"),
        (4096, 128, 64, False, True, "torch.builtin"),
    ],
)
def test_auto_on_hopper_where_values_are_narrower(length, d, d_v, gradient, is_causal, expected, built_everywhere):
    shapes = tuple((2, 16, length, width) for width in (d, d, d_v))
    case = Case("", shapes, {"is_causal": is_causal, "scale": None, "enable_gqa": False})
    with gpu.pretend("H100"), tables.without():
        found, refused = chosen("attention", case, torch.bfloat16, gradient=gradient)
    assert found == expected, refused


@needs_extension
def test_rows_of_99_kib_that_no_step_holds(built_everywhere):
    row = 65536
    with gpu.pretend("A10"):
        shapes = ((32, row), (row,), (32, row), (row,), (row,))
        case = Case("", shapes, {"p": 0.1, "seed": 1, "eps": 1e-5})
        found, _ = chosen("bias_dropout_add_layer_norm", case, torch.bfloat16, gradient=True)
    assert found == "triton.online"


@needs_extension
def test_a_gpu_before_ampere_is_refused_by_name(built_everywhere):
    with gpu.pretend("T4"):
        reason = table.unavailable("gelu", "cuda")
        assert reason == "the cuda level needs compute capability 8.0 or later, T4 has 7.5"
        found, refused = chosen("gelu", Case("", ((4, 4),), {"approximate": "none"}), torch.float16, gradient=False)
    assert found == "torch.builtin"
    assert "8.0 or later" in refused["triton.fused"]


@pytest.mark.parametrize(
    ("capability", "codes", "expected"),
    [
        ((8, 0), ["sm_80", "sm_90a"], "sm_80"),
        ((8, 6), ["sm_80", "sm_90a"], "sm_80"),
        ((8, 6), ["sm_80", "sm_86", "sm_89"], "sm_86"),
        ((8, 0), ["sm_86"], None),
        ((9, 0), ["sm_80", "sm_90a"], "sm_90a"),
        ((9, 0), ["sm_80", "sm_90"], "sm_90"),
        ((9, 0), ["compute_80", "sm_80"], "compute_80"),
        ((10, 0), ["sm_80", "sm_90a"], None),
        ((10, 0), ["compute_90a", "sm_90a"], None),
        ((10, 0), ["compute_80", "sm_80", "sm_90a"], "compute_80"),
        ((10, 3), ["sm_100a"], None),
        ((10, 3), ["sm_100f"], "sm_100f"),
        ((10, 3), ["sm_100"], "sm_100"),
        ((12, 1), ["sm_120"], "sm_120"),
        ((12, 0), ["compute_120", "sm_100a"], "compute_120"),
        ((7, 5), ["compute_80", "sm_80"], None),
    ],
)
def test_the_code_that_a_gpu_runs(capability, codes, expected):
    assert built_for.code_for(capability, codes) == expected


def pretend_built_for(monkeypatch, codes: list[str]) -> None:
    monkeypatch.setattr(cuda_impl, "architectures", lambda: codes)


@needs_extension
@pytest.mark.parametrize("name", ["B200", "RTX 5090"])
def test_an_extension_without_code_for_the_gpu_is_unavailable(name, monkeypatch):
    pretend_built_for(monkeypatch, ["sm_80", "sm_90a"])
    with gpu.pretend(name) as found:
        reason = table.unavailable("gelu", "cuda")
    assert "was built for sm_80, sm_90a" in reason
    assert name in reason
    assert "TORCH_CUDA_ARCH_LIST={}.{}".format(*found.capability) in reason


ROWS, LONG_ROWS = (
    Case("", ((64, n), (n,), (n,)), {"normalized_shape": (n,), "eps": 1e-5})  # of one block, of a cluster
    for n in (4096, 65536)
)
PRODUCT = Case("", ((512, 512), (512, 512)))


@needs_extension
@pytest.mark.parametrize(
    ("codes", "lacking"),
    [
        # Clusters are empty kernels in what the driver makes of compute_80.
        (["compute_80", "sm_80"], {"cluster": "thread-block clusters are not in compute_80", "wgmma": "compute_80"}),
        (["sm_80", "sm_90"], {"cluster": None, "wgmma": "wgmma is not in sm_90"}),
        (["sm_80", "sm_90a"], {"cluster": None, "wgmma": None}),
    ],
)
def test_steps_are_refused_whose_code_was_left_out(codes, lacking, monkeypatch):
    pretend_built_for(monkeypatch, codes)
    with gpu.pretend("H100"):
        rows, _ = chosen("layer_norm", ROWS, torch.bfloat16, gradient=False)
        long_rows, of_rows = chosen("layer_norm", LONG_ROWS, torch.bfloat16, gradient=False)
        _, of_products = chosen("matmul", PRODUCT, torch.bfloat16, gradient=False)
        attention = Case("", ((1, 4, 512, 128),) * 3, ATTENTION)
        _, of_attention = chosen("attention", attention, torch.bfloat16, gradient=False)
    assert rows == "cuda.registers"
    assert (long_rows == "cuda.cluster") == (lacking["cluster"] is None)
    for refused, name, why in (
        (of_rows, "cuda.cluster", lacking["cluster"]),
        *((of_products, f"cuda.{step}", lacking["wgmma"]) for step in ("wgmma", "persistent", "stream_k", "split_k")),
        *((of_attention, f"cuda.{step}", lacking["wgmma"]) for step in ("wgmma", "pingpong", "persistent")),
    ):
        if why is None:
            assert name not in refused, refused[name]
        else:
            assert why in refused[name]
            assert "TORCH_CUDA_ARCH_LIST=9.0a" in refused[name]
    assert "cuda.mma" not in of_products
    assert "cuda.flash" not in of_attention


#: In names of rungs whose instructions Hopper alone has.
OF_HOPPER = re.compile("cluster|wgmma|warp_specialized|pingpong|persistent|stream_k|split_k$|tma")


@needs_extension
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_no_rung_of_hopper_runs_as_code_of_ampere(op, monkeypatch):
    pretend_built_for(monkeypatch, ["compute_80", "sm_80"])
    late = {v.name for v in table.variants(op, "cuda") if OF_HOPPER.search(v.name)}
    for case in kernel_ladder.spec(op).sweep[:3]:
        with gpu.pretend("H100"):
            found, refused = chosen(op, case, torch.bfloat16, gradient=False)
        assert found not in late
        assert late <= refused.keys(), (case.id, late - refused.keys())


def test_what_is_pretended_ends_with_its_block():
    before = table.unavailable("gelu", "cuda"), gpu.visible(), gpu.count()
    with gpu.pretend("A10") as found:
        assert gpu.visible()
        assert gpu.count() == 1
        assert gpu.of(0) is gpu.of(7) is gpu.current() is found
    assert (table.unavailable("gelu", "cuda"), gpu.visible(), gpu.count()) == before
    with pytest.raises(KeyError, match="error of the block"), gpu.pretend("A10"):
        raise KeyError("error of the block")
    assert not gpu.pretended()


def test_what_is_kept_of_a_gpu_is_asked_once_until_another_is_pretended():
    asked = []

    @gpu.cached
    def name(index):
        asked.append(index)
        return gpu.of(index).name

    with gpu.pretend("A10"):
        assert name(0) == name(0) == "A10"
        assert len(asked) == 1
        with gpu.pretend(dataclasses.replace(gpu.KNOWN["L4"], name="mine")):
            assert name(0) == "mine"
        assert name(0) == "A10"


@needs_gpu
@needs_extension
def test_the_gpu_that_is_here():
    found, properties = gpu.current(), torch.cuda.get_device_properties(torch.cuda.current_device())
    assert found.capability == (properties.major, properties.minor)
    assert found.shared_per_block == properties.shared_memory_per_block_optin
    assert found.multiprocessors == properties.multi_processor_count
    assert table.unavailable("gelu", "cuda") is None
    assert built_for.code_for(found.capability, cuda_impl.architectures()) is not None


def run_variant(variant: table.Variant, *inputs: torch.Tensor, **options: object) -> Output:
    return autograd.run(variant, inputs, options)


@needs_gpu
@needs_extension
def test_what_would_be_chosen_elsewhere_agrees_here(built_everywhere):
    """What ``auto`` chooses under another GPU's limits, forward and backward."""
    for name in ("A10", "RTX 5090"):
        for op in kernel_ladder.OPS:
            case = typical_case(op)
            spec, inputs = kernel_ladder.spec(op), make_inputs(case, torch.bfloat16, DEVICE)
            grad = make_grad(spec, inputs, case.options) if op in differentiable_ops() else None
            of_call = as_leaves(inputs) if op in differentiable_ops() else inputs
            with gpu.pretend(name):
                variant = selection.resolve(op, "auto", of_call, case.options)
                found = agreement(spec, functools.partial(run_variant, variant), inputs, case.options, grad)
            assert found.agrees, f"{variant}: {found}"


def test_nothing_is_captured_where_no_gpu_was_used(monkeypatch):
    """PyTorch for CUDA asks the driver, which a machine without a GPU does not have."""

    def no_driver():
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    assert not gpu.capturing()
