"""What ``inspect`` says of XLA's programs: fusions, bytes, HLO, and the lowering for a TPU."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from kernel_ladder import table
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection.inspect import Request, inspect
from kernel_ladder.testing.samples import make_inputs
from xla_impl import bridge
from xla_impl.inspect import instructions
from xla_impl.rung import PROGRAMS

from ..conftest import DEVICE, typical_case

pytestmark = pytest.mark.skipif(table.unavailable("gelu", "xla") is not None, reason="JAX is not installed")

HLO = """HloModule jit_f

fused_computation {
  p = f32[4] parameter(0)
  ROOT inside = f32[4] fusion(p), kind=kLoop, calls=g
}

ENTRY main {
  x = f32[4]{0} parameter(0)
  a.1 = f32[4]{0} fusion(x), kind=kLoop, calls=fused_computation
  c = (f32[4]{0}, s8[16]{0}) custom-call(a.1), custom_call_target="__cublas$gemm"
  ROOT %b = f32[] fusion(a.1), kind=kInput, calls=h
}
"""


def looked_into(op: str, name: str, pass_: str = "forward", *code: str):
    (variant,) = table.named(op, name)
    return inspect(Request(variant, typical_case(op, 20_000), torch.float32, pass_, code=frozenset(code)))


def test_only_what_the_entry_computation_runs_is_counted():
    assert [(kernel.name, kernel.note) for kernel in instructions(HLO)] == [
        ("a.1", "fusion, kLoop"),
        ("c", "library, __cublas$gemm"),
        ("b", "fusion, kInput"),
    ]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_gelu_becomes_one_fusion_that_moves_the_least_bytes(pass_):
    found = looked_into("gelu", "xla.jit", pass_, "hlo", "source")
    assert found.kernel_count == 1
    assert found.compile_s > 0
    assert found.source.startswith("xla_impl/gelu.py:")
    source, before, after = found.code
    assert "def formula" in source.text
    assert "fusion(" not in before.text
    assert "fusion(" in after.text
    counts = re.search(r"count: (?:(\S+) before fusion, )?(\S+) after fusion; the least is (\S+)$", found.notes[0])
    unfused, fused, least = counts.groups()
    assert float(fused) == pytest.approx(float(least), rel=0.01)
    if DEVICE.type == "cpu":
        assert float(unfused) > float(fused)


def test_a_program_is_lowered_for_a_tpu_and_said_not_to_have_run():
    (code,) = looked_into("softmax", "xla.jit", "forward", "tpu").code
    assert "not run" in code.title
    assert "stablehlo" in code.text


def test_a_kernel_for_triton_has_no_lowering_for_a_tpu():
    with pytest.raises(InspectError, match="`tpu`: this program cannot be lowered for a TPU"):
        looked_into("softmax", "xla.pallas", "forward", "tpu")


@pytest.mark.parametrize("op", ["softmax", "matmul", "attention"])
def test_pallas_kernels_are_lowered_by_triton_on_a_gpu(op):
    """The head of ``xla_impl/pallas.py`` says why not by Mosaic GPU. This needs no GPU: JAX lowers ahead of time."""
    (variant,) = table.named(op, "xla.pallas")
    target, case = "__gpu$xla.gpu.triton", typical_case(op, 20_000)
    inputs = make_inputs(case, torch.bfloat16, torch.device("cpu"))
    programs = PROGRAMS[op, variant.name]
    static, traced = programs.split(dict(case.options), inputs[0])
    export = importlib.import_module("jax.export")
    allowed = [export.DisabledSafetyCheck.custom_call(target)]
    exported = export.export(programs.forward(static), platforms=["cuda"], disabled_checks=allowed)
    module = exported(*map(bridge.to_jax, inputs), traced).mlir_module()
    assert target in module
    assert "mosaic" not in module
