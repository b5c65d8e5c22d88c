"""The block `climb OP`: steps in order, each beside the one before, with counters; `bench readme --check` over it."""

from __future__ import annotations

import json
import re

import pytest

from bench.__main__ import main
from bench.profile import counters
from bench.rows import store
from bench.rows.store import Row
from bench.show import climb_counters
from bench.show.climb import by_call, gains
from bench.show.headline import headline
from bench.show.readme import default_results
from kernel_ladder.spec import TOGETHER

SHAPE = "16384x4096 tanh"
LEAST = 2**28


def _row(backend: str, us: float | None, pass_: str = "forward", **fields) -> Row:
    base = {"op": "gelu", "backend": backend, "level": backend.partition(".")[0], "dtype": "bfloat16", "shape": SHAPE}
    if us is not None:
        base |= {
            "us": us,
            "us_q1": us,
            "us_q3": us,
            "rounds": 25,
            "bytes": LEAST,
            "flops": LEAST,
            "of_ceiling": 30 / us,
        }
        base |= {"gbs": LEAST / us / 1e3, "tflops": LEAST / us / 1e6, "ceiling_gbs": 4000.0, "ceiling_tflops": 700.0}
        base |= {"speedup": 80 / us, "speedup_low": 79.2 / us, "speedup_high": 80.8 / us}
    base |= {"commit": "012345c0ffee6789", "pass_": pass_, "gpu": "GPU 1", "when": "2026-01-01T00:00:00+00:00"}
    return Row(**{**base, **fields})


ROWS = [
    _row("ceiling.copy", 60.0, op="ceiling", shape="256 MiB"),
    _row("peer.liger", 90.0),
    _row("torch.naive", 800.0),
    _row("torch.builtin", 80.0, speedup=1.0, speedup_low=None, speedup_high=None),
    _row("triton.fused", 64.0, shape="another shape"),
    _row("triton.fused", 64.0),
    _row("cuda.naive", 320.0),
    _row("cuda.refused", None, unsupported="not | today"),
    _row("cuda.vectorized", 64.0),
    _row("cuda.broken", None, wrong="output: 3 > 1"),
    _row("torch.builtin", 100.0, "backward", speedup=1.0),
]


def _counters(backend: str, **values) -> dict:
    key = {"op": "gelu", "backend": backend, "pass": "forward", "dtype": "bfloat16", "shape": SHAPE}
    commit = "c0ffee0123456789"
    return {**key, "gpu": "GPU 1", "commit": commit, "counters": {"least_bytes": LEAST, **values}, "kernels": []}


PROFILED = [
    _counters("cuda.naive", dram_bytes=LEAST, issue_pct=91.0, registers=16, top_stalls={"wait": 5.0}),
    _counters(
        "cuda.naive", dram_bytes=1.25 * LEAST, issue_pct=20.0, registers=32, top_stalls={"wait": 5.0, "long_sb": 60.0}
    ),
    _counters("cuda.vectorized", dram_bytes=1.26 * LEAST, issue_pct=60.0, registers=32, top_stalls={"wait": 40.0}),
]


@pytest.fixture
def page(tmp_path):
    """A page with one block, and its command line."""
    results = tmp_path / "gpu-1.jsonl"
    store.write(results, ROWS)
    file = tmp_path / "LOG.md"
    file.write_text("# Log\n\n<!-- results:begin climb gelu -->\n<!-- results:end climb gelu -->\n\nprose\n")
    return file, ["readme", str(file), "--results", str(results)]


def _table(text: str, title: str) -> dict[str, list[str]]:
    lines = text[text.index(title) :].split("\n\n")[1].splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}


