"""Bad arguments give one clear error, the same at every level, available or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import has_gradient
from kernel_ladder.testing.samples import empty_inputs, make_inputs

from ..conftest import DEVICE, OWN_DTYPES, public, skip_unless_available, typical_case

NUMBERS = [
    ("softmax", {"dim": np.int64(-1)}, {"dim": -1}),
    ("sum", {"dim": np.int32(0)}, {"dim": 0}),
    ("sum", {"dim": [np.int64(0), 1]}, {"dim": (0, 1)}),
    (
        "layer_norm",
        {"normalized_shape": (np.int64(8),), "eps": np.float32(0.25)},
        {"normalized_shape": (8,), "eps": 0.25},
    ),
    ("rms_norm", {"normalized_shape": [np.int64(8)], "eps": np.float64(0.25)}, {"normalized_shape": (8,), "eps": 0.25}),
    ("add_rms_norm", {"eps": np.float16(0.25)}, {"eps": 0.25}),
    ("dropout", {"p": np.float64(0.25), "seed": np.int64(3)}, {"p": 0.25, "seed": 3}),
    ("dropout", {"p": np.float32(0.25), "seed": np.uint8(3)}, {"p": 0.25, "seed": 3}),
    (
        "bias_dropout_add_layer_norm",
        {"p": np.float32(0.25), "seed": np.int64(3), "eps": np.float64(0.25)},
        {"p": 0.25, "seed": 3, "eps": 0.25},
    ),
    ("attention", {"scale": np.float64(0.25), "window_size": (np.int64(2), 0)}, {"scale": 0.25, "window_size": (2, 0)}),
    (
        "attention_varlen",
        {"max_seqlen_q": np.int64(200), "scale": np.float32(0.25)},
        {"max_seqlen_q": 200, "scale": 0.25},
    ),
    (
        "attention_paged",
        {"scale": np.float32(0.25), "window_size": [np.int64(2), 0]},
        {"scale": 0.25, "window_size": (2, 0)},
    ),
]


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
    skip_unless_available(op, level)
    case = typical_case(op)
    with pytest.raises(kernel_ladder.UnsupportedError, match="tensors, got meta"):
        public(op, empty_inputs(case, torch.float32, "meta"), case.options, backend=level)


@pytest.mark.parametrize("op", [op for op in kernel_ladder.OPS if op not in OWN_DTYPES])
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


@pytest.mark.parametrize(("op", "given", "taken"), NUMBERS, ids=[f"{op}-{given}" for op, given, _ in NUMBERS])
def test_numpys_numbers_reach_a_kernel_as_pythons(op, given, taken, scratch_table):
    """As PyTorch takes them, and a kernel's launcher and torch.compile do not."""
    seen = {}
    table.register(op, "torch.look", forward=lambda *inputs, **options: (seen.update(options) or inputs[0], ()))
    case = typical_case(op)
    inputs = make_inputs(case, torch.float32, DEVICE)
    if "normalized_shape" in given:
        inputs = (torch.zeros(2, 8, device=DEVICE),)
    public(op, inputs, {**case.options, **given}, backend="torch.look")
    for name, value in taken.items():
        assert seen[name] == value
        assert type(seen[name]) is type(value)
        if isinstance(value, tuple):
            assert [type(n) for n in seen[name]] == [int] * len(value)


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_every_spec_has_error_cases_for_type_and_dtype(op):
    errors = [case.error for case in kernel_ladder.spec(op).errors]
    assert errors.count(TypeError) >= 2, "at least: not a tensor, and a dtype that is not accepted"
