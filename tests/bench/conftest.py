"""Fixtures of several files: a browser's page, a whole report, the command `compare`."""

from __future__ import annotations

import pytest

from bench.__main__ import main
from bench.rows import store
from bench.rows.store import Row

from . import browser
from .report_rows import full_rows, written


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    if browser.executable() is None:
        pytest.skip(f"no browser to open the page in: none of {', '.join(browser.NAMES)} is on the PATH")
    with browser.page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    return written(tmp_path_factory.mktemp("full"), full_rows())


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
