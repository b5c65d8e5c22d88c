"""A sweep under torchrun: each rank has a GPU and a share of its own, and rank 0 joins the rows."""

from __future__ import annotations

import pytest
import torch

from bench import ranks, shares, sweep
from bench.__main__ import main
from bench.rows import store

QUICK = ["--quick", "--time", "0.02", "--no-pictures", "--no-ceilings", "--op", "gelu,add", "--backend", "torch"]


class FakeGroup:
    """The group as one of its ranks sees it, where the others say the same."""

    size = 2

    def __init__(self, device: torch.device, *timeouts: float) -> None:
        self.rank = ranks.launched().rank

    def gather(self, value):
        return [value, value]

    def agree(self, attempt):
        return attempt(), None

    def close(self) -> None: ...


class FakeBoard(ranks.Board):
    """Shares out by turns, as two ranks that go on side by side."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.place = slice(ranks.launched().rank, None, FakeGroup.size) if shared else slice(None)

    def shared_out(self, todo):
        return iter(todo[self.place])


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process the one of two that torchrun starts as a given rank."""
    monkeypatch.setattr(ranks, "Group", FakeGroup)
    monkeypatch.setattr(ranks, "Board", FakeBoard)

    def become(rank: int) -> None:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    return become


def keys(path):
    return sorted((row.op, row.backend, row.pass_, row.shape) for row in store.read(path))


@pytest.mark.usefixtures("small_sweeps")
def test_ranks_share_a_sweep_and_rank_0_joins_it(tmp_path, as_rank, capsys):
    output = tmp_path / "rows.jsonl"
    argv = [*QUICK, "--output", str(output)]
    as_rank(1)
    assert main(argv) == 0
    assert shares.parts_of(output) == [tmp_path / "rows.part-2-of-2.jsonl"]
    assert not capsys.readouterr().out
    as_rank(0)
    assert main(argv) == 0
    assert not shares.parts_of(output)
    assert "are in" in capsys.readouterr().out
    alone = tmp_path / "alone.jsonl"
    as_rank(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        assert main([*QUICK, "--output", str(alone)]) == 0
    assert keys(output) == keys(alone) != []


@pytest.mark.usefixtures("small_sweeps")
def test_what_an_interrupted_sweep_left_is_joined(tmp_path, as_rank, capsys):
    output = tmp_path / "rows.jsonl"
    as_rank(1)
    assert main([*QUICK, "--output", str(output)]) == 0
    part = shares.part_file(output, 1, 2)
    left = len(keys(part))
    with part.open("a") as file:
        file.write('{"op": "ge')  # cut short
    as_rank(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        assert main([*QUICK, "--resume", "--output", str(output)]) == 0
    assert not part.exists()
    assert len(keys(output)) > left > 0
    assert f"--resume: {left} rows and 0 ceilings" in capsys.readouterr().out


def test_a_share_by_hand_is_refused_under_torchrun(tmp_path, as_rank, capsys):
    as_rank(0)
    assert main([*QUICK, "--share", "1/2", "--output", str(tmp_path / "rows.jsonl")]) == 2
    assert "--share is for a process alone" in capsys.readouterr().err


def test_gpus_of_two_models_are_refused(tmp_path, as_rank, capsys, monkeypatch):
    monkeypatch.setattr(FakeGroup, "gather", lambda self, value: [value, "another"])
    as_rank(0)
    assert main([*QUICK, "--output", str(tmp_path / "rows.jsonl")]) == 2
    assert "every rank needs a GPU of its own, all of one model; by rank: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("visible", "local", "own"), [(None, 1, "1"), ("4,5", 1, "5"), ("4,5", 2, ""), ("GPU-abc,GPU-def", 0, "GPU-abc")]
)
def test_each_rank_sees_its_own_gpu(monkeypatch, visible, local, own):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": str(local), ranks.VISIBLE: visible}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    ranks.take_own_gpu()
    assert ranks.os.environ[ranks.VISIBLE] == own


def test_a_process_alone_keeps_all_gpus(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", ranks.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    ranks.take_own_gpu()
    assert ranks.VISIBLE not in ranks.os.environ


@pytest.mark.usefixtures("small_sweeps")
def test_the_hosts_cost_is_measured_once_however_often_a_sweep_is_resumed(tmp_path, monkeypatch):
    measured = []
    host_us = sweep.candidates.host_us

    def noted(variant, inputs, options, device, backward):
        measured.append((variant.op, variant.name, backward))
        return host_us(variant, inputs, options, device, backward)

    monkeypatch.setattr(sweep.candidates, "host_us", noted)
    output = tmp_path / "rows.jsonl"
    argv = ["--time", "0.02", "--no-pictures", "--no-ceilings", "--op", "gelu", "--backend", "torch"]
    argv += ["--output", str(output)]
    assert main(argv) == 0
    rows = store.read(output)
    assert len(measured) == len(set(measured)) < len(rows)
    store.write(output, [row for row in rows if row.shape != rows[0].shape])
    monkeypatch.setattr(sweep.candidates, "host_us", None)
    assert main([*argv, "--resume"]) == 0
    again = store.read(output)
    assert len(again) == len(rows)
    assert all(row.host_us is not None for row in again if row.us)
