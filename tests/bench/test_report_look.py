"""The look of the report in a real browser: phones, themes, print, names of points."""

from __future__ import annotations

import itertools

import pytest

from . import browser


@pytest.mark.parametrize("op", ["all", "gelu", "softmax", "matmul", "attention"])
def test_names_do_not_overlap(page, full, op):
    page.open(full, f"op={op}", width=1280)
    for section in ("rates", "roofline", "climb"):
        page.charts(section)
    boxes = page.run(
        "[...document.querySelectorAll('.chart')].map((chart) =>"
        "[...chart.querySelectorAll('.annotation-text, .legendtext')].map((t) => { const b = t.getBoundingClientRect();"
        "return [t.textContent, b.left, b.right, b.top, b.bottom]; }))"
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
    for section in ("rates", "roofline", "climb"):
        for chart in page.charts(section):
            assert chart["width"] <= 390, "text keeps its size: a chart is drawn at the width that it has"
            assert not chart["drags"], "a finger scrolls"
    inside = page.run(
        "[...document.querySelectorAll('.legendtext, .ytick text')].map((t) => t.getBoundingClientRect())"
        ".filter((b) => b.width).map((b) => [b.left, b.right])"
    )
    assert inside
    assert all(left >= 0 and right <= 390 for left, right in inside)
    page.clean()


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
        assert {chart["paper"].replace(" ", "") for chart in page.charts("climb")} == {before.replace(" ", "")}
        assert (before == "rgb(255, 255, 255)") == (theme == "light")
        for _ in range(1 if theme == "dark" else 2):
            page.click("#theme")
        assert page.run(ground) != before
        (paper,) = {chart["paper"] for chart in page.charts("climb")}
        assert paper.replace(" ", "") == page.run(ground).replace(" ", ""), "charts follow the theme"
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
    page.clean()


def test_reduced_motion(page, full):
    try:
        page.emulate(prefers_reduced_motion="reduce")
        page.open(full, "op=gelu")
        page.charts("rates")
        durations = page.run(
            "[...new Set([...document.querySelectorAll('*')].map((e) => getComputedStyle(e).transitionDuration))]"
        )
        assert durations == ["0s"], "nothing moves"
    finally:
        page.emulate()
