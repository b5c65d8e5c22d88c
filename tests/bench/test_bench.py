"""The benchmark: rows, tables, pictures, README. Its method: test_method.py; wrong kernels: test_sweep_errors.py."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from rich.console import Console

import kernel_ladder
from bench import __main__ as bench_main
from bench import sweep
from bench.__main__ import main
from bench.measure import cases, timing
from bench.measure.selection import Group, Selection, groups
from bench.rows import store
from bench.rows.store import FIELDS, Row
from bench.show import pictures, rates
from bench.show import table as bench_table
from kernel_ladder import table
from kernel_ladder.selection.rules import RULES
from kernel_ladder.spec import PASSES, Case
from kernel_ladder.testing.samples import empty_inputs

from ..conftest import DEVICE, SWEEP_BYTES, a_row, needs_gpu, sweeping_small_cases

#: The fields that every row must have, whatever else it has.
DESIGNED = {
    *("op", "backend", "level", "pass", "dtype", "shape", "options", "unsupported"),
    *("us", "us_q1", "us_q3", "bytes", "flops", "gbs", "tflops", "of_ceiling", "speedup", "host_us", "compile_s"),
    *("error", "bound", "peak_mib", "gpu", "driver", "cuda", "torch", "triton", "commit", "dirty", "when"),
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Rows of a quick sweep without the compile level, which takes most of the time."""
    path = tmp_path_factory.mktemp("bench") / "results" / "here.jsonl"
    argv = [
        "--op",
        "gelu",
        "--backend",
        "torch,triton,cuda",
        "--quick",
        "--no-ceilings",
        "--time",
        "0.05",
        "--output",
        str(path),
    ]
    with sweeping_small_cases():
        assert main(argv) == 0
    return path


def test_rows_have_every_field(swept):
    lines = [json.loads(line) for line in swept.read_text().splitlines()]
    assert lines
    for line in lines:
        assert set(line) == set(FIELDS) >= DESIGNED
        assert {"op", "level", "pass", "dtype", "shape", "gpu", "torch", "when"} <= {k for k, v in line.items() if v}
        if line["unsupported"] is None:
            assert line["wrong"] is None
            assert line["us"] > 0
            assert line["us_q1"] <= line["us"] <= line["us_q3"]
            assert 0 <= line["error"] <= line["bound"]
            assert line["speedup"] > 0
            assert line["of_ceiling"] > 0
            # A quick sweep leaves out what the backward pass costs on the host.
            if line["interpreted"] or line["pass"] == "backward":
                assert line["host_us"] is None
            else:
                assert line["host_us"] > 0
        else:
            assert line["unsupported"]
            assert line["us"] is None
    assert {line["pass"] for line in lines} == {"forward", "backward"}
    assert {line["backend"] for line in lines} >= {"torch.naive", "torch.builtin", "triton.fused"}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is visible: nothing is interpreted, nothing unavailable")
def test_rows_without_a_gpu(swept):
    found = store.read(swept)
    assert {row.interpreted for row in found if row.level == "triton"} == {True}
    cuda = [row for row in found if row.level == "cuda"]
    assert cuda
    for row in cuda:
        assert row.unsupported == table.unavailable("gelu", "cuda")


def test_baseline_pairs_with_itself(swept):
    assert {row.speedup for row in store.read(swept) if row.backend == "torch.builtin"} == {1.0}


@pytest.mark.usefixtures("small_sweeps")
def test_a_new_run_supersedes(swept):
    before = store.read(swept)
    argv = [
        "--op",
        "gelu",
        "--backend",
        "torch.naive",
        "--pass",
        "forward",
        "--quick",
        "--no-ceilings",
        "--time",
        "0.02",
        "--no-pictures",
    ]
    assert main([*argv, "--output", str(swept)]) == 0
    after = store.read(swept)
    assert [row.key for row in after] == [row.key for row in before]
    renewed = [a.when > b.when for a, b in zip(after, before, strict=True)]
    measured = [row.pass_ == "forward" and row.backend in ("torch.naive", "torch.builtin") for row in before]
    assert renewed == measured


