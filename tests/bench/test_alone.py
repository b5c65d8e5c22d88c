"""Jobs of one GPU: while one measures, the others are stopped, and each knows for how long it was."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time

import pytest

from bench import jobs
from bench.jobs import Job
from bench.measure import alone, phases
from bench.measure.selection import Selection
from bench.sweep import Sweep

#: Works for a while, with a note of the time each few milliseconds; in the middle it measures alone.
WORKER = """
import json, os, pathlib, signal, sys, time
import torch
from bench.measure.alone import ENV_FOLDER, Stopped, alone

folder = pathlib.Path(os.environ[ENV_FOLDER])
(folder / f"ready-{os.getpid()}").touch()
while len([*folder.glob("ready-*")]) < int(sys.argv[1]):
    time.sleep(0.01)
began, stopped, ticks = time.monotonic(), Stopped(), []
while time.monotonic() < began + 0.5 or not ticks:
    ticks.append(time.monotonic())
    time.sleep(0.002)
with alone(torch.device("cpu")):
    with alone(torch.device("cpu")):  # within itself it waits for nobody
        inside = [time.monotonic()]
    time.sleep(0.3)
    inside.append(time.monotonic())
    if "dies" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
while time.monotonic() < began + 2.6:
    ticks.append(time.monotonic())
    time.sleep(0.002)
print(json.dumps({"ticks": ticks, "inside": inside, "stopped": stopped.seconds}))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)

    def run(*arguments: str, **kwargs) -> tuple[jobs.Queue, list[dict]]:
        command = f"PYTHONPATH=. {sys.executable} {tmp_path / 'worker.py'}"
        of = [Job(f"job-{i}", f"{command} {len(arguments)} {argument}") for i, argument in enumerate(arguments)]
        queue = jobs.run(of, (None,), tmp_path / "logs", **{"seconds": None, "together": len(of), **kwargs})
        logs = [(tmp_path / "logs" / f"{job.name}.log").read_text() for job in of]
        return queue, [json.loads(log) for log in logs if log.startswith("{")]

    return run


def test_while_one_measures_the_others_are_stopped(run):
    queue, found = run("", "", "")
    assert (queue.failed, queue.left, len(found)) == ([], [], 3)
    for measured in found:
        begin, end = measured["inside"]
        for other in (one for one in found if one is not measured):
            assert not [tick for tick in other["ticks"] if begin < tick < end]
            assert other["ticks"][-1] > end
    for one in found:
        expected = sum(end - begin for begin, end in (other["inside"] for other in found if other is not one))
        assert one["stopped"] == pytest.approx(expected, abs=0.2)


#: Measures again and again, with hardly a pause between.
GREEDY = """
import os, pathlib, sys, time
from bench.measure.alone import ENV_FOLDER, Folder

folder = Folder(pathlib.Path(os.environ[ENV_FOLDER]))
(folder.path / f"ready-{os.getpid()}").touch()
while len([*folder.path.glob("ready-*")]) < 3:
    time.sleep(0.01)
for _ in range(20):
    with folder.lock():
        with (folder.path / "turns").open("a") as file:
            print(os.getpid(), file=file)
        time.sleep(0.03)
"""


