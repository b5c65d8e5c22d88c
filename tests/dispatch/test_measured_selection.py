"""Choices by tables and by measurement: scratch tables of a pretended GPU, and times that a test makes up."""

from __future__ import annotations

import json
import time
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kernel_ladder
from kernel_ladder import gpu, selection, table
from kernel_ladder.__main__ import main
from kernel_ladder.errors import VariableError
from kernel_ladder.selection import choosers, measured, tables
from kernel_ladder.selection.features import FEATURES, Features
from kernel_ladder.selection.tables import Entry
from kernel_ladder.spec import Case, as_leaves
from kernel_ladder.testing.samples import empty_inputs, on_absent_gpu

from ..conftest import DEVICE, needs_extension

OPTIONS = {"approximate": "none"}


def rung(name: str, refuses=lambda input: None):
    def forward(input, **options):
        return input.clone(), ()

    return table.register(
        "gelu",
        name,
        forward=forward,
        backward=lambda saved, grad, needs: (grad,),
        unsupported=lambda input, **options: refuses(input),
    )


@pytest.fixture
def ladder(scratch_table):
    """Two more rungs of gelu at the torch level: `first`, and after it `last`, which a level's name stands for."""
    return rung("torch.first"), rung("torch.last")


def entry(better: str | None, sizes: tuple[int, ...], gain: float = 1.3, measured: tuple[str, ...] = ()) -> Entry:
    category = FEATURES["gelu"]((torch.zeros(2, 2),), OPTIONS).category
    return Entry(category, sizes, better, gain, measured or ("torch.first", "torch.last"), "a call")


@pytest.fixture
def use_table(monkeypatch, tmp_path):
    """A function that gives the pretended H100 a table of gelu."""
    monkeypatch.setenv(tables.ENV_FOLDER, str(tmp_path))

    def write(*entries: Entry, backend: str = "torch", pass_: str = tables.FORWARD) -> None:
        found = tables.to_json({("gelu", backend, pass_): entries})
        (tmp_path / "h100.json").write_text(json.dumps({"tables": found}))
        tables.load.cache_clear()

    yield write
    tables.load.cache_clear()
    gpu.forget()
    table.forget()


def chosen(rows: int, length: int, backend: str = "torch", *, gradients: bool = False) -> tuple[str, str]:
    """What a backend's name stands for on the pretended H100, and why."""
    case = Case("", ((rows, length),), OPTIONS)
    with gpu.pretend("H100"), on_absent_gpu(case, torch.float32, gradients=gradients) as inputs:
        rung = selection.resolve("gelu", backend, inputs, OPTIONS)
        assert selection.explain("gelu", backend, inputs, OPTIONS)[-1] == (rung.name, None)
        return rung.name, selection.why("gelu", backend, inputs, OPTIONS)


def test_the_nearest_entry_chooses(ladder, use_table):
    use_table(entry("torch.first", (64, 1024), 1.3), entry(None, (4096, 1024)))
    with gpu.pretend("H100"), on_absent_gpu(Case("", ((64, 1024),), OPTIONS), torch.float32, gradients=False) as inputs:
        assert selection.preferred_first(table.named("gelu", "torch"), inputs, OPTIONS)[0].name == "torch.first"
    assert chosen(64, 1024) == ("torch.first", "table h100: 1.30x the rule's choice at a call, forward")
    assert chosen(4096, 1024) == ("torch.last", "order: the last rung that takes the call")
    assert chosen(64, 1100)[0] == "torch.first"


def test_a_far_entry_needs_a_large_gain(ladder, use_table):
    use_table(entry("torch.first", (64, 1024), 1.3), entry("torch.first", (1, 4096), 2.0))
    assert chosen(64, 2000)[0] == "torch.last"
    assert chosen(1, 8000)[0] == "torch.first"
    assert chosen(1, 9000)[0] == "torch.last"  # out of reach


def test_a_rung_without_rows_is_not_displaced(ladder, use_table):
    use_table(entry("torch.first", (64, 1024), measured=("torch.first", "torch.builtin")))
    assert chosen(64, 1024)[0] == "torch.last"