@pytest.mark.usefixtures("small_sweeps")
def test_xla_is_never_captured(tmp_path, monkeypatch):
    """It launches on streams of its own. All else is offered to a CUDA graph."""
    if (reason := table.unavailable("gelu", "xla")) is not None:
        pytest.skip(reason)
    asked, prepare = [], timing.prepare

    def watched(*given, capture=True, **options):
        asked.append(capture)
        return prepare(*given, capture=capture, **options)

    monkeypatch.setattr(timing, "prepare", watched)
    argv = ["--op", "gelu", "--quick", "--no-ceilings", "--no-pictures", "--time", "0.05", "--pass", "forward"]
    assert main([*argv, "--backend", "torch.builtin,xla.jit", "--output", str(tmp_path / "rows.jsonl")]) == 0
    rows = [row for row in store.read(tmp_path / "rows.jsonl") if row.us is not None]
    assert asked.count(False) == sum(row.level == "xla" for row in rows)
    assert {row.level for row in rows} == {"torch", "xla"}


def test_table_and_pictures(swept):
    console = Console(record=True, width=250)
    found = store.latest(store.read(swept))
    bench_table.show(found, console)
    text = console.export_text()
    idle = {level for level, _ in bench_table.idle_levels(found)}
    for row in found:
        assert (row.level if row.level in idle else row.backend) in text
        assert row.unsupported is None or row.unsupported in text
    assert text.count("◀") >= len({(r.op, r.shape, r.pass_, r.dtype) for r in found})
    (picture,) = pictures.draw(swept)
    first = picture.read_bytes()
    assert b"<svg" in first
    pictures.draw(swept)
    assert picture.read_bytes() == first, "the same rows must draw the same picture"


def _timed(backend: str, us: float, speedup: float | None, low: float | None = None, high: float | None = None) -> Row:
    measured = {"us_q1": us, "us_q3": us, "gbs": 1.0, "tflops": 1.0, "bytes": 1, "flops": 1}
    ends = {"speedup_low": low, "speedup_high": high}
    return a_row(backend=backend, us=us, speedup=speedup, **measured, **ends)


def test_the_fastest_is_told_by_paired_ratios_and_has_its_equals():
    rows_ = [_timed("torch.builtin", 10.0, 1.0), _timed("a", 9.0, 0.97, 0.96, 0.98), _timed("b", 12.0, 1.3, 1.2, 1.4)]
    assert bench_table.fastest(rows_) == {"b"}, "times of rows measured on different days do not compare"
    assert bench_table.fastest([*rows_, _timed("c", 11.0, 1.15, 1.1, 1.21)]) == {"b", "c"}
    assert bench_table.fastest([*rows_, _timed("d", 8.0, None)]) == {"d"}, "a time without a ratio is all there is"
    assert bench_table.fastest([a_row(unsupported="no")]) == set()


def test_marks_have_a_legend():
    steady = dataclasses.replace(_timed("torch.builtin", 10.0, 1.0), clocks_moved=False, graph=True)
    moved = dataclasses.replace(_timed("torch.naive", 12.0, 0.8), clocks_moved=True, graph=False)
    block = rates.of_op("gelu", [steady, moved])
    assert "†‡ |" in block
    assert block.endswith(
        "† its SM clock was not that of the rungs beside it; ‡ launched call by call, with the gaps between."
    )
    assert "†" not in rates.of_op("gelu", [steady])


def test_the_machine_s_line_names_every_version():
    older, newer = a_row(torch="2.11", when="2026-01-01"), a_row(torch="2.12", commit="c0ffee", when="2026-01-02")
    assert "with PyTorch 2.11 and 2.12; source `c0ffee`; 2026-01-02." in rates.machine(None, [newer, older])


def test_a_backward_that_moves_nothing_is_not_timed():
    selection = Selection(["add", "sum"], quick=True)
    passes = {(g.op, g.case.id): [*g.passes] for g in groups(selection, torch.device("cuda"))}
    assert passes["add", "16384x4096"] == passes["sum", "16384x4096 dim=0"] == ["forward"]
    assert passes["add", "16384x4096 row"] == ["forward", "backward"]
    backward_alone = Selection(["add", "sum"], passes=("backward",))
    assert {g.op for g in groups(backward_alone, torch.device("cuda"))} == {"add"}