def test_none_measures_twice_while_another_waits(tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    environment = {**os.environ, "PYTHONPATH": ".", alone.ENV_FOLDER: str(tmp_path / "gpu")}
    workers = [subprocess.Popen([sys.executable, tmp_path / "greedy.py"], env=environment) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    turns = (tmp_path / "gpu" / "turns").read_text().split()
    assert len(turns) == 60
    all_wait = turns[5 : 3 * 12]  # at first some may not have come yet, at last some have gone
    assert [one for one, after in itertools.pairwise(all_wait) if one == after] == []


@pytest.mark.parametrize("busy", [False, True])
def test_it_waits_until_the_gpu_is_quiet(busy, monkeypatch):
    """Where another's kernels never end it says so, and measures all the same."""
    import torch

    monkeypatch.setattr(alone, "PATIENCE_S", 0.05)
    monkeypatch.setattr(alone.torch, "zeros", lambda *x, **k: torch.ones(1))
    monkeypatch.setattr(alone.timing, "wall", lambda call, device: (1e-3 if busy else 1e-5, None))
    with pytest.warns(UserWarning, match="still works for others") if busy else contextlib.nullcontext():
        alone._wait_until_quiet(torch.device("cuda"))


def test_one_that_dies_while_it_measures_leaves_no_other_stopped(run):
    queue, found = run("dies", "")
    assert queue.failed == ["job-0"]
    assert len(found) == 1


def test_jobs_that_are_stopped_end_with_the_time(run):
    begin = time.monotonic()
    queue, found = run("", "", "", seconds=2.0)
    assert {job.name for job in queue.left} == {"job-0", "job-1", "job-2"}
    assert found == []
    assert time.monotonic() - begin < 2.0 + 2 * jobs.GRACE_S


def test_jobs_share_the_part_of_the_memory_that_jax_may_take(tmp_path, monkeypatch):
    """It keeps what it has taken, so that several would leave nothing to PyTorch."""
    for name in jobs.environment.JAX_MEMORY:
        monkeypatch.delenv(name, raising=False)
    of = [Job(name, "echo $XLA_CLIENT_MEM_FRACTION") for name in "ab"]
    for together, said in ((1, ""), (2, "0.200")):
        jobs.run(of, (None,), tmp_path / str(together), None, together)
        assert {(tmp_path / str(together) / f"{name}.log").read_text().strip() for name in "ab"} == {said}


def test_a_sweep_of_its_own_gpu_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.delenv(alone.ENV_FOLDER, raising=False)
    with alone.alone(pytest.importorskip("torch").device("cpu")):
        pass
    assert alone.Stopped().seconds == 0.0


@pytest.mark.usefixtures("small_sweeps")
def test_a_sweep_measures_alone(tmp_path, monkeypatch):
    """Its rounds and what it estimates them by, and first calls at levels that time candidates of their own."""
    import torch

    from bench.measure.selection import groups

    held: list[bool] = []
    monkeypatch.setenv(alone.ENV_FOLDER, str(tmp_path))
    for name in ("settle", "prepare", "interleave"):
        was = getattr(alone.timing, name)
        monkeypatch.setattr(
            alone.timing, name, lambda *x, was=was, **k: (held.append(alone._depth == 1), was(*x, **k))[1]
        )
    cpu = torch.device("cpu")
    selection = Selection(ops=["add"], backends=["torch"], passes=["forward"], quick=True, seconds=0.01)
    sweep = Sweep(selection, lambda row: None, cpu)
    sweep.measure(groups(selection, cpu)[0])
    assert held
    assert all(held)
    assert sweep.phases.seconds[phases.WAIT] > 0
    assert alone._depth == 0


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("shared", [False, True])
def test_what_finds_no_memory_beside_other_jobs_has_no_row(shared, tmp_path, monkeypatch):
    """Another job may have the memory: only a run with the GPU for itself can say that the call needs too much."""
    import torch

    from bench.measure.selection import groups

    if shared:
        monkeypatch.setenv(alone.ENV_FOLDER, str(tmp_path))
    cpu, rows = torch.device("cpu"), []
    selection = Selection(ops=["add"], backends=["torch"], passes=["forward"], quick=True, seconds=0.01)
    sweep = Sweep(selection, rows.append, cpu)

    def refuse(*x, **k):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("bench.measure.correctness.Expected.of", refuse)
    group = groups(selection, cpu)[0]
    sweep.measure(group)
    assert sweep.postponed == len(sweep.chosen(group)) * shared
    assert len(rows) == len(sweep.chosen(group)) * (not shared)
    assert all("no memory is left" in row.unsupported for row in rows)