def test_passes_have_entries_of_their_own(ladder, use_table):
    use_table(entry("torch.first", (64, 1024)), pass_=tables.TRAINING)
    assert chosen(64, 1024)[0] == "torch.last"
    name, reason = chosen(64, 1024, gradients=True)
    assert (name, reason) == ("torch.first", "table h100: 1.30x the rule's choice at a call, training")


def test_auto_goes_to_the_level_that_the_table_names(ladder, use_table):
    levels = ("torch", "triton", "cuda")
    use_table(entry("torch", (64, 1024), measured=levels), backend="auto")
    name, reason = chosen(64, 1024, "auto")
    assert name == "torch.last"
    assert reason.startswith("table h100")
    assert chosen(4096, 1024, "auto")[0] != "torch.last"


def test_a_rung_that_refuses_is_passed_over(scratch_table, use_table):
    rung("torch.first", lambda input: "not today")
    rung("torch.last")
    use_table(entry("torch.first", (64, 1024)))
    assert chosen(64, 1024) == ("torch.last", "order: the last rung that takes the call")


def test_the_reason_of_a_rule_is_the_first_line_of_its_docstring(ladder):
    def rule(inputs, options):
        """Prefers `first` up to :data:`MOST`.

        For reasons that a reader of the choice does not need.
        """
        return ("torch.first",)

    chooser = choosers.Chooser("gelu", "torch", table.named("gelu", "torch"), rule)
    assert chooser.choice((torch.zeros(8, 16),), OPTIONS) == (("torch.first",), "rule: Prefers `first` up to `MOST`.")


