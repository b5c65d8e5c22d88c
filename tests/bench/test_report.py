"""The report in a real browser: what it shows, how it answers, and that no string of a row is ever run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

from bench.__main__ import main
from bench.measure import environment
from bench.rows import store
from bench.rows.store import Row
from bench.show import climb, report, roofline_chart
from bench.show.roofline import operations, roofs
from bench.show.table import fastest

from . import browser

H200 = environment.ROOT / "bench" / "results" / "nvidia-h200.jsonl"
CPU = environment.ROOT / "bench" / "results" / "cpu.jsonl"
HOSTILE = "</script><img src=x onerror=\"window.ran = 1\"><script>window.ran = 1</script><!-- ${'&amp;'} \u2028"
SECTIONS = ("rates", "roofline", "climb", "peers", "costs", "unmeasured", "rows", "environment")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if browser.executable() is None:
        pytest.skip(f"no browser to open the page in: none of {', '.join(browser.NAMES)} is on the PATH")
    with browser.page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def _ceiling(backend: str, **fields) -> Row:
    place = {"op": "ceiling", "level": "ceiling", "pass_": "forward", "dtype": "bfloat16", "gpu": "NVIDIA H200"}
    return Row(**place, backend=f"ceiling.{backend}", when="2026-01-01T00:00:00+00:00", **fields)


CEILINGS = [
    _ceiling("copy", shape="256 MiB", bytes=2**28, gbs=4321.0, us=62.0),
    _ceiling("l2", shape="16 MiB", bytes=2**24, gbs=9876.0, us=1.7),
    _ceiling("launch", shape="empty kernel", us=2.1),
    _ceiling("tensor", shape="8192x8192x8192", flops=2 * 8192**3, tflops=789.0, us=1400.0),
    _ceiling("cuda_core", shape="fma", flops=2**40, tflops=123.0, us=9000.0),
]


def _measured() -> list[Row]:
    """Rows of operations that a GPU gave, without the ceilings beside them, which the tests set themselves."""
    return operations(store.read(H200))


def _full_rows() -> list[Row]:
    """Measured rows, with what a later version of the sweep adds: intervals, clocks, a peer, ceilings."""
    found: list[Row] = []
    for i, row in enumerate(store.latest(_measured())):
        if row.us is not None:
            row.us_low, row.us_high = 0.99 * row.us, 1.01 * row.us
            if row.speedup is not None:
                row.speedup_low, row.speedup_high = 0.99 * row.speedup, 1.01 * row.speedup
            row.clock_mhz, row.power_w, row.temperature_c, row.clocks_moved = 1980.0, 650.0, 61.0, i % 50 == 3
        found.append(row)
        if row.backend == "torch.builtin":
            found.append(dataclasses.replace(row, backend="peer.example", level="peer"))
    return [*found, *CEILINGS]


def _shown(*view: str) -> list[Row]:
    """The rows of an operation, dtype and pass in the page's order: level by level, peers last."""
    climbs = climb.by_call(r for r in _full_rows() if (r.op, r.dtype, r.pass_) == view)
    return [row for steps in climbs for row in steps]


def _written(tmp: Path, found: list[Row]) -> Path:
    store.write(tmp / "rows.jsonl", found)
    assert main(["report", str(tmp / "rows.jsonl"), "--output", str(tmp / "report.html")]) == 0
    return tmp / "report.html"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return _written(tmp_path_factory.mktemp("full"), _full_rows())


def _text(page: browser.Page, selector: str) -> str:
    return page.run(f"document.querySelector({json.dumps(selector)}).innerText")


