"""Regret: the time of what a name chose over that of the best rung, in `bench table` and in the block `regret`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.measure import sets
from bench.rows import regret, store
from bench.show import regret as block
from bench.show import table, table_regret
from kernel_ladder.selection import tables

from ..conftest import TIMED, a_row


def timed(backend: str, us: float, chosen: tuple[str, ...] = (), **fields):
    level = backend.partition(".")[0]
    times = {**TIMED, "us": us, "us_q1": us, "us_q3": us, "gpu": "a GPU"}
    return a_row(**{**times, "op": "gelu", "backend": backend, "level": level, "chosen": list(chosen), **fields})


def a_call(shape: str, auto: float, cuda: float = 10.0, **fields):
    """A call that "auto" gives to PyTorch, whose time is `auto`, and "cuda" to a rung of `cuda`; the best takes 10."""
    return [
        timed("torch.builtin", auto, ("auto", "torch"), shape=shape, **fields),
        timed("compile.default", 1.0, ("compile",), shape=shape, **fields),
        timed("cuda.naive", 10.0, shape=shape, **fields),
        timed("cuda.vectorized", cuda, ("cuda",), shape=shape, **fields),
    ]


def test_a_level_is_judged_by_its_rungs_and_auto_by_all_but_compile():
    rows = a_call("a", auto=12.0, cuda=11.0)
    assert regret.of_row(rows[0], rows, "auto") == pytest.approx(1.2)
    assert regret.of_row(rows[0], rows, "torch") == 1.0
    assert regret.of_row(rows[3], rows, "cuda") == pytest.approx(1.1)
    assert regret.of_row(timed("cuda.naive", 1.0, wrong="1 of 8 differ"), rows, "cuda") is None


def test_shares_tails_and_the_worst_call():
    rows = [row for i in range(20) for row in a_call(f"{i}x8", auto=10.2 if i else 15.0)]
    auto, cuda = regret.by_name(rows)
    assert (auto.op, auto.name, auto.near, len(auto.values)) == ("gelu", "auto", 19, 20)
    assert auto.p95 == pytest.approx(1.02)
    assert auto.worst == (1.5, "0x8 float32 forward")
    assert (cuda.name, cuda.near, cuda.worst[0]) == ("cuda", 20, 1.0)


def test_rows_of_kernels_that_are_gone_do_not_count():
    fields = {"op": "cross_entropy", "shape": "a", "when": "2026-11-27T01:00:00"}
    rows = [timed("triton.online", 1.0, ("triton",), **fields), timed("triton.naive", 9.0, ("auto",), **fields)]
    (found,) = regret.by_name(rows)
    assert (found.name, found.worst[0]) == ("auto", 1.0)


def test_the_table_has_a_column_of_regret():
    out = io.StringIO()
    table.show(a_call("a", auto=12.0, cuda=11.0), Console(file=out, width=250))
    lines = out.getvalue().splitlines()
    assert "regret" in next(line for line in lines if "quartiles" in line)
    assert "1.20 auto, 1.00 torch" in next(line for line in lines if "torch.builtin" in line)
    assert "1.10 cuda" in next(line for line in lines if "cuda.vectorized" in line)


def test_the_block_takes_every_set_and_names_the_worst(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert block.write(path, []) == ""
    other = tmp_path / sets.MODELS / path.name
    store.write(other, a_call("of a model", auto=15.0, set=sets.MODELS))
    said = block.write(path, a_call("a", auto=10.0))
    assert "on a GPU: `auto`: 1 of 2; `cuda`: 2 of 2." in said
    assert "| **gelu** | `auto` | 1 of 2 | 1.50 | 1.50 | of a model float32 forward |" in said
    assert "|  | `cuda` | 2 of 2 | 1.00 | 1.00 |  |" in said


def test_the_published_page_has_the_block():
    page = Path(__file__).parents[2] / "docs" / "selection.md"
    assert "<!-- results:begin regret -->" in page.read_text(encoding="utf-8")


def a_part(name: str, pass_: str, kept: bool, rules: float, table: float):
    """A part of a table's file: two of four calls are near, one of two that were held out."""

    def figures(worst: float, points: int, near: int):
        return {"mean": 1.0, "p95": 1.0, "worst": worst, "at": "8x8 bfloat16", "points": points, "within 3 %": near}

    return {
        "op": "gelu", "backend": name, "pass": pass_, "kept": kept,
        "rules": figures(rules, 4, 2), "table": figures(table, 4, 2),
        "held out, rules": figures(rules, 2, 1),
        "held out, table": figures(table, 2, 1) if pass_ == "forward" else None,
    }  # fmt: skip


def test_the_block_of_tables_has_each_gpu_and_name_and_what_was_held_out(tmp_path):
    parts = a_part("cuda", "forward", False, 2.5, 1.5), a_part("cuda", "training", True, 3.0, 1.2)
    (tmp_path / "a.json").write_text(
        json.dumps({"gpu": "GPU A", "regret": [*parts, a_part("auto", "forward", True, 2, 1)]})
    )
    (tmp_path / "b.json").write_text(json.dumps({"gpu": "GPU B", "regret": [parts[0]]}))
    where = "gelu 8x8 bfloat16 forward, by rules"
    lines = table_regret.write({}, tmp_path).splitlines()[2:]
    assert lines == [
        f"| GPU A | `auto` | 4 | 50.0% | 1.00 | {where[:-5]}table | 2 | 50.0% | 1.00 | {where[:-5]}table |",
        f"|  | `cuda` | 8 | 50.0% | 2.50 | {where} | 2 | 50.0% | 2.50 | {where} |",
        f"| GPU B | `cuda` | 4 | 50.0% | 2.50 | {where} | 2 | 50.0% | 2.50 | {where} |",
    ]
    assert table_regret.write({}, tmp_path / "none") == ""


def test_the_block_of_tables_has_every_gpu_that_ships_one():
    written = table_regret.write({})
    assert all(f"| {json.loads(path.read_text())['gpu']} |" in written for path in tables.FOLDER.glob("*.json"))
