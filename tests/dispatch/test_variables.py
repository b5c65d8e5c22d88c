"""Environment variables: a bad value gives one sentence that names the variable, what it is and what it may be."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import kernel_ladder
from kernel_ladder import BackendError, UnavailableError, UnsupportedError, table
from kernel_ladder.__main__ import main
from kernel_ladder.errors import VariableError
from kernel_ladder.variables import switch

from ..conftest import DEVICE
from ..processes import run_python

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"KERNEL_LADDER_[A-Z]+")

#: What a bad value of a variable gives, at its own end of the sentence.
BAD = {
    "KERNEL_LADDER_REQUIRE": (
        "torch,kuda",
        r"names 'kuda', which is no level; levels are torch, compile, xla, triton, cuda",
    ),
    "KERNEL_LADDER_AUTOTUNE": ("yes", r"must be 0 or 1, got 'yes'; unset means 1"),
}

COMMANDS = [
    ["kernel_ladder", "list", "gelu"],
    ["kernel_ladder", "doctor"],
    ["kernel_ladder", "inspect", "gelu", "--backend", "triton"],
    ["bench", "--op", "gelu", "--quick"],
]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_commands_end_with_a_sentence(name, command):
    value, message = BAD[name]
    done = run_python(["-m", *command], {**os.environ, "KERNEL_LADDER_REQUIRE": "", name: value})
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"python -m {command[0]}.*: the environment variable {name} {message}.*\n", done.stderr)
    assert "Traceback" not in done.stdout


def test_a_level_that_must_be_there_ends_a_command_with_a_sentence(monkeypatch, capsys):
    for op in kernel_ladder.OPS:
        table.variants(op)
        monkeypatch.delitem(table._unavailable, (op, "triton"))
    monkeypatch.setitem(table.LEVELS, "triton", "no_such_package")
    monkeypatch.setenv("KERNEL_LADDER_REQUIRE", "triton")
    assert main(["list", "gelu"]) == 2
    message = (
        "the environment variable KERNEL_LADDER_REQUIRE names triton, which is unavailable: the triton level could"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("value", "on"), [(None, True), ("", True), ("1", True), ("0", False), (" 0 ", False)])
def test_a_switch(monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("KERNEL_LADDER_ANY", raising=False)
    else:
        monkeypatch.setenv("KERNEL_LADDER_ANY", value)
    assert switch("KERNEL_LADDER_ANY") is on


@pytest.mark.parametrize("value", ["2", "true", "off"])
def test_a_switch_that_is_neither(monkeypatch, value):
    monkeypatch.setenv("KERNEL_LADDER_ANY", value)
    with pytest.raises(VariableError, match=f"variable KERNEL_LADDER_ANY must be 0 or 1, got '{value}'"):
        switch("KERNEL_LADDER_ANY")


CHOSEN = [
    ("torch.nave", BackendError, r"unknown `backend` 'torch\.nave'; did you mean 'torch\.naive'"),
    ("triton.moon", UnavailableError, "backend 'triton.moon' is unavailable: the moon is full"),
    ("torch.odd", UnsupportedError, "torch.odd does not support this call: sizes must be even"),
]


@pytest.fixture
def odd(scratch_table, monkeypatch):
    """A level that is unavailable, and a variant that takes nothing."""
    table.register(
        "gelu",
        "torch.odd",
        forward=lambda input, **options: (input, ()),
        unsupported=lambda *x, **o: "sizes must be even",
    )
    table.register("gelu", "triton.moon", forward=lambda input, **options: (input, ()))
    monkeypatch.setitem(table._unavailable, ("gelu", "triton"), "the moon is full")
    monkeypatch.delenv(table.ENV_BACKEND, raising=False)


@pytest.mark.parametrize(("backend", "error", "message"), CHOSEN)
def test_an_error_names_where_the_backend_comes_from(backend, error, message, odd, monkeypatch):
    x = torch.zeros(2, device=DEVICE)
    with pytest.raises(error, match=f"gelu: {message}"):
        kernel_ladder.gelu(x, backend=backend)
    if error is not BackendError:  # which use raises itself
        with (
            kernel_ladder.use(backend),
            pytest.raises(error, match=rf"gelu: kernel_ladder\.use\('{backend}'\): {message}"),
        ):
            kernel_ladder.gelu(x)
    monkeypatch.setenv(table.ENV_BACKEND, backend)
    for call in (kernel_ladder.gelu, torch.compile(lambda x: kernel_ladder.gelu(x), backend="eager")):
        with pytest.raises(Exception, match=f"the environment variable {table.ENV_BACKEND} is '{backend}': {message}"):
            call(x)


def test_a_choice_that_another_operation_has_not(monkeypatch):
    monkeypatch.delenv(table.ENV_BACKEND, raising=False)
    x = torch.zeros(2, device=DEVICE)
    with (
        kernel_ladder.use("torch.flash"),
        pytest.raises(
            BackendError, match=r"gelu: kernel_ladder\.use\('torch\.flash'\): unknown `backend` 'torch\.flash'"
        ),
    ):
        kernel_ladder.gelu(x)


def test_every_variable_of_ours_is_documented():
    """Those that the sources name, and no other."""
    folders = ("kernel_ladder", "torch_ref", "compile_impl", "xla_impl", "triton_impl", "cuda_impl", "bench", "_build")
    sources = [ROOT / "setup.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    named = {name for path in sources for name in OURS.findall(path.read_text())}
    assert named == set(OURS.findall((ROOT / "docs" / "environment.md").read_text()))
