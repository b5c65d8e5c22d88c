"""Commands that share the GPUs of a machine: files of jobs, what is left at the end of the time, cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bench import jobs
from bench.__main__ import _selection, _sweep_parser
from bench.jobs import Job
from bench.measure.environment import ROOT

from ..conftest import needs_extension


def run(of: list[Job], tmp_path, seconds: float | None = None, gpus=(None, None)) -> jobs.Queue:
    return jobs.run(of, gpus, tmp_path / "logs", seconds)


def test_each_job_runs_once_and_a_failure_stops_no_other(tmp_path, capsys):
    codes = [0, 0, 3, 0, 0]
    queue = run([Job(f"job-{i}", f"echo said {i}; exit {code}") for i, code in enumerate(codes)], tmp_path)
    assert (queue.failed, queue.left) == (["job-2"], [])
    assert [(tmp_path / "logs" / f"job-{i}.log").read_text() for i in range(5)] == [f"said {i}\n" for i in range(5)]
    printed = sorted(line.split(",")[0] for line in capsys.readouterr().out.splitlines())
    assert printed == [f"job-{i}: exit code {code}" for i, code in enumerate(codes)]


def test_a_job_sees_its_gpu_alone(tmp_path):
    run(
        [Job("a", "echo $CUDA_VISIBLE_DEVICES; sleep 1"), Job("b", "echo $CUDA_VISIBLE_DEVICES")],
        tmp_path,
        gpus=("4", "7"),
    )
    assert {(tmp_path / "logs" / f"{name}.log").read_text() for name in "ab"} == {"4\n", "7\n"}


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler], ids=["background", "terminal"])
def test_at_the_end_of_the_time_jobs_are_interrupted_and_left(handler, tmp_path, monkeypatch):
    """One that writes what it holds, one that hears of nothing, and one that has not begun."""
    monkeypatch.setattr(jobs, "GRACE_S", 0.5)
    before = signal.signal(signal.SIGINT, handler)
    saves = "trap 'echo saved; exit 1' INT; while :; do sleep 0.1; done"
    each = [Job("saves", saves), Job("deaf", "trap '' INT; sleep 60; sleep 60"), Job("later", "true")]
    try:
        queue = run(each, tmp_path, seconds=1.5)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(job.name for job in queue.left) == ["deaf", "later", "saves"]
    assert queue.failed == []
    assert (tmp_path / "logs" / "saves.log").read_text() == "saved\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: true\nb true\n", r":2: a job is `name: command`"),
        ("a: true\n\n# of the same name\na: false\n", r":4: there are two jobs 'a'"),
        ("a/b: true\n", "a name of letters, digits"),
    ],
)
def test_a_file_that_is_no_good(text, said, tmp_path, capsys):
    file = tmp_path / "jobs"
    file.write_text(text)
    with pytest.raises(jobs.UsageError, match=said):
        jobs.read(file)
    assert jobs.main([str(file)]) == 2
    assert jobs.main([str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err


def test_no_job_begins_without_a_level_that_is_required(tmp_path):
    """In a process of its own: what a level lacks is found out once."""
    file, ran = tmp_path / "night", tmp_path / "ran"
    file.write_text(f"only: touch {ran}\n")
    environment = {**os.environ, "KERNEL_LADDER_REQUIRE": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.jobs", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "KERNEL_LADDER_REQUIRE names cuda, which is unavailable: " in done.stderr
    assert not ran.exists()


def test_what_is_left_is_another_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs.environment, "MEASURED", tmp_path)
    monkeypatch.setattr(jobs.torch.cuda, "device_count", lambda: 0)
    file = tmp_path / "night"
    file.write_text("first: sleep 60\nsecond: true\n")
    assert jobs.main([str(file), "--seconds", "0.5"]) == 0
    left = tmp_path / "night.left"
    assert jobs.read(left) == jobs.read(file)
    left.write_text("second: exit 4\n")
    assert jobs.main([str(left)]) == 1
    assert "failed: second" in capsys.readouterr().err
    assert jobs.main([str(file), "--gpus", "0"]) == 2
    assert "--gpus names 0; visible are none" in capsys.readouterr().err


@needs_extension
def test_what_is_open_is_a_file_of_jobs_with_commands_of_the_bench():
    of = jobs.read(ROOT / "bench" / "open.jobs")
    assert of
    for job in of:
        words = job.command.split()
        words = words[words.index("python") :]
        assert words[:2] == ["python", "-m"]
        assert words[2] in ("bench", "bench.attention_backward", "pytest")
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
        if words[2:4] == ["bench", "--op"]:
            _selection(_sweep_parser().parse_args(words[3:]))


def test_cores_are_shared_out():
    assert jobs.shares(range(8), 3) == [{0, 1}, {2, 3}, {4, 5}]
    assert jobs.shares([5], 2) == [{5}, {5}]