def test_steps_and_gains(page):
    file, argv = page
    assert main(argv) == 0
    text = file.read_text()
    table = _table(text, f"gelu forward, {SHAPE}, bfloat16, GPU 1:")
    steps = [step.strip("`") for step in table if "`" in step]
    own = ["torch.naive", "torch.builtin", "triton.fused"]
    assert steps == [*own, "cuda.naive", "cuda.refused", "cuda.vectorized", "cuda.broken", "peer.liger"]
    gains = {step.strip("`"): cells[2] for step, cells in table.items()}
    assert gains["torch.naive"] == gains["triton.fused"] == gains["cuda.naive"] == gains["peer.liger"] == ""
    # torch.builtin over itself is exactly one, and torch.naive's speed-up is known to 1 %.
    assert gains["torch.builtin"] == "10 (9.9 – 10.1)"
    # A ratio of two speed-ups that are each known to 1 %: 1.4 % in all. The refused step in between is passed over.
    assert gains["cuda.vectorized"] == "5 (4.93 – 5.07)"
    assert table["`cuda.refused`"][0] == "–¹"
    assert "- ¹ not \\| today" in text.splitlines()
    assert table["`cuda.broken`"][0] == "wrong: output: 3 > 1"
    assert table["`cuda.vectorized`"] == ["64 µs", "4,194 GB/s", "5 (4.93 – 5.07)", "0.47", "1.25 (1.24 – 1.26)"]
    assert "ceiling.copy" not in text
    assert "another shape" not in text
    assert list(_table(text, "gelu backward")) == ["step", "---", "`torch.builtin`"]
    assert "counters" not in text


def test_gains_are_over_the_step_of_the_same_call():
    """PyTorch's own functions over the plain formula, whichever came between; no other shape, no other GPU."""
    own = [
        _row("torch.naive", 800.0),
        _row("torch.builtin", 80.0),
        _row("torch.flash", 100.0),
        _row("torch.cudnn", 40.0),
    ]
    other = [_row("cuda.naive", 10.0, gpu="GPU 2"), _row("cuda.naive", 320.0), _row("cuda.vectorized", 64.0)]
    refused = _row("torch.later", None, unsupported="no")
    found = gains([*own, refused, *other, _row("cuda.naive", 1.0, "backward"), *ROWS[:2]])
    steps = {key[1]: (before.backend, pytest.approx(gain.value)) for key, (before, gain) in found.items()}
    of_naive = {"torch.builtin": 10, "torch.flash": 8, "torch.cudnn": 20}
    expected = {name: ("torch.naive", times) for name, times in of_naive.items()}
    assert steps == expected | {"cuda.vectorized": ("cuda.naive", 5)}
    late = [_row("peer.liger", 90.0), *other[1:], *own[::-1]]
    assert [[row.backend for row in call] for call in by_call(late)] == [
        ["torch.cudnn", "torch.flash", "torch.builtin", "torch.naive", "cuda.naive", "cuda.vectorized", "peer.liger"]
    ], "by level; within one the file's order"


def test_counters_that_moved(page):
    file, argv = page
    beside = counters.file_beside(file.parent / "gpu-1.jsonl")
    assert beside.name == "gpu-1.profile.jsonl"
    beside.write_text("".join(json.dumps(line) + "\n" for line in PROFILED))
    assert main(argv) == 0
    text = file.read_text()
    lines = [line for line in text.splitlines() if line.startswith(("| counters", "| `cuda"))]
    assert lines[-3:] == [
        "| counters | DRAM bytes / least | issue slots | registers | largest stall |",
        "| `cuda.naive` | 1.25 | 20 % | 32 | long_sb |",
        "| `cuda.vectorized` | 1.26 | **60 %** | 32 | **wait** |",
    ]
    assert "from the step before. Counters: GPU 1, commit c0ffee012345; times: GPU 1, commit 012345c0ffee." in text
    assert main([*argv, "--check"]) == 0


def test_check_finds_a_stale_climb(page, capsys):
    file, argv = page
    assert main([*argv, "--check"]) == 1
    assert main(argv) == 0
    assert main([*argv, "--check"]) == 0
    store.append(file.parent / "gpu-1.jsonl", _row("cuda.vectorized", 50.0, when="2026-01-02T00:00:00+00:00"))
    before = file.read_text()
    assert main([*argv, "--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert file.read_text() == before
    assert before.startswith("# Log\n")
    assert before.endswith("\n\nprose\n")


def test_no_rows_yet(page):
    file, argv = page
    store.write(file.parent / "gpu-1.jsonl", ROWS[:1])
    assert main(argv) == 0
    assert "*No rows yet: `python -m bench --op gelu` writes them.*" in file.read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"op": "gelu"', "1: not a whole JSON object"),
        ('{"op": "gelu"}', "1: not a row of counters: it lacks backend, pass, dtype, shape, gpu, counters, kernels"),
        ("[]", "1: not a row of counters"),
    ],
)
def test_spoiled_counters(line, message, page, capsys):
    file, argv = page
    beside = counters.file_beside(file.parent / "gpu-1.jsonl")
    beside.write_text(line + "\n")
    before = file.read_text()
    assert main(argv) == 2
    assert f"{beside}:{message}" in capsys.readouterr().err
    assert file.read_text() == before


