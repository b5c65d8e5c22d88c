"""``python -m kernel_ladder exercise``: solutions pass, wrong ones are told why, and a user's own rungs are loaded."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import kernel_ladder
from kernel_ladder import user_rungs
from kernel_ladder.__main__ import main
from kernel_ladder.cli import exercise as exercise_command
from kernel_ladder.errors import RungFileError
from kernel_ladder.exercises import catalog, causes, guards, judge, template, timing
from kernel_ladder.exercises.cuda import CudaKernel
from kernel_ladder.exercises.exercise import DIFFICULTIES
from kernel_ladder.inspection.heads import ladder

from ..conftest import skip_unless_available
from ..processes import run_python

ROOT = Path(__file__).resolve().parents[2]

every_exercise = pytest.mark.parametrize("exercise", catalog.EXERCISES, ids=lambda each: each.name)

OWN_RUNG = """
from kernel_ladder.table import register


def gelu(input, *, approximate):
    \"\"\"A rung of the user's.\"\"\"
    from torch_ref.gelu import naive  # PyTorch's own function makes NaN of inf on some CPUs

    return naive(input, approximate=approximate){}, ()


register("gelu", "torch.mine", forward=gelu)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def last_event(path: Path) -> dict:
    return [event for event in judge.judge(path, [], timed=False) if event["event"] != "emulated"][-1]


# ---- the exercises ---------------------------------------------------------------------------------------------------


@every_exercise
def test_the_data_of_an_exercise_stands(exercise):
    spec = kernel_ladder.spec(exercise.op)
    assert exercise.difficulty in DIFFICULTIES
    assert len(exercise.hints) >= 3
    assert exercise.timed in [case.id for case in spec.sweep]
    assert exercise.rung.partition(".")[2] in ladder(exercise.op, exercise.level)
    dtypes = {dtype for _, dtype in judge.samples(exercise.op, exercise)}
    narrow = judge.device().type == "cpu" or exercise.level == "cuda"
    assert dtypes == set(exercise.dtypes if narrow else judge.DTYPES)


@every_exercise
def test_a_template_is_a_solution_with_gaps(exercise):
    open_, solved = template.template(exercise), template.solution(exercise)
    assert len(open_.splitlines()) < 150
    compile(open_, "template", "exec")
    gaps = template.gaps(open_)
    assert [todo for _, todo in gaps] == [f"TODO {n}" for n in range(1, len(gaps) + 1)]
    assert not template.gaps(solved)
    assert not [line for line in (open_ + solved).splitlines() if template._mark(line)]
    for line in exercise.formula.splitlines():
        assert line in open_


@every_exercise
def test_the_solution_passes(exercise, folder, scratch_table):
    if exercise.level == "triton":  # those in CUDA bring their own kernel, emulated without a GPU
        skip_unless_available(exercise.op, "triton")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < exercise.capability:
        pytest.skip(f"needs compute capability {exercise.capability}")
    path = written(folder, f"solved_{exercise.name}", template.solution(exercise))
    event = last_event(path)
    assert event["event"] == "passed", json.dumps(event, default=str)
    assert event["passed"] == event["of"] >= 8
    assert event["refused"] == 0


