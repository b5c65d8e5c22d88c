"""The xla level beside plain JAX: what is measured, rows that are kept, and the block of a page."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.__main__ import main
from bench.bridge import command, rows
from bench.bridge.rows import BridgeRow
from bench.show import bridge
from kernel_ladder import table

from ..conftest import DEVICE

needs_jax = pytest.mark.skipif(table.unavailable("gelu", "xla") is not None, reason="JAX is not installed")
ROW = BridgeRow(
    "gelu", "forward", "bfloat16", "8192x16384 tanh", 200.0, 204.0, 1.02, "64x64", 60.0, 95.0, 120.0, 20.0, 10.0,
    "a GPU", "2.0", "0.11", "abc", False, "2026-01-01",
)  # fmt: skip


@needs_jax
@pytest.mark.parametrize("op", ["swiglu", "attention"])
def test_plain_jax_computes_what_the_rung_does(op):
    """Both passes, on the same values. Nothing is timed."""
    for pass_ in ("forward", "backward"):
        setting = command.Setting(op, pass_, command.host_case(command.case_of(op)), torch.float32, DEVICE)
        torch.testing.assert_close(*setting.results)
        rung = setting.call.call()
        made = [x for x in (rung if isinstance(rung, tuple) else (rung,)) if x is not None]
        torch.testing.assert_close(made, list(setting.results[1]))


@needs_jax
def test_the_command_writes_rows_that_a_page_shows(monkeypatch, tmp_path, capsys):
    path = tmp_path / "bridge" / "gpu.jsonl"
    monkeypatch.setattr(rows, "results_file", lambda: path)
    monkeypatch.setattr(command, "ROUNDS", 2)
    monkeypatch.setattr(command, "BATCHES", 2)
    monkeypatch.setattr(command, "SAMPLE_S", 1e-4)
    for _ in range(2):
        assert main(["bridge", "--op", "swiglu", "--quick"]) == 0
    assert "xla.jit takes" in capsys.readouterr().out
    found = rows.read(path)
    assert [(row.op, row.pass_) for row in found] == [("swiglu", "forward"), ("swiglu", "backward")]
    assert all(min(row.plain_us, row.ours_us, row.ratio, row.host_plain_us, row.host_call_us) > 0 for row in found)
    assert bridge.write({tmp_path / "gpu.jsonl": None}).count("\n| swiglu ") == 2


def test_every_shape_is_one_of_the_sweep():
    assert [command.case_of(op).id for op in command.SHAPES] == list(command.SHAPES.values())


def test_the_bridge_is_the_difference_that_tensors_make(tmp_path):
    slow = dataclasses.replace(ROW, pass_="backward", ratio=1.06, host_run_us=150.0)
    rows.save(tmp_path / "bridge" / "gpu.jsonl", [ROW, slow])
    written = bridge.write({tmp_path / "gpu.jsonl": None})
    assert "xla.jit takes 1.04 × plain JAX at the median, 1.06 at most." in written
    assert "62.5 µs a call at the median, 90 µs at most, 40 µs or less in 1 of 2 rows." in written
    line = "| gelu 8192x16384 tanh | forward | 200 µs | 204 µs | 1.02 | 60 µs | 95 µs | 35 µs | 120 µs |"
    assert line in written
    assert bridge.write({tmp_path / "other.jsonl": None}) == ""


def test_bad_input(monkeypatch, tmp_path, capsys):
    assert main(["bridge", "--op", "softmx"]) == 2
    assert "softmax" in capsys.readouterr().err
    monkeypatch.setattr(table, "unavailable", lambda op, level: "JAX is not installed")
    assert main(["bridge"]) == 2
    assert capsys.readouterr().err == "python -m bench bridge: JAX is not installed\n"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"op": 1}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not a row of the bridge"):
        rows.read(path)
