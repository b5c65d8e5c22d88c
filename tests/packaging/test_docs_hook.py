"""The markers that pages of ``docs/`` hold: tables, and the error that ends a build."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize(
    "marker", ["{{ table lengths }}", "{{ table }}", "{{ figure swizle }}", "{{ us gelu cuda.none x }}"]
)
def test_a_marker_of_what_is_not_there_ends_the_build_and_is_named(hook, marker):
    with pytest.raises(hook.PluginError) as raised:
        hook.on_page_markdown(f"text {marker} text", PAGE)
    assert str(raised.value).startswith(f"lessons/7-compile.md: {marker}: ")
