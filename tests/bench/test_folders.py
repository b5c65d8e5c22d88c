"""`bench readme --folders`: what is read of the files' heads, and the gains beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rows.store import Row
from bench.show import folders
from kernel_ladder.inspection import heads

HEAD = """\
// softmax, rung 3 of 6: shared
// Idea      One block per row. The row stays in shared memory,
//           so global memory is read once.
// Predicts  2.0× over `online`.
// Limit now One row in flight per block.
// Next      `registers`.

#include "core/common.cuh"
"""
TABLE = """\
// Softmax along one dimension.
//
//   variant    the one idea it adds                       what limits it now
//   naive      one thread a row: maximum, sum,            uncoalesced reads
//              quotient
//   online     one block a row                            the second read
//
// Any strides.
"""
DOCSTRING = '''"""Softmax in Triton.

fused    whole rows in registers,
         several per program
online   rows of any length

No more.
"""
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with the sources of one operation, whose ladders are known."""
    rungs = {"cuda": ["naive", "online", "shared"], "triton": ["fused", "online"]}
    monkeypatch.setattr(heads, "ROOT", tmp_path)
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    monkeypatch.setattr(heads, "ladder", lambda op, level: rungs.get(level, []) if op == "softmax" else [])
    for name, text in (("csrc/softmax/softmax.cu", TABLE), ("csrc/softmax/shared.cu", HEAD)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "triton_impl").mkdir()
    (tmp_path / "triton_impl" / "softmax.py").write_text(DOCSTRING)
    return tmp_path


def test_a_head_gives_idea_and_limit(root):
    head = heads.heads("softmax", "cuda")["shared"]
    assert head.idea == "One block per row. The row stays in shared memory, so global memory is read once."
    assert (head.limit, head.place) == ("One row in flight per block.", "3 of 6")
    assert head.file == root / "csrc" / "softmax" / "shared.cu"


def test_a_docstrings_head_is_one_too():
    title = '"""layer_norm and rms_norm, rung 2 of 4: triton.fused'
    text = title + '\n\nIdea      Rows in registers.\nLimit now Long rows.\n"""'
    ((ops, rung, head),) = heads._heads_in(Path("a.py"), text)
    assert set(ops) == {"layer_norm", "and", "rms_norm"}
    assert (rung, head.idea, head.limit, head.place) == ("fused", "Rows in registers.", "Long rows.", "2 of 4")


def test_a_table_is_read_by_columns(root):
    known = heads.heads("softmax", "cuda")
    assert (known["naive"].idea, known["naive"].limit) == (
        "one thread a row: maximum, sum, quotient",
        "uncoalesced reads",
    )
    assert (known["online"].idea, known["online"].limit) == ("one block a row", "the second read")


def test_a_docstring_is_a_list(root):
    known = heads.heads("softmax", "triton")
    assert {rung: head.idea for rung, head in known.items()} == {
        "fused": "whole rows in registers, several per program",
        "online": "rows of any length",
    }


def test_a_place_that_is_not_the_rungs(root):
    assert folders.faults() == ["csrc/softmax/shared.cu: softmax cuda.shared is rung 3 of 3, its head says 3 of 6"]


@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_the_name_of_an_operation_may_hold_digits(level):
    known = heads.heads("linear_float8", level)
    assert set(known) == set(heads.ladder("linear_float8", level)) != set()
    assert all(head.predicts and head.limit for head in known.values())


def test_ladders_of_cuda_need_no_build():
    assert heads.ladder("gelu", "cuda")[:2] == ["naive", "vectorized"]
    assert "registers" in heads.ladder("layer_norm", "cuda")


def _row(backend: str, us: float | None, commit: str, when: str = "2026-01-01", **more) -> Row:
    level = backend.partition(".")[0]
    return Row(
        "softmax", backend, level, "forward", "bfloat16", "8x8", us=us, commit=commit, when=when, gpu="GPU 1", **more
    )


def test_gains_are_of_one_commit(root):
    found = [
        _row("cuda.naive", 80.0, "a" * 40),
        _row("cuda.online", None, "a" * 40, unsupported="not today"),
        _row("cuda.shared", 20.0, "a" * 40),
        _row("cuda.online", 1.0, "b" * 40, "2026-01-02"),
    ]
    page = folders.pages(found)[root / "csrc" / "softmax" / "README.md"]
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert lines[0].endswith("| forward, × rung before |")
    assert (
        lines[1]
        == "| 1 | [`cuda.naive`](softmax.cu) | One thread a row: maximum, sum, quotient | Uncoalesced reads |  |"
    )
    assert lines[2].endswith("| The second read |  |")
    assert lines[3].endswith("| 4 over `naive` |")
    assert "Forward: 8x8, bfloat16, GPU 1, commit `aaaaaaaaaaaa`." in page


def test_pages_link_to_each_other(root):
    written = folders.pages([])
    assert "[softmax/](softmax/README.md)" in written[root / "csrc" / "README.md"]
    assert "../csrc/softmax/README.md#softmax" in written[root / "cuda_impl" / "README.md"]
    assert "[`triton.fused`](softmax.py)" in written[root / "triton_impl" / "README.md"]


def test_a_page_of_no_ladder_is_named(root):
    for name in ("csrc/old", "csrc/core"):
        (root / name).mkdir()
    (root / "csrc" / "old" / "README.md").write_text(folders.NOTE)
    (root / "csrc" / "core" / "README.md").write_text("By hand.")
    assert folders.abandoned(folders.pages([])) == [root / "csrc" / "old" / "README.md"]
