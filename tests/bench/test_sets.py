"""Sets of calls beside the sweep: public models and random ones, their rows, and the distributions made of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernel_ladder
from bench import sweep
from bench.__main__ import _selection, _sweep_parser, main
from bench.measure import drawn, environment, models, row_lengths, sets
from bench.measure.cases import layouts_of, sweep_members
from bench.measure.selection import Selection, groups
from bench.rows import store
from bench.show import distribution
from kernel_ladder.testing.samples import empty_inputs

from ..conftest import DEVICE, TIMED, a_row

OTHER_SETS = (sets.MODELS, sets.RANDOM, sets.LENGTHS)


@pytest.mark.parametrize("set_", OTHER_SETS)
def test_every_call_of_a_set_is_one_that_its_operation_takes(set_):
    for op in kernel_ladder.OPS:
        spec = kernel_ladder.spec(op)
        members = sets.members(set_, op)
        assert len({member.case.id for member in members}) == len(members)
        for case, names in members[:: max(len(members) // 40, 1)]:
            inputs = empty_inputs(case, torch.bfloat16, "meta")
            assert spec.check(*inputs, **case.options) is None
            assert not case.climb
            assert spec.flops(case, False) > 0 or spec.bytes(case, 2, False) > 0
            assert bool(names) == (set_ == sets.MODELS)


def test_the_models_are_those_that_people_run():
    products = {member.case.id: member.names for member in sets.members(sets.MODELS, "linear")}
    assert "Llama 3 8B down" in products["777x4096x14336 none no bias"]
    assert "Mistral 7B down" in products["777x4096x14336 none no bias"]
    assert {"GPT-2 head"} <= set(products["2048x50257x768 none no bias"])
    assert {model.vocab for model in models.MODELS} >= {32000, 50257, 128256, 151936, 152064}
    assert {model.hidden for model in models.MODELS} >= {1536, 3584, 4544, 5120, 8192}
    assert {model.intermediate for model in models.MODELS} >= {11008, 13824, 18944}
    tokens = {member.case.shapes[0][0] for member in sets.members(sets.MODELS, "rms_norm")}
    assert tokens == set(models.TOKENS)
    decode = {member.case.id for member in sets.members(sets.MODELS, "attention")}
    assert "B1 H32/8 Q1 S4096 D128 decode" in decode


def test_a_seed_draws_the_same_calls_and_another_others():
    first, again, other = (list(drawn.calls(seed)) for seed in (1, 1, 2))
    assert [call.case for call in first] == [call.case for call in again]
    assert [call.case for call in first] != [call.case for call in other]
    products = [call.case.shapes for call in first if call.op == "matmul"]
    sizes = [(*a, b[1]) for a, b in products]
    squares = [m for m, k, n in sizes if m == n == k]
    assert squares
    assert all(size % 128 for size in squares)
    aligned = [all(size % 8 == 0 for size in each) for each in sizes]
    assert True in aligned
    assert False in aligned


def test_rows_of_every_length_are_of_64_mib_and_more():
    for op in row_lengths.OPS:
        cases = [member.case for member in sets.members(sets.LENGTHS, op)]
        assert [case.shapes[0][1] for case in cases] == list(row_lengths.LENGTHS)
        for case in cases:
            (m, n), *_ = case.shapes
            assert 0 <= 2 * m * n - 2**26 < 2 * n
    assert sets.members(sets.LENGTHS, "matmul") == ()


def test_a_set_is_measured_with_contenders_and_says_so(monkeypatch, tmp_path):
    case = dataclasses.replace(kernel_ladder.spec("softmax").sweep[0], climb=False)
    member = sets.Member(case, ("a model", "another"))
    monkeypatch.setattr(sets, "members", lambda set_, op, seed: (member,) if set_ == sets.MODELS else ())
    selection = Selection(["softmax"], passes=("forward",), set=sets.MODELS)
    (group,) = groups(selection, DEVICE)
    assert (group.set, group.names) == (sets.MODELS, ("a model", "another"))
    run = sweep.Sweep(selection, print, DEVICE)
    measured = {v.name for v in run.chosen(group)}
    assert "torch.builtin" in measured
    assert "torch.naive" not in measured
    assert run._stands_for(group, "forward", "torch.builtin")
    row = run._row(kernel_ladder.spec("softmax"), group, "forward", "torch.builtin")
    assert (row.set, row.names) == (sets.MODELS, ["a model", "another"])
    assert "torch" in row.chosen
    path = tmp_path / "rows.jsonl"
    store.append(path, row)
    assert store.read(path) == [row]


def test_the_command_line_names_sets():
    assert _selection(_sweep_parser().parse_args(["--set", "random", "--seed", "7"])).set_name == "random:7"
    assert _selection(_sweep_parser().parse_args([])).set_name == "sweep"
    assert main(["--set", "modles"]) == 2
    assert main(["--seed", "7"]) == 2
    assert environment.results_file("models").parent.name == "models"


def test_tiny_cases_keep_the_names_of_all_that_shrink_to_them():
    members = sets.members(sets.MODELS, "add")
    tiny = sweep_members(kernel_ladder.spec("add"), members, torch.device("cpu"), quick=False)
    assert len(tiny) < len(members)
    assert {name for member in tiny for name in member.names} == {name for m in members for name in m.names}
    transposed = next(m.case for m in sets.members(sets.MODELS, "matmul"))
    assert layouts_of(transposed) == ["contiguous", "transposed"]
    assert layouts_of(members[0].case) == []


def timed(backend: str, shape: str, us: float, speedup: float, chosen: list[str], **fields):
    level = backend.partition(".")[0]
    times = {**TIMED, "us": us, "us_q1": us, "us_q3": us, "speedup": speedup}
    return a_row(
        **{**times, "op": "softmax", "backend": backend, "level": level, "shape": shape, "chosen": chosen, **fields}
    )


@pytest.fixture
def measured_rows():
    rows = []
    for i in range(20):
        shape, fields = f"{i}x8", {"set": "models", "names": ["a model head", "another"]}
        best = 10.0 if i else 8.0
        rows.append(timed("torch.builtin", shape, 12.0, 1.0, ["torch"], **fields))
        rows.append(timed("cuda.registers", shape, 10.0, 1.2 if i else 0.9, ["auto", "cuda"], **fields))
        rows.append(timed("cuda.cluster", shape, best, 12 / best, [], **fields))
        rows.append(timed("compile.default", shape, 1.0, 12.0, ["compile"], **fields))
    rows.append(timed("cuda.registers", "sweep", 99.0, 0.1, ["cuda"]))
    return rows


def test_distributions_have_mean_tails_and_regret(measured_rows):
    found = {d.backend: d for d in distribution.distributions(measured_rows, ["models"])}
    assert list(found) == ["auto", "torch", "compile", "cuda"]
    cuda = found["cuda"]
    assert len(cuda.speedups) == len(cuda.regrets) == 20
    assert cuda.speedups[0] == distribution.Value(0.9, "0x8 (a model head and 1 more)")
    assert distribution.quantile(cuda.speedups, 0.05).ratio == 0.9
    assert distribution.quantile(cuda.regrets, 0.95).ratio == 1.0
    assert cuda.regrets[-1].ratio == 1.25
    assert found["auto"].regrets[-1].ratio == 1.25  # the compile level is none of its candidates
    assert distribution.mean(cuda.speedups) == pytest.approx(1.2 * (0.9 / 1.2) ** (1 / 20))


def test_rates_of_lengths_stand_beside_a_copys(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    for shape, gbs in (("a", 3000.0), ("b", 2400.0)):
        fields = {"set": "lengths", "gbs": gbs, "ceiling_gbs": 3000.0, "ceiling_tflops": 100.0}
        store.append(path, timed("cuda.registers", shape, 10.0, 1.0, ["cuda"], **fields))
    (found,) = distribution.distributions(store.read(path), ["lengths"])
    assert [value.ratio for value in found.rates] == [0.8, 1.0]
    assert main(["distribution", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "rate over the rate of a copy" in said
    assert "softmax forward float32 cuda 2 0.894 0.800 b" in said


def test_the_command_prints_the_worst_calls(measured_rows, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    store.write(path, measured_rows)
    assert main(["distribution", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "models: softmax, float32, forward" in said
    assert "1.250" in said
    assert main(["distribution", str(path), "--set", "random"]) == 2
    assert "no row says which" in capsys.readouterr().err