def _texts(page: browser.Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")


def _choose(page: browser.Page, switch: str, value: str) -> None:
    page.run(
        f"(() => {{ const s = document.getElementById('switch-{switch}'); s.value = {json.dumps(value)};"
        "s.dispatchEvent(new Event('change')); })()"
    )


def _clean(page: browser.Page) -> None:
    """No error, and nothing asked for but the page itself."""
    assert page.errors == []
    assert len(page.requests) == 1
    assert page.requests[0].startswith("file:")


def test_every_section_has_something_to_show(page, full):
    page.open(full)
    for name in SECTIONS:
        assert page.run(f"document.querySelectorAll('#{name} .body svg, #{name} .body table').length"), name
    found = store.latest(_full_rows())
    shown = [r for r in found if r.op != "ceiling" and r.dtype == "bfloat16" and r.pass_ == "forward"]
    assert page.run("document.querySelectorAll('#rates .point').length") == sum(r.us is not None for r in shown)
    assert page.run("document.querySelectorAll('#rows tbody tr').length") == len(shown)
    _clean(page)


def test_switches_change_the_view_and_the_address(page, full):
    page.open(full)
    assert _text(page, "#view") == "all operations · forward · bfloat16 · NVIDIA H200"
    _choose(page, "op", "softmax")
    _choose(page, "dtype", "float32")
    _choose(page, "pass", "backward")
    assert _text(page, "#view") == "softmax · backward · float32 · NVIDIA H200"
    found = _shown("softmax", "float32", "backward")
    assert _texts(page, "#rows tbody code") == [r.backend for r in found]
    fragment = page.run("location.hash")
    assert fragment == "#op=softmax&dtype=float32&pass=backward"
    page.open(full, fragment.removeprefix("#"))
    assert _text(page, "#view") == "softmax · backward · float32 · NVIDIA H200"
    _clean(page)


def test_a_shape_can_be_chosen_for_climb_and_roofline(page, full):
    page.open(full, "op=matmul")
    _choose(page, "shape", "1024x1024x1024")
    for name in ("climb", "roofline"):
        assert "matmul 1024x1024x1024" in _text(page, f"#{name} h3")
        labels = page.run(f"[...document.querySelectorAll('#{name} .point')].map((e) => e.getAttribute('aria-label'))")
        assert labels
        assert all("1024x1024x1024" in label for label in labels)
    _clean(page)


def test_unknown_choices_in_the_address_fall_back(page, full):
    page.open(full, "op=saxpy&dtype=int3&pass=sideways&shape=none&gpu=abacus&sort-rows=nothing")
    assert _text(page, "#view") == "all operations · forward · bfloat16 · NVIDIA H200"
    _clean(page)


def test_a_column_sorts_up_and_down_and_back(page, full):
    page.open(full, "op=softmax")
    found = _shown("softmax", "bfloat16", "forward")
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
        assert _texts(page, "#rows tbody code") == [r.backend for r in ordered]
    page.open(full, "op=softmax&sort-rows=-us")
    assert _texts(page, "#rows tbody code")[0] == max(rising, key=lambda r: r.us).backend
    _clean(page)


@pytest.mark.parametrize("section", ["rates", "roofline", "climb"])
def test_a_point_shows_its_whole_row_under_the_pointer(page, full, section):
    page.open(full, "op=gelu")
    assert page.run("document.getElementById('details').hidden")
    page.hover(f"#{section} .point .hit")
    shown = _text(page, "#details")
    row = next(r for r in _full_rows() if r.op == "gelu" and r.backend == "torch.naive")
    assert shown.startswith("gelu torch.naive")
    for part in ("95 % interval", "quartiles", "rounds", "1980 MHz", "650 W", "61 °C", row.commit[:12], row.torch):
        assert part in shown
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert page.run("document.getElementById('details').hidden")
    _clean(page)


def test_points_answer_to_the_keyboard(page, full):
    page.open(full, "op=gelu")
    page.run("document.querySelector('#rates .point[tabindex=\"0\"]').focus()")
    first = _text(page, "#details")
    page.press("ArrowRight")
    second = _text(page, "#details")
    assert first != second
    assert first.splitlines()[0] == second.splitlines()[0]  # along the same line
    page.press("ArrowDown")
    assert page.run("document.querySelectorAll('#rates .point[tabindex=\"0\"]').length") == 1
    page.press("Enter")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert not page.run("document.getElementById('details').hidden"), "Enter pins"
    page.press("Escape")
    assert page.run("document.getElementById('details').hidden")
    _clean(page)


#: A timed row has these; every other field that may be null is null in some row.
_ALWAYS = {"op", "backend", "level", "pass_", "dtype", "shape", "when", "us", "shapes", "options", "interpreted"}


def _bare(row: Row, **fields) -> Row:
    """All null that may be null, and what is given."""
    names = {field.name for field in dataclasses.fields(Row)} - _ALWAYS
    return dataclasses.replace(row, **{**dict.fromkeys(names), **fields})


@pytest.mark.parametrize("bare", ["some", "all"])
def test_what_a_row_lacks_is_left_out(page, tmp_path, bare):
    base = next(row for row in _measured() if row.op == "gelu" and row.us is not None and row.speedup)
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
    _choose(page, "gpu", "unknown machine")
    for op in ("all", "gelu", "another"):
        _choose(page, "op", op)
        for name in SECTIONS:
            drawn = page.run(f"document.querySelector('#{name} .body').innerHTML")
            assert not re.search("null|undefined|NaN|Infinity", drawn), (op, name)
    _choose(page, "op", "gelu")
    assert "unknown machine" in _text(page, "#environment")
    assert ("Nothing has a rate." in _text(page, "#rates")) == (bare == "all")
    assert ("Nothing has a rate." in _text(page, "#climb")) == (bare == "all")
    if bare == "some":
        page.hover("#climb .point .hit")
        shown = _text(page, "#details")
        assert shown.startswith("gelu cuda.rate")
        assert "4096×64, absent, scalar" in shown
        assert "500 W" in shown
        assert "°C" not in shown, "nothing is known of it"
        assert any(re.fullmatch("— [0-9.]+ µs", words) for words in _texts(page, "#climb text")), "a time, no rate"
    _clean(page)
    page.open(path, scripts=False)
    assert "cuda.bare" in _text(page, "noscript")
    _clean(page)


def _hostile_rows() -> list[Row]:
    base = next(row for row in _measured() if row.us is not None)
    return [
        dataclasses.replace(base, **dict.fromkeys(("op", "backend", "level", "dtype", "gpu", "torch"), HOSTILE)),
        dataclasses.replace(base, shape=HOSTILE, options={HOSTILE: HOSTILE}, commit=HOSTILE, driver=HOSTILE),
        dataclasses.replace(base, shape=f"{HOSTILE} 2", us=None, unsupported=HOSTILE),
        dataclasses.replace(base, shape=f"{HOSTILE} 3", us=None, wrong=HOSTILE),
    ]


def test_hostile_strings_stay_strings(page, tmp_path):
    path = _written(tmp_path, _hostile_rows())
    for gpu in range(2):
        page.open(path)
        _choose(page, "gpu", page.run(f"document.getElementById('switch-gpu').options[{gpu}].value"))
        page.hover("#rates .point .hit")
        assert page.run("window.ran") is None
        assert page.run("document.querySelectorAll('img').length") == 0
        assert page.run("document.scripts.length") == 2
        _clean(page)
    page.open(path)
    _choose(page, "gpu", "NVIDIA H200")
    assert f"wrong: {HOSTILE}" in _texts(page, "#rows td.note")
    assert HOSTILE in _texts(page, "#unmeasured td.note")
    page.open(path, scripts=False)
    assert HOSTILE in _texts(page, "noscript td")
    assert page.run("document.querySelectorAll('img').length") == 0


def test_the_policy_lets_nothing_else_run_or_load(page, full):
    page.open(full)
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.ran = 1\">')")
    refused = page.run("fetch('https://example.invalid/').then(() => 'loaded', (error) => String(error))")
    assert "TypeError" in refused
    assert page.run("window.ran") is None
    assert len(page.errors) >= 2
    assert all("Content Security Policy" in error for error in page.errors)


