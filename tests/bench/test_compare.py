"""`bench compare`: real changes are found, noise and drift are not taken for them, and the exit code says so."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.compare import changes
from bench.rows.ratio import Estimate, time_of
from bench.rows.store import ResultsError, Row

from .compare_rows import BACKENDS, SHAPES, json_of, run_of, timed_row


def test_a_true_slowdown_is_found(compare):
    code, text = compare(run_of(seed=1), run_of(seed=2, slow={"cuda.vectorized": 1.10}))
    assert code == 1
    assert f"FAIL: {len(SHAPES)} slower past 5 %" in text
    slower = text[text.index("Slower past 5 %") : text.index("Geometric means")]
    assert slower.count("cuda.vectorized") == len(SHAPES)
    assert not re.search(r"triton|naive", slower.partition("\n\n")[0])


def test_the_size_of_a_slowdown_is_right(compare):
    found = json_of(compare, run_of(seed=1), run_of(seed=2, slow={"cuda.naive": 1.10}))
    by_backend = {group["backend"]: group["corrected"] for group in found["groups"]}
    assert by_backend.pop("cuda.naive") == pytest.approx(1.10, rel=0.005)
    assert all(ratio == pytest.approx(1, rel=0.005) for ratio in by_backend.values())
    sizes = [abs(change["corrected"]["value"] - 1) for change in found["changes"][: len(SHAPES)]]
    assert {change["backend"] for change in found["changes"][: len(SHAPES)]} == {"cuda.naive"}
    assert sizes == sorted(sizes, reverse=True)


def test_noise_is_not_taken_for_a_change(compare):
    code, text = compare(run_of(seed=1), run_of(seed=2))
    assert code == 0
    assert "PASS: nothing slower past 5 %, nothing broken" in text


def test_a_faster_variant_passes(compare):
    code, text = compare(run_of(seed=1), run_of(seed=2, slow={"triton.fused": 0.8}))
    assert code == 0
    assert f"Faster past 5 % ({len(SHAPES)})" in text


def test_a_slowdown_below_the_threshold_is_shown_and_passes(compare):
    code, text = compare(run_of(seed=1), run_of(seed=2, slow={"triton.fused": 1.03}))
    assert code == 0
    assert "Slower, not past the threshold" in text
    assert compare(run_of(seed=1), run_of(seed=2, slow={"triton.fused": 1.03}), "--threshold", "0.02")[0] == 1


def test_drift_is_told_apart(compare):
    drifted = run_of(seed=2, drift=1.12)
    code, text = compare(run_of(seed=1), drifted)
    assert code == 0
    assert re.search(rf"{len(SHAPES)} controls took 1\.1[12]\d × as long in B", text)
    assert "The drift is past the threshold" in text
    assert compare(run_of(seed=1), drifted, "--raw")[0] == 1
    assert compare(run_of(seed=1), run_of(seed=2, drift=1.12, slow={"cuda.naive": 1.1}))[0] == 1


def test_raw_shows_what_was_measured(compare):
    found = json_of(compare, run_of(seed=1), run_of(seed=2, drift=1.12), "--raw")
    assert not found["drift"]["applied"]
    assert found["drift"]["factor"] == pytest.approx(1.12, rel=0.01)
    assert all(change["corrected"]["value"] == change["raw"]["value"] for change in found["changes"])


def test_a_passing_state_of_the_machine_is_no_slowdown(compare):
    """One group is slower in all its members, torch.builtin too, and the drift of all the others does not tell."""
    after = [
        dataclasses.replace(row, **{name: 1.1 * getattr(row, name) for name in ("us", "us_low", "us_high")})
        if row.shape == SHAPES[3]
        else row
        for row in run_of(seed=2)
    ]
    code, text = compare(run_of(seed=1), after)
    assert code == 0
    assert "Slower, not past the threshold (4)" in text


def test_a_paired_ratio_that_may_be_one_is_no_witness(compare):
    """A time that rose by a fifth, beside a speed-up so noisy that it may not have changed."""
    ends = {"speedup_low": 0.5, "speedup_high": 2.0}
    before, after = timed_row(speedup=1.0, **ends), timed_row(us=120.0, speedup=1 / 1.2, **ends)
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
            for row in run_of(noise=0.001)
            for us in [row.us * random_.lognormvariate(0, 0.03)]
        ]

    found = json_of(compare, scattered(1), scattered(2))
    assert found["drift"]["scatter"] > 0.015
    changed = [c for c in found["changes"] if c["judged"] and c["direction"] != "unchanged"]
    assert len(changed) <= 3, "of 32 rows, about 5 % lie outside of 95 % intervals"


def test_ceilings_are_controls_and_not_judged(compare):
    def ceilings(factor: float) -> list[Row]:
        return [
            timed_row(name, 50.0 * factor, op="ceiling", shape="256 MiB", bytes=2**28)
            for name in ("ceiling.copy", "ceiling.read", "ceiling.write", "ceiling.launch")
        ]

    found = json_of(compare, [*ceilings(1), timed_row()], [*ceilings(1.2), timed_row(us=120.0)])
    assert found["drift"]["controls"] == 3, "launch cost is the host's"
    assert found["passed"]
    assert [c["corrected"]["value"] for c in found["changes"] if c["judged"]] == [pytest.approx(1)]


def test_another_pytorch_is_no_control(compare):
    after = [dataclasses.replace(row, torch="2.12.0") for row in run_of(seed=2, slow={"torch.builtin": 1.2})]
    code, text = compare(run_of(seed=1), after)
    assert code == 1, "torch.builtin is judged where it is not the same code"
    assert "PyTorch: 2.11.0 → 2.12.0" in text
    assert "Drift: unknown" in text

    def ceiling(name, **fields):
        return [timed_row(f"ceiling.{name}", op="ceiling", shape=f"{size} MiB", **fields) for size in (64, 256, 1024)]

    found = json_of(compare, [*run_of(), *ceiling("copy"), *ceiling("tensor")],
                  [*after, *ceiling("copy", torch="2.12.0"), *ceiling("tensor", torch="2.12.0")])  # fmt: skip
    assert found["drift"]["controls"] == 3, "bandwidth does not depend on PyTorch; the best product does"


def test_peers_are_shown_and_not_judged(compare):
    code, text = compare([*run_of(), timed_row("peer.liger")], [*run_of(), timed_row("peer.liger", us=200.0)])
    assert code == 0
    assert "peer.liger" in text
    assert (
        compare([*run_of(), timed_row("peer.liger")], [*run_of(), timed_row("peer.liger", us=None, wrong="raised")])[0]
        == 0
    )


@pytest.mark.parametrize(
    ("before", "after", "kind", "code"),
    [
        (timed_row(), timed_row(us=None, wrong="output: 3 > 1"), "Became wrong", 1),
        (None, timed_row(us=None, wrong="output: 3 > 1"), "Became wrong", 1),
        (timed_row(us=None, unsupported="no"), timed_row(us=None, wrong="output: 3 > 1"), "Became wrong", 1),
        (timed_row(), timed_row(us=None, unsupported="no CUDA extension"), "Became unsupported", 1),
        (timed_row(us=None, wrong="3 > 1"), timed_row(us=None, unsupported="not for 16 bits"), "Now refused", 0),
        (timed_row(us=None, wrong="3 > 1"), timed_row(), "Mended", 0),
        (timed_row(us=None, unsupported="no"), timed_row(), "Became supported", 0),
        (timed_row(us=None, wrong="3 > 1"), timed_row(us=None, wrong="3 > 1"), "Wrong in both", 0),
        (None, timed_row(), "Appeared", 0),
        (timed_row(), None, "Vanished", 0),
    ],
)
def test_transitions(before, after, kind, code, compare):
    other = timed_row("cuda.naive")
    got, text = compare([other, *filter(None, [before])], [other, *filter(None, [after])])
    assert got == code
    assert f"{kind} (1)" in text
    reason = after and (after.wrong or after.unsupported)
    assert not reason or reason in text


REASON = "the cuda level could not be imported: no _C"
LATER = "2026-01-02T00:00:00+00:00"


def _without_cuda(found: list[Row], when: str = LATER) -> list[Row]:
    """As the sweep writes rows where the extension file is missing: one a group for the whole level."""
    lost = {row.shape: timed_row("cuda", None, shape=row.shape, unsupported=REASON, when=when) for row in found}
    return [*(row for row in found if row.level != "cuda"), *lost.values()]


@pytest.mark.parametrize(
    "options", [(), ("--complete",), ("--raw",), ("--backend", "cuda"), ("--backend", "cuda.naive")], ids=" ".join
)
def test_a_build_that_lost_a_level_fails(options, compare):
    before = [
        *run_of(seed=1),
        timed_row("cuda.tiled", None, unsupported="no"),
        timed_row("cuda.split", None, wrong="3 > 1"),
    ]
    found = json_of(compare, before, _without_cuda(run_of(seed=2)), *options)
    lost = len(SHAPES) * (1 if "cuda.naive" in options else 2)
    assert found["failures"] == [f"{lost} became unsupported"]
    assert found["outcome"] == "FAIL"
    assert {t["reason"] for t in found["transitions"]} == {REASON}
    kinds = {t["kind"]: t["backend"] for t in found["transitions"] if t["backend"] not in BACKENDS}
    assert kinds == ({} if "cuda.naive" in options else {"now refused": "cuda.split"})
    assert compare(before, _without_cuda(run_of(seed=2)), *options)[0] == 1


def test_a_build_that_found_a_level_passes(compare):
    code, text = compare(_without_cuda(run_of(seed=1)), run_of(seed=2), "--complete")
    assert code == 0
    assert f"Became supported ({2 * len(SHAPES)})" in text
    assert "Vanished" not in text
    assert compare(_without_cuda(run_of(seed=1)), _without_cuda(run_of(seed=2)), "--complete")[0] == 0


def test_of_a_level_and_its_variants_in_one_file_the_newer_counts(compare):
    """As where a file is kept from build to build."""
    both = [*run_of(seed=2), *_without_cuda(run_of(seed=2))]
    assert f"FAIL: {2 * len(SHAPES)} became unsupported" in compare(run_of(seed=1), both)[1]
    older = [*run_of(seed=2), *_without_cuda(run_of(seed=2), when="2025-01-01T00:00:00+00:00")]
    assert compare(run_of(seed=1), older, "--complete")[0] == 0


@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_nothing_to_judge_is_no_pass(options, compare):
    refused = timed_row(us=None, unsupported="no")
    for rows_ in (
        [timed_row("torch.builtin"), timed_row("peer.liger")],
        [refused],
        [timed_row("triton.fused", interpreted=True)],
    ):
        code, text = compare(rows_, rows_, *options)
        assert code == 2
        assert "UNDECIDED: nothing could be judged; 0 calls judged by their time" in text
        assert "PASS" not in text
        found = json_of(compare, rows_, rows_)
        assert (found["outcome"], found["passed"], found["failures"]) == ("UNDECIDED", False, [])
    assert compare([refused], [timed_row()])[0] == 0, "what became of it is judged"


def test_complete_fails_for_what_vanished(compare):
    other = timed_row("cuda.naive")
    assert compare([other, timed_row()], [other], "--complete")[0] == 1
    assert compare([other], [other, timed_row()], "--complete")[0] == 0


def test_interpreted_rows_are_not_judged(compare):
    slow = [timed_row("triton.fused", interpreted=True)], [timed_row("triton.fused", us=300.0, interpreted=True)]
    code, text = compare(*([timed_row(), *found] for found in slow))
    assert code == 0
    assert "interpreted" in text


def test_filters(compare):
    before, after = run_of(seed=1), run_of(seed=2, slow={"cuda.naive": 1.5})
    assert compare(before, after, "--backend", "triton,torch")[0] == 0
    assert compare(before, after, "--backend", "cuda.naive")[0] == 1
    assert compare(before, after, "--backend", "cuda")[0] == 1
    found = json_of(compare, before, after, "--backend", "cuda.naive", "--dtype", "bfloat16", "--pass", "forward")
    assert {change["backend"] for change in found["changes"]} == {"cuda.naive"}
    assert found["drift"]["controls"] == len(SHAPES), "the drift is that of all rows"


def test_older_rows_get_intervals_from_quartiles(compare):
    def old(found):
        return [dataclasses.replace(row, us_low=None, us_high=None) for row in found]

    code, text = compare(old(run_of(seed=1)), run_of(seed=2, slow={"cuda.naive": 1.1}))
    assert code == 1
    assert "are derived from quartiles" in text
    assert compare(old(run_of(seed=1)), run_of(seed=2))[0] == 0
    estimate = time_of(timed_row(us_low=None, us_high=None))
    # Quartiles 0.8 % apart over 25 rounds: 1.96 · 1.2533 / 1.349 · 0.8 % / 5.
    assert estimate.high / estimate.value - 1 == pytest.approx(0.00291, rel=0.01)
    single = time_of(timed_row(us_low=None, us_high=None, rounds=1))
    assert (single.low, single.high) == (None, None)


def _few(us: float, rounds: int, width: float = 0.004, **fields) -> Row:
    return timed_row("cuda.naive", us, width, rounds=rounds, **{"us_low": None, "us_high": None, **fields})


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("controls", [0, len(SHAPES)])
def test_too_few_rounds_are_undecided(rounds, controls, compare):
    """Six percent more, in quartiles that are too near to each other to be witness, is neither slower nor unchanged."""
    rest = [row for row in run_of() if row.backend == "torch.builtin"][:controls]
    rest.append(timed_row("triton.fused"))
    width = 0.01 if rounds > 1 else 0
    before, after = [*rest, _few(100.0, rounds, width)], [*rest, _few(106.0, rounds, width)]
    code, text = compare(before, after)
    assert code == 0
    assert text.rstrip().endswith("; 1 calls judged by their time, 1 undecided")
    table = text[text.index("Undecided: too few rounds to tell (1)") :]
    assert re.search(r"cuda\.naive .* 1\.060 +1\.060 +none +few rounds\n", table)
    assert f"1 of {len(rest) + 1} ratios have no interval" in text
    assert "Undecided: too few rounds to tell (1)" in compare(before, after, "--markdown")[1]
    found = json_of(compare, before, after)
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
        (timed_row("cuda.naive"), _few(10_000.0, 1), 1),
        (_few(100.0, 3, speedup=1.0), _few(110.0, 3, speedup=1.0), 0),
        (_few(100.0, 3, speedup=1.0), _few(110.0, 3, speedup=0.9), 1),
        (_few(110.0, 3), _few(100.0, 3), 0),
    ],
)
def test_quartiles_far_apart_are_witness_enough(before, after, code, compare):
    """So that a kernel of few rounds, or one that became so slow that it has few, does not escape the gate."""
    others = [timed_row("triton.fused")]
    assert compare([*others, before], [*others, after])[0] == code
    slower = "Slower past 5 % (1)" in compare([*others, before], [*others, after])[1]
    assert slower == bool(code)


def test_what_is_faster_in_few_rounds(compare):
    text = compare([_few(110.0, 3)], [_few(100.0, 3)])[1]
    assert "Faster past 5 % (1)" in text
    assert "PASS" in text


def test_drift_and_scatter_are_taken_off_quartiles(compare):
    """A tenth more, in a run where everything took a tenth more."""
    controls = [timed_row("torch.builtin", 10.0, shape=shape) for shape in SHAPES]
    drifted = [dataclasses.replace(row, us=11.0, us_low=10.9, us_high=11.1) for row in controls]
    assert "Undecided: too few" in compare([*controls, _few(100.0, 3)], [*drifted, _few(110.0, 3)])[1]
    scattered = [
        dataclasses.replace(row, us=us, us_low=0.99 * us, us_high=1.01 * us)
        for row, us in zip(controls, (9.0, 9.2, 9.4, 9.8, 10.2, 10.5, 10.7, 11.0), strict=True)
    ]
    assert "Undecided: too few" in compare([*controls, _few(100.0, 3)], [*scattered, _few(110.0, 3)])[1]


def test_the_newest_row_counts(compare):
    stale = timed_row(us=50.0, when="2025-01-01T00:00:00+00:00")
    assert compare([timed_row(), stale], [timed_row()])[0] == 0


def test_machines(compare):
    here, there = [timed_row()], [timed_row(gpu="GPU 2", us=200.0)]
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
                    timed_row(backend, us, width, shape=shape, speedup=draw(times), **draw(st.sampled_from([{}, few])))
                )
            elif state != "absent":
                found.append(timed_row(backend, None, shape=shape, **{state: "for a reason"}))
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
        time_of(timed_row(us_low=200.0))
