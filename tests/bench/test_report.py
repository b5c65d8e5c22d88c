"""The report in a real browser: what it shows, how it answers, and that no string of a row is ever run."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import pytest

from bench.rows import store
from bench.rows.store import Row
from bench.show import report

from .report_rows import CPU, GPU, embedded, full_rows, measured, shown, written

HOSTILE = "</script><img src=x onerror=\"window.ran = 1\"><script>window.ran = 1</script><!-- ${'&amp;'} \u2028"
SECTIONS = ("rates", "roofline", "climb", "peers", "costs", "unmeasured", "rows", "environment")
#: A timed row has these; every other field that may be null is null in some row.
_ALWAYS = {"op", "backend", "level", "pass_", "dtype", "shape", "when", "us", "shapes", "options", "interpreted"}


def test_every_section_has_something_to_show(page, full):
    page.open(full)
    for name in SECTIONS:
        page.charts(name)
        assert page.run(f"document.querySelectorAll('#{name} .body .main-svg, #{name} .body table').length"), name
    found = store.latest(full_rows())
    shown = [r for r in found if r.op != "ceiling" and r.dtype == "bfloat16" and r.pass_ == "forward"]
    assert sum(len(chart["rows"]) for chart in page.charts("rates")) == sum(r.us is not None for r in shown)
    assert page.run("document.querySelectorAll('#rows tbody tr').length") == len(shown)
    page.clean()


def test_the_page_opens_with_what_it_is_and_the_best_of_each_operation(page, full):
    for scripts in (True, False):
        page.open(full, scripts=scripts, width=400)
        order = page.run("[...document.querySelectorAll('main > section')].map((s) => s.id)")
        assert order[:3] == ["glance", "climb", "peers"]
        assert page.text("#about").startswith("kernel_ladder writes the operations")
        told = page.texts("#glance tbody tr:first-child td")
        assert told[0] == "gelu 16384x4096 tanh"
        assert all(cell.count("·") == 1 for cell in told[1:])
        assert page.run("document.documentElement.scrollWidth") == 400, "the table scrolls in its own box"
    page.clean()


def test_switches_change_the_view_and_the_address(page, full):
    page.open(full)
    assert page.text("#view") == f"all operations · forward · bfloat16 · {GPU}"
    page.choose("op", "softmax")
    page.choose("dtype", "float32")
    page.choose("pass", "backward")
    assert page.text("#view") == f"softmax · backward · float32 · {GPU}"
    found = shown("softmax", "float32", "backward")
    assert page.texts("#rows tbody code") == [r.backend for r in found]
    fragment = page.run("location.hash")
    assert fragment == "#op=softmax&dtype=float32&pass=backward"
    page.open(full, fragment.removeprefix("#"))
    assert page.text("#view") == f"softmax · backward · float32 · {GPU}"
    page.clean()


def test_a_shape_can_be_chosen_for_climb_and_roofline(page, full):
    page.open(full, "op=matmul")
    page.choose("shape", "1024x1024x1024")
    for name in ("climb", "roofline"):
        assert "matmul 1024x1024x1024" in page.text(f"#{name} h3")
        (chart,) = page.charts(name)
        assert chart["rows"]
        assert all(row["shape"] == "1024x1024x1024" for row in chart["rows"])
    page.clean()


def test_unknown_choices_in_the_address_fall_back(page, full):
    page.open(full, "op=saxpy&dtype=int3&pass=sideways&shape=none&gpu=abacus&sort-rows=nothing")
    assert page.text("#view") == f"all operations · forward · bfloat16 · {GPU}"
    page.clean()


def test_a_column_sorts_up_and_down_and_back(page, full):
    page.open(full, "op=softmax")
    found = shown("softmax", "bfloat16", "forward")
    rising = sorted((r for r in found if r.us is not None), key=lambda r: r.us)
    untimed = [r for r in found if r.us is None]
    assert untimed
    heading = '#rows th[data-key="us"]'
    for ordered, direction in (
        ([*rising, *untimed], "ascending"),
        ([*sorted(rising, key=lambda r: -r.us), *untimed], "descending"),
        (found, "none"),
    ):
        page.click(f"{heading} button")
        assert page.run(f"document.querySelector('{heading}').getAttribute('aria-sort')") == direction
        assert page.texts("#rows tbody code") == [r.backend for r in ordered]
    page.open(full, "op=softmax&sort-rows=-us")
    assert page.texts("#rows tbody code")[0] == max(rising, key=lambda r: r.us).backend
    page.clean()


POINT = {section: f"#{section} .points .point" for section in ("rates", "roofline", "climb")}
HOVER = "document.querySelector('.hoverlayer .hovertext')?.textContent"


@pytest.mark.parametrize("section", POINT)
def test_a_point_shows_its_interval_on_hover_and_its_row_on_a_click(page, full, section):
    page.open(full, "op=gelu")
    page.charts(section)
    assert page.run("document.getElementById('details').hidden")
    page.hover(POINT[section])
    page.wait(HOVER)
    row = next(r for r in full_rows() if r.op == "gelu" and r.backend == "torch.naive")
    assert page.run(HOVER).startswith("torch.naive")
    assert "95 % interval" in page.run(HOVER)
    assert "of the ceiling" in page.run(HOVER)
    page.click(POINT[section])
    page.wait("!document.getElementById('details').hidden")
    shown = page.text("#details")
    assert shown.startswith("gelu torch.naive")
    for part in ("95 % interval", "quartiles", "rounds", "1980 MHz", "650 W", "61 °C", row.commit[:12], row.torch):
        assert part in shown
    page.click("h1")
    assert page.run("document.getElementById('details').hidden")
    page.clean()


def press_until(page, key: str, condition: str) -> None:
    """Press a key, and once more after every five seconds in which it did nothing: a busy browser loses some."""
    for _ in range(12):
        page.press(key)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if page.run(condition):
                return
    page.wait(condition)


def test_points_answer_to_the_keyboard(page, full):
    page.open(full, "op=gelu")
    page.charts("rates")
    page.run("document.querySelector('#rates .chart').focus()")
    page.press("ArrowRight")
    first = page.run(HOVER)
    assert first.startswith("torch.naive")
    press_until(page, "ArrowRight", f"{HOVER} !== {json.dumps(first)}")
    assert page.run(HOVER).startswith("torch.naive"), "along the same line"
    press_until(page, "ArrowDown", f"{HOVER}.startsWith('torch.builtin')")
    page.press("Enter")
    assert page.text("#details").startswith("gelu torch.builtin")
    page.press("Escape")
    assert page.run("document.getElementById('details').hidden")
    page.clean()


def _bare(row: Row, **fields) -> Row:
    """All null that may be null, and what is given."""
    names = {field.name for field in dataclasses.fields(Row)} - _ALWAYS
    return dataclasses.replace(row, **{**dict.fromkeys(names), **fields})


@pytest.mark.parametrize("bare", ["some", "all"])
def test_what_a_row_lacks_is_left_out(page, tmp_path, bare):
    base = next(row for row in measured() if row.op == "gelu" and row.us is not None and row.speedup)
    absent = {"shapes": [[4096, 64], None, []]}
    lacking = [
        _bare(base, backend="cuda.bare", level="cuda", **absent),
        _bare(base, backend="cuda.rate", level="cuda", gbs=1.0, bytes=10**6, power_w=500.0, **absent),
        _bare(base, backend="cuda.half", level="cuda", us_low=base.us, us_q1=base.us, temperature_c=44.0, rounds=3),
        _bare(base, backend="cuda.none", level="cuda", us=None),
        _bare(base, op="another", backend="cuda.bare", level="cuda"),
    ]
    path = tmp_path / "report.html"  # made of the rows themselves: no file may hold a time without its work
    path.write_text(report.page([base, *lacking] if bare == "some" else [lacking[0], *lacking[3:]]), encoding="utf-8")
    page.open(path)
    page.choose("gpu", "unknown machine")
    for op in ("all", "gelu", "another"):
        page.choose("op", op)
        for name in SECTIONS:
            page.charts(name)
            drawn = page.run(f"document.querySelector('#{name} .body').innerHTML")
            assert not re.search("null|undefined|NaN|Infinity", drawn), (op, name)
    page.choose("op", "gelu")
    assert "unknown machine" in page.text("#environment")
    assert ("Nothing has a rate." in page.text("#rates")) == (bare == "all")
    assert ("Nothing has a rate." in page.text("#climb")) == (bare == "all")
    if bare == "some":
        page.charts("climb")
        page.click(POINT["climb"])
        page.wait("!document.getElementById('details').hidden")
        shown = page.text("#details")
        assert shown.startswith("gelu cuda.rate")
        assert "4096×64, absent, scalar" in shown
        assert "500 W" in shown
        assert "°C" not in shown, "nothing is known of it"
        assert any(re.fullmatch("— [0-9.]+ µs", words) for words in page.texts("#climb .annotation-text")), (
            "a time, no rate"
        )
    page.clean()
    page.open(path, scripts=False)
    assert "cuda.bare" in page.text("noscript")
    page.clean()


def _hostile_rows() -> list[Row]:
    base = next(row for row in measured() if row.us is not None)
    return [
        dataclasses.replace(base, **dict.fromkeys(("op", "backend", "level", "dtype", "gpu", "torch"), HOSTILE)),
        dataclasses.replace(base, shape=HOSTILE, options={HOSTILE: HOSTILE}, commit=HOSTILE, driver=HOSTILE),
        dataclasses.replace(base, shape=f"{HOSTILE} 2", us=None, unsupported=HOSTILE),
        dataclasses.replace(base, shape=f"{HOSTILE} 3", us=None, wrong=HOSTILE),
    ]


def test_hostile_strings_stay_strings(page, tmp_path):
    path = written(tmp_path, _hostile_rows())
    for gpu in range(2):
        page.open(path)
        page.choose("gpu", page.run(f"document.getElementById('switch-gpu').options[{gpu}].value"))
        for section in POINT:
            page.charts(section)
        page.hover(POINT["rates"])
        page.wait(HOVER)
        assert HOSTILE[:20] in page.run(HOVER)
        assert page.run("window.ran") is None
        assert page.run("document.querySelectorAll('img').length") == 0
        assert page.run("document.scripts.length") == 3
        page.clean()
    page.open(path)
    page.choose("gpu", GPU)
    assert f"wrong: {HOSTILE}" in page.texts("#rows td.note")
    assert HOSTILE in page.texts("#unmeasured td.note")
    page.open(path, scripts=False)
    assert HOSTILE in page.texts("noscript td")
    assert page.run("document.querySelectorAll('img').length") == 0


def test_the_policy_lets_nothing_else_run_or_load(page, full):
    page.open(full)
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.ran = 1\">')")
    refused = page.run("fetch('https://example.invalid/').then(() => 'loaded', (error) => String(error))", awaits=True)
    assert "TypeError" in refused
    assert page.run("window.ran") is None
    assert len(page.errors) >= 2
    assert all("Content Security Policy" in error for error in page.errors)


def test_without_scripts_there_is_a_table(page, full):
    page.open(full, scripts=False)
    found = [row for row in store.latest(full_rows()) if row.op != "ceiling"]
    assert page.run("document.querySelectorAll('noscript tbody tr').length") == len(found)
    assert page.run("document.getElementById('switches').hidden")


def test_rows_of_a_cpu(page, tmp_path):
    path = written(tmp_path, store.read(CPU))
    page.open(path)
    page.charts("climb")
    assert "(interpreted)" in " ".join(page.texts("#climb .ytick text"))
    assert page.charts("rates")[0]["rows"]
    assert page.charts("rates")[0]["scale"] == "log", "interpreted kernels are far slower"
    page.clean()


def test_no_rows(page, tmp_path):
    path = written(tmp_path, [])
    page.open(path)
    assert "There are no rows yet" in page.text("#summary")
    assert page.run("document.getElementById('main').hidden")
    page.clean()


def test_rows_without_a_time(page, tmp_path):
    base = next(row for row in measured() if row.us is None)
    page.open(written(tmp_path, [base]))
    assert "Nothing has a time" in page.text("#rates")
    assert base.unsupported in page.text("#unmeasured")
    page.clean()


def test_ceilings_are_drawn_and_are_no_operations(page, full, tmp_path):
    page.open(full, "op=gelu")
    assert "ceiling" not in page.run("[...document.getElementById('switch-op').options].map((o) => o.value)")
    page.charts("roofline")
    drawn = " ".join(page.texts("#roofline .legendtext"))
    best = max(r.ceiling_tflops or r.tflops or 0.0 for r in full_rows() if r.dtype == "bfloat16")
    assert best >= 789.0, "the ceiling's own row"
    roof = f"tensor cores, bfloat16: {best:.0f} TFLOP/s"
    for name in ("L2 cache: 9,876 GB/s", "memory, by a copy: 4,321 GB/s", roof):
        assert name in drawn
    assert "launch" in page.text("#environment")
    page.open(written(tmp_path, measured()), "op=gelu")
    page.charts("roofline")
    drawn = " ".join(page.texts("#roofline .legendtext"))
    assert "best matrix product, bfloat16" in drawn
    assert "L2" not in drawn
    page.clean()


@pytest.mark.parametrize(("op", "baseline"), [("matmul", "torch.builtin"), ("dropout", "torch.naive")])
def test_the_climb_shows_them(page, full, op, baseline):
    page.open(full, f"op={op}")
    (headline,) = [
        h for h in embedded(full)["headlines"] if (h["op"], h["dtype"], h["pass"]) == (op, "bfloat16", "forward")
    ]
    page.charts("climb")
    words = [said for said in page.texts("#climb .annotation-text") if not said.startswith("—")]
    found = [r for r in embedded(full)["rows"] if all(r[name] == headline[name] for name in headline)]
    timed = [r for r in found if "us" in r]
    assert len(words) == len(timed)
    for said, row in zip(words, timed, strict=True):
        gain = re.search(r"([\d.,]+)× step before", said)
        assert bool(gain) == ("gain" in row)
        assert not gain or float(gain[1].replace(",", "")) == pytest.approx(row["gain"], rel=0.01)
        assert ("speedup" in row) == said.endswith(f"× {baseline}")
    assert f"× {baseline}" in page.texts("#rows thead th")
    page.run(f"showDetails(DATA.rows.find((row) => row.op === {json.dumps(op)} && row.speedup != null))")
    assert f"× {baseline}" in page.text("#details")
    page.open(full)
    assert "× baseline" in page.texts("#rows thead th"), "no name holds for all operations"
    page.clean()
