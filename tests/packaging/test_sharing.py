"""How many processes test at once, the runs of pytest that are made, GPU memory that is asked for, skips told once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import kernel_ladder
from kernel_ladder import table

from .. import once_a_rung, sampling, sharing
from ..__main__ import NOTHING_SELECTED, ROOT, main, outcome, plan
from ..conftest import ALONE, DEVICE, alone, every_variant, needs_gpu, skip_unless_it_runs
from ..sharing import GIB, Ledger, worker_count

# ---- how many processes, and what they run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "gib", "workers"),
    [(1, None, 1), (2, None, 2), (64, None, 64), (16, 80, 15), (16, 24, 4), (16, 8, 1), (128, 80, 16), (1, 80, 1)],
)
def test_workers_use_the_cores_and_leave_gpu_memory(cores, gib, workers):
    assert worker_count(cores, None if gib is None else gib * GIB) == workers
    assert gib is None or workers == 1 or workers * sharing.WORKER_BYTES <= sharing.WORKERS_PART * gib * GIB


def test_on_a_gpu_some_tests_run_alone_and_first():
    side_by_side = ["-n", "15", "--dist", "worksteal"]
    assert plan(80 * GIB, 15, ["-k", "gelu"]) == [
        ["--alone", "only", "-k", "gelu"],
        ["--alone", "without", *side_by_side, "-k", "gelu"],
    ]
    assert plan(None, 15, ["-x"]) == [[*side_by_side, "-x"]]
    assert plan(80 * GIB, 1, ["-x"]) == [["-x"]], "a single process has the GPU alone"


def test_an_interrupted_run_goes_on_where_its_file_stands(monkeypatch, tmp_path):
    """pytest takes an option's value that names a file for a file of tests, and then knows no option of these."""
    ran = []
    monkeypatch.setattr(
        "tests.__main__.subprocess.run", lambda run, **_: ran.append(run) or SimpleNamespace(returncode=0)
    )
    monkeypatch.setattr("tests.__main__.torch.cuda.is_available", lambda: False)
    main(["--workers", "1", "-q", "--resume", str(tmp_path)])
    assert ran[0][-2:] == ["-q", f"--resume={tmp_path}"]


@pytest.mark.parametrize(("items", "workers", "long"), [(100, 7, 20), (5, 8, 3), (0, 2, 1), (10, 1, 3), (10, 3, 10)])
def test_each_worker_begins_with_its_share_of_what_is_long(items, workers, long):
    order = sharing.long_first(range(items), lambda item: item >= items - long, workers)
    assert sorted(order) == list(range(items))
    end = 0
    for worker in range(workers):  # as pytest-xdist parts them
        begin, end = end, end + (items - end) // (workers - worker)
        its = [item >= items - long for item in order[begin:end]]
        assert its == sorted(its, reverse=True), "the long ones come first"
        assert sum(its) <= -(-min(long, items) // workers)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([0], 0),
        ([1, 0], 1),
        ([0, 1], 1),
        ([2], 2),
        ([NOTHING_SELECTED], NOTHING_SELECTED),
        ([NOTHING_SELECTED, 0], 0),
        ([NOTHING_SELECTED, 1], 1),
        ([NOTHING_SELECTED, NOTHING_SELECTED], NOTHING_SELECTED),
    ],
)
def test_the_exit_status_is_that_of_the_first_run_that_failed(statuses, status):
    assert outcome(statuses) == status


@pytest.mark.parametrize(("failing", "status"), [(0, 1), (1, 1), (None, 0)])
def test_both_runs_are_made_and_told(monkeypatch, capsys, failing, status):
    ran = []

    def run(command, **options):
        ran.append(command[1:])
        return SimpleNamespace(returncode=int(len(ran) - 1 == failing))

    monkeypatch.setattr("tests.__main__.subprocess.run", run)
    monkeypatch.setattr("tests.__main__.torch.cuda.is_available", lambda: True)
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr("tests.__main__.torch.cuda.get_device_properties", lambda device: properties)
    assert main(["--workers", "3", "-k", "gelu and not slow"]) == status
    assert [command[2:4] for command in ran] == [["--alone", "only"], ["--alone", "without"]]
    assert all(command[-2:] == ["-k", "gelu and not slow"] for command in ran)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.count("passed") == 2 - (failing is not None)
    assert failing is None or f"run {failing + 1} failed with exit status 1" in last