def test_a_case_without_a_climb_measures_the_rung_that_a_levels_name_stands_for(monkeypatch):
    (case,) = (c for c in kernel_ladder.spec("matmul").sweep if c.id == "512x512x512 NT")
    assert [x.stride() for x in empty_inputs(case, torch.bfloat16, "meta")] == [(512, 1), (1, 512)]
    group = Group("matmul", case, torch.bfloat16, case.passes)

    def measured(backends: list[str] | None = None) -> list[str]:
        chosen = sweep.Sweep(Selection(["matmul"], backends), print, DEVICE).chosen(group)
        return [v.name for v in chosen if v.level in ("torch", "triton")]

    # Few tiles and a short k: the last rung of the level, `split_k`, is not the one to take.
    assert measured() == measured(["triton"]) == ["torch.builtin", "triton.tiled"]
    climb = table._variants["matmul", "triton"]
    refusing = dataclasses.replace(climb["triton.tiled"], unsupported=lambda *inputs: "not today")
    monkeypatch.setitem(climb, "triton.tiled", refusing)
    assert measured() == ["torch.builtin", "triton.split_k"]
    assert measured(["triton.naive"]) == ["torch.builtin", "triton.naive"]


def test_without_a_climb_each_pass_measures_its_own_choice(monkeypatch):
    case = dataclasses.replace(kernel_ladder.spec("softmax").sweep[0], climb=False)
    first, last = "triton.online", "triton.fused"
    rule = lambda inputs, options: (last if inputs[0].requires_grad else first,)  # noqa: E731
    monkeypatch.setitem(RULES, ("softmax", "triton"), rule)
    for passes, rungs in ((["forward"], {first}), (["backward"], {last}), (["forward", "backward"], {first, last})):
        group = Group("softmax", case, torch.float32, passes)
        chosen = sweep.Sweep(Selection(["softmax"]), print, DEVICE).chosen(group)
        assert {v.name for v in chosen if v.level == "triton"} == rungs