def test_without_scripts_there_is_a_table(page, full):
    page.open(full, scripts=False)
    found = [row for row in store.latest(_full_rows()) if row.op != "ceiling"]
    assert page.run("document.querySelectorAll('noscript tbody tr').length") == len(found)
    assert page.run("document.getElementById('switches').hidden")


def test_rows_of_a_cpu(page, tmp_path):
    path = _written(tmp_path, store.read(CPU))
    page.open(path)
    assert "(interpreted)" in _text(page, "#climb")
    assert page.run("document.querySelectorAll('#rates .point').length") > 0
    _clean(page)


def test_no_rows(page, tmp_path):
    path = _written(tmp_path, [])
    page.open(path)
    assert "There are no rows yet" in _text(page, "#summary")
    assert page.run("document.getElementById('main').hidden")
    _clean(page)


def test_rows_without_a_time(page, tmp_path):
    base = next(row for row in _measured() if row.us is None)
    page.open(_written(tmp_path, [base]))
    assert "Nothing has a time" in _text(page, "#rates")
    assert base.unsupported in _text(page, "#unmeasured")
    _clean(page)


def test_ceilings_are_drawn_and_are_no_operations(page, full, tmp_path):
    page.open(full, "op=gelu")
    assert "ceiling" not in page.run("[...document.getElementById('switch-op').options].map((o) => o.value)")
    drawn = " ".join(_texts(page, "#roofline text"))
    best = max(r.ceiling_tflops for r in _full_rows() if r.ceiling_tflops and r.dtype == "bfloat16")
    assert 789.0 < best < 1000, "a variant's product is above the measured ceiling, as below"
    roof = f"tensor cores, bfloat16: {best:.0f} TFLOP/s"
    for name in ("L2 cache: 9,880 GB/s", "memory, by a copy: 4,320 GB/s", roof):
        assert name in drawn
    assert "launch" in _text(page, "#environment")
    page.open(_written(tmp_path, _measured()), "op=gelu")
    drawn = " ".join(_texts(page, "#roofline text"))
    assert "best matrix product, bfloat16" in drawn
    assert "L2" not in drawn
    _clean(page)


