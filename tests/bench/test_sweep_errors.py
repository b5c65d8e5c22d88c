"""A sweep with variants that are wrong, raise, break the GPU or lack memory, and interrupted ones."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
import types
import weakref

import pytest
import torch

import kernel_ladder
from bench import sweep
from bench.__main__ import main
from bench.measure import cases, environment
from bench.rows import store
from bench.show import pictures
from kernel_ladder import table

from ..conftest import DEVICE, TIMED, a_row, captured, needs_gpu


def _wrong(monkeypatch, **changes):
    """Put a changed `torch.naive` in the table."""
    table.variants("gelu")  # loads them
    climb = table._variants["gelu", "torch"]
    monkeypatch.setitem(climb, "torch.naive", dataclasses.replace(climb["torch.naive"], **changes))


@pytest.mark.usefixtures("small_sweeps")
def test_a_wrong_variant_gets_no_time(monkeypatch, tmp_path, capsys):
    _wrong(monkeypatch, forward=lambda input, **options: (input * 0.5, ()))
    path = tmp_path / "wrong.jsonl"
    argv = ["--op", "gelu", "--backend", "torch.naive", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 1
    for row in store.read(path):
        if row.backend == "torch.naive":
            assert row.us is None
            assert row.gbs is None
            assert row.error > row.bound
            assert "largest deviation" in row.wrong
        else:
            assert row.us > 0
    assert "WRONG: gelu torch.naive forward" in capsys.readouterr().err


@pytest.mark.usefixtures("small_sweeps")
def test_a_wrong_gradient_gets_no_time(monkeypatch, tmp_path):
    right = table._variants["gelu", "torch"]["torch.naive"].forward

    def forward(input, **options):
        return right(input, **options)[0], (input,)

    _wrong(monkeypatch, forward=forward, backward=lambda saved, grad, needs: (grad * 0.5,))
    path = tmp_path / "wrong.jsonl"
    argv = ["--op", "gelu", "--backend", "torch.naive", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 1
    timed = {row.pass_: row.us is not None for row in store.read(path) if row.backend == "torch.naive"}
    assert timed == {"forward": True, "backward": False}


@pytest.mark.usefixtures("small_sweeps")
def test_a_variant_that_raises_does_not_stop_the_sweep(monkeypatch, tmp_path):
    def forward(input, **options):
        raise RuntimeError("misaligned address\nand a long trace")

    _wrong(monkeypatch, forward=forward)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch.naive", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 1
    found = {(row.backend, row.us is None, row.wrong) for row in store.read(path)}
    assert found == {
        ("torch.naive", True, "raised RuntimeError: misaligned address"),
        ("torch.builtin", False, None),
    }


@pytest.mark.usefixtures("small_sweeps")
def test_a_variant_that_breaks_the_gpu_is_the_only_one_blamed(monkeypatch, tmp_path, capsys):
    broken = []

    def forward(input, **options):
        broken.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _wrong(monkeypatch, forward=forward)
    monkeypatch.setattr(sweep.timing, "synchronize", synchronize)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu,softmax", "--backend", "torch", "--quick", "--no-ceilings", "--time", "0.02"]
    assert main([*argv, "--no-pictures", "--output", str(path)]) == 1
    assert "the GPU answers nothing but RuntimeError: CUDA error: an illegal" in capsys.readouterr().err
    assert [(row.backend, row.pass_) for row in store.read(path) if row.wrong] == [("torch.naive", "forward")]
    assert not any(row.op == "softmax" for row in store.read(path)), "nothing was measured after it"


@pytest.mark.usefixtures("small_sweeps")
def test_an_unsupported_variant_says_why(monkeypatch, tmp_path):
    _wrong(monkeypatch, unsupported=lambda *inputs, **options: "only on Sundays")
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch.naive", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 0
    naive = [row for row in store.read(path) if row.backend == "torch.naive"]
    assert naive
    assert {(row.us, row.unsupported) for row in naive} == {(None, "only on Sundays")}


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("could not allocate the output")], ids=repr)
def test_a_variant_without_memory_is_not_wrong(monkeypatch, tmp_path, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(sweep.candidates, "forward_call", full)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch", "--quick", "--no-ceilings", "--pass", "forward", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 0
    assert [(row.us, row.wrong, "out of memory" in (row.unsupported or "")) for row in store.read(path)] == [
        (None, None, True)
    ] * 2


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("baseline", [False, True])
def test_a_variant_without_memory_beside_others_is_timed_beside_the_baseline(monkeypatch, tmp_path, baseline):
    forward_call, short = sweep.candidates.forward_call, []

    def once(variant, copies):
        call = forward_call(variant, copies)
        named = variant.name == ("torch.builtin" if baseline else "torch.naive")
        if named and len(short) < 1:
            short.append(variant.name)
            raise torch.OutOfMemoryError
        return call

    monkeypatch.setattr(sweep.candidates, "forward_call", once)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch,triton.fused", "--quick", "--pass", "forward", "--time", "0.02"]
    assert main([*argv, "--no-ceilings", "--no-pictures", "--output", str(path)]) == 0
    assert len(short) == 1
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["backend"] for row in found) == ["torch.builtin", "torch.naive", "triton.fused"]
    assert all(row["us"] > 0 and row["unsupported"] is None for row in found)
    (naive,) = (row for row in found if row["backend"] == "torch.naive")
    assert baseline or naive["speedup"] > 0


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("could not allocate the output")], ids=repr)
def test_variants_too_large_to_be_timed_together_are_timed_beside_the_baseline(monkeypatch, tmp_path, error):
    run, together = sweep.rounds.run, []
    forward_call, compiled = sweep.candidates.forward_call, set()

    def compiling(variant, copies):
        call = forward_call(variant, copies)

        def first_takes_long(i):
            if variant.name not in compiled:
                time.sleep(0.1)
                compiled.add(variant.name)
            return call(i)

        return first_takes_long

    monkeypatch.setattr(sweep.candidates, "forward_call", compiling)

    def one_beside_the_baseline(launches, baseline, **options):
        together.append(set(launches))
        if len(launches) > 2:
            raise error
        return run(launches, baseline, **options)

    monkeypatch.setattr(sweep.rounds, "run", one_beside_the_baseline)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch,triton", "--quick", "--pass", "forward", "--time", "0.02"]
    assert main([*argv, "--no-ceilings", "--no-pictures", "--output", str(path)]) == 0
    found = store.read(path)
    assert len(together[0]) == len(found) > 2
    assert together[1:] == [{row.backend, "torch.builtin"} for row in found]
    assert all(row.us > 0 and row.speedup > 0 and row.unsupported is None for row in found)
    assert all(row.compile_s > 0.1 for row in found)


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_the_hosts_cost_is_of_a_small_call_where_the_case_takes_long(monkeypatch, tmp_path, op):
    monkeypatch.setattr(sweep.timing, "HOST_CALL_S", 0.0)
    monkeypatch.setattr(cases, "HOST_DIM", 16)
    sizes = []
    host_us = sweep.candidates.host_us

    def noted(variant, inputs, *others):
        sizes.extend(size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape)
        return host_us(variant, inputs, *others)

    monkeypatch.setattr(sweep.candidates, "host_us", noted)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", op, "--backend", "torch.naive", "--quick", "--time", "0.02", "--no-ceilings", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 0
    found = store.read(path)
    assert found
    assert not [row.wrong for row in found if row.wrong]
    assert all(row.host_us for row in found if row.us and row.pass_ == "forward")
    assert max(sizes) <= cases.HOST_DIM


@pytest.mark.usefixtures("small_sweeps")
@pytest.mark.parametrize("short", ["ceilings", "copies", "timing"])
def test_a_sweep_goes_on_where_memory_is_short(monkeypatch, tmp_path, short):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError

    module, name = {
        "ceilings": (sweep.ceilings, "copy_gbs"),
        "copies": (sweep.candidates.Copies, "of"),
        "timing": (sweep.timing, "interleave"),
    }[short]
    monkeypatch.setattr(module, name, full)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 0
    found = store.read(path)
    assert {row.pass_ for row in found} == {"forward", "backward"}
    for row in found:
        assert row.of_ceiling is None
        assert (row.us is not None) == (short == "ceilings")
        assert (row.unsupported is None) == (short == "ceilings")
        assert row.unsupported is None or "no memory is left for" in row.unsupported


@pytest.mark.usefixtures("small_sweeps")
def test_an_interrupt_is_one_even_where_another_error_hides_it(monkeypatch, tmp_path):
    def forward(input, **options):
        try:
            raise KeyboardInterrupt
        finally:  # as a lock does that was given up before it was taken again
            raise RuntimeError("release unlocked lock")

    _wrong(monkeypatch, forward=forward)
    path = tmp_path / "rows.jsonl"
    argv = ["--op", "gelu", "--backend", "torch.naive", "--quick", "--no-ceilings", "--time", "0.02", "--no-pictures"]
    assert main([*argv, "--output", str(path)]) == 130
    assert not any(row.wrong for row in store.read(path))


@pytest.mark.usefixtures("small_sweeps")
def test_an_interrupt_keeps_finished_rows(monkeypatch, tmp_path):
    measure_pass = sweep.Sweep._measure_pass

    def interrupted(self, spec, group, pass_, *rest):
        if pass_ == "backward":
            raise KeyboardInterrupt
        measure_pass(self, spec, group, pass_, *rest)

    monkeypatch.setattr(sweep.Sweep, "_measure_pass", interrupted)
    path = tmp_path / "rows.jsonl"
    argv = [
        "--op",
        "gelu",
        "--backend",
        "torch",
        "--quick",
        "--no-ceilings",
        "--time",
        "0.02",
        "--no-pictures",
        "--output",
        str(path),
    ]
    assert main(argv) == 130
    assert {row.pass_ for row in store.read(path)} == {"forward"}


def test_an_interrupt_before_the_first_row_keeps_nothing(monkeypatch, tmp_path, capsys):
    def interrupted(self, group):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.Sweep, "measure", interrupted)
    path = tmp_path / "rows.jsonl"
    assert main(["--op", "gelu", "--backend", "torch", "--quick", "--no-ceilings", "--output", str(path)]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was measured yet\n"
    assert not path.exists()


def test_an_interrupt_of_a_command_is_one_line(monkeypatch, tmp_path, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    store.write(tmp_path / "rows.jsonl", [a_row(**TIMED)])
    monkeypatch.setattr(pictures, "draw", interrupted)
    assert main(["pictures", str(tmp_path / "rows.jsonl")]) == 130
    assert capsys.readouterr().err == "python -m bench: interrupted\n"
    finder = types.SimpleNamespace(find_spec=interrupted)  # while a command's module is imported
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "bench.show.report", raising=False)
    monkeypatch.delattr(sys.modules["bench.show"], "report", raising=False)
    assert main(["report"]) == 130
    assert capsys.readouterr().err == "python -m bench: interrupted\n"


@pytest.mark.parametrize(
    ("given", "left"), [({}, ["0.4", None]), ({0: "0.9"}, ["0.9", None]), ({1: "0.9"}, [None, "0.9"])]
)
def test_jax_leaves_memory_to_pytorch_unless_the_user_says_more(monkeypatch, given, left):
    for place, name in enumerate(environment.JAX_MEMORY):
        monkeypatch.setenv(name, given.get(place, ""))  # so that it is as it was after the test
        if place not in given:
            monkeypatch.delenv(name)
    environment.leave_memory_to_pytorch()
    assert [environment.os.environ.get(name) for name in environment.JAX_MEMORY] == left


class _Cycle:
    """Keeps itself, and what it is given, until Python collects cycles."""

    def __init__(self, kept: object) -> None:
        self.kept, self.itself = kept, self


@pytest.mark.parametrize(("reserved", "collected"), [(environment.MUCH_MEMORY + 1, True), (0, False)])
def test_cycles_are_collected_where_the_process_keeps_much_memory(monkeypatch, reserved, collected):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    cycle = weakref.ref(_Cycle(None))
    gc.disable()
    try:
        environment.give_memory_back(torch.device("cuda"))
        assert (cycle() is None) == collected
    finally:
        gc.enable()
    environment.give_memory_back(torch.device("cpu"))


@needs_gpu
def test_the_memory_of_a_graph_in_a_cycle_is_given_back(gpu_memory):
    gpu_memory(2 * environment.MUCH_MEMORY)
    environment.give_memory_back(DEVICE)
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        torch.empty(environment.MUCH_MEMORY + (1 << 21), dtype=torch.uint8, device=DEVICE)
    cycle = weakref.ref(_Cycle(graph))
    del graph
    assert cycle() is not None
    assert torch.cuda.memory_reserved() > before + environment.MUCH_MEMORY
    environment.give_memory_back(DEVICE)
    assert torch.cuda.memory_reserved() <= before
