"""A sweep in shares, and files of rows joined."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernel_ladder
from bench.__main__ import main
from bench.measure.selection import Group, Selection, groups
from bench.rows import store
from bench.rows.store import Row

QUICK = ["--quick", "--time", "0.02", "--no-pictures", "--no-ceilings"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_shares_are_the_whole_and_alike(parts, device):
    def share(part: int, of: int) -> list[Group]:
        return groups(Selection(list(kernel_ladder.OPS), share=(part, of)), torch.device(device))

    whole = share(1, 1)
    shares = [share(part, parts) for part in range(1, parts + 1)]
    assert sorted(str(group) for part in shares for group in part) == sorted(map(str, whole))
    sizes = [len({(group.op, group.case.id) for group in part}) for part in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "1/0", "1/2/3", "half"])
def test_a_share_that_is_none(share, capsys, tmp_path):
    assert main(["--share", share, "--output", str(tmp_path / "rows.jsonl")]) == 2
    assert f"--share must be I/N with 1 <= I <= N, such as 1/2 and 2/2 for two GPUs, got '{share}'" in (
        capsys.readouterr().err
    )


def test_a_share_without_a_case_says_so(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch", *QUICK, "--output", str(path)]
    assert main([*argv, "--share", "5/5"]) == 0
    assert "share 5/5 holds no case to measure" in capsys.readouterr().out
    assert not path.exists()


@pytest.mark.usefixtures("small_sweeps")
def test_shares_of_a_sweep_join_to_the_whole(tmp_path):
    argv = ["--op", "gelu,softmax", "--backend", "torch", *QUICK, "--output"]
    shares = [tmp_path / f"{part}.jsonl" for part in (1, 2)]
    for part, path in enumerate(shares, 1):
        assert main([*argv, str(path), "--share", f"{part}/2"]) == 0
    whole = tmp_path / "whole.jsonl"
    assert main(["merge", *map(str, shares), "--into", str(tmp_path / "joined.jsonl")]) == 0
    assert main([*argv, str(whole)]) == 0
    joined = store.read(tmp_path / "joined.jsonl")
    assert [row.key for row in joined] == [row.key for row in store.read(whole)]
    assert {row.when for row in joined} == {row.when for path in shares for row in store.read(path)}


def _row(**fields) -> Row:
    known = {"op": "matmul", "backend": "torch.builtin", "level": "torch", "pass_": "forward", "dtype": "bfloat16"}
    measured = {
        "us": 1.0,
        "us_q1": 1.0,
        "us_q3": 1.0,
        "gbs": 0.001,
        "bytes": 1,
        "flops": 10**6,
        "tflops": 1.0,
        "ceiling_gbs": 1e9,
        "ceiling_tflops": 2.0,
    }
    known |= {"shape": "8x8x8", "gpu": "here", "commit": "c0ffee", "when": "2026-01-01T00:00:00+00:00"}
    return Row(**{**known, **measured, **fields})


def test_newer_rows_win_and_others_stay(tmp_path, capsys):
    into, path = tmp_path / "into.jsonl", tmp_path / "rows.jsonl"
    stays = _row(shape="another", commit="decaf")
    store.write(into, [_row(us=3.0), stays, _row(dtype="float16", us=4.0, when="2026-01-03")])
    store.write(path, [_row(us=2.0, when="2026-01-02"), _row(dtype="float16", us=5.0, when="2026-01-02")])
    assert main(["merge", str(path), "--into", str(into)]) == 0
    assert "1 of 2 rows are new" in capsys.readouterr().out
    found = {(row.shape, row.dtype): row for row in store.read(into)}
    assert {key: row.us for key, row in found.items()} == {
        ("8x8x8", "bfloat16"): 2.0,
        ("8x8x8", "float16"): 4.0,
        ("another", "bfloat16"): 1.0,
    }
    assert found["another", "bfloat16"] == dataclasses.replace(stays, of_ceiling=0.5)


def test_an_absent_peer_does_not_displace_its_measurement(tmp_path):
    into, path = tmp_path / "into.jsonl", tmp_path / "rows.jsonl"
    peer, nothing = {"backend": "peer.quack", "level": "peer"}, dict.fromkeys(("us", "us_q1", "us_q3", "gbs", "tflops"))
    later = {**nothing, "when": "2026-01-02T00:00:00+00:00"}
    store.write(into, [_row(**peer), _row(**peer, shape="wrong"), _row(shape="ours")])
    absent = _row(**peer, **later, unsupported="not installed; `pip install quack` gets it")
    disagreed = _row(**peer, **later, shape="wrong", wrong="output: far off")
    refused = _row(**later, shape="ours", unsupported="takes float32")
    never = _row(**peer, **later, shape="never", unsupported="not installed")
    store.write(path, [absent, disagreed, refused, never])
    assert main(["merge", str(path), "--into", str(into)]) == 0
    found = {row.shape: row for row in store.read(into)}
    assert found["8x8x8"].us == 1.0
    assert found["8x8x8"].unsupported is None
    assert found["wrong"].wrong == "output: far off"
    assert found["ours"].unsupported == "takes float32"
    assert found["never"].unsupported == "not installed"


def test_shares_are_held_to_the_best_product_of_all(tmp_path):
    paths = [tmp_path / "1.jsonl", tmp_path / "2.jsonl", tmp_path / "other.jsonl"]
    store.write(paths[0], [_row()])
    store.write(paths[1], [_row(shape="9x9x9", tflops=4.0)])
    store.write(paths[2], [_row(shape="7x7x7", tflops=8.0, commit="decaf")])
    into = tmp_path / "into.jsonl"
    assert main(["merge", *map(str, paths), "--into", str(into)]) == 0
    assert {row.shape: row.ceiling_tflops for row in store.read(into)} == {"8x8x8": 4.0, "9x9x9": 4.0, "7x7x7": 8.0}


def test_files_that_cannot_be_joined(tmp_path, capsys):
    into, broken = tmp_path / "into.jsonl", tmp_path / "broken.jsonl"
    store.write(into, [_row()])
    before = into.read_text()
    assert main(["merge", str(tmp_path / "none.jsonl"), "--into", str(into)]) == 2
    assert "none.jsonl does not exist; expected rows" in capsys.readouterr().err
    broken.write_text("a diary\n")
    assert main(["merge", str(broken), "--into", str(into)]) == 2
    assert "broken.jsonl:1" in capsys.readouterr().err
    assert into.read_text() == before