@pytest.mark.parametrize("op", ["all", "gelu", "softmax", "matmul", "attention"])
def test_names_of_points_do_not_overlap(page, full, op):
    page.open(full, f"op={op}", width=1280)
    boxes = page.run(
        "['rates', 'roofline'].map((id) => [...document.querySelectorAll(`#${id} svg.chart`)].map((chart) =>"
        "[...chart.querySelectorAll('.series text')].map((t) => { const b = t.getBoundingClientRect();"
        "return [t.textContent, b.left, b.right, b.top, b.bottom]; }))).flat()"
    )
    assert any(boxes)
    for chart in boxes:
        for (a, left, right, top, bottom), (b, left2, right2, top2, bottom2) in itertools.combinations(chart, 2):
            across = min(right, right2) - max(left, left2)
            down = min(bottom, bottom2) - max(top, top2)
            assert across <= 0 or down <= 1.5, f"{a} lies on {b}"  # a box is a little taller than its letters


@pytest.mark.parametrize("op", ["all", "gelu", "matmul", "attention"])
def test_a_phone_scrolls_tables_not_the_page(page, full, op):
    page.open(full, f"op={op}", width=390)
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert page.run("document.querySelector('#rows .scroll').scrollWidth") > 390
    widest = page.run("Math.max(...[...document.querySelectorAll('svg.chart')].map((s) => s.viewBox.baseVal.width))")
    assert widest <= 390, "text keeps its size: a chart is drawn at the width that it has"
    _clean(page)


def _contrast(page: browser.Page, selector: str) -> float:
    """WCAG 2's ratio of a text's colour to the page's."""

    def luminance(colour: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour[:3])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ink, ground = page.run(
        f"[getComputedStyle(document.querySelector('{selector}')).color,"
        "getComputedStyle(document.body).backgroundColor].map((c) => c.match(/[\\d.]+/g).map(Number))"
    )
    low, high = sorted((luminance(ink), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(page, full, theme):
    page.emulate(prefers_color_scheme=theme)
    try:
        page.open(full)
        for selector in ("#view", "#summary", "nav a"):
            assert _contrast(page, selector) >= 4.5
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.run(ground)
        assert (before == "rgb(255, 255, 255)") == (theme == "light")
        for _ in range(1 if theme == "dark" else 2):
            page.click("#theme")
        assert page.run(ground) != before
        assert _contrast(page, "#summary") >= 4.5
    finally:
        page.emulate()


def test_print_holds_the_view_and_no_switches(page, full):
    page.open(full, "op=gelu")
    page.emulate("print", prefers_color_scheme="dark")
    try:
        style = "getComputedStyle(document.querySelector('{}')).{}"
        for selector in ("#switches", "nav", "#theme"):
            assert page.run(style.format(selector, "display")) == "none"
        assert page.run(style.format("#view", "display")) != "none"
        assert page.run(style.format("body", "backgroundColor")) == "rgb(255, 255, 255)"
        assert page.run(style.format("#rows .scroll", "overflowX")) == "visible"
    finally:
        page.emulate()
    assert page.pdf().startswith(b"%PDF")
    _clean(page)


def test_reduced_motion(page, full):
    try:
        durations = []
        for wish in ("no-preference", "reduce"):
            page.emulate(prefers_reduced_motion=wish)
            page.open(full, "op=gelu")
            durations.append(page.run("getComputedStyle(document.querySelector('.series')).transitionDuration"))
        assert durations == ["0.12s", "0s"]
    finally:
        page.emulate()


def _embedded(path: Path) -> dict:
    text = path.read_text()
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def test_data_survives_the_page(full):
    text = full.read_text()
    embedded = _embedded(full)
    found = store.latest(_full_rows())
    assert len(embedded["rows"]) + len(embedded["ceilings"]) == len(found)
    assert {row["backend"] for row in embedded["ceilings"]} == {row.backend for row in CEILINGS}
    again = store.read(full.parent / "rows.jsonl")
    assert report.page(again) == text, "the same rows must make the same page"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b'{"kernel": "saxpy"}\n', "not a row of this benchmark"),
        (b'{"op": "gelu", ', "not a whole JSON object"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
    ids=["missing", "foreign", "truncated", "binary"],
)
def test_bad_files(content, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path), "--output", str(tmp_path / "report.html")]) == 2
    assert message in (said := capsys.readouterr().err)
    assert str(path) in said
    assert not (tmp_path / "report.html").exists()


