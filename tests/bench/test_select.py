"""Tables of measured choices: what is made of rows, what is held out, and that the committed tables are up to date."""

from __future__ import annotations

import json

import pytest

import kernel_ladder
from bench.__main__ import main
from bench.measure import environment, sets
from bench.rows import store
from bench.select import build, command, points
from bench.select.points import Point
from bench.select.split import REWRITTEN, SPLIT, older_than_rung
from kernel_ladder import table
from kernel_ladder.selection import tables
from kernel_ladder.selection.features import Features

from ..conftest import TIMED, a_row, needs_extension


def a_point(size: int, *, pass_: str = tables.FORWARD, chosen: str = "cuda.last", **times: float) -> Point:
    """A call of gelu, whose rungs at the cuda level took these times."""
    rungs = {f"cuda.{name}": us for name, us in times.items()}
    features = Features("16 bits", (64, size))
    return Point("gelu", pass_, f"64x{size}", "bfloat16", features, rungs, {}, {"cuda": chosen})


def test_an_entry_names_what_is_faster_than_the_rules_choice():
    (entry,) = build.entries_of([a_point(256, last=13.0, first=10.0)], "cuda")
    assert (entry.better, entry.gain, entry.measured) == ("cuda.first", 1.3, ("cuda.first", "cuda.last"))
    (entry,) = build.entries_of([a_point(256, last=10.2, first=10.0)], "cuda")
    assert (entry.better, entry.gain) == (None, 1.0)


def test_equal_calls_are_one_entry_of_what_all_of_them_timed():
    alike = [a_point(256, last=12.0, first=10.0, other=1.0), a_point(256, last=10.0, first=10.0)]
    (entry,) = build.entries_of(alike, "cuda")
    assert entry.measured == ("cuda.first", "cuda.last")
    assert entry.gain == pytest.approx(1.2**0.5, abs=1e-4)


def test_points_without_the_rules_choice_make_no_table():
    assert not build.parts([a_point(256 * i, first=1.0, other=2.0) for i in range(1, 9)])
    assert build.parts([a_point(256 * i, last=1.0, other=2.0) for i in range(1, 9)])


def test_a_table_is_kept_where_it_gains_three_per_cent_and_loses_nothing_held_out():
    sizes = [64 * 2**i for i in range(12)]
    (part,) = build.parts([a_point(size, last=2.0, first=1.0) for size in sizes])
    assert part.kept
    assert part.rules.mean == 2.0
    assert part.table.mean == 1.0
    (part,) = build.parts([a_point(size, last=1.02, first=1.0) for size in sizes])
    assert not part.kept
    # One call in which the other rung is faster misleads the table at its neighbours, which are held out.
    held = [build.is_held_out(a_point(size, last=1.0)) for size in sizes]
    assert True in held
    assert False in held
    mixed = [
        a_point(size, last=1.0, first=3.0) if out else a_point(size, last=3.0, first=1.0)
        for size, out in zip(sizes, held, strict=True)
    ]
    (part,) = build.parts(mixed)
    assert part.held_out_table.mean > part.held_out_rules.mean
    assert not part.kept


def row(backend: str, us: float, pass_: str = "forward", **fields):
    times = {**TIMED, "us": us, "us_q1": us, "us_q3": us, "gpu": "NVIDIA H200", "driver": "1", "dtype": "bfloat16"}
    shapes = {"op": "matmul", "shape": "4095x4097x4099", "shapes": [[4095, 4099], [4099, 4097]]}
    return a_row(
        **{**times, **shapes, "backend": backend, "level": backend.partition(".")[0], "pass_": pass_, **fields}
    )


@needs_extension
def test_an_old_row_of_a_split_rung_is_the_time_of_its_level():
    rows = [row("torch.builtin", 900.0), row("cuda.split_k", 250.0), row("cuda.persistent", 260.0)]
    assert [older_than_rung(each) for each in rows] == [False, True, False]
    (point,) = points.points(rows, points.machine_of(rows))
    assert point.times == {"torch.builtin": 900.0, "cuda.persistent": 260.0}
    assert point.usual("auto") == "cuda"
    assert point.levels["torch"] == 900.0
    assert point.levels["cuda"] == (260.0 if point.chosen["cuda"] == "cuda.persistent" else 250.0)
    assert point.features.category == "16 bits, unaligned"
    (entry,) = build.entries_of([point], "auto")
    assert entry.better is None


