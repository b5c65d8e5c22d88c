"""Bad arguments give one clear error, the same at every level, available or not."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.samples import empty_inputs, make_inputs
from kernel_ladder.spec import has_gradient

from .conftest import DEVICE, public, typical_case


def error_cases():
    for op in kernel_ladder.OPS:
        for case in kernel_ladder.spec(op).errors:
            for backend in (None, *table.LEVELS):
                yield pytest.param(op, case, backend, id=f"{op}-{case.id}-{backend or 'default'}")


@pytest.mark.parametrize(("op", "case", "backend"), list(error_cases()))
def test_bad_arguments(op, case, backend):
    args, kwargs = case.arguments()
    with pytest.raises(case.error, match=case.message) as raised:
        getattr(kernel_ladder, op)(*args, **kwargs, backend=backend)
    assert type(raised.value) is case.error, "a subclass would read differently"
    assert str(raised.value).startswith(f"{op}: "), "the message names the operation first"


@pytest.mark.parametrize("op", kernel_ladder.OPS)
@pytest.mark.parametrize("backend", [None, *table.LEVELS])
def test_inputs_on_two_devices(op, backend):
    case = typical_case(op)
    *others, last = make_inputs(case, torch.float32, DEVICE)
    if not others:
        pytest.skip("one tensor argument cannot be on two devices")
    with pytest.raises(ValueError, match=r"must be on the same device, got \w+(:\d)? and meta"):
        public(op, (*others, last.to("meta")), case.options, backend=backend)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
@pytest.mark.parametrize("level", ["cuda", "triton"])
def test_tensors_without_data_are_refused_by_kernels(op, level):
    if (reason := table.unavailable(op, level)) is not None:
        pytest.skip(reason)
    case = typical_case(op)
    with pytest.raises(kernel_ladder.UnsupportedError, match="tensors, got meta"):
        public(op, empty_inputs(case, torch.float32, "meta"), case.options, backend=level)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
@pytest.mark.parametrize("backend", [None, *table.LEVELS])
def test_inputs_of_two_dtypes(op, backend):
    case = typical_case(op)
    inputs = list(make_inputs(case, torch.float32, DEVICE))
    *others, last = [i for i, x in enumerate(inputs) if has_gradient(x)]
    if not others:
        pytest.skip("one tensor argument cannot have two dtypes")
    inputs[last] = inputs[last].half()
    with pytest.raises(TypeError, match="must have the same dtype, got float32 and float16"):
        public(op, tuple(inputs), case.options, backend=backend)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_every_spec_has_error_cases_for_type_and_dtype(op):
    errors = [case.error for case in kernel_ladder.spec(op).errors]
    assert errors.count(TypeError) >= 2, "at least: not a tensor, and a dtype that is not accepted"