def test_gains_and_baselines_are_those_of_the_log(full):
    """KERNEL_LOG.md's climbs and the page's are of the same rows: what one shows, the other must."""
    embedded = _embedded(full)
    climbs = climb.by_call(operations(store.read(full.parent / "rows.jsonl")))
    expected = {
        row.key: (before.backend, climb.gain(row, before))
        for steps in climbs
        for row, before in climb.with_step_before(steps)
        if before and row.us is not None
    }
    shown = {
        tuple(row.get(name) for name in ("op", "backend", "pass", "dtype", "shape", "gpu")): row
        for row in embedded["rows"]
        if "gain" in row
    }
    order = [row["backend"] for row in embedded["rows"]]
    assert order == [row.backend for steps in climbs for row in steps], "whoever was measured first"
    assert shown.keys() == expected.keys()
    for key, (before, gain) in expected.items():
        row = shown[key]
        assert row["step_before"] == before
        assert (row["gain"], row["gain_low"], row["gain_high"]) == (gain.value, gain.low, gain.high)
    of_torch = {row["step_before"] for row in shown.values() if row["level"] == "torch"}
    assert of_torch == {"torch.naive"}
    assert {row["level"] for row in shown.values()} == {"torch", "compile", "triton", "cuda"}, "peers are no steps"
    assert embedded["baselines"]["gelu"] == "torch.builtin"
    assert embedded["baselines"]["dropout"] == "torch.naive"


def test_the_fastest_are_those_of_the_tables(page, full):
    shown = {row["shape"]: set() for row in _embedded(full)["rows"]}
    wanted = {"op": "softmax", "pass": "forward", "dtype": "bfloat16"}
    mine = [row for row in _embedded(full)["rows"] if all(row[name] == value for name, value in wanted.items())]
    for row in mine:
        shown[row["shape"]] |= {row["backend"]} if row.get("fastest") else set()
    found = [
        r for r in store.latest(store.read(full.parent / "rows.jsonl")) if (r.op, r.pass_) == ("softmax", "forward")
    ]
    for shape in {row["shape"] for row in mine}:
        assert shown[shape] == fastest(r for r in found if (r.shape, r.dtype) == (shape, "bfloat16"))
    page.open(full, "op=softmax&dtype=bfloat16&pass=forward")
    marked = [text for text in _texts(page, "#peers td") if "◀" in text]
    # Of a level's variants the fastest alone has a cell.
    assert len({row["shape"] for row in mine}) <= len(marked) <= sum(map(len, shown.values()))
    _clean(page)


@pytest.mark.parametrize(("op", "baseline"), [("matmul", "torch.builtin"), ("dropout", "torch.naive")])
def test_the_climb_shows_them(page, full, op, baseline):
    page.open(full, f"op={op}")
    (headline,) = [
        h for h in _embedded(full)["headlines"] if (h["op"], h["dtype"], h["pass"]) == (op, "bfloat16", "forward")
    ]
    words = _texts(page, "#climb svg text.halo")
    found = [r for r in _embedded(full)["rows"] if all(r[name] == headline[name] for name in headline)]
    timed = [r for r in found if "us" in r]
    assert len(words) == len(timed)
    for said, row in zip(words, timed, strict=True):
        gain = re.search(r"([\d.,]+)× step before", said)
        assert bool(gain) == ("gain" in row)
        assert not gain or float(gain[1].replace(",", "")) == pytest.approx(row["gain"], rel=0.01)
        assert ("speedup" in row) == said.endswith(f"× {baseline}")
    assert f"× {baseline}" in _texts(page, "#rows thead th")
    page.hover("#climb .point:last-child .hit")
    assert f"× {baseline}" in _text(page, "#details")
    page.open(full)
    assert "× baseline" in _texts(page, "#rows thead th"), "no name holds for all operations"
    _clean(page)


