"""Calls on DTensors give what the call on one GPU gives: outputs and gradients, whatever the placements."""

from __future__ import annotations

import json

import pytest
import torch

from kernel_ladder.distributed.sharding import RULES
from kernel_ladder.spec import Case
from kernel_ladder.table import OPS

from ..conftest import elements, plain_cases, typical_case
from . import group, sharded


def cases(op: str) -> list[Case]:
    """The typical sample, and the smallest samples with other numbers of dimensions."""
    chosen = {tuple(len(s) for s in typical_case(op, 3000).shapes): typical_case(op, 3000)}
    for case in sorted(plain_cases(op), key=elements):
        if elements(case) > 40 and None not in case.shapes:
            chosen.setdefault(tuple(len(s) for s in case.shapes), case)
    return list(chosen.values())[:3]


def calls() -> list:
    found = [
        (op, "torch", case, torch.float64, 6 if i else 40, 1e-9) for op in RULES for i, case in enumerate(cases(op))
    ]
    return [*found, *((op, "triton", typical_case(op, 3000), torch.float32, 4, 1e-4) for op in RULES)]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtensor")
    group.run(2, folder, sharded.check_all, calls(), folder / "faults.json")
    return json.loads((folder / "faults.json").read_text())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_an_operation_gives_what_one_gpu_gives(op, backend, faults):
    assert faults[f"{op} {backend}"] == {}


def test_a_mesh_of_two_dimensions(tmp_path):
    group.run(4, tmp_path, sharded.check_mesh_of_two_dimensions)


def test_bad_placements_are_refused_and_odd_ones_redistributed(tmp_path):
    group.run(2, tmp_path, sharded.check_errors)


def test_every_operation_has_a_rule():
    assert set(RULES) == set(OPS)
