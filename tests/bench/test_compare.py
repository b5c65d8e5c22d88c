"""`bench compare`: real changes are found, noise and drift are not taken for them, and the exit code says so."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.__main__ import main
from bench.compare import changes
from bench.rows import store
from bench.rows.ratio import Estimate, time_of
from bench.rows.store import ResultsError, Row

SHAPES = [f"{2**i}x1024" for i in range(6, 14)]
BACKENDS = ("torch.builtin", "torch.naive", "triton.fused", "cuda.naive", "cuda.vectorized")


def _row(backend: str = "cuda.vectorized", us: float | None = 100.0, width: float = 0.004, **fields) -> Row:
    """A row whose interval reaches `width` to each side of its time."""
    base = {"op": "gelu", "backend": backend, "level": backend.partition(".")[0], "pass_": "forward"}
    base |= {"dtype": "bfloat16", "shape": SHAPES[0], "gpu": "GPU 1", "torch": "2.11.0", "cuda": "13.0", "rounds": 25}
    if us is not None:
        ends = (us * (1 - width), us * (1 + width))
        base |= {"us": us, "us_q1": ends[0], "us_q3": ends[1], "us_low": ends[0], "us_high": ends[1]}
        base |= {"bytes": 2**20, "flops": 2**20, "gbs": 2**20 / us / 1e3, "tflops": 2**20 / us / 1e6}
    return Row(**{**base, "when": "2026-01-01T00:00:00+00:00", **fields})


def _run(drift: float = 1.0, noise: float = 0.002, seed: int = 0, slow: dict[str, float] | None = None) -> list[Row]:
    """Rows of one run: every time has the drift and noise of its own, and `slow` backends a factor more."""
    random_ = random.Random(seed)
    found = []
    for i, shape in enumerate(SHAPES):
        times = {
            name: 10.0 * 2**i * (1 + BACKENDS.index(name)) * drift * random_.lognormvariate(0, noise)
            for name in BACKENDS
        }
        for name, factor in (slow or {}).items():
            times[name] *= factor
        for name, us in times.items():
            speedup = times["torch.builtin"] / us
            bounds = {"speedup_low": 0.998 * speedup, "speedup_high": 1.002 * speedup}
            found.append(_row(name, us, 2 * noise, shape=shape, speedup=speedup, **bounds))
    return found


@pytest.fixture
def compare(tmp_path, capsys):
    """Write two lists of rows, compare them on the command line, and return the exit code and what was printed."""

    def run(before: list[Row], after: list[Row], *options: str) -> tuple[int, str]:
        for name, found in (("a", before), ("b", after)):
            store.write(tmp_path / f"{name}.jsonl", found)
        code = main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *options])
        captured = capsys.readouterr()
        return code, captured.out or captured.err

    return run


def _json(compare, *args) -> dict:
    return json.loads(compare(*args, "--json")[1])


def test_a_true_slowdown_is_found(compare):
    code, text = compare(_run(seed=1), _run(seed=2, slow={"cuda.vectorized": 1.10}))
    assert code == 1
    assert f"FAIL: {len(SHAPES)} slower past 5 %" in text
    slower = text[text.index("Slower past 5 %") : text.index("Geometric means")]
    assert slower.count("cuda.vectorized") == len(SHAPES)
    assert not re.search(r"triton|naive", slower.partition("\n\n")[0])


def test_the_size_of_a_slowdown_is_right(compare):
    found = _json(compare, _run(seed=1), _run(seed=2, slow={"cuda.naive": 1.10}))
    by_backend = {group["backend"]: group["corrected"] for group in found["groups"]}
    assert by_backend.pop("cuda.naive") == pytest.approx(1.10, rel=0.005)
    assert all(ratio == pytest.approx(1, rel=0.005) for ratio in by_backend.values())
    sizes = [abs(change["corrected"]["value"] - 1) for change in found["changes"][: len(SHAPES)]]
    assert {change["backend"] for change in found["changes"][: len(SHAPES)]} == {"cuda.naive"}
    assert sizes == sorted(sizes, reverse=True)


def test_noise_is_not_taken_for_a_change(compare):
    code, text = compare(_run(seed=1), _run(seed=2))
    assert code == 0
    assert "PASS: nothing slower past 5 %, nothing broken" in text


def test_a_faster_variant_passes(compare):
    code, text = compare(_run(seed=1), _run(seed=2, slow={"triton.fused": 0.8}))
    assert code == 0
    assert f"Faster past 5 % ({len(SHAPES)})" in text


def test_a_slowdown_below_the_threshold_is_shown_and_passes(compare):
    code, text = compare(_run(seed=1), _run(seed=2, slow={"triton.fused": 1.03}))
    assert code == 0
    assert "Slower, not past the threshold" in text
    assert compare(_run(seed=1), _run(seed=2, slow={"triton.fused": 1.03}), "--threshold", "0.02")[0] == 1


def test_drift_is_told_apart(compare):
    drifted = _run(seed=2, drift=1.12)
    code, text = compare(_run(seed=1), drifted)
    assert code == 0
    assert re.search(rf"{len(SHAPES)} controls took 1\.1[12]\d × as long in B", text)
    assert "The drift is past the threshold" in text
    assert compare(_run(seed=1), drifted, "--raw")[0] == 1
    assert compare(_run(seed=1), _run(seed=2, drift=1.12, slow={"cuda.naive": 1.1}))[0] == 1


def test_raw_shows_what_was_measured(compare):
    found = _json(compare, _run(seed=1), _run(seed=2, drift=1.12), "--raw")
    assert not found["drift"]["applied"]
    assert found["drift"]["factor"] == pytest.approx(1.12, rel=0.01)
    assert all(change["corrected"]["value"] == change["raw"]["value"] for change in found["changes"])


def test_a_passing_state_of_the_machine_is_no_slowdown(compare):
    """One group is slower in all its members, torch.builtin too, and the drift of all the others does not tell."""
    after = [
        dataclasses.replace(row, **{name: 1.1 * getattr(row, name) for name in ("us", "us_low", "us_high")})
        if row.shape == SHAPES[3]
        else row
        for row in _run(seed=2)
    ]
    code, text = compare(_run(seed=1), after)
    assert code == 0
    assert "Slower, not past the threshold (4)" in text


def test_a_paired_ratio_that_may_be_one_is_no_witness(compare):
    """A time that rose by a fifth, beside a speed-up so noisy that it may not have changed."""
    ends = {"speedup_low": 0.5, "speedup_high": 2.0}
    before, after = _row(speedup=1.0, **ends), _row(us=120.0, speedup=1 / 1.2, **ends)
    assert compare([before], [after])[0] == 0
    sure = {"speedup_low": 0.82, "speedup_high": 0.84}
    tight = dataclasses.replace(before, speedup_low=0.99, speedup_high=1.01)
    assert compare([tight], [dataclasses.replace(after, **sure)])[0] == 1


def test_the_scatter_between_runs_widens_intervals(compare):
    """Intervals within a run are tight, but two runs of the same code differ by more: the controls show it."""

    def scattered(seed: int) -> list[Row]:
        random_ = random.Random(seed)
        return [
            dataclasses.replace(row, us=us, us_low=0.999 * us, us_high=1.001 * us, speedup=None)
            for row in _run(noise=0.001)
            for us in [row.us * random_.lognormvariate(0, 0.03)]
        ]

    found = _json(compare, scattered(1), scattered(2))
    assert found["drift"]["scatter"] > 0.015
    changed = [c for c in found["changes"] if c["judged"] and c["direction"] != "unchanged"]
    assert len(changed) <= 3, "of 32 rows, about 5 % lie outside of 95 % intervals"


def test_ceilings_are_controls_and_not_judged(compare):
    def ceilings(factor: float) -> list[Row]:
        return [
            _row(name, 50.0 * factor, op="ceiling", shape="256 MiB", bytes=2**28)
            for name in ("ceiling.copy", "ceiling.read", "ceiling.write", "ceiling.launch")
        ]

    found = _json(compare, [*ceilings(1), _row()], [*ceilings(1.2), _row(us=120.0)])
    assert found["drift"]["controls"] == 3, "launch cost is the host's"
    assert found["passed"]
    assert [c["corrected"]["value"] for c in found["changes"] if c["judged"]] == [pytest.approx(1)]


def test_another_pytorch_is_no_control(compare):
    after = [dataclasses.replace(row, torch="2.12.0") for row in _run(seed=2, slow={"torch.builtin": 1.2})]
    code, text = compare(_run(seed=1), after)
    assert code == 1, "torch.builtin is judged where it is not the same code"
    assert "PyTorch: 2.11.0 → 2.12.0" in text
    assert "Drift: unknown" in text

    def ceiling(name, **fields):
        return [_row(f"ceiling.{name}", op="ceiling", shape=f"{size} MiB", **fields) for size in (64, 256, 1024)]

    found = _json(compare, [*_run(), *ceiling("copy"), *ceiling("tensor")],
                  [*after, *ceiling("copy", torch="2.12.0"), *ceiling("tensor", torch="2.12.0")])  # fmt: skip
    assert found["drift"]["controls"] == 3, "bandwidth does not depend on PyTorch; the best product does"


def test_peers_are_shown_and_not_judged(compare):
    code, text = compare([*_run(), _row("peer.liger")], [*_run(), _row("peer.liger", us=200.0)])
    assert code == 0
    assert "peer.liger" in text
    assert compare([*_run(), _row("peer.liger")], [*_run(), _row("peer.liger", us=None, wrong="raised")])[0] == 0


@pytest.mark.parametrize(
    ("before", "after", "kind", "code"),
    [
        (_row(), _row(us=None, wrong="output: 3 > 1"), "Became wrong", 1),
        (None, _row(us=None, wrong="output: 3 > 1"), "Became wrong", 1),
        (_row(us=None, unsupported="no"), _row(us=None, wrong="output: 3 > 1"), "Became wrong", 1),
        (_row(), _row(us=None, unsupported="no CUDA extension"), "Became unsupported", 1),
        (_row(us=None, wrong="3 > 1"), _row(us=None, unsupported="not for 16 bits"), "Now refused", 0),
        (_row(us=None, wrong="3 > 1"), _row(), "Mended", 0),
        (_row(us=None, unsupported="no"), _row(), "Became supported", 0),
        (_row(us=None, wrong="3 > 1"), _row(us=None, wrong="3 > 1"), "Wrong in both", 0),
        (None, _row(), "Appeared", 0),
        (_row(), None, "Vanished", 0),
    ],
)
def test_transitions(before, after, kind, code, compare):
    other = _row("cuda.naive")
    got, text = compare([other, *filter(None, [before])], [other, *filter(None, [after])])
    assert got == code
    assert f"{kind} (1)" in text
    reason = after and (after.wrong or after.unsupported)
    assert not reason or reason in text


REASON = "the cuda level could not be imported: no _C"
LATER = "2026-01-02T00:00:00+00:00"


def _without_cuda(found: list[Row], when: str = LATER) -> list[Row]:
    """As the sweep writes rows where the extension file is missing: one a group for the whole level."""
    lost = {row.shape: _row("cuda", None, shape=row.shape, unsupported=REASON, when=when) for row in found}
    return [*(row for row in found if row.level != "cuda"), *lost.values()]


@pytest.mark.parametrize(
    "options", [(), ("--complete",), ("--raw",), ("--backend", "cuda"), ("--backend", "cuda.naive")], ids=" ".join
)
def test_a_build_that_lost_a_level_fails(options, compare):
    before = [*_run(seed=1), _row("cuda.tiled", None, unsupported="no"), _row("cuda.split", None, wrong="3 > 1")]
    found = _json(compare, before, _without_cuda(_run(seed=2)), *options)
    lost = len(SHAPES) * (1 if "cuda.naive" in options else 2)
    assert found["failures"] == [f"{lost} became unsupported"]
    assert found["outcome"] == "FAIL"
    assert {t["reason"] for t in found["transitions"]} == {REASON}
    kinds = {t["kind"]: t["backend"] for t in found["transitions"] if t["backend"] not in BACKENDS}
    assert kinds == ({} if "cuda.naive" in options else {"now refused": "cuda.split"})
    assert compare(before, _without_cuda(_run(seed=2)), *options)[0] == 1


def test_a_build_that_found_a_level_passes(compare):
    code, text = compare(_without_cuda(_run(seed=1)), _run(seed=2), "--complete")
    assert code == 0
    assert f"Became supported ({2 * len(SHAPES)})" in text
    assert "Vanished" not in text
    assert compare(_without_cuda(_run(seed=1)), _without_cuda(_run(seed=2)), "--complete")[0] == 0


def test_of_a_level_and_its_variants_in_one_file_the_newer_counts(compare):
    """As where a file is kept from build to build."""
    both = [*_run(seed=2), *_without_cuda(_run(seed=2))]
    assert f"FAIL: {2 * len(SHAPES)} became unsupported" in compare(_run(seed=1), both)[1]
    older = [*_run(seed=2), *_without_cuda(_run(seed=2), when="2025-01-01T00:00:00+00:00")]
    assert compare(_run(seed=1), older, "--complete")[0] == 0


@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_nothing_to_judge_is_no_pass(options, compare):
    refused = _row(us=None, unsupported="no")
    for rows_ in ([_row("torch.builtin"), _row("peer.liger")], [refused], [_row("triton.fused", interpreted=True)]):
        code, text = compare(rows_, rows_, *options)
        assert code == 2
        assert "UNDECIDED: nothing could be judged; 0 calls judged by their time" in text
        assert "PASS" not in text
        found = _json(compare, rows_, rows_)
        assert (found["outcome"], found["passed"], found["failures"]) == ("UNDECIDED", False, [])
    assert compare([refused], [_row()])[0] == 0, "what became of it is judged"


def test_complete_fails_for_what_vanished(compare):
    other = _row("cuda.naive")
    assert compare([other, _row()], [other], "--complete")[0] == 1
    assert compare([other], [other, _row()], "--complete")[0] == 0


def test_interpreted_rows_are_not_judged(compare):
    slow = [_row("triton.fused", interpreted=True)], [_row("triton.fused", us=300.0, interpreted=True)]
    code, text = compare(*([_row(), *found] for found in slow))
    assert code == 0
    assert "interpreted" in text


def test_filters(compare):
    before, after = _run(seed=1), _run(seed=2, slow={"cuda.naive": 1.5})
    assert compare(before, after, "--backend", "triton,torch")[0] == 0
    assert compare(before, after, "--backend", "cuda.naive")[0] == 1
    assert compare(before, after, "--backend", "cuda")[0] == 1
    found = _json(compare, before, after, "--backend", "cuda.naive", "--dtype", "bfloat16", "--pass", "forward")
    assert {change["backend"] for change in found["changes"]} == {"cuda.naive"}
    assert found["drift"]["controls"] == len(SHAPES), "the drift is that of all rows"


def test_older_rows_get_intervals_from_quartiles(compare):
    def old(found):
        return [dataclasses.replace(row, us_low=None, us_high=None) for row in found]

    code, text = compare(old(_run(seed=1)), _run(seed=2, slow={"cuda.naive": 1.1}))
    assert code == 1
    assert "are derived from quartiles" in text
    assert compare(old(_run(seed=1)), _run(seed=2))[0] == 0
    estimate = time_of(_row(us_low=None, us_high=None))
    # Quartiles 0.8 % apart over 25 rounds: 1.96 · 1.2533 / 1.349 · 0.8 % / 5.
    assert estimate.high / estimate.value - 1 == pytest.approx(0.00291, rel=0.01)
    single = time_of(_row(us_low=None, us_high=None, rounds=1))
    assert (single.low, single.high) == (None, None)


def _few(us: float, rounds: int, width: float = 0.004, **fields) -> Row:
    return _row("cuda.naive", us, width, rounds=rounds, **{"us_low": None, "us_high": None, **fields})


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("controls", [0, len(SHAPES)])
def test_too_few_rounds_are_undecided(rounds, controls, compare):
    """Six percent more, in quartiles that are too near to each other to be witness, is neither slower nor unchanged."""
    rest = [row for row in _run() if row.backend == "torch.builtin"][:controls]
    rest.append(_row("triton.fused"))
    width = 0.01 if rounds > 1 else 0
    before, after = [*rest, _few(100.0, rounds, width)], [*rest, _few(106.0, rounds, width)]
    code, text = compare(before, after)
    assert code == 0
    assert text.rstrip().endswith("; 1 calls judged by their time, 1 undecided")
    table = text[text.index("Undecided: too few rounds to tell (1)") :]
    assert re.search(r"cuda\.naive .* 1\.060 +1\.060 +none +few rounds\n", table)
    assert f"1 of {len(rest) + 1} ratios have no interval" in text
    assert "Undecided: too few rounds to tell (1)" in compare(before, after, "--markdown")[1]
    found = _json(compare, before, after)
    change = next(c for c in found["changes"] if c["backend"] == "cuda.naive")
    assert (change["direction"], change["judged"], change["past_threshold"]) == ("undecided", False, False)
    assert change["corrected"]["low"] is None
    assert found["groups"][-1]["undecided"] == 1
    assert compare(before[-1:], after[-1:])[0] == 2, "nothing could be judged"


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (_few(100.0, 3), _few(110.0, 3), 1),
        (_few(100.0, 3), _few(105.5, 3), 0),
        (_few(100.0, 3, 0.05), _few(110.0, 3, 0.05), 0),
        (_few(100.0, 1), _few(140.0, 5), 0),
        (_few(100.0, 1), _few(160.0, 5), 1),
        (_few(100.0, 1), _few(160.0, 1), 1),
        (_row("cuda.naive"), _few(10_000.0, 1), 1),
        (_few(100.0, 3, speedup=1.0), _few(110.0, 3, speedup=1.0), 0),
        (_few(100.0, 3, speedup=1.0), _few(110.0, 3, speedup=0.9), 1),
        (_few(110.0, 3), _few(100.0, 3), 0),
    ],
)
def test_quartiles_far_apart_are_witness_enough(before, after, code, compare):
    """So that a kernel of few rounds, or one that became so slow that it has few, does not escape the gate."""
    others = [_row("triton.fused")]
    assert compare([*others, before], [*others, after])[0] == code
    slower = "Slower past 5 % (1)" in compare([*others, before], [*others, after])[1]
    assert slower == bool(code)


def test_what_is_faster_in_few_rounds(compare):
    text = compare([_few(110.0, 3)], [_few(100.0, 3)])[1]
    assert "Faster past 5 % (1)" in text
    assert "PASS" in text


def test_drift_and_scatter_are_taken_off_quartiles(compare):
    """A tenth more, in a run where everything took a tenth more."""
    controls = [_row("torch.builtin", 10.0, shape=shape) for shape in SHAPES]
    drifted = [dataclasses.replace(row, us=11.0, us_low=10.9, us_high=11.1) for row in controls]
    assert "Undecided: too few" in compare([*controls, _few(100.0, 3)], [*drifted, _few(110.0, 3)])[1]
    scattered = [
        dataclasses.replace(row, us=us, us_low=0.99 * us, us_high=1.01 * us)
        for row, us in zip(controls, (9.0, 9.2, 9.4, 9.8, 10.2, 10.5, 10.7, 11.0), strict=True)
    ]
    assert "Undecided: too few" in compare([*controls, _few(100.0, 3)], [*scattered, _few(110.0, 3)])[1]


def test_the_newest_row_counts(compare):
    stale = _row(us=50.0, when="2025-01-01T00:00:00+00:00")
    assert compare([_row(), stale], [_row()])[0] == 0


def test_machines(compare):
    here, there = [_row()], [_row(gpu="GPU 2", us=200.0)]
    code, text = compare(here, there)
    assert code == 2
    assert "measured on different machines" in text
    assert "GPU 1" in text
    assert "GPU 2" in text
    code, text = compare(here, there, "--across-gpus")
    assert code == 1
    assert "machine: GPU 1 → GPU 2" in text
    assert "the machines differ" in text
    both = [*here, *there]
    code, text = compare(both, both)
    assert code == 2
    assert "choose one with --gpu" in text
    assert compare(both, both, "--gpu", "GPU 2")[0] == 0
    assert compare(both, here)[0] == 0, "one machine is in both"
    assert "--gpu 'GPU 3' is not in both files" in compare(both, both, "--gpu", "GPU 3")[1]
    assert "takes files of one machine each" in compare(both, here, "--across-gpus")[1]


def test_plain_text_is_stable(compare):
    """In a pipe: no colour, no box, no trailing space, nothing wrapped or cut; the same each time."""
    before, after = _run(seed=1), _run(seed=2, slow={"cuda.naive": 1.5})
    code, text = compare(before, after, "--all")
    assert code == 1
    assert text == compare(before, after, "--all")[1]
    assert not re.search(r"[\x1b│─╭…]|[ \t]$", text, re.MULTILINE)
    for row in after:
        assert re.search(rf"^gelu +{row.backend} +forward +bfloat16 +{row.shape} ", text, re.MULTILINE)


def test_markdown(compare):
    before = [*_run(seed=1), _row("cuda.naive", op="softmax")]
    broken = _row("cuda.naive", us=None, op="softmax", wrong="a | b\nin <two> lines")
    code, text = compare(before, [*_run(seed=2), broken], "--markdown")
    assert code == 1
    assert text.startswith("**FAIL: 1 became wrong")
    assert "a \\| b in &lt;two> lines |" in text
    lines = text.splitlines()
    tables = [i for i, line in enumerate(lines) if line.startswith("|--")]
    assert tables
    for i in tables:
        cells = lines[i].count("|")
        while i < len(lines) and lines[i].startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", lines[i])) == cells
            i += 1
    assert text.count("<details>") == text.count("</details>")


def test_markdown_fits_a_comment(compare):
    shapes = [f"{i}x4096" for i in range(2000)]
    before = [_row(shape=shape) for shape in shapes]
    after = [_row(shape=shape, us=150.0 + i) for i, shape in enumerate(shapes)]
    text = compare(before, after, "--markdown", "--all")[1]
    assert "and 1960 more" in text
    assert len(text) < 65_536


def test_json(compare):
    found = _json(compare, _run(seed=1), _run(seed=2, slow={"cuda.naive": 1.1}))
    assert not found["passed"]
    assert found["failures"] == [f"{len(SHAPES)} slower past 5 %"]
    assert len(found["changes"]) == len(SHAPES) * len(BACKENDS)
    for change in found["changes"]:
        low, value, high = (change["corrected"][name] for name in ("low", "value", "high"))
        assert low <= value <= high
        assert change["past_threshold"] == (change["backend"] == "cuda.naive")
        assert (change["direction"] == "slower") >= change["past_threshold"]
        assert change["control"] == (change["backend"] == "torch.builtin") != change["judged"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[:-30], "not a whole JSON object"),
        (lambda text: text[:-1], "has no end"),
        (lambda text: '{"kernel": "saxpy"}\n', "not a row of this benchmark: it lacks 'op'"),
        (lambda text: "", "holds no rows"),
        (lambda text: text.replace('"us": 100.0', '"us": -1.0'), "'us' must be above zero, got -1.0"),
        (lambda text: text.replace('"us": 100.0', '"us": "fast"'), "'us' must be a number or null, got 'fast'"),
        (lambda text: text.replace('"us": 100.0', '"us": null'), "neither a time nor a reason"),
    ],
    ids=["truncated", "no-end", "foreign", "empty", "negative", "text", "no-time"],
)
def test_spoiled_files(spoil, message, tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    store.write(good, [_row()])
    bad.write_text(spoil(good.read_text()))
    for pair in ((good, bad), (bad, good)):
        assert main(["compare", *map(str, pair)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "gelo"], "unknown op 'gelo'; did you mean 'gelu'?"),
        (["--backend", "cuda.vectorised"], "did you mean 'cuda.vectorized'"),
        (["--pass", "sideways"], "unknown pass 'sideways'"),
        (["--dtype", "float8"], "Known are bfloat16"),
        (["--backend", ""], "--backend: no name in ''; known are cuda, cuda.vectorized"),
        (["--pass", ","], "--pass: no name in ','; known are forward"),
    ],
)
def test_unknown_names(options, message, compare):
    code, text = compare([_row()], [_row()], *options)
    assert code == 2
    assert message in text


@pytest.mark.parametrize("threshold", ["5", "-0.1", "nan", "five"])
def test_bad_thresholds(threshold, compare, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare([_row()], [_row()], "--threshold", threshold)
    assert "expected a share from 0 up to 1" in capsys.readouterr().err


def test_missing_files_and_nothing_in_common(tmp_path, compare, capsys):
    assert main(["compare", str(tmp_path / "no.jsonl"), str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err
    assert "nothing to compare" in compare([_row()], [_row("cuda.naive")])[1]


def test_the_clocks_difference_is_shown(compare):
    before, after = ([_row(clock_mhz=mhz)] for mhz in (1980.0, 1755.0))
    assert "median clock: 1,980 MHz → 1,755 MHz" in compare(before, after)[1]


def test_notes(compare):
    before = _row(peak_mib=96.0, graph=True)
    after = _row(us=150.0, peak_mib=224.0, graph=False, clocks_moved=True)
    text = compare([before], [after])[1]
    assert "launch gaps in B alone, clock moved, peak memory 96 → 224 MiB" in text


times = st.floats(0.5, 1e6)
widths = st.floats(0, 0.2)


@st.composite
def runs(draw) -> list[Row]:
    """Rows of torch.builtin and a variant at each shape, some absent, refused or wrong."""
    found = []
    for shape in SHAPES[:5]:
        for backend in ("torch.builtin", "cuda.naive"):
            state = draw(st.sampled_from(["timed", "timed", "timed", "wrong", "unsupported", "absent"]))
            us, width = draw(times), draw(widths)
            few = {"rounds": draw(st.sampled_from([1, 3])), "us_low": None, "us_high": None}
            if state == "timed":
                found.append(
                    _row(backend, us, width, shape=shape, speedup=draw(times), **draw(st.sampled_from([{}, few])))
                )
            elif state != "absent":
                found.append(_row(backend, None, shape=shape, **{state: "for a reason"}))
    return found


@settings(max_examples=100, deadline=None)
@given(runs(), runs())
def test_swapping_the_files_inverts_every_ratio(a, b):
    there, back = changes.compare(a, b), changes.compare(b, a)
    assert there.drift.factor * back.drift.factor == pytest.approx(1)
    assert there.drift.scatter == pytest.approx(back.drift.scatter)
    returned = {change.after.key: change for change in back.changes}
    assert len(returned) == len(there.changes)
    opposite = {"slower": "faster", "faster": "slower", "unchanged": "unchanged", "undecided": "undecided"}
    for change in there.changes:
        other = returned[change.after.key]
        for name in ("raw", "corrected", "paired"):
            x, y = getattr(change, name), getattr(other, name)
            assert (x is None) == (y is None)
            assert x is None or x.value * y.value == pytest.approx(1)
            assert x is None or x.low is None or x.low * y.high == pytest.approx(1)
        ends = [end for end in (change.corrected.low, change.corrected.high) if end is not None]
        near_one = any(end == pytest.approx(1, abs=1e-9) for end in ends)
        assert near_one or other.direction == opposite[change.direction]
    assert len(there.transitions) == len(back.transitions)


@given(times, widths, times, widths)
def test_the_interval_of_a_ratio_holds_it_and_no_more_than_all_ends(a, a_width, b, b_width):
    x, y = (Estimate(v, v * (1 - w), v * (1 + w)) for v, w in ((a, a_width), (b, b_width)))
    ratio = x.over(y)
    assert ratio.low <= ratio.value <= ratio.high
    slack = 1e-9
    assert x.low / y.high * (1 - slack) <= ratio.low
    assert ratio.high <= x.high / y.low * (1 + slack)


def test_a_bad_row_is_named():
    with pytest.raises(ResultsError, match=f"gelu cuda.vectorized forward bfloat16 {SHAPES[0]}: expected times"):
        time_of(_row(us_low=200.0))
