"""An interrupted sweep keeps its rows, and ``--resume`` goes on from there; what a file cut short comes to."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from bench import sweep
from bench.__main__ import main
from bench.measure import clocks, environment, intervals
from bench.rows import resume, store

from ..conftest import DEVICE, SWEEP_BYTES, a_row, needs_gpu

QUICK = ["--quick", "--time", "0.02", "--no-pictures", "--no-ceilings"]


def run_sweep(path: Path, *argv: str) -> int:
    return main(["--op", "gelu,softmax", "--backend", "torch", *QUICK, "--output", str(path), *argv])


@pytest.fixture
def known_source(monkeypatch):
    """A commit without changes, whatever the state of the files here."""
    facts = {**environment.facts(), "commit": "c0ffee", "dirty": False}
    monkeypatch.setattr(environment, "facts", lambda: facts)
    return facts


@pytest.fixture
def interrupted(monkeypatch, tmp_path, known_source, small_sweeps):
    """The rows of a sweep that was interrupted after gelu's."""
    path = tmp_path / "rows.jsonl"
    measure = sweep.Sweep.measure

    def stop_at_softmax(self, group):
        if group.op == "softmax":
            raise KeyboardInterrupt
        measure(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(sweep.Sweep, "measure", stop_at_softmax)
        assert run_sweep(path) == 130
    return path


def test_resume_goes_on_where_the_sweep_was_interrupted(interrupted, capsys):
    before = store.read(interrupted)
    assert {row.op for row in before} == {"gelu"}
    assert run_sweep(interrupted, "--resume") == 0
    out = capsys.readouterr().out
    assert f"--resume: {len(before)} rows and 0 ceilings in {interrupted} stand and are skipped" in out
    after = store.read(interrupted)
    assert {row.op for row in after} == {"gelu", "softmax"}
    assert [row for row in after if row.op == "gelu"] == before
    assert run_sweep(interrupted, "--resume") == 0
    assert store.read(interrupted) == after, "nothing is left to do"


def test_resume_measures_a_missing_variant_beside_the_baseline(interrupted):
    lines = [row for row in store.read(interrupted) if (row.backend, row.pass_) != ("torch.naive", "backward")]
    store.write(interrupted, lines)
    before = {row.key: row.when for row in lines}
    assert main(["--op", "gelu", "--backend", "torch", *QUICK, "--output", str(interrupted), "--resume"]) == 0
    changed = {(row.backend, row.pass_) for row in store.read(interrupted) if before.get(row.key) != row.when}
    assert changed == {("torch.naive", "backward"), ("torch.builtin", "backward")}


@pytest.mark.parametrize("changed", [{"commit": "decaf"}, {"torch": "1.0"}, {"dirty": True}])
def test_resume_takes_no_row_of_another_source_or_software(interrupted, known_source, changed, capsys):
    known_source.update(changed)
    when = {row.key: row.when for row in store.read(interrupted)}
    assert main(["--op", "gelu", "--backend", "torch", *QUICK, "--output", str(interrupted), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "--resume: 0 rows" in out
    assert ("nobody knows" in out) == (changed == {"dirty": True})
    assert all(row.when > when[row.key] for row in store.read(interrupted))


def test_resume_reports_what_was_wrong_before(interrupted, capsys):
    found = store.read(interrupted)
    found[0].wrong, found[0].us = "largest deviation 1", None
    store.write(interrupted, found)
    assert run_sweep(interrupted, "--resume") == 1
    assert "WRONG: gelu" in capsys.readouterr().err


def test_a_peer_s_row_stands_for_one_version_of_its_library(monkeypatch):
    facts = dict.fromkeys(resume.SAME)
    peer = a_row(backend="peer.liger", level="peer", gpu=None, peer_version=None, unsupported="not installed")
    mine = a_row(gpu=None)
    for installed, expected in ((None, 2), ("0.8.5", 1)):
        monkeypatch.setattr(resume.peers, "version", lambda backend, installed=installed: installed)
        assert len(resume.standing([peer, mine], facts)) == expected


def test_this_run_s_rows_supersede_those_of_a_clock_that_was_ahead(interrupted):
    found = store.read(interrupted)
    for row in found:
        row.when, row.us = "2999-01-01T00:00:00+00:00", 1.0
    store.write(interrupted, found)
    assert main(["--op", "gelu", "--backend", "torch", *QUICK, "--output", str(interrupted)]) == 0
    after = store.read(interrupted)
    assert {row.key for row in after} == {row.key for row in found}
    assert not any(row.when.startswith("2999") for row in after)


def test_two_sweeps_do_not_write_one_file(interrupted, capsys):
    before = interrupted.read_bytes()
    with store.writing(interrupted):
        assert run_sweep(interrupted, "--resume") == 2
        assert main(["merge", str(interrupted), "--into", str(interrupted)]) == 2
    assert "another process is writing to it; give this one an --output of its own" in capsys.readouterr().err
    assert interrupted.read_bytes() == before
    with store.writing(interrupted), store.writing(interrupted.with_name("other.jsonl")):
        pass


def test_what_resume_says_of_an_unknown_source():
    facts = dict.fromkeys(resume.SAME)
    assert "the commit is unknown here" in resume.report({}, facts, "rows.jsonl")
    assert "whether files differ" in resume.report({}, {**facts, "commit": "c0ffee"}, "rows.jsonl")
    clean = resume.report({}, {**facts, "commit": "c0ffee", "dirty": False}, "rows.jsonl")
    assert clean == "--resume: 0 rows and 0 ceilings in rows.jsonl stand and are skipped"


def test_resume_drops_a_line_that_was_cut_short(interrupted, capsys):
    whole = interrupted.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    interrupted.write_bytes(whole[:-20])
    assert run_sweep(interrupted) == 2
    assert "a sweep with --resume drops a last line that was cut short" in capsys.readouterr().err
    assert interrupted.read_bytes() == whole[:-20]
    assert run_sweep(interrupted, "--resume") == 0
    assert f"dropped the last line, a row whose writing was cut short after {len(last) - 20} bytes" in (
        capsys.readouterr().out.replace("\n", " ")
    )
    measured = {row.key for row in store.read(interrupted)}
    assert {store.from_json(line, "").key for line in whole.decode().splitlines()} <= measured


def test_only_an_unfinished_last_row_is_repaired(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert store.drop_unfinished(path) is None
    for row in (a_row(unsupported="µ"), a_row(backend="torch.builtin")):
        store.append(path, row)
    whole = path.read_bytes()
    assert store.drop_unfinished(path) is None
    path.write_bytes(whole[:-1])
    assert "gave it one" in store.drop_unfinished(path)
    assert path.read_bytes() == whole
    first = whole.splitlines(keepends=True)[0]
    path.write_bytes(first + first[: first.index("µ".encode()) + 1])  # cut within a character
    with pytest.raises(store.ResultsError, match=r"rows\.jsonl:2: not UTF-8"):
        store.read(path)
    assert "dropped" in store.drop_unfinished(path)
    assert path.read_bytes() == first


def test_a_row_that_is_written_in_part_is_undone(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    store.append(path, a_row())
    write = os.write
    for room in (0, 1, 20):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, line, room=room: write(file, line[:room]))
            with pytest.raises(OSError, match=f"only {room} of the .* bytes of a row could be written"):
                store.append(path, a_row(backend="torch.builtin"))
        assert store.read(path) == [a_row()]
    store.append(path, a_row(backend="torch.builtin"))
    assert len(store.read(path)) == 2


@pytest.mark.parametrize(
    "content", ["a diary\nof mine", 'a diary\n{"op": "ge', '{"kernel": "sax', '{"op": "gelu"}\n{"op']
)
def test_a_foreign_file_is_not_repaired(content, tmp_path, capsys):
    path = tmp_path / "diary.txt"
    path.write_text(content)
    with pytest.raises(store.ResultsError, match=r"diary\.txt:\d"):
        store.drop_unfinished(path)
    assert run_sweep(path, "--resume") == 2
    assert path.read_text() == content


def test_rows_have_intervals(interrupted):
    for line in map(json.loads, interrupted.read_text().splitlines()):
        if line["rounds"] is not None and line["rounds"] >= intervals.LEAST_VALUES:
            assert line["us_low"] <= line["us"] <= line["us_high"]
            assert line["speedup_low"] <= line["speedup"] <= line["speedup_high"]
        assert DEVICE.type == "cuda" or line["clock_mhz"] is None


@needs_gpu
def test_rows_of_a_gpu_have_clocks_and_graphs(tmp_path, gpu_memory):
    """At the sweep's real sizes: tiny ones are over before a clock is read."""
    gpu_memory(SWEEP_BYTES)
    source, reason = clocks.gpu(DEVICE)
    path = tmp_path / "rows.jsonl"
    assert main(["--op", "gelu", "--backend", "torch", *QUICK, "--output", str(path)]) == 0
    found = store.read(path)
    assert all(row.graph for row in found)
    assert source is None or any((row.clock_mhz or 0) > 100 for row in found), reason


def test_no_lock_is_left_and_a_removed_one_holds_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    with store.writing(rows):
        (lock,) = tmp_path.glob("*.lock")
        waiting = lock.open("w")  # as a process that has opened the lock, and takes it once it is free
        with pytest.raises(store.ResultsError, match="another process is writing"), store.writing(rows):
            pass
    assert not list(tmp_path.glob("*.lock"))
    fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with store.writing(rows):
        assert not store._is_at(waiting, lock)
    waiting.close()