def test_a_sweep_of_levels_that_are_absent_is_a_bad_command(capsys, monkeypatch):
    monkeypatch.setattr(bench_main, "unavailable", lambda op, level: "no GPU is visible" if level == "cuda" else None)
    assert main(["--op", "gelu,softmax", "--backend", "cuda,cuda.naive"]) == 2
    assert "--backend: none of cuda, cuda.naive is available here: no GPU is visible" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--op", "gelo"], "unknown operation 'gelo'; did you mean 'gelu'?"),
        (["--op", "gelu", "--backend", "trito"], "unknown backend 'trito'; did you mean 'triton'"),
        (["--dtype", "float23"], "unknown dtype 'float23'; did you mean 'float32'"),
        (["--pass", "sideways"], "unknown pass 'sideways'"),
        (["--time", "0"], "--time must be a positive number of seconds, got 0"),
        (["--op", ""], "--op: no name in ''; known are gelu, softmax"),
        (["--op", "gelu", "--op", ","], "--op: no name in ','; known are gelu, softmax"),
        (["--op", "gelu", "--backend", ""], "--backend: no name in ''; known are torch, compile, xla, triton, cuda"),
        (["--dtype", ","], "--dtype: no name in ','; known are float32, float16, bfloat16"),
        (["--peers", ","], "--peers: no name in ','; known are"),
        (["table", "no/such.jsonl"], "no/such.jsonl does not exist"),
    ],
)
def test_bad_command_lines(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_peer_named_is_tuned_at_all_cases(tmp_path):
    parser = bench_main._sweep_parser()
    group = Group("matmul", Case("a", ((1,),), quick=True), torch.bfloat16, PASSES)
    for argv, named in (
        (["--peers"], False),
        (["--peers", "quack-gemm"], True),
        (["--peers", "peer.quack-gemm,liger"], True),
    ):
        chosen = bench_main._selection(parser.parse_args([*argv, "--quick"]))
        assert "quack-gemm" in chosen.peers
        assert chosen.has_time_for("peer.quack-gemm", group) == named


def test_readme(swept, tmp_path, capsys):
    file = tmp_path / "README.md"
    names = ("summary", "machine", "gelu", "picture gelu")
    blocks = "\n".join(f"<!-- results:begin {n} -->\nold\n<!-- results:end {n} -->\nprose {n}" for n in names)
    file.write_text(f"# Title\n{blocks}\n")
    argv = ["readme", str(file), "--results", str(swept)]
    assert main([*argv, "--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert "\nold\n" in file.read_text()
    assert main(argv) == 0
    once = file.read_text()
    assert "old" not in once
    assert once.startswith("# Title\n")
    for name in names:
        assert f"prose {name}" in once
    for row in store.read(swept):
        assert f"`{row.backend}`" in once
        assert row.unsupported is None or row.unsupported in once
    assert "results/pictures/gelu-here.svg)" in once
    assert main(argv) == 0
    assert file.read_text() == once
    assert main([*argv, "--check"]) == 0
    file.write_text(once.replace("torch.naive", "torch.navie", 1))
    assert main([*argv, "--check"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- results:begin gelu -->\n", "line 1: `results:begin gelu` has no"),
        ("a\n<!-- results:begin gleu -->\n<!-- results:end gleu -->\n", "line 2: unknown block 'gleu'"),
    ],
    ids=["no-end", "unknown"],
)
def test_bad_markers(text, message, tmp_path, capsys):
    file = tmp_path / "README.md"
    file.write_text(text)
    store.write(tmp_path / "none.jsonl", [])
    assert main(["readme", str(file), "--results", str(tmp_path / "none.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == text


@pytest.mark.parametrize("written", [False, True], ids=["missing", "empty"])
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_tables_do_not_give_way_to_no_rows(check, written, tmp_path, capsys):
    file, path = tmp_path / "README.md", tmp_path / "typo.jsonl"
    file.write_text("<!-- results:begin gelu -->\n\na table\n\n<!-- results:end gelu -->\n")
    before = file.read_text()
    if written:
        store.write(path, [])
    assert main(["readme", str(file), "--results", str(path), *check]) == 2
    said = f"line 1: there are no rows in {path} to replace" if written else f"{path} does not exist; expected rows"
    assert said in capsys.readouterr().err
    assert file.read_text() == before
    file.write_text(before.replace("a table", ""))
    if written:
        for _ in range(2):
            assert main(["readme", str(file), "--results", str(path)]) == 0
            assert "*No rows yet: `python -m bench --op gelu` writes them.*" in file.read_text()


def test_footnotes_are_text(tmp_path):
    file, path = tmp_path / "README.md", tmp_path / "rows.jsonl"
    end = "<!-- results:end gelu -->"
    file.write_text(f"<!-- results:begin gelu -->\n{end}\n")
    reasons = {"torch.builtin": {"wrong": f"a | b\n{end}"}, "torch.naive": {"unsupported": "<b>only\non Sundays"}}
    store.write(path, [a_row(backend=backend, **reason) for backend, reason in reasons.items()])
    for _ in range(2):
        assert main(["readme", str(file), "--results", str(path)]) == 0
        notes = file.read_text().partition("| — (1) | — (2) |\n\n")[2]
        said = "(1) wrong: a \\| b &lt;!-- results:end gelu -->\\\n(2) &lt;b>only on Sundays"
        assert notes == f"{said}\n\n{end}\n"


def test_shrinking_keeps_shapes_that_fit():
    spec = kernel_ladder.spec("gelu")
    case = Case("8192x16384 tanh", ((8192, 16384),), {"approximate": "tanh"})
    tiny = cases.shrink(case, spec)
    assert spec.bytes(tiny, 4, False) <= cases.TINY_BYTES
    assert tiny.id == f"{tiny.shapes[0][0]}x{tiny.shapes[0][1]} tanh"
    assert cases._resized(case, {8192: 4, 16384: 8}).id == "4x8 tanh"
    assert cases.host_case(Case("H32/8 S4096", ((32, 4096), (8, 4096)))).shapes == ((32, 64), (8, 64))


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_every_sweep_shrinks_to_valid_calls(op):
    spec = kernel_ladder.spec(op)
    for case in (*cases.sweep_cases(spec, torch.device("cpu"), quick=False), *map(cases.host_case, spec.sweep)):
        inputs = empty_inputs(case, torch.float32, "meta")
        assert all(math.prod(shape) > 0 for shape in spec.output_shapes(inputs, case.options))


@needs_gpu
def test_gradients_are_timed_in_a_graph(tmp_path, gpu_memory):
    """At the sweep's real sizes."""
    gpu_memory(SWEEP_BYTES)
    path = tmp_path / "rows.jsonl"
    argv = [
        "--op",
        "gelu",
        "--quick",
        "--no-ceilings",
        "--pass",
        "backward",
        "--time",
        "0.05",
        "--no-pictures",
        "--output",
        str(path),
    ]
    assert main(argv) == 0
    timed = [row for row in store.read(path) if row.us is not None]
    assert {row.graph for row in timed if row.level != "xla"} == {True}
    assert not any(row.graph for row in timed if row.level == "xla"), "no graph captures what JAX launches"
