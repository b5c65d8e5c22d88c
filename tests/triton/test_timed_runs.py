"""Tuning runs a kernel many times on the tensors of the call. The call's result must be that of a single run.

Kernels whose output is also an operand, or that add to what is there, are the ones that could fail.
"""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import as_leaves
from kernel_ladder.testing.agreement import agreement, standards
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, public, variant_id
from ..ops.test_far_strides import CASES

if (reason := table.unavailable("gelu", "triton")) is not None:
    pytest.skip(reason, allow_module_level=True)

from triton_impl.runtime import autotuner, launch_cache

#: Of each configuration, before the run that counts.
RUNS = 3


@pytest.fixture
def timed(monkeypatch):
    """Every launch is prepared anew, and its configuration is run several times."""
    choose = autotuner.Autotuner.__call__

    def several(self, key, configs, run):
        def runs(config, only_compile):
            for _ in range(RUNS):
                found = run(config, only_compile)
            return found

        return choose(self, key, configs, runs)

    monkeypatch.setattr(autotuner.Autotuner, "__call__", several)
    monkeypatch.setattr(launch_cache.LaunchCache, "get", lambda self, key, default=None: default)


def parameters():
    """Every rung in bfloat16, or in float32 where it takes that alone; each of a case's passes that it has."""
    for op, cases in CASES.items():
        for variant in table.variants(op, "triton"):
            for index, case in enumerate(cases):
                for dtype in (torch.bfloat16, torch.float32):
                    inputs = make_inputs(case, dtype, DEVICE)
                    if variant.unsupported(*inputs, **case.options) is None:
                        yield pytest.param(variant, index, dtype, id=f"{variant_id(variant)}-{case.id}")
                        break


@pytest.mark.parametrize(("variant", "index", "dtype"), list(parameters()))
def test_a_kernel_that_is_timed_leaves_one_run(variant, index, dtype, timed):
    spec, case = kernel_ladder.spec(variant.op), CASES[variant.op][index]
    inputs = make_inputs(case, dtype, DEVICE)
    trained = variant.unsupported(*as_leaves(inputs), **case.options) is None

    def call(*inputs, **options):
        return public(variant.op, inputs, options, backend=variant.name)

    grad = make_grad(spec, inputs, case.options) if trained else None
    result = agreement(spec, call, inputs, case.options, grad, to=standards(spec, inputs, case.options, grad))
    assert result.agrees, str(result)
