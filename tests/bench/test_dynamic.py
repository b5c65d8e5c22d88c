"""Calls of changing lengths: programs that are compiled, rows that are kept, and the block of a page."""

from __future__ import annotations

import pytest
import torch

from bench.__main__ import main
from bench.dynamic import command, rows
from bench.show import dynamic
from kernel_ladder import table

from ..conftest import DEVICE

LENGTHS = (8, 5, 12)


@pytest.mark.parametrize("way", command.ways("softmax"))
def test_each_way_compiles_as_many_programs_as_it_must(way):
    """One a length of constants; two where the second length makes a variable of them; one where they begin as it."""
    with command.without_caches():
        row = command.measure("softmax", way, LENGTHS, 16, torch.float32, DEVICE)
    level = way.partition(".")[0]
    if level in table.LEVELS and (reason := table.unavailable("softmax", level)):
        assert (row.unsupported, row.first_s, row.later_us) == (reason, [], None)
        return
    if row.unsupported is not None:
        assert level in ("triton", "cuda"), "a level that refuses tensors of this machine"
        return
    assert len(row.first_s) == len(LENGTHS)
    assert row.later_us > 0
    expected = {
        "torch.compile(dynamic=False)": len(LENGTHS),
        "torch.compile": 2,
        "torch.compile(dynamic=True)": 1,
        "xla.jit": len(LENGTHS),
    }
    assert row.programs == expected.get(way)


def test_a_wrong_result_is_no_row(monkeypatch):
    monkeypatch.setattr(command, "_callable", lambda op, way: lambda x: x)
    with pytest.raises(AssertionError, match="softmax eager"):
        command.measure("softmax", "eager", LENGTHS, 16, torch.float32, DEVICE)


def test_the_command_writes_rows_that_a_page_shows(monkeypatch, tmp_path, capsys):
    path = tmp_path / "dynamic" / "gpu.jsonl"
    monkeypatch.setattr(rows, "results_file", lambda: path)
    monkeypatch.setattr(command, "ways", lambda op: ["eager", "cuda"])
    monkeypatch.setattr(table, "unavailable", lambda op, level: "no GPU | here" if level == "cuda" else None)
    for _ in range(2):
        assert main(["dynamic", "--op", "swiglu", "--quick"]) == 0
    assert "swiglu" in capsys.readouterr().out
    eager, refused = rows.read(path)
    assert eager.later_us > 0
    assert refused.unsupported == "no GPU | here"
    written = dynamic.write({tmp_path / "gpu.jsonl": None})
    assert written.startswith("`swiglu`, ")
    assert "| `cuda` | – | – | – | no GPU \\| here |" in written
    assert dynamic.write({tmp_path / "other.jsonl": None}) == ""


def test_bad_input(tmp_path, capsys):
    assert main(["dynamic", "--op", "softmx"]) == 2
    assert "softmax" in capsys.readouterr().err
    path = tmp_path / "rows.jsonl"
    path.write_text('{"op": 1}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not a row of changing lengths"):
        rows.read(path)