@needs_extension
def test_rows_of_lengths_are_points_of_their_own_kinds_of_arguments():
    """Labels are integers, which a row does not say; the set does."""
    case = sets.members(sets.LENGTHS, "cross_entropy")[0].case
    fields = {"op": "cross_entropy", "shape": case.id, "shapes": list(map(list, case.shapes)), "set": sets.LENGTHS}
    fields |= {"options": case.options, "when": "2026-11-27T09:00:00"}
    rows = [row(name, us, **fields) for name, us in (("torch.builtin", 9.0), ("cuda.online", 3.0))]
    (point,) = points.points(rows, points.machine_of(rows))
    assert point.features == Features("16 bits, rows, not smoothed", tuple(case.shapes[0]))
    assert point.usual("auto") == "cuda"
    assert point.levels == {"torch": 9.0, "cuda": 3.0}


@needs_extension
def test_training_is_forward_and_backward_together():
    rows = [
        row(name, us, pass_)
        for name, us in (("torch.builtin", 9.0), ("cuda.mma", 3.0))
        for pass_ in ("forward", "backward")
    ]
    forward, training = points.points(rows, points.machine_of(rows))
    assert (forward.pass_, training.pass_) == (tables.FORWARD, tables.TRAINING)
    assert training.times == {"torch.builtin": 18.0, "cuda.mma": 6.0}


@needs_extension
def test_splits_are_of_rungs_that_exist():
    rewritten = [((op, level), change) for (op, level, _), changes in REWRITTEN.items() for change in changes]
    for (op, level), (_, rungs) in [*SPLIT.items(), *rewritten]:
        assert rungs <= {v.name for v in table.variants(op, level)}


@needs_extension
def test_rows_of_kernels_that_are_gone_say_nothing():
    of = {"op": "attention", "shape": "B1 H1 S64 D128 full", "shapes": [[1, 1, 64, 128]] * 3}
    of["options"] = {"is_causal": False, "scale": None, "enable_gqa": False}
    rows = [
        row(name, 5.0, pass_, **of)
        for name in ("torch.builtin", "cuda.persistent")
        for pass_ in ("forward", "backward")
    ]
    forward, training = points.points(rows, points.machine_of(rows))
    assert set(forward.times) | {"cuda.persistent"} == set(training.times) | {"cuda.persistent"}
    assert "cuda.persistent" not in training.times
    assert "cuda" not in training.levels


def test_rows_of_a_gpu_that_no_rule_knows_are_refused():
    with pytest.raises(store.ResultsError, match="rows are of Some GPU, which is not here"):
        points.machine_of([row("torch.builtin", 1.0, gpu="Some GPU")])
    with pytest.raises(store.ResultsError, match="of one GPU's rows"):
        points.machine_of([row("torch.builtin", 1.0, gpu="A100"), row("torch.builtin", 1.0, gpu="L4")])


