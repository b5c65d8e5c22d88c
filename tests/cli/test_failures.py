"""Failures of compilers, explained: known ones by their messages, and what ``inspect --explain`` prints."""

from __future__ import annotations

import pytest
import torch

import kernel_ladder
from kernel_ladder.__main__ import main
from kernel_ladder.inspection import failures


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("out of resource: shared memory, Required: 393216, Hardware limit: 232448", "more shared memory"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "exceed the memory"),
        ("Unknown backend cuda. Available backends are ['cpu']", "JAX has no device of this kind"),
        ("The precision 'F16_F16_F32' is not supported by dot_general on CPU", "no implementation of an instruction"),
        ("Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run.", "CUDA graph"),
    ],
)
def test_known_failures_have_a_cause_and_a_way_out(message, cause):
    found = failures.explain(RuntimeError(message))
    assert found is not None
    assert cause in found[0]
    assert found[1]


def test_the_failure_behind_another_is_found():
    outer = ValueError("the kernel could not be built")
    outer.__cause__ = RuntimeError("ptxas fatal: Value 'sm_103a' is not defined")
    found = failures.explain(outer)
    assert found is not None
    assert "ptxas refused" in found[0]


def test_what_is_unknown_is_not_explained():
    assert failures.explain(ValueError("something else")) is None
    assert "not one of the known failures" in failures.in_words(ValueError("something else"))[-1]


def test_a_real_graph_break():
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(breaks, fullgraph=True, backend="eager")(torch.ones(2))
    assert "cannot trace" in failures.explain(raised.value)[0]


def test_inspect_explains_a_failing_rung(scratch_table, capsys, monkeypatch):
    def fails(input, *, approximate):
        raise RuntimeError("out of resource: shared memory, Required: 1, Hardware limit: 0")

    kernel_ladder.register("gelu", "compile.fails", forward=fails)
    command = ["inspect", "gelu", "--backend", "compile.fails"]
    assert main([*command, "--explain"]) == 2
    said = capsys.readouterr().err
    assert "RuntimeError: out of resource" in said
    assert "cause: a kernel's tiles need more shared memory" in said
    assert "way out: give smaller tiles" in said
    with pytest.raises(RuntimeError, match="out of resource"):
        main(command)
