"""The check of attention's backward kernels: which cases it runs, and that a case which never ends does not stop it."""

from __future__ import annotations

import sys

import pytest
import torch

from bench import attention_backward as script

#: Reads cases and reports them: wrong with an odd number of queries, and without an end with two of them.
WORKER = """
import json, sys, time
cases = json.load(sys.stdin)
print(json.dumps("ready"), flush=True)
for case in cases:
    if case["seqlen_q"] == 2:
        time.sleep(60)
    wrong = "odd" if case["seqlen_q"] % 2 else None
    print(json.dumps({"wrong": wrong, "over": case["seqlen_q"] == 5}), flush=True)
"""


def check(seqlen_q: int) -> script.Check:
    return script.Check("wgmma", seqlen_q, 4, 64, 64, 1, 1, "full", "bfloat16")


def test_a_case_that_never_ends_is_ended(capsys):
    failed = script.watched([check(n) for n in (4, 2, 3, 5, 6)], (sys.executable, "-c", WORKER), 1)
    assert [(case.seqlen_q, why) for case, why in failed] == [(2, "no result in 1 s"), (3, "odd"), (5, "odd")]
    assert "Q2 K4 D64/64 full bfloat16 agree: no result in 1 s" in capsys.readouterr().out


def test_cases_are_all_different_and_begin_with_a_plain_one():
    cases = list(script.checks(script.RUNGS))
    assert len(set(cases)) == len(cases)
    assert cases[0].band == "full"
    assert {case.asks for case in cases} == {"agree", "lse", "expanded", "repeat", "unordered"}


def test_operations_count_both_head_dimensions():
    wide = script.Shape(2, 16, 4, 8, 192, 128, True)
    assert wide.name == "B2 H16/4 S8 D192/128 causal"
    assert wide.flop == 2 * (2 * 16 * 8 * 8 / 2) * (192 + 192 + 192 + 128 + 128)
    assert len({shape.name for shape in script.SHAPES}) == len(script.SHAPES)


def test_sums_in_any_order_are_refused_where_determinism_is_asked_for():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="`ordered` is False, a sum in any order"):
            script.backward_of("warp_specialized", (), torch.zeros(1), ordered=False)
    finally:
        torch.use_deterministic_algorithms(False)