@needs_extension
def test_the_command_writes_a_table_that_selection_reads(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    # Calls far apart, so that none is the other's neighbour.
    for scale, name in ((1, "a"), (4, "b")):
        m, n, k = (size // scale for size in (4096, 4096, 8192))
        for backend, us in (("torch.builtin", 900.0), ("cuda.split_k", 250.0)):
            store.append(path, row(backend, us, shape=name, shapes=[[m, k], [k, n]]))
    assert main(["select", str(path), "--into", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 tables are kept" in said
    others = [op for op in kernel_ladder.OPS if op != "matmul"]
    assert f"no call of {', '.join(others)} has times of its choice and of another" in said
    (file,) = tmp_path.glob("*.json")
    assert file.name == "nvidia-h200.json"
    found = tables.load(file)
    assert {entry.better for entry in found.entries["matmul", "auto", tables.FORWARD]} == {"cuda"}
    (part,) = json.loads(file.read_text())["regret"]
    assert part["kept"]
    assert part["rules"]["mean"] == 3.6
    assert main(["select", str(path), "--into", str(tmp_path), "--check"]) == 0
    file.write_text("{}")
    assert main(["select", str(path), "--into", str(tmp_path), "--check"]) == 1


@needs_extension
def test_the_committed_tables_are_those_of_the_committed_rows():
    assert main(["select", "--check"]) == 0


def test_where_a_committed_table_is_kept_auto_is_no_slower_than_by_rules():
    """By the committed rows: what "auto" chooses with the tables, over the best, against what rules choose."""
    kept = {
        (part["op"], part["backend"], part["pass"]): part
        for path in tables.FOLDER.glob("*.json")
        for part in json.loads(path.read_text())["regret"]
        if part["kept"]
    }
    assert {("matmul", "auto", "training"), ("linear", "auto", "training")} <= set(kept)
    for part in kept.values():
        assert part["table"]["mean"] <= 1.03
        assert part["table"]["mean"] < part["rules"]["mean"]
        assert part["held out, table"]["mean"] <= part["held out, rules"]["mean"]


def test_default_files_leave_replaced_sweeps_out():
    assert command.default_files()
    assert not any("archive" in path.parts for path in command.default_files())


def test_a_table_that_mends_a_bad_choice_is_kept_where_the_mean_gains_little():
    """One call of fifty where the rule's rung takes twice the best one's time."""
    sizes = [2**i for i in range(6, 16)]
    mostly_right = [a_point(size, last=1.0, first=3.0) for size in sizes for _ in range(5)]
    (before,) = build.parts(mostly_right)
    assert not before.kept
    (part,) = build.parts([*mostly_right, a_point(2**20, last=2.0, first=1.0)])
    assert part.rules.mean / part.table.mean < build.LEAST_MEAN_GAIN
    assert (part.rules.worst, part.table.worst) == (2.0, 1.0)
    assert part.kept
    assert (part.rules.near, part.chosen.near, part.chosen.points) == (50, 51, 51)


@needs_extension
def test_the_table_of_an_older_sweep_is_that_of_its_archived_and_later_rows():
    archived = environment.PUBLISHED / "archive" / "nvidia-h200-2026-11-27.jsonl"
    later = environment.PUBLISHED / "others" / "nvidia-h200.jsonl"
    of_sets = [later.parent / name / later.name for name in sets.SETS if name != sets.SWEEP]
    assert main(["select", *map(str, (archived, later, *of_sets)), "--check"]) == 0


#: Names that a table leaves beyond a tenth, by GPU, operation, name and pass, and why.
BEYOND = {
    ("NVIDIA H200", "attention", "auto", "forward"): (
        "a single query to 4,096 keys takes 8.5 µs by cuDNN and 11.9 by split_kv once its plan is built, which takes "
        "40 ms at each new length of a cache that grows"
    ),
    ("NVIDIA H200", "softmax", "auto", "forward"): (
        "of three to five rows, or one of 128,256, the table of the other half is worse than rules: they take 0.2 to "
        "2 µs more than need be, less than a call costs on the host"
    ),
}


@pytest.mark.parametrize("file", sorted(tables.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_name_is_within_a_tenth_of_the_best_rung_at_every_committed_call(file):
    """Of "auto" and the levels' names; a part beyond a tenth stands in BEYOND, and none stands there without need."""
    data = json.loads(file.read_text())
    worst = {
        (data["gpu"], part["op"], part["backend"], part["pass"]): part["table" if part["kept"] else "rules"]["worst"]
        for part in data["regret"]
    }
    assert {name for _, _, name, _ in worst} == {"auto", "cuda", "triton"}
    beyond = {part for part, regret in worst.items() if regret > build.MOST_REGRET}
    assert beyond == {part for part in BEYOND if part[0] == data["gpu"]}
