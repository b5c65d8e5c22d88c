"""``python -m kernel_ladder``: readable, complete, and the same facts as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import kernel_ladder
from kernel_ladder.__main__ import main

from ..processes import run_python


def output_of(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_list_names_every_backend_with_its_reason(capsys):
    text = output_of(capsys, "list")
    for op in kernel_ladder.OPS:
        assert op in text
        for name, reason in kernel_ladder.backends(op).items():
            assert name in text
            assert reason is None or " ".join(reason.split()[:3]) in text


def test_list_says_which_step_of_a_level_cannot_run_here(capsys):
    rows = json.loads(output_of(capsys, "list", "softmax", "--json"))
    reasons = {row["variant"]: row["reason"] for row in rows}
    assert reasons == kernel_ladder.backends("softmax")
    if reasons["triton.fused"] is None and not torch.cuda.is_available():
        assert "has no interpreter" in reasons["triton.cluster"]


def test_list_of_one_operation(capsys):
    rows = json.loads(output_of(capsys, "list", "gelu", "--json"))
    assert {row["op"] for row in rows} == {"gelu"}
    assert {row["variant"]: row["reason"] for row in rows} == kernel_ladder.backends("gelu")


def test_doctor_says_what_is_available_and_why_the_rest_is_not(capsys):
    text = output_of(capsys, "doctor")
    found = json.loads(output_of(capsys, "doctor", "--json"))
    for level in kernel_ladder.LEVELS:
        assert level in text
    assert found["versions"]["torch"] in text
    assert set(found["levels"]) == set(kernel_ladder.OPS)
    assert ("none is visible" in text) == (not found["gpus"])
    for kernel in found["kernels"]:  # of which nothing is known without a driver but that they are built in
        assert (kernel["name"] in text) == (kernel["registers"] >= 0)
    if found["kernels"]:
        assert ("are built in" in text) == (not found["gpus"])


def test_no_colour_when_piped():
    whole = [sys.executable, "-m", "kernel_ladder", "doctor"]  # which imports torch as well, and warns of nothing
    results = [
        subprocess.run(whole, capture_output=True, text=True, check=True),
        run_python(["-m", "kernel_ladder", "list"]),
        run_python(["-m", "kernel_ladder", "inspect", "gelu", "--backend", "torch", "--source"]),
    ]
    for result in results:
        assert result.returncode == 0
        assert result.stdout
        assert "\x1b" not in result.stdout
        assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["inspect", "gelu"], "the following arguments are required: --backend"),
        (["lst"], "invalid choice: 'lst'"),
        (["list", "gel"], "unknown operation 'gel'; operations are gelu"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
