"""A fork of a process that has imported torch ends, says and sees what a process of its own would."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..processes import ROOT, run_python

#: Programs that need no torch, so that a process of their own costs little.
PROGRAMS = [
    "print('said'); import sys; print('told', file=sys.stderr)",
    "import sys; sys.exit(3)",
    "raise SystemExit('a sentence')",
    "raise ValueError('why')",
    "import os; print(os.environ['KERNEL_LADDER_ANY'], sorted(os.environ) == sorted(set(os.environ)), os.getcwd())",
    "import sys; print(sys.argv, sys.path[0], __name__, sys.stdin.read(), sys.stdout.isatty())",
    "import atexit, threading, time; atexit.register(print, 'end'); threading.Thread(target=lambda: time.sleep(0.1)"
    " or print('thread')).start()",
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_fork_is_as_a_process_of_its_own(code, tmp_path):
    env = {**os.environ, "KERNEL_LADDER_ANY": "this"}
    own = subprocess.run(
        [sys.executable, "-c", code, "more"],
        env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    fork = run_python(["-c", code, "more"], env, tmp_path)
    assert (fork.returncode, fork.stdout) == (own.returncode, own.stdout)
    assert fork.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]  # of a traceback, not the frames above it


def test_a_fork_has_torch_and_nothing_of_this_project():
    code = "import sys; print('torch' in sys.modules, [n for n in ('kernel_ladder', 'triton') if n in sys.modules])"
    assert run_python(["-c", code]).stdout == "True []\n"


def test_a_signal_ends_a_fork_and_not_the_next():
    assert run_python(["-c", "import os; os.abort()"]).returncode == -6
    assert run_python(["-m", "this"], cwd=ROOT).stdout.startswith("The Zen of Python")
    with pytest.raises(ValueError, match=r"must begin with '-c' or '-m', got 'x\.py'"):
        run_python(["x.py"])