#: Exercise, what to replace in its solution by what, and what the check must say.
WRONG = [
    ("add", "(x + y)", "(x - y)", "operand is subtracted"),
    ("add", "triton.cdiv(numel, BLOCK)", "max(1, numel // BLOCK)", "were never written"),
    ("add", "element_ty), mask=mask)", "element_ty))", "past the end of a tensor"),
    ("gelu", "tl.sigmoid(2 * u)", "tl.sigmoid(u)", "not sigmoid"),
    ("swiglu", "gate * tl.sigmoid(gate) * up", "up * tl.sigmoid(up) * gate", "are swapped"),
    ("row_sum", "partial += x", "partial = x", "Only the last block"),
    ("row_sum", ", mask=i < n_cols, other=0.0", "", "a load without a mask"),
    ("softmax", "x - tl.max(x, axis=0)", "x", "maximum is not subtracted"),
    ("softmax", 'other=-float("inf")', "other=0.0", "Masked lanes count as 0"),
    ("softmax_online", "row_sum * tl.exp(row_max - new_max)", "row_sum", "not rescaled"),
    ("softmax_online", "tl.exp(row_max - new_max) +", "0 +", "sums of earlier blocks are lost"),
    ("softmax_online", "tl.maximum(row_max, tl.max(x, axis=0))", "tl.max(x, axis=0)", "maximum of one block"),
    ("rms_norm", "axis=0) / n_cols", "axis=0) / BLOCK", "masked lanes too"),
    ("rms_norm", "tl.sqrt(mean_square + eps)", "(mean_square + eps)", "root is missing"),
    ("add_rms_norm", "x = total.to(tl.float32)", "pass", "of the input alone"),
    ("dropout", "tl.where(keep, scale, 0.0)", "tl.where(keep, 1.0, 0.0)", r"1 / \(1 − p\) is missing"),
    ("dropout", "random_word(i, seed).to", "random_word(i % BLOCK, seed).to", "mask of the first"),
    ("dropout", "(launch(grad.contiguous(), p, seed),)", "(grad,)", "gradient is passed on"),
    ("matmul", "tl.dot(a, b, acc, ", "tl.dot(a, b, ", "Only the last tile of K"),
    ("matmul_tiled", "inside % rows_in_group", "inside % GROUP_M", ""),
    ("rms_norm_backward", "g - normalized * mean", "g", "term with the mean is missing"),
    ("rms_norm_backward", "partial.sum(0)", "partial[0]", "share of one program"),
    ("flash_attention", " * scale\n", "\n", "scale, .* is missing"),
    ("flash_attention", "<= q_rows[:, None]", "< q_rows[:, None]", "NaN|hides the diagonal"),
    ("flash_attention", "acc * rescale[:, None]", "acc", "`acc` is not rescaled"),
    ("cuda_gelu", "    if (i >= numel) return;\n", "", "past the end of a tensor"),
    ("cuda_gelu_vectorized", "j < numel; ++j", "j < 0; ++j", "were never written"),
    ("cuda_gelu_vectorized", "gelu(v.y), gelu(v.z), gelu(v.w)", "gelu(v.x), gelu(v.x), gelu(v.x)", "v.y, v.z and v.w"),
    ("cuda_gelu_vectorized", "i + VECTOR <= numel", "i < numel", "past the end of a tensor"),
    ("cuda_row_sum", "i += blockDim.x", "i += n_cols", "first 256 elements"),
    ("cuda_matmul", "b_tile[k][threadIdx.x]", "b_tile[threadIdx.x][k]", ""),
]
ARRIVES = "        barrier_arrive(&empty[stage]);\n"
WAITS = "        barrier_wait(&full[stage], round & 1);\n"
if not torch.cuda.is_available():  # a GPU need not show a race, the emulator always does; nor does a hang end there
    WRONG += [
        ("cuda_matmul", "threadIdx.x];\n        __syncthreads();", "threadIdx.x];", ""),
        ("cuda_matmul_pipeline", WAITS, WAITS + ARRIVES, "overwritten while consumers still read"),
        ("cuda_matmul_pipeline", WAITS, "", "read before their bytes"),
        ("cuda_matmul_pipeline", "expect(&full[stage], 2 *", "expect(&full[stage], ", "bytes that full"),
    ]


