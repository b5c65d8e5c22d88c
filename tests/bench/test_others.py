"""RESULTS.md's last section: operations on another GPU, and that no other table takes their rows."""

from __future__ import annotations

from dataclasses import replace

import kernel_ladder
from bench.measure import environment
from bench.rows import published, store
from bench.show import others

from .test_climb import SHAPE, _row


def test_each_gpu_has_its_operations_with_their_commits(tmp_path):
    for gpu, op, commit in (("A", "softmax", "c0ffee"), ("A", "gelu", "decade"), ("B", "gelu", "facade")):
        row = replace(_row("torch.builtin", 90.0), op=op, gpu=gpu, commit=commit)
        store.append(tmp_path / f"{gpu}.jsonl", row)
    first, second = others.write({}, tmp_path).split("### B")
    assert first.startswith("### A")
    assert first.index("gelu, every shape") < first.index("source `decade`") < first.index("softmax, every shape")
    assert first.index("softmax, every shape") < first.index("source `c0ffee`")
    assert first.count(f"| {SHAPE} |") == 2
    assert "source `facade`" in second
    assert others.write({}, tmp_path / "none") == ""


def test_each_published_operation_is_of_one_commit_and_in_the_page():
    page = (environment.ROOT / "RESULTS.md").read_text(encoding="utf-8")
    for path in (published.FOLDER / "others").glob("*.jsonl"):
        assert path not in published.of_gpus()
        rows = store.read_given(path)
        assert len({row.gpu for row in rows}) == 1
        for op in {row.op for row in rows}:
            assert op in kernel_ladder.OPS
            assert len({row.commit for row in rows if row.op == op}) == 1, op
        assert f"### {rows[0].gpu}\n" in page
