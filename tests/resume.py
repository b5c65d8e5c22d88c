"""``--resume FILE``: a run goes on where an earlier one was interrupted.

FILE has the names of tests that passed or were skipped, one a line. They are left out, and what passes now is added. It
knows nothing of changes of the code: delete it after one. What fails is told at once in a second file beside it, for
pytest tells it at a run's end only.
"""

from __future__ import annotations

from pathlib import Path

import pytest

OPTION = "--resume"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        type=Path,
        metavar="FILE",
        help="leave out what FILE says has passed, and add what passes now: an interrupted run goes on",
    )


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of `items` what has passed before."""
    path = config.getoption(OPTION)
    if path is None or not path.exists():
        return
    passed = set(path.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def failures_file(path: Path) -> Path:
    """Where failures are told: ``passed-failures.txt`` beside ``passed.txt``."""
    return path.with_name(f"{path.stem}-failures{path.suffix}")


class Recorder:
    """Adds the name of each test that passes or is skipped to the file, and what is said of others to the second."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._failures = failures_file(path).open("a", buffering=1)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
            self._failures.write(f"== {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        if report.when == "teardown" and report.nodeid not in self._failed:
            self._file.write(f"{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()
        self._failures.close()


def record(config: pytest.Config) -> None:
    """Record what passes, in the process that hears of all tests."""
    path = config.getoption(OPTION)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))
