"""The arguments of ``python -m bench.sanitize``, what it says of a tool's exit code, and of a tool that is absent."""

from __future__ import annotations

import sys

import pytest
import torch

import kernel_ladder
from bench import sanitize


def test_choosing():
    given = ["--op", "attention,attention_varlen", "--tool", "racecheck", "--seconds", "9"]
    chosen = sanitize.parser().parse_args(given)
    assert (chosen.op, chosen.tool, chosen.seconds) == (["attention", "attention_varlen"], ["racecheck"], 9)
    everything = sanitize.parser().parse_args([])
    assert (everything.op, everything.tool) == (list(kernel_ladder.OPS), list(sanitize.TOOLS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_operands_end_with_a_word(dtype):
    for x in (torch.arange(65 * 129).view(65, 129).to(dtype), torch.arange(70).to(dtype)[3:].view(67)[::2]):
        moved = sanitize.in_whole_words(x)
        assert torch.equal(moved, x)
        assert (moved.stride(), moved.storage_offset()) == (x.stride(), x.storage_offset())
        assert moved.untyped_storage().nbytes() % sanitize.WORD == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--op", "atention"], "argument --op: unknown 'atention'; accepted are "),
        (["--tool", "memchek"], "argument --tool: unknown 'memchek'; accepted are memcheck, racecheck"),
        (["--seconds", "0"], "argument --seconds: must be a positive number of seconds, got '0'"),
        (["--seconds", "soon"], "must be a positive number of seconds, got 'soon'"),
    ],
)
def test_bad_arguments(capsys, given, message):
    with pytest.raises(SystemExit) as ended:
        sanitize.main(given)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_absent_tool_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.main(["--op", "attention"]) == 2
    assert "no compute-sanitizer on the path or in CUDA_HOME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("print('fine')", "clean"),
        (f"raise SystemExit({sanitize.FOUND})", "FOUND"),
        ("raise SystemExit(1)", "failed with exit code 1"),
    ],
)
def test_exit_codes(program, result):
    assert sanitize.outcome([sys.executable, "-S", "-c", program], 20)[0] == result


def test_a_time_limit():
    program = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    assert sanitize.outcome(program, 0.2)[0] == "no result in 0.2 s"
