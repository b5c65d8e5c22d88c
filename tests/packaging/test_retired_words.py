"""`_build/retired_words.py` finds home-made words where they are refused, and nowhere else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("retired_words", ROOT / "_build" / "retired_words.py")
retired_words = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(retired_words)


def _words(file: str, text: str) -> list[tuple[int, str]]:
    return [(found.line, found.word) for found in retired_words.check(file, text)]


def test_a_finding_names_place_and_term(capsys, monkeypatch, tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "new.cu").write_text("// A row.\nLetterbox box;\n")
    monkeypatch.setattr(retired_words, "ROOT", tmp_path)
    assert retired_words.main(["csrc/new.cu"]) == 1
    assert capsys.readouterr().out == f"csrc/new.cu:2: letterbox: use {retired_words.REDUCE_SMEM}\n"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("bench/a.py", '"""A mailbox of two crews."""\n', [(1, "crews"), (1, "mailbox")]),
        ("bench/a.py", "def begin_early(): ...\n", [(1, "begin_early")]),
        ("csrc/a.cuh", "/* each\n   TEAM */ norm_team<T>();\n", [(2, "team")]),
        ("csrc/a.cu", "struct StayingMail {};\n", [(1, "staying")]),
        ("csrc/a.cu", "int is_early_launch, own_turn;\n", [(1, "is_early_launch"), (1, "own_turn")]),
        ("csrc/a.cu", 'f("x"); load<ONCE>(); once(p);\n', [(1, "ONCE"), (1, "once")]),
        ("triton_impl/a.py", "def kernel(slots, HELD): ...\n", [(1, "HELD"), (1, "slots")]),
    ],
)
def test_refused(file, text, words):
    assert _words(file, text) == words


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("csrc/a.cu", '#pragma once\n// Once, in turn, early; slots hide letters.\nf("together");\n'),
        ("triton_impl/a.py", '"""Loads issue early and hide latency."""\nx = "turn"  # once\n'),
        ("kernel_ladder/a.py", "early = once = slots = RESIDUAL = 1\n"),
        ("csrc/a.cu", "int steamship, steam, returns, secret_screws;\n"),
    ],
)
def test_english_is_taken(file, text):
    assert _words(file, text) == []


def test_the_source_holds_none(capsys):
    assert retired_words.main([]) == 0, capsys.readouterr().out
