"""The markers that pages of ``docs/`` hold: tables, and the error that ends a build."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.show import dynamic
from kernel_ladder.inspection import failures

pytest.importorskip("mkdocs", reason="mkdocs is not installed; pip install kernel_ladder[docs]")

ROOT = Path(__file__).resolve().parents[2]
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="lessons/7-compile.md", src_path="lessons/7-compile.md"))


@pytest.fixture(scope="module")
def hook():
    """The hook as mkdocs loads it: its folder is on the path meanwhile."""
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "_build" / "docs_hook.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "_build"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "_build"))
    return module


def test_the_table_of_failures_has_a_line_for_each(hook):
    written = hook.on_page_markdown("before\n\n{{ table failures }}\n\nafter", PAGE)
    before, table, after = written.split("\n\n")
    assert (before, after) == ("before", "after")
    head, ruler, *lines = table.splitlines()
    assert (head, ruler) == ("| cause | way out |", "|---|---|")
    assert len(lines) == len(failures.KNOWN)
    for line, known in zip(lines, failures.KNOWN, strict=True):
        assert line.startswith(f"| {known.cause} | "), "a bar or a `<` in it would break the table"


def test_the_table_of_lengths_is_that_of_its_rows_or_names_the_command(hook, monkeypatch):
    asked = []
    monkeypatch.setattr(dynamic, "write", lambda machines: asked.append(list(machines)) or "| a table |")
    assert hook.on_page_markdown("{{ table dynamic }}", PAGE) == "| a table |"
    assert asked == [[hook.ROWS]]
    monkeypatch.setattr(dynamic, "write", lambda machines: "")
    assert hook.on_page_markdown("{{ table dynamic }}", PAGE) == "*No rows yet: `python -m bench dynamic` writes them.*"


GELU = 'gelu {} "16384x4096 tanh"'


def data(written: str) -> dict[str, str]:
    return dict(re.findall(r'data-(\w+)="([^"]*)"', written))


def test_a_prediction_holds_its_formula_against_the_row(hook):
    written = hook.on_page_markdown(f'{{{{ predict us {GELU.format("cuda.vectorized")} by="2 · T / copy" }}}}', PAGE)
    (row,) = [
        each
        for each in hook.rows()
        if (each["op"], each["backend"], each["shape"], each["dtype"], each["pass"])
        == ("gelu", "cuda.vectorized", "16384x4096 tanh", "bfloat16", "forward")
    ]
    expected = 1e6 * 2 * (16384 * 4096 * 2) / (hook.best_ceiling("ceiling.copy", "gbs") * 1e9)
    found = data(written)
    assert found["unit"] == "µs"
    assert float(found["measured"]) == pytest.approx(row["us"], rel=1e-5)
    assert float(found["formula"]) == pytest.approx(expected, rel=1e-5)
    assert f"2 · T / {hook.ceiling('copy')} = <strong>{hook.microseconds(expected)}</strong>" in written
    assert f"<strong>{hook.microseconds(row['us'])}</strong>: gelu cuda.vectorized" in written
    assert row["gpu"] in written
    assert f"off by {max(row['us'] / expected, expected / row['us']):.2f}×" in written


def test_a_predicted_ratio_and_counter_are_those_of_their_markers(hook):
    call = 'gelu torch.builtin torch.naive "16384x4096 tanh"'
    written = hook.on_page_markdown(f'{{{{ predict ratio {call} by="52 / 2" }}}}', PAGE)
    assert f">{float(data(written)['measured']):.3g}<" in hook.on_page_markdown(f"{{{{ ratio {call} }}}}", PAGE)
    assert (data(written)["formula"], data(written)["unit"]) == ("26", "times")
    call = 'softmax cuda.online "issue slots" "16384x4096"'
    written = hook.on_page_markdown(f'{{{{ predict counter {call} by="100 / 2" }}}}', PAGE)
    assert f">{float(data(written)['measured']):.0f} %<" in hook.on_page_markdown(f"{{{{ counter {call} }}}}", PAGE)
    assert (data(written)["formula"], data(written)["unit"]) == ("50", "%")


def test_every_prediction_of_a_lesson_is_a_fold_that_the_script_finds():
    script = (ROOT / "docs" / "javascripts" / "predict.js").read_text()
    assert "extra_javascript: [javascripts/predict.js]" in (ROOT / "mkdocs.yml").read_text()
    assert "details.predict" in script
    assert ".prediction" in script
    for page in sorted((ROOT / "docs" / "lessons").glob("[1-8]-*.md")):
        text = page.read_text()
        folds = re.findall(r'<details class="question predict" markdown="1">\n(.*?)</details>', text, re.DOTALL)
        assert folds, page
        for fold in folds:
            assert re.match(r'<summary markdown="1">Predict: .*</summary>\n\n\{\{ predict .* by=".*" \}\}\n', fold), (
                page
            )
        assert len(folds) == text.count("{{ predict ")


def test_a_part_of_a_time_and_a_machine_are_those_of_the_row(hook):
    call = 'attention torch.naive "B4 H16 S4096 D128 causal"'
    row = hook._row("attention", "torch.naive", "B4 H16 S4096 D128 causal")
    spent = 1e6 * 275e9 / (hook.best_ceiling("ceiling.tensor", "tflops", "bfloat16") * 1e12)
    written = hook.on_page_markdown(f"{{{{ part tensor 275e9 {call} }}}}", PAGE)
    assert f">{100 * spent / row['us']:.2g} %<" in written
    said = hook.on_page_markdown(f"{{{{ machine {call} }}}}", PAGE)
    assert said.startswith(f"{row['gpu']}, commit {row['commit'][:12]}; counters: ")


def test_a_function_inside_another_stands_at_the_margin(hook):
    written = hook.on_page_markdown("{{ source torch_ref/attention.py scores_of }}", PAGE)
    assert written.splitlines()[1].startswith("def scores_of(")


@pytest.mark.parametrize(
    "marker",
    [
        "{{ table lengths }}",
        "{{ table }}",
        "{{ figure swizle }}",
        "{{ us gelu cuda.none x }}",
        '{{ counter softmax cuda.online stalls "16384x4096" }}',
        '{{ predict us gelu cuda.none "16384x4096 tanh" by="T / copy" }}',
        '{{ predict counter softmax cuda.online stalls "16384x4096" by="1" }}',
        '{{ predict us gelu cuda.vectorized "16384x4096 tanh" by="2 · U / copy" }}',
        '{{ predict us gelu cuda.vectorized "16384x4096 tanh" by="2 · T /" }}',
        '{{ predict us gelu cuda.vectorized "16384x4096 tanh" }}',
        '{{ predict share gelu cuda.vectorized "16384x4096 tanh" by="1" }}',
    ],
)
def test_a_marker_of_what_is_not_there_ends_the_build_and_is_named(hook, marker):
    with pytest.raises(hook.PluginError) as raised:
        hook.on_page_markdown(f"text {marker} text", PAGE)
    assert str(raised.value).startswith(f"lessons/7-compile.md: {marker}: ")


def test_a_table_that_stays_markdown_ends_the_build(hook):
    raw = "<details>\n| a | b |\n|---|---:|\n| 1 | 2 |\n</details>"
    with pytest.raises(hook.PluginError, match=re.escape("7-compile.md: a table is not rendered: | a | b |")):
        hook.on_page_content(raw, PAGE)
    code = f"<p>As written:</p>\n<pre><code>{raw}</code></pre>"
    assert hook.on_page_content(code, PAGE) == code


def test_what_folds_at_the_top_of_the_repository_is_rendered_in_the_site(hook):
    """GitHub renders Markdown inside ``<details>``, the site does where the element says so."""
    results = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    page = hook.from_the_top("RESULTS.md")
    assert page.count('<details markdown="1">') == results.count("<details>") > 15
    assert "<details>" not in page