def test_a_file_that_is_no_table_is_ignored_with_one_warning(ladder, use_table, tmp_path):
    use_table()
    (tmp_path / "h100.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match=r"h100\.json: the table of choices is ignored"):
        assert chosen(64, 1024)[0] == "torch.last"


@needs_extension
@pytest.mark.parametrize("path", sorted(tables.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_tables_that_ship_name_what_exists(path):
    found = tables.load(path)
    for (op, backend, pass_), entries in found.entries.items():
        assert pass_ in (tables.FORWARD, tables.TRAINING)
        known = set(table.LEVELS) if backend == "auto" else {v.name for v in table.variants(op, backend)}
        assert {name for each in entries for name in (*each.measured, each.better or each.measured[0])} <= known
        assert all(each.better is None or each.gain >= tables.NEAR_GAIN for each in entries)
    data = json.loads(path.read_text())
    for part in data["regret"]:
        if part["kept"]:
            gain = part["rules"]["mean"] / part["table"]["mean"]
            assert gain >= 1.03 or part["rules"]["worst"] > 1.10 >= part["table"]["worst"]
            assert part["table"]["worst"] <= part["rules"]["worst"]
        assert (part["op"], part["backend"], part["pass"]) not in found.entries or part["kept"]


@pytest.mark.parametrize(
    ("op", "case", "dtype", "level"),
    [
        ("matmul", Case("", ((4095, 4099), (4099, 4097))), torch.bfloat16, "cuda"),
        ("matmul", Case("", ((4096, 4096), (4096, 4096))), torch.bfloat16, "torch"),
        ("matmul", Case("", ((1000, 1000), (1000, 1000))), torch.bfloat16, "torch"),
        ("linear", Case("", ((4095, 4099), (4097, 4099), (4097,)), {"activation": "gelu"}), torch.bfloat16, "cuda"),
    ],
)
def test_auto_takes_products_where_rows_show_a_gain(op, case, dtype, level):
    h200 = gpu.Gpu("NVIDIA H200", (9, 0), 227 * 1024, 132, 141 << 30)
    with gpu.pretend(h200), on_absent_gpu(case, dtype, gradients=False) as inputs:
        if table.unavailable(op, "cuda") is not None:
            pytest.skip(str(table.unavailable(op, "cuda")))
        found = selection.resolve(op, "auto", inputs, case.options)
        assert found.level == level
        assert selection.resolve(op, level, inputs, case.options) is found


# ---- measurement -----------------------------------------------------------------------------------------------------


@pytest.fixture
def measuring(monkeypatch, tmp_path, ladder):
    """Measures calls on this machine's device with made-up times; returns those, and the rungs timed."""
    times, timed = {"torch.first": 1.0, "torch.last": 2.0}, []

    def time_of(rung, inputs, options, gradient):
        timed.append((rung.name, gradient))
        return times.get(rung.name, 3.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(measured.ENV_SELECT, measured.MEASURE)
    monkeypatch.setattr(measured, "time_of", time_of)
    monkeypatch.setattr(measured, "can_time", lambda inputs: type(inputs[0]) is torch.Tensor)
    table.forget()
    gpu.forget()
    yield times, timed
    monkeypatch.undo()
    table.forget()
    gpu.forget()


def taken(x: torch.Tensor, backend: str = "torch") -> str:
    """A measured choice, of tensors that need no GPU."""
    with gpu.pretend("H100"):
        chooser = choosers.Chooser("gelu", backend, table.named("gelu", backend), None)
        return chooser.rule_of_names((x,), OPTIONS)[0]


def test_the_fastest_rung_is_taken_and_kept(measuring):
    times, timed = measuring
    x = torch.zeros(8, 16)
    assert taken(x) == "torch.first"
    count = len(timed)
    assert count >= 2
    times["torch.first"] = 5.0
    assert taken(x) == "torch.first"  # from disk: another chooser, as another process would have
    assert len(timed) == count
    assert taken(torch.zeros(8, 17)) == "torch.last"  # another kind of call


def test_a_gradient_is_another_kind_of_call(measuring):
    times, timed = measuring
    assert taken(torch.zeros(8, 16)) == "torch.first"
    times["torch.first"] = 5.0
    (leaf,) = as_leaves((torch.zeros(8, 16),))
    assert taken(leaf) == "torch.last"
    assert {gradient for _, gradient in timed} == {False, True}


def test_layouts_and_deterministic_calls_are_kinds_of_their_own(measuring):
    times, timed = measuring
    assert taken(torch.zeros(8, 16)) == "torch.first"
    times["torch.first"] = 5.0
    assert taken(torch.zeros(16, 8).t()) == "torch.last"
    torch.use_deterministic_algorithms(True)
    try:
        assert taken(torch.zeros(8, 16)) == "torch.last"
    finally:
        torch.use_deterministic_algorithms(False)
    count = len(timed)
    assert taken(torch.zeros(8, 16)) == "torch.first"
    assert len(timed) == count


def test_measurement_on_a_cpu_is_refused_with_one_warning(monkeypatch, scratch_table):
    monkeypatch.setenv(measured.ENV_SELECT, measured.MEASURE)
    measured.warn_of_cpu.cache_clear()
    table.forget()
    x = torch.zeros(8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selection.check("gelu", "torch")
        selection.resolve("gelu", "torch.builtin", (x,), OPTIONS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for op, options in (("gelu", OPTIONS), ("softmax", {"dim": -1})):
            selection.resolve(op, "torch", (x,), options)
    assert [str(each.message).partition(";")[0] for each in told] == [
        "KERNEL_LADDER_SELECT=measure measures calls on a GPU alone"
    ]


def test_tensors_without_data_are_not_timed(measuring):
    _, timed = measuring
    case = Case("", ((8, 16),), OPTIONS)
    with gpu.pretend("H100"), on_absent_gpu(case, torch.float32, gradients=False) as inputs:
        assert selection.resolve("gelu", "torch", inputs, OPTIONS).name == "torch.last"
    assert not timed


def test_the_reason_tells_the_times(measuring):
    with gpu.pretend("H100"):
        chooser = choosers.Chooser("gelu", "torch", table.named("gelu", "torch"), None)
        names, reason = chooser.choice((torch.zeros(8, 16),), OPTIONS)
    assert names == ("torch.first",)
    assert reason == "measured: 1e+06 us, 2.00x torch.last"


def test_a_spoiled_file_is_ignored_with_a_warning(measuring):
    assert taken(torch.zeros(8, 16)) == "torch.first"
    (file,) = measured.folder().glob("*.json")
    data = json.loads(file.read_text())
    assert data["versions"]["torch"] == torch.__version__
    file.write_text("nonsense")
    with pytest.warns(RuntimeWarning, match="measured choices are ignored"):
        assert taken(torch.zeros(8, 16)) == "torch.first"
    file.write_text(json.dumps({**data, "versions": {**data["versions"], "torch": "1.0"}}))
    with pytest.warns(RuntimeWarning, match="of other versions"):
        assert taken(torch.zeros(8, 16)) == "torch.first"


def test_a_variable_with_another_value_is_told(monkeypatch):
    monkeypatch.setenv(measured.ENV_SELECT, "fast")
    with pytest.raises(VariableError, match="KERNEL_LADDER_SELECT must be measure, got 'fast'"):
        measured.enabled()


@needs_extension
@pytest.mark.parametrize(("queries", "measures"), [(1, False), (64, True)])
def test_a_step_of_decoding_is_not_measured(queries, measures, measuring, built_everywhere, monkeypatch):
    """A cache that grows has a new length at each step: rules choose, without the plan that cuDNN builds for each."""
    _, timed = measuring
    monkeypatch.setattr(measured, "can_time", lambda inputs: True)
    options = {"is_causal": False, "scale": None, "enable_gqa": False, "return_lse": False}
    case = Case("", ((1, 8, queries, 64), (1, 8, 300, 64), (1, 8, 300, 64)), options)
    h200 = gpu.Gpu("NVIDIA H200", (9, 0), 227 * 1024, 132, 141 << 30)
    with gpu.pretend(h200), on_absent_gpu(case, torch.bfloat16, gradients=False) as inputs:
        found = selection.resolve("attention", "auto", inputs, case.options)
    assert bool(timed) == measures
    assert measures or found.name == "cuda.split_kv"


def test_real_times_rank_a_slow_rung_last(scratch_table):
    slow = table.register("gelu", "torch.slow", forward=lambda input, **options: (time.sleep(0.01), (input, ()))[1])
    quick = table.spec("gelu") and next(v for v in table.variants("gelu", "torch") if v.name == "torch.builtin")
    x = torch.zeros(8, 16, device=DEVICE)
    assert measured.time_of(slow, (x,), OPTIONS, False) > measured.time_of(quick, (x,), OPTIONS, False) > 0
    assert measured.time_of(quick, (x,), OPTIONS, True) > 0
    fails = table.register("gelu", "torch.fails", forward=lambda input, **options: 1 / 0)
    assert measured.time_of(fails, (x,), OPTIONS, False) is None


def test_list_prints_the_reason(ladder, capsys):
    assert main(["list", "gelu", "--for", "64x64 none", "--json"]) == 0
    rows = {row["backend"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"]["variant"] == "torch.last"
    assert rows["torch"]["why"] == "order: the last rung that takes the call"


def test_inspect_prints_the_reason(capsys):
    case = kernel_ladder.spec("softmax").sweep[0]
    assert main(["inspect", "softmax", "--backend", "torch", "--shape", case.id.replace("65536", "16"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "order: the last rung that takes the call"


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_features_of_every_operation_are_the_same_while_a_compiler_traces(op):
    case = kernel_ladder.spec(op).sweep[-1]
    tensors = empty_inputs(case, torch.bfloat16, "meta")
    found = FEATURES[op](tensors, case.options)
    assert isinstance(found, Features)
    assert all(type(size) is int and size > 0 for size in found.sizes)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode:  # each size is a symbol
        traced = tuple(None if x is None else mode.from_tensor(x) for x in tensors)
        assert FEATURES[op](traced, case.options) == found
    assert not shapes.guards


@pytest.mark.parametrize(
    ("dim", "shape", "found"),
    [
        (None, (4, 8, 16), ("32 bits, all", (1, 512))),
        ((), (4, 8), ("32 bits, all", (1, 32))),
        (-1, (4, 8, 16), ("32 bits, rows", (32, 16))),
        ((1, -1), (4, 8, 16), ("32 bits, rows", (4, 128))),
        (0, (4, 8, 16), ("32 bits, columns", (128, 4))),
        ((0, 2), (4, 8, 16), ("32 bits, mixed", (8, 64))),
        (0, (), ("32 bits, all", (1, 1))),
    ],
)
def test_sums_of_rows_and_of_columns_are_different_categories(dim, shape, found):
    assert FEATURES["sum"]((torch.zeros(shape),), {"dim": dim}) == found
