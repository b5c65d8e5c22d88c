"""The cards of the climbs: predictions as times, verdicts, counters before and after; and the check of whole pages."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import kernel_ladder
from bench.profile import counters
from bench.rows import store
from bench.rows.store import Row
from bench.show import cards, log_index, predictions
from kernel_ladder.inspection.heads import ladder

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("cards_check", ROOT / "_build" / "cards.py")
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)

SHAPE, LEAST = "16384x4096 tanh", 2**28


def _row(backend: str, us: float | None, **fields) -> Row:
    base = {"op": "gelu", "backend": backend, "level": backend.partition(".")[0], "dtype": "bfloat16", "shape": SHAPE}
    base |= {"us": us, "bytes": LEAST, "flops": 2 * LEAST, "ceiling_gbs": 4000.0, "ceiling_tflops": 700.0}
    if us is not None:
        base |= {"us_q1": us, "us_q3": us, "rounds": 25, "gbs": LEAST / us / 1e3, "of_ceiling": 67.1 / us}
    return Row(**{**base, "pass_": "forward", "gpu": "GPU 1", "when": "2026-01-01T00:00:00+00:00", **fields})


NAIVE, VECTORIZED = _row("cuda.naive", 200.0), _row("cuda.vectorized", 68.0)
HERE = {row.backend: row for row in (NAIVE, VECTORIZED)}


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ({"bytes": 1}, "268 MB / 4,000 GB/s → **67.1 µs**"),
        ({"bytes": [1, 1.5]}, "1 to 1.5 × 268 MB / 4,000 GB/s → **67.1 µs to 101 µs**"),
        ({"share": 0.5}, "268 MB / 0.5 of 4,000 GB/s → **134 µs**"),
        ({"matrix": 0.5}, "1 GFLOP / (0.5 of 700 TFLOP/s) → **1.53 µs**"),
        ({"over": 4}, "time of `cuda.naive` / 4 (200 µs) → **50 µs**"),
        ({"times": 2, "as": "cuda.vectorized"}, "2 × time of `cuda.vectorized` (68 µs) → **136 µs**"),
    ],
)
def test_a_formula_becomes_a_time(note, said):
    assert str(predictions.predict(note, HERE, NAIVE)) == said


def test_a_prediction_may_be_of_another_operations_time():
    note = {"times": 1.5, "as": "matmul cuda.mma"}
    product = _row("cuda.mma", 100.0, op="matmul", shape="16384x4096")
    others = [_row("cuda.mma", 1.0, op="matmul", shape="16384x4096", dtype="float32"), product]
    found = predictions.predict(note, HERE, NAIVE, others)
    assert str(found) == "1.5 × time of matmul's `cuda.mma` (100 µs) → **150 µs**"
    assert predictions.predict(note, HERE, NAIVE, others[:1]) is None, "another dtype"
    same = _row("cuda.mma", 50.0, op="matmul", shape=SHAPE)
    assert predictions.predict(note, HERE, NAIVE, [product, same]).low == 75.0, "the call itself before its plain shape"


def test_without_what_a_formula_needs_there_is_no_prediction():
    assert predictions.predict({}, HERE, NAIVE) is None
    assert predictions.predict({"bytes": 1}, {}, None) is None
    assert predictions.predict({"over": 2}, HERE, None) is None
    assert predictions.predict({"times": 1, "as": "cuda.gone"}, HERE, NAIVE) is None


@pytest.mark.parametrize(
    ("us", "verdict"),
    [
        (67.1, "As predicted."),
        (73.0, "As predicted."),
        (134.2, "2.00 × slower than predicted."),
        (50.0, "1.34 × faster than predicted."),
    ],
)
def test_a_verdict_compares(us, verdict):
    assert predictions.predict({"bytes": 1}, HERE, None).verdict(us) == verdict


def test_ratios_are_held_more_closely():
    predicted = predictions.predict({"over": 1.05}, HERE, NAIVE)
    assert predicted.verdict(190.0) == "As predicted."
    assert predicted.verdict(200.0) == "1.05 × slower than predicted."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("byte = 1", "unknown key 'byte'; known are bytes, "),
        ("bytes = 1\nshare = 0.5", "two formulas, bytes and share; give one"),
        ("bytes = [2, 1]", r"bytes = \[2, 1\]; give a number above 0, or two that rise"),
        ("share = 0", "share = 0; give a number above 0"),
        ("times = 2", "`times` and `as` stand together"),
        ('counter = "speed"', "no counter 'speed'; known are DRAM bytes / least, "),
    ],
)
def test_a_wrong_table_is_refused_by_name(text, said, tmp_path, monkeypatch):
    (tmp_path / "predictions.toml").write_text(f'[gelu."cuda.naive"]\n{text}\n')
    monkeypatch.setattr(predictions, "FILE", tmp_path / "predictions.toml")
    with pytest.raises(predictions.PredictionError, match=rf'^predictions.toml: \[gelu."cuda.naive"\]: {said}'):
        predictions.notes.__wrapped__()


def test_every_prediction_is_of_a_rung():
    for op, rungs in predictions.notes().items():
        for rung, note in rungs.items():
            of, _, base = note.get("as", "").rpartition(" ")
            for there, each in ((op, rung), *([(of or op, base)] if base else [])):
                level, _, name = each.partition(".")
                assert there in kernel_ladder.OPS
                assert name in ladder(there, level), f'[{op}."{rung}"] names {each} of {there}, which is no rung'


def test_cards_show_counters_before_and_after_and_pass_the_check(tmp_path):
    file = tmp_path / "gpu.jsonl"
    store.replace(file, "")
    key = {"op": "gelu", "pass": "forward", "dtype": "bfloat16", "shape": SHAPE, "gpu": "GPU 1", "kernels": []}
    counted = [
        {**key, "backend": "cuda.naive", "counters": {"least_bytes": LEAST, "dram_bytes": LEAST, "registers": 16}},
        {**key, "backend": "cuda.vectorized", "counters": {"least_bytes": LEAST, "dram_bytes": LEAST, "registers": 32}},
    ]
    counters.file_beside(file).write_text("".join(json.dumps(each) + "\n" for each in counted))
    page = cards.write("gelu", file, [NAIVE, VECTORIZED])
    ((_, rung, said),) = check.faults(page)
    assert (rung, said.partition(":")[0]) == ("triton.fused", "has no counters and does not say why")
    vectorized = page[page.index("## cuda.vectorized") :]
    assert f"DRAM bytes / least 1.00 · registers 16 → 32 ({SHAPE}, since `cuda.naive`)." in vectorized
    assert "**Measured**: 68 µs, 3,948 GB/s, 0.99 of the ceiling, 2.94 × `cuda.naive`" in vectorized
    assert "**Verdict**: As predicted." in vectorized
    assert "**Measured**: not yet in the committed rows." in page[: page.index("## cuda.naive")]


def test_a_timed_backward_pass_has_counters_or_a_reason(tmp_path, monkeypatch):
    file = tmp_path / "gpu.jsonl"
    store.replace(file, "")
    key = {"op": "gelu", "backend": "cuda.naive", "dtype": "bfloat16", "shape": SHAPE, "gpu": "GPU 1", "kernels": []}
    of_forward = {"least_bytes": LEAST, "dram_bytes": LEAST, "registers": 16}
    counters.file_beside(file).write_text(json.dumps({**key, "pass": "forward", "counters": of_forward}) + "\n")
    page = cards.write("gelu", file, [NAIVE, _row("cuda.naive", 300.0, pass_="backward")])
    reason = " Backward: none, and no reason: `no_counters` in bench/show/predictions.toml."
    assert page.count(reason) == 1
    faults = {rung: said for _, rung, said in check.faults(page)}
    assert faults["cuda.naive"].startswith("times its backward pass, has no counters of it")
    note = {"no_counters": "ncu ends with an error"}
    monkeypatch.setattr(predictions, "notes", lambda: {"gelu": {"cuda.naive": note}})
    page = cards.write("gelu", file, [NAIVE, _row("cuda.naive", 300.0, pass_="backward")])
    assert " Backward: none committed yet: ncu ends with an error." in page
    assert "cuda.naive" not in {rung for _, rung, _ in check.faults(page)}


def test_the_index_has_every_rung_and_names_shapes_other_than_the_headline(tmp_path):
    file = tmp_path / "gpu.jsonl"
    store.replace(file, "")
    elsewhere = _row("triton.fused", 20.0, shape="16384x1024 tanh")
    refused = _row("compile.max_autotune", None, unsupported="out of memory")
    lines = log_index.write(file, [NAIVE, VECTORIZED, elsewhere, refused]).splitlines()[2:]
    of_gelu = lines[: sum(len(ladder("gelu", level)) for level in cards.CLIMBED)]
    cells = {line.split("|")[2].strip(): [cell.strip() for cell in line.split("|")[3:5]] for line in of_gelu}
    assert "| [gelu](docs/climb/gelu.md) 16384x4096 tanh | `triton.fused` | 20 µs (16384x1024 tanh) |" in lines[0]
    assert cells["`compile.default`"] == ["no row yet", ""]
    assert cells["`cuda.vectorized`"] == ["68 µs", "2.94"]
    assert cells["`triton.fused`"] == ["20 µs (16384x1024 tanh)", ""]
    assert cells["`compile.max_autotune`"] == ["not timed: see its card", ""]
    assert len(lines) == sum(len(ladder(op, level)) for op in kernel_ladder.OPS for level in cards.CLIMBED)


def test_cards_show_both_passes_and_name_another_gpu(tmp_path):
    file, other = tmp_path / "gpu.jsonl", tmp_path / "gpu-2.jsonl"
    key = {"op": "gelu", "dtype": "bfloat16", "shape": SHAPE, "gpu": "GPU 2", "kernels": [], "backend": "cuda.naive"}
    lines = [{**key, "pass": pass_, "counters": {"registers": n}} for pass_, n in (("forward", 16), ("backward", 24))]
    counters.file_beside(other).write_text("".join(json.dumps(each) + "\n" for each in lines))
    said = f"- **Counters**: registers 16 ({SHAPE}, GPU 2). Backward: registers 24."
    assert said in cards.write("gelu", file, [NAIVE]).splitlines()
    own = {**key, "pass": "forward", "gpu": "GPU 1", "counters": {"registers": 40}}
    counters.file_beside(file).write_text(json.dumps(own) + "\n")
    assert said in cards.write("gelu", file, [NAIVE]).splitlines(), "of the GPU with most calls"
    counters.file_beside(file).write_text(
        "".join(json.dumps({**own, "pass": p}) + "\n" for p in ("forward", "backward"))
    )
    said = f"- **Counters**: registers 40 ({SHAPE}). Backward: registers 40."
    assert said in cards.write("gelu", file, [NAIVE]).splitlines()
    naive = {**own, "backend": "cuda.naive", "counters": {"registers": 40}}
    lines = [{**naive, "pass": "forward"}, {**naive, "pass": "forward", "shape": "1x1"}]
    counters.file_beside(file).write_text("".join(json.dumps(each) + "\n" for each in lines))
    only = {**lines[0], "pass": "backward", "gpu": "GPU 2", "counters": {"registers": 24}}
    counters.file_beside(other).write_text(json.dumps(only) + "\n")
    said = f"- **Counters**: registers 40 ({SHAPE}). Backward: registers 24 (GPU 2)."
    assert said in cards.write("gelu", file, [NAIVE]).splitlines(), "what the other GPU alone has counted"


CARD = "## cuda.naive\n\n" + "\n".join(f"- **{line}**: text" for line in cards.LINES) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# gelu\n", "has no card"),
        (CARD, "has no counters and does not say why"),
        (CARD.replace("- **Verdict**: text\n", ""), "wanted are Idea, Diff, "),
        (CARD.replace("**Idea**: text", "**Idea**: "), "Idea is empty"),
        (CARD + "more\n" * 20, "29 lines; at most 25"),
    ],
)
def test_a_page_that_is_not_whole_is_refused(text, said):
    assert any(said in fault for _, _, fault in check.faults(text))


@pytest.mark.parametrize("verdict", ["8.42 × slower than predicted.", "12 × faster than predicted. Why is open: none."])
def test_a_verdict_far_off_says_why(verdict):
    reason = "**Counters**: none committed yet: the profiler has not been run on this rung."
    page = CARD.replace("**Counters**: text", reason).replace("**Verdict**: text", f"**Verdict**: {verdict}")
    ((_, _, said),) = check.faults(page)
    assert said == f"is {verdict.split()[0]} × off its prediction and does not say why; `verdict` in predictions.toml"
    assert not list(check.faults(page.replace("predicted.", "predicted. Bytes.").replace("Why is open: none.", "")))
    assert not list(check.faults(page.replace("8.42 ×", "4.9 ×").replace("12 ×", "5.0 ×")))


def test_a_reason_stands_for_counters():
    reason = "**Counters**: none committed yet: the profiler has not been run on this rung."
    assert list(check.faults(CARD.replace("**Counters**: text", reason))) == []
    assert check.LINES == cards.LINES
    assert check.COMPILERS == cards.COMPILERS