def test_the_option_parts_the_tests(request):
    def chosen(option, *marked):
        items = [SimpleNamespace(get_closest_marker={name: True}.get, name=name) for name in marked]
        config = SimpleNamespace(getoption={"--alone": option}.get, hook=request.config.hook)
        config.hook = SimpleNamespace(pytest_deselected=lambda items: None)
        (conftest,) = (p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "sweeping_small_cases"))
        conftest.pytest_collection_modifyitems(config, items)
        return [item.name for item in items]

    assert chosen("only", "alone", "other") == ["alone"]
    assert chosen("without", "alone", "other") == ["other"]
    assert chosen(None, "alone", "slow", "other") == ["slow", "alone", "other"], "what is slow begins first"


# ---- memory --------------------------------------------------------------------------------------------------------


HOLD = """
import sys
from pathlib import Path
from tests.sharing import Ledger
print(Ledger(Path(sys.argv[1]), room=10).take(int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def another_process(path, nbytes: int) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(path), str(nbytes)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_request_waits_for_what_other_processes_hold(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = Ledger(path, room=10)
    with another_process(path, 6) as other:
        assert other.stdout.readline() == "True\n"
        assert not ledger.take(5)
        assert ledger.take(4)
        ledger.give_back()
        assert not ledger.take(5)
        other.kill()
        other.wait()
    assert ledger.take(5), "a process that died holds nothing"
    ledger.give_back()
    assert ledger.take(1000), "the only request always fits"


@needs_gpu
def test_memory_that_a_gpu_does_not_have_is_a_skip_with_both_numbers(gpu_memory):
    with pytest.raises(pytest.skip.Exception, match=r"needs 1024\.0 GiB of GPU memory, the GPU has \d+\.\d"):
        gpu_memory(1024 * GIB)


# ---- skips ---------------------------------------------------------------------------------------------------------


def skipping(variant):
    skip_unless_it_runs(variant)


def looking(variant):
    assert variant.name


def call(id: str, *marks, **params) -> SimpleNamespace:
    return SimpleNamespace(id=id, marks=[mark.mark for mark in marks], params=params)


def kept(function, *calls, marks=()) -> list[str]:
    metafunc = SimpleNamespace(
        function=function,
        definition=SimpleNamespace(iter_markers=lambda: iter([mark.mark for mark in marks])),
        _calls=list(calls),
    )
    once_a_rung.keep(metafunc)
    return [each.id for each in metafunc._calls]


@pytest.fixture
def one_rung_unavailable(monkeypatch):
    runs, never = table.variants("gelu", "torch")[:2]
    monkeypatch.setattr(once_a_rung, "never_runs", lambda variant: "not here" if variant is never else None)
    monkeypatch.setattr(once_a_rung, "_told", set())
    return runs, never


def test_a_rung_that_never_runs_is_collected_once(one_rung_unavailable):
    runs, never = one_rung_unavailable
    calls = [call(f"{name}{i}", variant=v) for name, v in (("runs", runs), ("never", never)) for i in range(3)]
    assert kept(looking, *calls) == [each.id for each in calls], "it has something to say of any rung"
    assert kept(skipping, *calls) == ["runs0", "runs1", "runs2", "never0"]
    assert kept(skipping, *calls) == ["runs0", "runs1", "runs2"], "another test has told the reason"


def test_a_function_that_never_runs_is_collected_once(one_rung_unavailable):
    calls = [call(str(i), variant=one_rung_unavailable[0]) for i in range(3)]
    holds, other = pytest.mark.skipif(True, reason="no GPU"), pytest.mark.skipif(False, reason="no GPU")
    assert kept(looking, *calls, marks=[holds]) == ["0"]
    assert kept(looking, *calls, marks=[other]) == ["0", "1", "2"]
    marked = [call("a", holds), call("b"), call("c", holds), call("d", pytest.mark.skip(reason="another"))]
    assert kept(looking, *marked) == ["a", "b", "d"]


def test_what_is_deselected_is_not_made():
    calls = [call("a"), call("b"), call("c", alone)]
    metafunc = SimpleNamespace(definition=SimpleNamespace(iter_markers=lambda: iter([])), _calls=calls)
    once_a_rung.keep_marked(metafunc, "alone")
    assert [each.id for each in calls] == ["a", "b", "c"]
    del calls[2]
    once_a_rung.keep_marked(metafunc, "alone")
    assert [each.id for each in calls] == ["a"]


def test_a_level_that_is_unavailable_is_collected_once_an_operation(monkeypatch):
    monkeypatch.setattr(once_a_rung, "_told", set())
    monkeypatch.setattr(table, "unavailable", lambda op, level: "not here" if level == "cuda" else None)
    pairs = [(op, level) for op in ("gelu", "add") for level in ("cuda", "torch")]
    calls = [call(f"{op} {level} {i}", op=op, level=level) for op, level in pairs for i in (0, 1)]
    cuda, others = ["gelu cuda 0", "add cuda 0"], [f"{op} torch {i}" for op in ("gelu", "add") for i in (0, 1)]
    assert sorted(kept(skipping, *calls)) == sorted([*cuda, *others])
    assert kept(skipping, call("any", level="cuda"), call("again", level="cuda")) == []


def test_what_runs_here_is_never_left_out():
    for variant in every_variant():
        if table.unavailable(variant.op, variant.level) is None and variant.here() is None and variant.level == "torch":
            refusing = once_a_rung.never_runs(variant)
            assert refusing is None or "CUDA" in refusing
    assert all(once_a_rung.never_runs(v) is None for op in kernel_ladder.OPS for v in table.variants(op, "torch")[:1])


def test_files_with_tests_that_run_alone_are_known_by_their_decorators():
    """The run of those tests imports no other file."""
    marked = re.compile(r"^\s*(@(pytest\.mark\.)?|pytestmark\b.*|.*\bmarks=.*)\balone\b", re.MULTILINE)
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    found = {path for path, text in files.items() if marked.search(text)}
    assert len(found) > 5
    assert found == {path for path, text in files.items() if ALONE.search(text)}


@alone
@needs_gpu
def test_a_test_that_needs_the_gpu_alone_has_no_worker_beside_it(request):
    """Where the project's own command runs it; pytest with workers, called by hand, may run it beside others."""
    assert DEVICE.type == "cuda"
    if request.config.getoption("--alone") is not None:
        assert not hasattr(request.config, "workerinput")