@pytest.mark.parametrize(("name", "right", "wrong", "said"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_a_wrong_solution_is_told_why(name, right, wrong, said, folder, scratch_table):
    exercise = catalog.named(name)
    if exercise.level == "triton":
        skip_unless_available(exercise.op, "triton")
    text = template.solution(exercise)
    assert right in text
    event = last_event(written(folder, f"wrong_{name}", text.replace(right, wrong)))
    assert event["event"] == "wrong", json.dumps(event, default=str)
    explained = f"{event.get('reason')} {event.get('cause')}"
    assert re.search(said, explained), event


@pytest.mark.parametrize(("causes_", "told"), [(["nearly", None, "known", None], 2), ([None, "nearly", None], 1)])
def test_a_later_sample_may_tell_more_than_rounding(causes_, told, folder, scratch_table, monkeypatch):
    """Without a running maximum, an online softmax is a little off on one sample, and infinite on a later one."""
    skip_unless_available("gelu", "triton")
    said = {"nearly": causes.ROUNDING, "known": "the mistake"}
    left = [cause and {"cause": said[cause]} for cause in causes_]
    monkeypatch.setattr(judge, "check_sample", lambda *args: left.pop(0) if left else None)
    event = last_event(written(folder, "wrong_gelu", template.solution(catalog.named("gelu"))))
    assert event["event"] == "wrong"
    assert event["cause"] == said[causes_[told]]
    assert event["passed"] == next(i for i, cause in enumerate(causes_) if cause), "those before the first wrong one"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("cuda_matmul", "float sum = 0.0f;", "float sum = 0.0f", "CompileError: kernel:.* error: expected"),
        (
            "cuda_matmul",
            "float sum = 0.0f;",
            "float sum = 0.0f; if (row == 0) __syncwarp();",
            "Deadlock: some threads of a block wait",
        ),
        ("cuda_matmul_pipeline", "full[stage], round & 1", "full[stage], 0", "arrivals or bytes that never come"),
        ("cuda_matmul_pipeline", "a_tile[stage][i], from", "a_tile[stage][i], from + 1", "that 16 divides"),
    ],
)
def test_what_the_emulator_cannot_run_is_told(name, right, wrong, said, folder, scratch_table):
    text = template.solution(catalog.named(name))
    assert right in text
    event = last_event(written(folder, "refused", text.replace(right, wrong)))
    assert event["event"] == "error", event
    assert re.search(said, event["reason"]), event


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_warps_exchange_values_in_the_emulator():
    source = """
    extern "C" __global__ void sums(float* out, const float* x) {
        float v = x[threadIdx.x], w = v;
        for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
        for (int d = 16; d > 0; d /= 2) w += __shfl_down_sync(0xffffffff, w, d);
        out[threadIdx.x] = v;
        if (threadIdx.x % 32 == 0) out[64 + threadIdx.x / 32] = __shfl_sync(1, w, 0);
    }
    """
    x = torch.arange(64.0)
    out = torch.zeros(66)
    CudaKernel(source, "sums")(1, 64, out, x)
    assert out[:32].tolist() == [496.0] * 32
    assert out[32:64].tolist() == [1520.0] * 32
    with pytest.raises(ValueError, match=r"argument `block` must be at most 1024 threads, got \(2048, 1, 1\)"):
        CudaKernel(source, "sums")(1, 2048, out, x)
    with pytest.raises(ValueError, match="argument `grid` must be one to three positive ints, got 0"):
        CudaKernel(source, "sums")(0, 64, out, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_a_kernel_in_the_emulator_prints_and_adds_atomically(capfd):
    source = """
    extern "C" __global__ void count(float* out) {
        if (atomicAdd(out, 2.0f) == 0.0f) printf("thread %d is the first", threadIdx.x);
    }
    """
    out = torch.zeros(1)
    CudaKernel(source, "count")(2, 64, out)
    assert out.item() == 256.0
    assert capfd.readouterr().err == "thread 0 is the first", "standard output is for verdicts"


def test_rounding_is_no_factor_and_one_column_no_tail():
    exact = torch.full((8,), 3.0, dtype=torch.float64)
    got = (exact * 1.004).half()
    said = causes.symptom(got, exact, torch.ones(8, dtype=torch.bool), 1e-3)
    assert said.startswith("Nearly right: rounding.")
    wrong, got = torch.arange(8) > 0, exact + torch.arange(8)
    assert "All wrong elements are in the last columns" in causes.symptom(got[None], exact[None], wrong[None], 1e-3)
    assert causes.symptom(got, exact, wrong, 1e-3) is None, "of sums, one a row"


def test_a_slow_solution_is_told_what_makes_it_slow():
    vectors = catalog.named("cuda_gelu_vectorized")
    assert "float4" in timing._slow(vectors, "cuda.mine", {"cuda.mine": 2.0, vectors.rung: 1.0})
    assert timing._slow(vectors, "cuda.mine", {"cuda.mine": 1.1, vectors.rung: 1.0}) is None
    assert timing._slow(vectors, "cuda.mine", {"cuda.mine": 2.0}) is None
    assert timing._slow(catalog.named("add"), "triton.mine", {"triton.mine": 2.0, "triton.fused": 1.0}) is None


def test_a_check_without_a_gpu_says_that_one_is_needed(folder, capsys, monkeypatch, scratch_table):
    written(folder, "mine", template.solution(catalog.named("cuda_gelu")))
    monkeypatch.setattr(exercise_command, "_events", lambda path, chosen: judge.judge(path, [], timed=False))
    text = said_by(capsys, "check", "mine.py", "--no-time")
    assert ("need a GPU" in text and "emulated on the CPU" in text) != torch.cuda.is_available()


def test_what_is_read_past_an_input_is_nan_and_what_is_written_past_an_output_is_seen():
    x = guards.guarded(torch.arange(6.0).view(2, 3))
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x.as_strided((1,), (1,), x.storage_offset() + 6).isnan().all()
    with guards.Guards() as watched:
        y = torch.empty_like(x)
        z = x.new_zeros(3)
    assert guards.unwritten(y).all()
    assert not guards.unwritten(z).any()
    y.copy_(x)
    assert not guards.unwritten(y).any()
    assert watched.overrun() is None
    y.as_strided((7,), (1,), y.storage_offset()).fill_(1)
    assert watched.overrun() == "1 elements were written past the end of a tensor of shape (2, 3)"


# ---- the command -----------------------------------------------------------------------------------------------------


def said_by(capsys, *arguments: str, status: int = 0) -> str:
    found = main(["exercise", *arguments])
    captured = capsys.readouterr()
    assert found == status, captured.out + captured.err
    return captured.out + captured.err


def test_list_names_every_exercise(capsys):
    for arguments in ([], ["list"]):
        text = said_by(capsys, *arguments)
        for exercise in catalog.EXERCISES:
            assert exercise.name in text
            assert exercise.teaches.partition(" ")[0] in text  # a narrow terminal folds the rest


def test_start_writes_the_template_once(folder, capsys):
    assert "4 gaps" in said_by(capsys, "start", "add")
    path = folder / "add.py"
    assert path.read_text() == template.template(catalog.named("add"))
    path.write_text("mine")
    assert "--force overwrites it" in said_by(capsys, "start", "add", status=2)
    assert path.read_text() == "mine"
    said_by(capsys, "start", "add", "--force")
    said_by(capsys, "start", "gelu", "other.py")
    assert "Exercise gelu" in (folder / "other.py").read_text()


def test_check_names_the_gaps_that_are_left(folder, capsys):
    said_by(capsys, "start", "add")
    text = said_by(capsys, "check", "add.py", status=1)
    assert "4 gaps are still open" in text
    assert "TODO 4" in text


@pytest.mark.slow
def test_check_runs_a_file_in_a_process_of_its_own(folder, capsys):
    skip_unless_available("add", "triton")
    solved = template.solution(catalog.named("add"))
    written(folder, "right", solved)
    text = said_by(capsys, "check", "right.py")
    assert "Passed 10 of 10 samples" in text or torch.cuda.is_available()
    assert "triton.my_add" in text
    assert "torch.builtin" in text
    assert "solves it" in text
    assert ("mean nothing" in text) == (not torch.cuda.is_available())
    written(folder, "wrong", solved.replace("(x + y)", "(x * y)"))
    text = said_by(capsys, "check", "wrong.py", status=1)
    for fact in ("shapes", "dtype", "first at", "expected", "got", "bound", "operands are multiplied"):
        assert fact in text


@pytest.mark.parametrize(
    ("line", "limit", "said"),
    [
        ("import os; os.abort()", "300", "The process died of SIGABRT"),
        ("while True: pass", "4", "Stopped after 4 s"),
        ("import sys; sys.exit(0)", "300", "The process ended without a result. It ran before the first sample"),
    ],
)
def test_what_ends_the_process_is_told(line, limit, said, folder, capsys):
    written(folder, "mine", OWN_RUNG.format("") + line)
    assert said in said_by(capsys, "check", "mine.py", "--limit", limit, status=1)


@pytest.mark.slow
def test_a_file_of_own_rungs_is_checked_as_an_exercise_is(folder, capsys):
    written(folder, "mine", OWN_RUNG.format(""))
    assert "torch.mine" in said_by(capsys, "check", "--with", "mine.py", "--no-time")
    written(folder, "mine", OWN_RUNG.format(" * 2"))
    text = said_by(capsys, "check", "mine.py", "--no-time", status=1)
    assert "Every wrong element is 2 times what is expected" in text


def test_a_rung_that_refuses_everything_does_not_pass(folder, capsys):
    text = OWN_RUNG.format("").replace("forward=gelu", "forward=gelu, unsupported=lambda *x, **o: 'no'")
    written(folder, "mine", text)
    assert "nothing was checked" in said_by(capsys, "check", "mine.py", "--no-time", status=1)


def test_list_shows_a_users_rungs(folder, capsys, scratch_table):
    written(folder, "mine", OWN_RUNG.format(""))
    text = said_by(capsys, "list", "--with", "mine.py")
    assert "torch.mine" in text
    assert "A rung of the user's." in text


def test_hints_come_one_by_one(capsys):
    hints = catalog.named("softmax").hints
    text = said_by(capsys, "hint", "softmax")
    assert hints[0] in text
    assert hints[1] not in text
    assert hints[1] in said_by(capsys, "hint", "softmax", "2")


def test_the_solution_is_named_and_printed(capsys):
    assert "triton.online of softmax" in said_by(capsys, "solution", "softmax_online")
    text = said_by(capsys, "solution", "softmax_online", "--source")
    assert text == template.solution(catalog.named("softmax_online"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start", "sotfmax"], "argument `name`: unknown exercise 'sotfmax'; did you mean 'softmax'?"),
        (["start", "add", "add.txt"], "argument `file`: add.txt must be a Python file"),
        (["start", "add", "nowhere/add.py"], "argument `file`: nowhere/add.py cannot be written"),
        (["hint", "add", "9"], "argument `number` must be from 1 to 4, got 9"),
        (["check"], "argument `file`: name a file to check, or --with FILE"),
        (["check", "missing.py"], "argument `file`: missing.py does not exist"),
        (["check", "empty.py"], "argument `file`: empty.py registers no rung"),
        (["check", "broken.py"], "broken.py cannot be run: line 1: ZeroDivisionError"),
        (["check", "unknown.py"], "argument `file`: unknown exercise 'none'"),
        (["check", "empty.py", "--limit", "0"], "argument `--limit` must be a positive number of seconds, got 0"),
        (["list", "--with", "missing.py"], "argument `--with`: missing.py does not exist"),
    ],
)
def test_bad_use(arguments, message, folder, capsys):
    written(folder, "empty", "")
    written(folder, "broken", "1 / 0")
    written(folder, "unknown", OWN_RUNG.format("") + "EXERCISE = 'none'")
    assert message in said_by(capsys, *arguments, status=2)


def test_a_syntax_error_is_the_students(folder, capsys):
    written(folder, "mine", "def f(:\n")
    assert "mine.py, line 1: SyntaxError" in said_by(capsys, "check", "mine.py", status=1)


# ---- rungs from elsewhere --------------------------------------------------------------------------------------------


def test_the_benchmark_times_a_users_rung(folder, capsys, scratch_table, small_sweeps):
    from bench.__main__ import main as bench

    written(folder, "mine", OWN_RUNG.format(""))
    arguments = ["--with", "mine.py", "--op", "gelu", "--backend", "torch.mine", "--dtype", "float32", "--quick"]
    arguments += ["--pass", "forward", "--time", "0.05", "--no-pictures", "--no-ceilings", "--output", "rows.jsonl"]
    assert bench(arguments) == 0
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert "torch.mine" in {row["backend"] for row in rows}
    assert bench(["--with", "missing.py"]) == 2
    assert "argument `--with`: missing.py does not exist" in capsys.readouterr().err


def test_a_rung_registered_early_stands_after_the_levels_own():
    code = """
from kernel_ladder import table
table.register("gelu", "torch.mine", forward=lambda x, **o: (x, ()))
print([v.name for v in table.variants("gelu", "torch")])
"""
    assert fresh(code, {}) == "['torch.naive', 'torch.builtin', 'torch.mine']"


def fresh(code: str, environment: dict[str, str]) -> str:
    result = run_python(["-c", code], {**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return (result.stdout + result.stderr).strip()


def test_entry_points_are_loaded_and_one_that_fails_is_told(tmp_path):
    (tmp_path / "more_rungs.py").write_text(OWN_RUNG.format(""))
    info = tmp_path / "more_rungs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-rungs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernel_ladder.variants]\nmine = more_rungs\nlost = nowhere_at_all\n")
    code = """
import kernel_ladder
print([name for name in kernel_ladder.backends("gelu") if name.startswith("torch.")])
kernel_ladder.backends("softmax")
"""
    said = fresh(code, {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])})
    assert "['torch.naive', 'torch.builtin', 'torch.mine']" in said
    assert said.count("lost (nowhere_at_all): ModuleNotFoundError") == 1


def test_a_file_of_rungs_that_clashes_is_refused(folder, scratch_table):
    path = written(folder, "mine", OWN_RUNG.format("").replace("torch.mine", "torch.naive"))
    kernel_ladder.backends("gelu")
    with pytest.raises(RungFileError, match=r"line 12: ValueError: register: .* 'torch\.naive' already"):
        user_rungs.load_file(path)
