"""Whole models, patched and not: what is checked, the rows that are kept, and the block of a page."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import pytest
import torch

from bench.__main__ import main
from bench.patched import rows
from bench.show import patched as shown

pytest.importorskip("transformers", reason="transformers is not installed; pip install kernel_ladder[models]")
from bench.patched import measure
from bench.patched.subjects import SUBJECTS

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds in each process


def test_a_way_is_checked_timed_and_shown(tmp_path, capsys):
    path = tmp_path / rows.FOLDER / "gpu.jsonl"
    options = ["--quick", "--model", "llama", "--mode", "eager", "--by", "plain,auto", "--out", str(path)]
    assert main(["patched", "--in-this-process", *options]) == 0
    found = rows.read(path)
    assert [(row.by, row.pass_) for row in found] == [
        (by, pass_) for by in ("plain", "auto") for pass_ in (rows.FORWARD, rows.DECODE, rows.ANEW, rows.STEP)
    ]
    timed = [row for row in found if row.unsupported is None]
    assert {row.pass_ for row in timed} >= {rows.FORWARD, rows.STEP}
    assert all(0 < row.low_us <= row.us <= row.high_us for row in timed)
    assert all((row.peak_bytes is not None) == (row.pass_ == rows.STEP and row.gpu is not None) for row in timed
               if torch.cuda.is_available())  # fmt: skip
    page = shown.write({tmp_path / "gpu.jsonl": None})
    assert page.startswith("**llama**, as TinyLlama")
    assert "| eager, plain | " in page
    assert "| eager, patched: auto | " in page


@pytest.mark.parametrize("family", SUBJECTS)
def test_every_model_is_made_and_patched(family):
    subject = SUBJECTS[family]
    model = subject.make(True, torch.float32, torch.device("cpu"))
    assert measure.wrong(subject, model, "torch", False, True) is None
    assert not any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())


def test_the_kernels_of_a_pass(tmp_path, capsys):
    path = tmp_path / "gpu.jsonl"
    options = ["--quick", "--model", "llama", "--mode", "eager", "--by", "plain", "--out", str(path)]
    assert main(["patched", "--kernels", "--in-this-process", *options]) == 0
    said = capsys.readouterr().out
    assert "llama, eager, plain: forward" in said
    assert "llama, eager, plain: training step" in said
    assert "in all: " in said
    assert not path.exists()
    assert main(["patched", "--kernels", "--pass", "decode"]) == 2
    assert "--kernels knows forward and training step" in capsys.readouterr().err


def test_a_compiled_way(monkeypatch):
    """By a compiler that generates no code: what it compiles is tested elsewhere."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    subject = SUBJECTS["llama"]
    (row,) = measure.measure(subject, "torch", True, [rows.STEP], True)
    assert (row.wrong, row.unsupported, row.compiled) == (None, None, True)
    assert row.us > 0


def test_a_wrong_patch_has_no_time(monkeypatch):
    def breaks(model, by):
        if by != rows.PLAIN:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)

    monkeypatch.setattr(measure, "patched", breaks)
    forward, step = measure.measure(SUBJECTS["llama"], "torch", False, [rows.FORWARD, rows.STEP], True)
    for row in (forward, step):
        assert row.us is None
        assert row.wrong.startswith("relative error ")


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="tests what happens without Liger")
def test_without_liger_a_row_says_so():
    (row,) = measure.measure(SUBJECTS["llama"], rows.LIGER, False, [rows.FORWARD], True)
    assert "liger_kernel" in row.unsupported
    assert row.us is None


def test_lines_compare_with_the_plain_model_of_their_mode():
    plain = measure.row_of(SUBJECTS["llama"], rows.PLAIN, False, rows.STEP, torch.bfloat16, False)
    plain = dataclasses.replace(plain, us=2000.0, tokens_per_s=1.0, peak_bytes=3 << 30, first_s=1.25)
    half = dataclasses.replace(plain, by="cuda", us=1000.0, peak_bytes=1 << 30)
    compiled = dataclasses.replace(half, compiled=True, later_peak_bytes=(1 << 30) * 3 // 4)
    bad = dataclasses.replace(plain, by="triton", us=None, wrong="NaN", peak_bytes=None, first_s=None)
    decoded = dataclasses.replace(plain, pass_=rows.DECODE, tokens_per_s=250.0)
    absent = dataclasses.replace(bad, by="liger", wrong=None, unsupported="ValueError: Liger does not know it")
    absent = [absent, dataclasses.replace(absent, pass_=rows.FORWARD)]
    assert shown.lines_of([half, compiled, bad, plain, decoded, *absent]) == [
        ["eager, plain", "–", "2 ms", "3.0 GiB", "250", "1.2 s"],
        ["eager, patched: cuda", "–", "1 ms (2.00 ×)", "1.0 GiB", "–", "1.2 s"],
        ["eager, patched: triton", "–", "wrong: NaN", "–", "–", "–"],
        ["eager, patched: liger (Liger does not know it)", "–", "–", "–", "–", "–"],
        ["compiled, patched: cuda", "–", "1 ms", "1.0 GiB, later 0.8", "–", "1.2 s"],
    ]


def test_decoding_at_new_lengths_has_a_column():
    plain = measure.row_of(SUBJECTS["llama"], rows.PLAIN, False, rows.DECODE, torch.bfloat16, False)
    plain = dataclasses.replace(plain, us=4000.0, tokens_per_s=250.0)
    anew = dataclasses.replace(plain, pass_=rows.ANEW, us=40000.0, tokens_per_s=25.0)
    ours = dataclasses.replace(anew, by="auto", us=5000.0, tokens_per_s=200.0)
    assert shown.header_of([plain])[-2:] == ["decoding, tokens/s", "first step"]
    assert shown.header_of([plain, anew])[-3:] == ["decoding, tokens/s", "at new lengths", "first step"]
    assert shown.lines_of([plain, anew, ours]) == [
        ["eager, plain", "–", "–", "–", "250", "25", "–"],
        ["eager, patched: auto", "–", "–", "–", "–", "200 (8.00 ×)", "–"],
    ]


def test_a_row_replaces_an_older_one(tmp_path):
    row = measure.row_of(SUBJECTS["bert"], rows.PLAIN, False, rows.FORWARD, torch.bfloat16, True)
    rows.save(tmp_path / "a.jsonl", [row])
    rows.save(tmp_path / "a.jsonl", [dataclasses.replace(row, us=1.0), dataclasses.replace(row, compiled=True)])
    assert [(each.us, each.compiled) for each in rows.read(tmp_path / "a.jsonl")] == [(1.0, False), (None, True)]
    (tmp_path / "b.jsonl").write_text('{"model": "llama"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:1: not a row of a patched model"):
        rows.read(tmp_path / "b.jsonl")


@pytest.mark.parametrize("option", ["--model", "--by", "--mode", "--pass"])
def test_a_wrong_name_is_a_sentence(option, capsys):
    assert main(["patched", option, "lama"]) == 2
    assert "known are " in capsys.readouterr().err.lower()
