"""The arguments of ``python -m bench.sanitize``, what it says of a tool's exit code, and of a tool that is absent."""

from __future__ import annotations

import sys

import pytest

import kernel_ladder
from bench import sanitize


def test_choosing():
    given = ["--op", "attention,attention_varlen", "--tool", "racecheck", "--seconds", "9"]
    chosen = sanitize.parser().parse_args(given)
    assert (chosen.op, chosen.tool, chosen.seconds) == (["attention", "attention_varlen"], ["racecheck"], 9)
    everything = sanitize.parser().parse_args([])
    assert (everything.op, everything.tool) == (list(kernel_ladder.OPS), list(sanitize.TOOLS))


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