def test_bad_places(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} is no regular file" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(H200), "--output", str(tmp_path / "file" / "report.html")]) == 2
    assert "--output: cannot write" in capsys.readouterr().err


def test_roofs_are_measured_ones_where_there_are_any():
    found = _full_rows()
    # That of the tensor cores is the best product of all: no variant's point stands above it.
    best = max(r.ceiling_tflops for r in found if r.ceiling_tflops and r.dtype == "bfloat16")
    assert best > 789.0
    assert [(roof.name, roof.gbs or roof.tflops) for roof in roofs(found, "bfloat16")] == [
        ("memory, by a copy", 4321.0),
        ("L2 cache", 9876.0),
        ("tensor cores, bfloat16", best),
        ("CUDA cores, bfloat16", 123.0),
    ]
    lower = [dataclasses.replace(r, ceiling_tflops=700.0) for r in found]
    assert ("tensor cores, bfloat16", 789.0) in [(roof.name, roof.tflops) for roof in roofs(lower, "bfloat16")]
    carried = _measured()
    memory, matrix = roofs(carried, "float32")
    assert memory.gbs == max(row.ceiling_gbs for row in carried if row.ceiling_gbs)
    assert matrix.tflops == max(r.ceiling_tflops for r in carried if r.ceiling_tflops and r.dtype == "float32")
    assert memory.at(2.0) == memory.gbs * 2 / 1e3
    assert matrix.at(2.0) == matrix.tflops


@pytest.mark.parametrize("measured", ["full", "cpu"])
def test_rooflines_are_drawn_and_the_same_again(measured, tmp_path):
    path = tmp_path / "rows.jsonl"
    few = ("matmul", "softmax", "ceiling")  # every operation's are drawn by the test below
    store.write(path, [r for r in _full_rows() if r.op in few] if measured == "full" else store.read(CPU))
    ops = {row.op for row in store.read(path)} - {"ceiling"}
    drawn = roofline_chart.draw(path)
    assert {p.name for p in drawn} == {"roofline-rows.svg", *(f"roofline-{op}-rows.svg" for op in ops)}
    before = [p.read_bytes() for p in drawn]
    assert all(b"<svg" in content for content in before)
    roofline_chart.draw(path)
    assert [p.read_bytes() for p in drawn] == before


def test_names_on_rooflines_do_not_overlap(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(roofline_chart.plt, "close", figures.append)
    path = tmp_path / "rows.jsonl"
    store.write(path, _full_rows())
    roofline_chart.draw(path)
    assert len(figures) == 1 + len({row.op for row in store.read(path)} - {"ceiling"})
    for figure in figures:
        for axes in figure.axes:
            # A rotated name's box is far larger than the name.
            level = [text for text in axes.texts if text.get_rotation() == 0]
            assert len(level) >= 3
            boxes = [(text.get_text(), Text.get_window_extent(text)) for text in level]  # without its leader
            for (a, box), (b, other) in itertools.combinations(boxes, 2):
                across = min(box.x1, other.x1) - max(box.x0, other.x0)
                down = min(box.y1, other.y1) - max(box.y0, other.y0)
                assert across <= 0 or down <= 1.5, f"{a} lies on {b}"
    monkeypatch.undo()
    roofline_chart.plt.close("all")


def test_roofline_of_no_rows(tmp_path):
    store.write(tmp_path / "rows.jsonl", [])
    assert roofline_chart.draw(tmp_path / "rows.jsonl") == []


def test_readme_links_rooflines(tmp_path, capsys):
    file = tmp_path / "README.md"
    names = ("roofline", "roofline gelu")
    file.write_text("\n".join(f"<!-- results:begin {n} -->\n<!-- results:end {n} -->" for n in names) + "\n")
    assert main(["readme", str(file), "--results", str(H200)]) == 0
    text = file.read_text()
    for name in ("roofline-nvidia-h200.svg", "roofline-gelu-nvidia-h200.svg"):
        assert f"pictures/{name})" in text
