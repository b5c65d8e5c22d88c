"""Rows that 16 elements do not fill: Triton's kernels are told what divides their length, and take whole vectors."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_ladder.inspection.inspect import Request, inspect
from kernel_ladder.spec import Case
from triton_impl.common.divisibility import divisibility_of

from ..conftest import every_variant, variant_id
from ..ops import test_norms

#: Of calls with rows that 8 divides, but not 16: how many, how long, and how long where a cluster has each. Rows of a
#: persistent cluster are multiples of 32.
ROWS, LENGTH = 4096, 1000
LENGTHS = {"triton.cluster": 20_008, "triton.persistent_cluster": 20_000}


def case_of(op: str, length: int) -> Case:
    if op in test_norms.OPS:
        return test_norms.case_of(op, ROWS, length)
    rows, row = (ROWS, length), (length,)
    shapes, options = {
        "softmax": ((rows,), {"dim": -1}),
        "add": ((rows, row), {}),
        "sum": ((rows,), {"dim": -1, "keepdim": False}),
        "bias_gelu": ((rows, row), {"approximate": "tanh"}),
    }[op]
    return Case(str(length), shapes, options)


OPS = ("softmax", "add", "sum", "bias_gelu", *test_norms.OPS)
#: Every rung but the naive ones, which leave it to Triton to see what divides a row.
BY_ROWS = [v for v in every_variant("triton") if v.op in OPS and v.name != "triton.naive"]


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize(
    ("variant", "length"),
    [pytest.param(v, LENGTHS.get(v.name, LENGTH), id=variant_id(v)) for v in BY_ROWS],
)
def test_rows_are_read_and_written_by_vectors(variant, length, pass_):
    """Element by element are at most what there is one of a row or column: what is kept of it, its sum, its first."""
    if pass_ == "backward" and variant.backward is None:
        pytest.skip(f"{variant.name} has no backward pass")
    request = Request(variant, case=case_of(variant.op, length), pass_=pass_, arch="sm_90", code=frozenset(["ptx"]))
    for ptx in (code.text for code in inspect(request).code if code.language == "ptx"):
        alone = re.findall(r"(?:ld|st)\.global\S*(?<!\.v2)(?<!\.v4)\.b16\b", ptx)
        assert len(alone) <= 4, f"{len(alone)} loads and stores of one element in\n{ptx[:400]}"


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("op", ["gelu", "add", "swiglu", "dropout"])
def test_whole_blocks_are_read_and_written_by_vectors_whatever_the_number_of_elements(op, pass_):
    """Every load and store of single elements, in the last block, has one of four words beside it."""
    shapes = ((ROWS + 1, LENGTH + 1),) * (1 if op in ("gelu", "dropout") else 2)
    options = {"gelu": {"approximate": "tanh"}, "dropout": {"p": 0.1, "seed": 1}}.get(op, {})
    (variant,) = [v for v in every_variant("triton") if v.op == op and v.name == "triton.fused"]
    if (op, pass_) == ("add", "backward"):
        pytest.skip("the gradients of add launch no kernel")
    case = Case(f"{ROWS + 1}x{LENGTH + 1}", shapes, options)
    request = Request(variant, case=case, pass_=pass_, arch="sm_90", code=frozenset(["ptx"]))
    (ptx,) = [code.text for code in inspect(request).code if code.language == "ptx"]
    for access in ("ld", "st"):
        words, elements = (len(re.findall(rf"{access}\.global\S*{form}\b", ptx)) for form in (r"\.v4\.b32", r"\.b16"))
        assert words >= 1
        assert elements == 8 * words


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=4))
def test_the_unit_is_the_largest_power_of_two_that_divides_all(numbers):
    unit = divisibility_of(*numbers)
    assert unit in (1, 2, 4, 8, 16)
    assert unit == math.gcd(16, *numbers)