def test_counters_are_no_rows(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("gpu-1.jsonl", "gpu-1.profile.jsonl", "cpu.jsonl"):
        (folder / name).touch()
    monkeypatch.setattr("bench.measure.environment.PUBLISHED", folder)
    assert [path.name for path in default_results()] == ["gpu-1.jsonl"]


@pytest.mark.parametrize(("then", "now"), [(100, 120), (100, 80), (0, 5), ("wait", "barrier")])
def test_what_moved(then, now):
    assert climb_counters.moved(then, now, "{}")
    assert climb_counters.moved(then, now, "{:.0f} %")


@pytest.mark.parametrize(("then", "now"), [(100, 105), (0, 0), ("wait", "wait"), (None, 5), (5, None)])
def test_what_did_not_move(then, now):
    assert not climb_counters.moved(then, now, "{}")


def test_a_per_cent_more_of_almost_nothing_has_not_moved():
    assert not climb_counters.moved(1, 2, "{:.0f} %")
    assert climb_counters.moved(1, 2, "{:.0f}")
    assert climb_counters.told({"issue_pct": 2, "registers": 40}, {"issue_pct": 1, "registers": 32}) == (
        "registers 32 → 40"
    )


def test_what_a_kernel_does_is_named_before_what_it_takes():
    mine, before = {"occupancy_pct": 71, "registers": 40}, {"occupancy_pct": 47, "registers": 80}
    assert climb_counters.told(mine, before) == "occupancy 47 % → 71 %"


SPECIALIZED = {"tensor_pipe_pct": 91, "occupancy_pct": 14, "issue_pct": 13, "l2_bytes": 90, "least_bytes": 10}
WGMMA = {"tensor_pipe_pct": 76, "occupancy_pct": 25, "issue_pct": 18, "l2_bytes": 170, "least_bytes": 10}


@pytest.mark.parametrize(
    ("limit", "named", "said"),
    [
        ("tensor pipe", "", "tensor pipe 76 % → 91 %"),
        ("tensor pipe", "issue slots", "issue slots 18 % → 13 %"),
        ("", "", "L2 bytes / least 17.00 → 9.00"),
        ("occupancy", "", "L2 bytes / least 17.00 → 9.00"),  # occupancy got worse, others did not
    ],
)
def test_the_counter_of_the_limit_tells_of_a_step_unless_it_got_worse(limit, named, said):
    assert climb_counters.told(SPECIALIZED, WGMMA, limit, named) == said


def test_a_counter_that_got_worse_is_named_where_no_other_moved():
    assert climb_counters.told({"occupancy_pct": 14}, {"occupancy_pct": 25}) == "occupancy 25 % → 14 %"
    assert climb_counters.told({"tensor_pipe_pct": 77}, {"tensor_pipe_pct": 72}) == "", "no tenth"
    assert climb_counters.told({"tensor_pipe_pct": 77}, {"tensor_pipe_pct": 72}, "tensor pipe").endswith("72 % → 77 %")
    assert climb_counters.told({"tensor_pipe_pct": 58}, {"tensor_pipe_pct": 0}, "tensor pipe").endswith("0 % → 58 %")


def test_the_limit_is_what_takes_longer():
    assert climb_counters.about(_row("cuda.naive", 320.0)) == "DRAM bytes / least"
    assert climb_counters.about(_row("cuda.naive", 320.0, flops=1000 * LEAST)) == "tensor pipe"


def test_what_moved_unseen_is_not_bold(monkeypatch):
    monkeypatch.setattr(climb_counters, "COLUMNS", [("share", lambda c: c["share"], "{:.0%}")])
    assert climb_counters.cells({"share": 0.0004}, {"share": 0.0001}) == ["0%"]
    assert climb_counters.cells({"share": 0.04}, {"share": 0.01}) == ["**4%**"]


def test_the_headline_is_of_single_passes_where_there_are_any():
    plain, both = "8192x4096 C32000", f"8192x4096 C32000 {TOGETHER}"
    rows = [
        _row("torch.builtin", 5.0, pass_, op="linear_cross_entropy", shape=shape)
        for shape, pass_ in ((plain, "forward"), ("4096x4096 C128256", "forward"), (both, "backward"))
    ]
    assert headline("linear_cross_entropy", rows) == (plain, "bfloat16")
    assert headline("linear_cross_entropy", rows[2:]) == (both, "bfloat16")
