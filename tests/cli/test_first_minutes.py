"""What a new user meets first: installing, tables in a narrow terminal, where results go, and what is warned of."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import cuda_impl
import kernel_ladder
from bench.__main__ import main as bench_main
from bench.compare import changes_text
from bench.compare import command as compare
from bench.measure import environment
from bench.profile import kernels, tables, targets
from bench.rows import store
from bench.rows.published import published
from bench.rows.store import Row
from bench.show import pictures
from bench.show import table as bench_table
from cuda_impl import not_built
from kernel_ladder import table
from kernel_ladder.__main__ import main
from kernel_ladder.cli import columns, doctor, listing
from kernel_ladder.cli.columns import Column, Footnotes, LeftOut, Line
from kernel_ladder.errors import InspectError
from kernel_ladder.inspection import cubin

from ..conftest import (
    DEVICE,
    TIMED,
    a_row,
    elements,
    every_variant,
    make_narrow,
    plain_cases,
    variant_id,
)

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (80, 100, 140)


def shown(width: int, show) -> str:
    """What a function prints to a terminal of a width."""
    console = make_narrow(width)
    show(console)
    return console.export_text()


def assert_fits(text: str, width: int) -> None:
    """No line is wider than the terminal, and none was cut."""
    for line in text.splitlines():
        assert cell_len(line) <= width, line
    assert "…" not in text


# ---- tables


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return store.latest(store.read(published()))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sweeps_tables_keep_times_shapes_and_reasons(measured, width):
    found = [row for row in measured if row.op in ("gelu", "attention", "bias_dropout_add_layer_norm", "ceiling")]
    text = shown(width, lambda console: bench_table.show(found, console))
    assert_fits(text, width)
    flat = "".join(text.split())
    # A cell may be folded: the rest of a shape then stands in the first column of the next line.
    of_shapes = "".join("".join(line.split("│")[1].split()) for line in text.splitlines() if line.startswith("│"))
    for row in found:
        if row.op == "ceiling":
            continue
        assert "".join(row.shape.split()) in of_shapes
        assert row.us is None or "".join(bench_table.microseconds(row.us).split()) in flat
        for reason in (row.unsupported, row.wrong):
            assert reason is None or "".join(reason.split()) in flat
    assert "Summary: the fastest" in text
    assert "calls timed" in text
    assert f"Left out at a width of {width}: " in text, "not even 140 are enough for all columns"


def test_a_wide_terminal_has_every_column(measured):
    text = shown(250, lambda console: bench_table.show([row for row in measured if row.op == "gelu"], console))
    assert "Left out" not in text
    for column in bench_table.COLUMNS:
        assert column.heading in text


def test_an_idle_level_has_one_line():
    idle = [
        a_row(backend=f"cuda.{i}", level="cuda", shape=f"{i}", unsupported="no CUDA GPU is visible") for i in range(9)
    ]
    text = shown(80, lambda console: bench_table.show([a_row(**TIMED), *idle], console))
    assert text.count("no CUDA GPU is visible") == 1
    assert "cuda: no CUDA GPU is visible (on here; 9 rows)" in text
    assert "cuda.3" not in text
    # What one row of a level refuses, another takes: each keeps its line.
    some = [*idle, a_row(backend="cuda.9", level="cuda", **TIMED)]
    assert "cuda.3" in shown(80, lambda console: bench_table.show(some, console))


@pytest.mark.parametrize("width", WIDTHS)
def test_list_fits(width):
    found = listing.rows_of_list(list(kernel_ladder.OPS))
    text = shown(width, lambda console: listing.print_list(console, found))
    assert_fits(text, width)
    words = text.split()
    for row in found:
        assert row["variant"] in words
        assert row["reason"] is None or "".join(row["reason"].split()) in "".join(words)
    reasons = {"".join(row["reason"].split()) for row in found if row["reason"] is not None}
    for reason in reasons:  # each is told once, by itself or as a part of another
        assert "".join(words).count(reason) == sum(reason in other for other in reasons)


def _kernel(registers: int) -> dict[str, object]:
    numbers = dict.fromkeys(("static_shared", "dynamic_shared", "local", "threads", "blocks_per_sm"), registers)
    return {"name": "attention_flash_query_kernel<64, 128>", "registers": registers, **numbers}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("known", [True, False])
def test_doctor_fits_and_lists_no_unknown_numbers(monkeypatch, width, known):
    monkeypatch.setattr(doctor, "kernels", lambda: [_kernel(168 if known else -1)] * 175)
    text = shown(width, lambda console: doctor.print_facts(console, doctor.facts()))
    assert_fits(text, width)
    assert "?" not in text
    assert text.count("attention_flash_query_kernel") == (175 if known else 0)
    assert known or "175 are built in" in text
    assert "usable here: torch" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_fits(tmp_path, measured, width):
    before = [row for row in measured if row.op == "gelu"]
    slower = [Row(**{**row.__dict__}) for row in before]
    for row in slower:
        if row.us is not None and row.level == "cuda":
            row.us, row.us_q1, row.us_q3 = 2 * row.us, 2 * row.us_q1, 2 * row.us_q3
            row.us_low, row.us_high = (x and 2 * x for x in (row.us_low, row.us_high))
            row.speedup, row.speedup_low, row.speedup_high = (
                x and x / 2 for x in (row.speedup, row.speedup_low, row.speedup_high)
            )
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, found in zip(files, (before, slower), strict=True):
        store.write(file, found)
    report = compare.report(compare._parser().parse_args([*map(str, files)]))
    console = make_narrow(width)
    changes_text.show(report, console, False)
    text = console.export_text()
    grids = [line for line in text.splitlines() if line.startswith(("│", "╭", "╰"))]
    assert grids
    assert all(cell_len(line) <= width for line in grids)
    assert "2.000" in text
    assert "16384x1024" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_profile_fits(width):
    (variant,) = (v for v in table.variants("gelu") if v.name == "torch.naive")
    case = targets.case_of("gelu", "64x64", {}, torch.float32, DEVICE)
    (target,) = targets.of_operation([variant], case, ["forward"], torch.float32, DEVICE)
    found = kernels.profile(target.make(), True, DEVICE)

    def show(console: Console) -> None:
        tables.show(target, found, console, False)
        tables.compare([(target, found), (target, found)], console)

    text = shown(width, show)
    grids = [line for line in text.splitlines() if line.startswith(("│", "┏", "└"))]
    assert all(cell_len(line) <= width for line in grids)
    assert "aten.erf.default" in text or DEVICE.type == "cuda"
    assert "…" not in text


def test_columns_are_left_out_by_need():
    columns_ = [Column("name"), Column("least", True, 3), Column("needed", True, 1), Column("time", True)]
    line = Line(["z" * 20, "1" * 20, "2" * 20, "3" * 20])
    for width, gone in ((100, []), (70, ["least"]), (50, ["needed", "least"]), (30, ["needed", "least"])):
        left_out = LeftOut()
        console = make_narrow(width)
        console.print(columns.fit(console, columns_, [line], left_out))
        text = console.export_text()
        assert sorted(left_out.headings) == sorted(gone)
        assert "3" * 20 in text, "a number is never cut"
        assert text.count("z") == 20, "a name may be folded, and is never cut"


def test_a_sentence_is_said_once():
    notes = Footnotes()
    assert [notes.mark(text) for text in ("a", "b", "a")] == ["(1)", "(2)", "(1)"]
    assert shown(80, notes.show) == "(1) a\n(2) b\n"


# ---- where results go


def test_a_sweep_changes_no_committed_file(monkeypatch, tmp_path, capsys, measured):
    monkeypatch.setattr(environment, "MEASURED", tmp_path / "bench-results")
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "bench" / "results").rglob("*") if path.is_file()}
    argv = ["--op", "gelu", "--backend", "torch", "--quick", "--no-ceilings", "--time", "0.02", "--pass", "forward"]
    assert bench_main(argv) == 0
    own = environment.results_file()
    assert own.parent == tmp_path / "bench-results"
    assert {row.gpu for row in store.read(own)} == {environment.machine_name()}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    drawn = {path.name for path in (own.parent / "pictures").iterdir()}
    assert f"gelu-{own.stem}.svg" in drawn
    # The other commands look at this machine's rows.
    monkeypatch.chdir(tmp_path)
    assert bench_main(["report"]) == 0
    assert "committed" not in capsys.readouterr().out
    assert json.dumps(environment.machine_name())[1:-1] in (tmp_path / "report.html").read_text()
    gpu = measured[0].gpu
    assert gpu not in (tmp_path / "report.html").read_text() or gpu == environment.machine_name()


def test_git_ignores_what_a_user_measures():
    path = environment.MEASURED.relative_to(ROOT) / "any.jsonl"
    done = subprocess.run(["git", "check-ignore", str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("there is no git to ask")
    assert done.stdout.strip() == str(path)


def test_without_rows_the_report_says_whose_it_shows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(environment, "MEASURED", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert bench_main(["report"]) == 0
    assert "This machine has no rows yet" in capsys.readouterr().out
    for command in ("table", "pictures"):
        assert bench_main([command]) == 2
        assert "this machine has no rows yet" in capsys.readouterr().err


def test_every_machine_has_a_file_of_its_own(monkeypatch):
    names = ["AMD EPYC 7763", "Intel(R) Xeon(R) Processor"]
    files = []
    for name in names:
        monkeypatch.setattr(environment, "machine_name", lambda name=name: name)
        files.append(environment.results_file().name)
    assert files == ["amd-epyc-7763.jsonl", "intel-r-xeon-r-processor.jsonl"]


def test_a_picture_shows_the_machine_that_it_names(tmp_path):
    path = tmp_path / "mixed.jsonl"
    old = a_row(**TIMED, gpu="another machine", shape="4x4", when="2026-01-01T00:00:00+00:00", us_low=1.0, us_high=2.0)
    new = a_row(**TIMED, gpu="this machine", shape="2x2", when="2026-02-01T00:00:00+00:00")
    store.write(path, [old, new])
    (picture,) = pictures.draw(path)
    text = picture.read_text()
    assert "gelu: this machine" in text
    assert "another machine" not in text
    assert "4x4" not in text
    (picture,) = pictures.draw(path, "another machine")
    assert "gelu: another machine" in picture.read_text()


# ---- warnings


def runnable_triton() -> list:
    return [pytest.param(v, id=variant_id(v)) for v in every_variant("triton") if v.here() is None]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is visible: nothing is interpreted")
@pytest.mark.parametrize("variant", runnable_triton())
def test_interpreted_kernels_warn_of_nothing(variant):
    from kernel_ladder import autograd
    from kernel_ladder.spec import as_leaves, as_tuple
    from kernel_ladder.testing.samples import make_inputs

    if (reason := table.unavailable(variant.op, "triton")) is not None:
        pytest.skip(reason)
    small = [case for case in plain_cases(variant.op) if elements(case) < 20_000]
    dtypes = (torch.float32, torch.bfloat16)  # tensor descriptors are for 16 bits
    made = [(case, make_inputs(case, dtype, DEVICE)) for dtype in dtypes for case in small]
    leaves = [(case, as_leaves(inputs)) for case, inputs in made]
    taken = [
        [(case, inputs) for case, inputs in calls if variant.unsupported(*inputs, **case.options) is None]
        for calls in (leaves, made)
    ]
    case, inputs = max(taken[0] or taken[1], key=lambda each: elements(each[0]))  # some rungs have no backward pass
    before = numpy.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        outputs = as_tuple(autograd.run(variant, inputs, case.options))
        if outputs[0].requires_grad:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    assert numpy.geterr() == before, "what NumPy does elsewhere stays"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is visible: nothing is interpreted")
def test_the_first_call_of_the_readme_is_silent():
    if (reason := table.unavailable("softmax", "triton")) is not None:
        pytest.skip(reason)
    code = "import torch, kernel_ladder as kl; kl.softmax(torch.randn(4, 1000), backend='triton')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- installing


@pytest.mark.parametrize(
    ("recorded", "nvcc", "said"),
    [
        (
            "KERNEL_LADDER_CUDA=0",
            "/cuda/bin/nvcc",
            "KERNEL_LADDER_CUDA=0, when the package was installed; unset it and run",
        ),
        ("KERNEL_LADDER_CUDA=0", None, "install nvcc or set CUDA_HOME, then unset it"),
        (
            "no nvcc found",
            "/cuda/bin/nvcc",
            "no nvcc found, when the package was installed; nvcc is here (/cuda/bin/nvcc)",
        ),
        ("no nvcc found", None, "install nvcc or set CUDA_HOME, then run `pip install -e .` again"),
        (None, "/cuda/bin/nvcc", "was not built; nvcc is here (/cuda/bin/nvcc): run `pip install -e .`"),
        (None, None, "install nvcc or set CUDA_HOME, then run `pip install -e .`"),
    ],
)
def test_why_the_extension_is_missing(monkeypatch, tmp_path, recorded, nvcc, said):
    monkeypatch.setattr(not_built, "RECORD", tmp_path / "record.txt")
    monkeypatch.setattr(not_built, "nvcc", lambda: nvcc)
    if recorded:
        (tmp_path / "record.txt").write_text(f"{recorded}\n")
    reason = not_built.reason()
    assert reason.startswith("the extension kernel_ladder._C was not built")
    assert said in reason
    assert ("install nvcc" in reason) == (nvcc is None)


def test_an_extension_older_than_its_operators_is_not_loaded(monkeypatch, tmp_path):
    """Else its level raises an error at an operator that is not there, and takes the package with it."""
    table_, library = tmp_path / "bindings.cpp", tmp_path / "_C.so"
    table_.write_text("gelu")
    monkeypatch.setattr(not_built, "OPERATORS", table_)
    assert not not_built.is_stale(str(library)), "copied without its hash"
    record = tmp_path / "_C.so.operators"
    record.write_text(f"{hashlib.sha256(b'gelu').hexdigest()}\n")
    assert not not_built.is_stale(str(library))
    table_.write_text("gelu, rope")
    assert not_built.is_stale(str(library))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(library)))
    cuda_impl.extension.cache_clear()
    cuda_impl.unavailable.cache_clear()
    try:
        assert cuda_impl.climb("gelu") == []
        assert cuda_impl.unavailable() == not_built.STALE
        table_.unlink()  # an installed package has no sources
        assert not not_built.is_stale(str(library))
    finally:
        cuda_impl.extension.cache_clear()
        cuda_impl.unavailable.cache_clear()


def test_the_build_leaves_its_reason_on_record(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    import environment as build

    assert build.RECORD == not_built.RECORD, "written where it is read"
    monkeypatch.setattr(build, "RECORD", tmp_path / "record.txt")
    monkeypatch.setenv("KERNEL_LADDER_CUDA", "0")
    assert build.cuda_home() is None
    assert (tmp_path / "record.txt").read_text() == f"{not_built.SWITCHED_OFF}\n"
    monkeypatch.delenv("KERNEL_LADDER_CUDA")
    monkeypatch.setattr(build, "_find_cuda_home", lambda: None)
    assert build.cuda_home() is None
    assert "no nvcc found: installing without the cuda level" in capsys.readouterr().err
    assert (tmp_path / "record.txt").read_text() == "no nvcc found\n"
    monkeypatch.setattr(build, "_find_cuda_home", lambda: tmp_path)
    assert build.cuda_home() == tmp_path
    assert not (tmp_path / "record.txt").exists(), "an extension that is built has no reason to be missing"


def test_progress_is_taken_from_the_builds_output(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "_build"))
    import install

    nvcc = "  [3/31 41.2s] /usr/local/cuda/bin/nvcc -DX=1 -I/a -c -c /x/csrc/matmul/mma.cu -o /x/build/mma.o -O1"
    assert install.told(nvcc) == "   compiled 3 of 31 files: csrc/matmul/mma.cu (41 s)"
    group = "  [4/31 50.0s] /usr/local/cuda/bin/nvcc -c /x/build/together/elementwise.cu -o /x/build/e.o"
    assert install.told(group) == "   compiled 4 of 31 files: build/together/elementwise.cu (50 s)"
    assert install.told("  kernel_ladder: no nvcc found: installing") == "   kernel_ladder: no nvcc found: installing"
    assert install.told("  Downloading torch-2.13.0.whl (900 MB)") == "   Downloading torch-2.13.0.whl (900 MB)"
    for hidden in ("  running build_ext", "  x.cu(3): warning", "", "  g++ -c -c x.cpp"):
        assert install.told(hidden) is None


def test_make_says_how_to_activate():
    # All of it, as on a fresh machine, whether or not it was installed here.
    done = subprocess.run(["make", "-n", "-B", "install"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "source .venv/bin/activate" in done.stdout
    assert "_build/install.py" in done.stdout
    own = subprocess.run(
        ["make", "-n", "install", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "activate" not in own.stdout, "an environment of the user's own is active as it is"
    readme = (ROOT / "README.md").read_text()
    first = readme.index("python -m kernel_ladder doctor")
    assert "source .venv/bin/activate" in readme[:first], "named before the first command that needs it"


# ---- profile


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["torch.naive", "torch.builtin"])
def test_operators_and_their_total_are_of_one_measurement(backend, pass_):
    (variant,) = (v for v in table.variants("gelu") if v.name == backend)
    case = targets.case_of("gelu", "256x256", {}, torch.float32, DEVICE)
    (target,) = targets.of_operation([variant], case, [pass_], torch.float32, DEVICE)
    found = kernels.profile(target.make(), True, DEVICE)
    assert not found.apart
    assert sum(kernel.us for kernel in found.kernels) <= 1.0001 * max(found.span_us, found.whole_us)
    if DEVICE.type == "cpu":
        assert found.device_us + found.gap_us == pytest.approx(found.span_us)
        assert found.plain_us > 0
        (line, *_) = tables.summary(target, found)
        for us in (found.device_us, found.gap_us, found.span_us, found.plain_us):
            assert bench_table.microseconds(us) in line


def test_the_profilers_own_log_is_silent():
    code = "import bench, os; print(os.environ['KINETO_LOG_LEVEL'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\n", done.stdout)


FAKE = """
template <typename T> __global__ void matmul_fake_kernel(T* x) {
#if __CUDA_ARCH__ >= 900
  x[threadIdx.x] *= 2;
#endif
}
template <typename T> __global__ void matmul_full_kernel(T* x) { x[threadIdx.x] *= 2; }
template __global__ void matmul_fake_kernel<float>(float*);
template __global__ void matmul_full_kernel<float>(float*);
"""


@pytest.mark.skipif(not_built.nvcc() is None or cubin.cuobjdump() is None, reason="no nvcc or no cuobjdump was found")
def test_a_rung_without_code_for_an_architecture_says_so(monkeypatch, tmp_path):
    import cuda_impl.inspect as of_cuda

    (tmp_path / "k.cu").write_text(FAKE)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a")]
    library = tmp_path / "k.so"
    command = [not_built.nvcc(), "-shared", "-Xcompiler", "-fPIC", *codes, str(tmp_path / "k.cu"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setattr(of_cuda, "_library", lambda: library)
    all_ = [of_cuda.Instance(of_cuda.readable(r.symbol), r) for r in cubin.resources(library)]
    fake, full = ([i for i in all_ if i.function == f"matmul_{name}_kernel"] for name in ("fake", "full"))
    assert {(i.resources.arch, of_cuda._is_empty(i)) for i in fake} == {("sm_80", True), ("sm_90a", False)}
    assert not any(of_cuda._is_empty(i) for i in full)
    of_80 = [i for i in all_ if i.resources.arch == "sm_80"]
    assert [i.function for i in of_cuda._with_code(of_80, all_, "it", "sm_80")] == ["matmul_full_kernel"]
    alone = [i for i in fake if i.resources.arch == "sm_80"]
    with pytest.raises(InspectError, match=r"matmul: cuda\.fake has no code for sm_80.*it has code for sm_90a"):
        of_cuda._with_code(alone, fake, "matmul: cuda.fake", "sm_80")


@pytest.mark.skipif(cuda_impl.extension() is None or cubin.cuobjdump() is None, reason="no extension or no cuobjdump")
def test_rungs_for_hopper_have_no_code_for_ampere(capsys):
    from cuda_impl.inspect import instances

    if "sm_80" not in {i.resources.arch for i in instances()}:
        pytest.skip("the extension was not built for 8.0")
    assert main(["inspect", "matmul", "--backend", "cuda.wgmma", "--arch", "sm_80"]) == 2
    assert "matmul: cuda.wgmma has no code for sm_80" in capsys.readouterr().err
    assert main(["inspect", "matmul", "--backend", "cuda.mma", "--arch", "sm_80"]) == 0


@pytest.mark.skipif(
    cuda_impl.extension() is None or DEVICE.type == "cuda", reason="no extension, or a GPU that can tell"
)
@pytest.mark.parametrize("backend", ["cuda", "cuda.vectorized"])
def test_a_shape_at_the_cuda_level_is_refused_where_no_gpu_can_tell(capsys, backend):
    assert main(["inspect", "gelu", "--backend", backend, "--shape", "16384x4096"]) == 2
    assert "is known on a GPU that runs them alone" in capsys.readouterr().err