# ---- a share of the cases, and runs that go on ---------------------------------------------------------------------


def item(name: str, *, level: str | None = None, marked: bool = True) -> SimpleNamespace:
    """What is asked of a test."""
    marker = SimpleNamespace(kwargs={} if level is None else {"level": level})
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda kind: marker if marked else None)


@pytest.mark.parametrize(
    ("rung", "device", "share"),
    [
        ("compile.default", "cpu", 12),
        ("triton.fused", "cpu", 3),
        ("triton.fused", "cuda", 12),
        ("compile.max_autotune", "cuda", 40),
        ("cuda.flash", "cuda", 1),
    ],
)
def test_a_share_of_what_compilers_make_anew_is_run(rung, device, share):
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    items = [item(f"tests/x.py::test[{i}-{rung}]") for i in range(900)]
    kept = [*items]
    sampling.choose(config, kept, device)
    assert len(kept) == pytest.approx(900 / share, rel=0.2)
    again = [*items]
    sampling.choose(config, again, device)
    assert again == kept, "the same ones in every process"
    unmarked = [item("tests/x.py::test[compile.default]", marked=False)] * 5
    sampling.choose(config, unmarked, device)
    assert len(unmarked) == 5


RESUMED = """
import pytest
@pytest.mark.parametrize("i", range(4))
def test(i):
    assert i != 2 or {good}
"""


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "2"]], ids=["one process", "two workers"])
def test_an_interrupted_run_goes_on(workers, tmp_path):
    path, passed = tmp_path / "test_some.py", tmp_path / "new" / "passed.txt"
    shared = (ROOT / "tests" / "resume.py").read_text()
    (tmp_path / "resume.py").write_text(shared)
    (tmp_path / "conftest.py").write_text(
        "import resume\npytest_addoption = resume.add_option\npytest_configure = resume.record\n"
        "def pytest_collection_modifyitems(config, items):\n    resume.leave_out(config, items)\n"
    )
    said, env = [], {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing plugins takes seconds
    for good in (False, True, True):
        path.write_text(RESUMED.format(good=good))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--resume", str(passed), *workers]
        said.append(subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False).stdout)
    assert "1 failed, 3 passed" in said[0]
    assert "1 passed" in said[1]
    assert "3 deselected" in said[1] or workers
    assert len(passed.read_text().splitlines()) == 4
    told = (tmp_path / "new" / "passed-failures.txt").read_text()
    assert told.count("== test_some.py::test[2] (call)") == 1
    assert "assert i != 2" in told
    assert "passed" not in said[2]
