"""Configurations of Triton kernels: chosen once, in order without tuning, and kept on disk with it."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch

import kernel_ladder
from kernel_ladder import table

from ..conftest import DEVICE, alone, needs_gpu
from ..processes import run_python

if (reason := table.unavailable("matmul", "triton")) is not None:
    pytest.skip(reason, allow_module_level=True)

import triton

from triton_impl import interpreted
from triton_impl.attention import flash
from triton_impl.matmul import descriptors, persistent, product, tiled, tiles
from triton_impl.runtime import autotuner, launch_cache
from triton_impl.runtime.autotuned_kernel import AutotunedKernel


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", code], {**os.environ, **variables})


def test_a_wrong_value_of_the_environment_variable_is_an_error():
    result = run("import kernel_ladder; kernel_ladder.backends('matmul')", KERNEL_LADDER_AUTOTUNE="yes")
    assert result.returncode != 0
    assert "KERNEL_LADDER_AUTOTUNE must be 0 or 1, got 'yes'" in result.stderr


def test_without_tuning_the_first_choice_and_then_the_last(monkeypatch):
    configs = [triton.Config({"BLOCK": n}) for n in (64, 32, 16)]
    monkeypatch.setattr(launch_cache, "TUNING", False)
    assert launch_cache.to_time(configs) == [configs[0], configs[2]]
    assert launch_cache.to_time(configs[:1]) == configs[:1]
    monkeypatch.setattr(launch_cache, "TUNING", True)
    assert launch_cache.to_time(configs) == configs


class _SmallMemory:
    """Stands for a kernel whose larger blocks do not fit."""

    arg_names = ("x_ptr", "n", "BLOCK")

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def __getitem__(self, grid):
        def launch(x, n, BLOCK, **options):
            self.blocks.append(BLOCK)
            if BLOCK > 16:
                raise triton.OutOfResources(2, 1, "shared memory")

        return launch


def test_a_choice_that_does_not_fit_gives_way_to_the_next(monkeypatch):
    monkeypatch.setattr(launch_cache, "TUNING", False)
    monkeypatch.setattr(launch_cache, "interpreted", lambda: False)

    @triton.jit
    def kernel(x_ptr, n, BLOCK):
        pass

    tuned = AutotunedKernel(kernel, [triton.Config({"BLOCK": n}) for n in (64, 32, 16)], ["n"])
    tuned.kernel = small = _SmallMemory()
    tuned(lambda meta: (meta["BLOCK"],), (torch.zeros(1),), (1,), {})
    assert small.blocks == [64, 16]

    tuned = AutotunedKernel(kernel, [triton.Config({"BLOCK": n}) for n in (64, 32)], ["n"])
    tuned.kernel = _SmallMemory()
    with pytest.raises(triton.OutOfResources):
        tuned(lambda meta: (meta["BLOCK"],), (torch.zeros(1),), (1,), {})


def _matmul(offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(33 * 17 + offset, device=DEVICE)[offset:].view(33, 17)
    b = torch.randn(17, 35, device=DEVICE)
    return kernel_ladder.matmul(a, b, backend="triton.tiled"), a @ b


def _attention(offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(2 * 33 * 16 + offset, device=DEVICE)[offset:].view(1, 2, 33, 16)
    k, v = torch.randn(2, 1, 2, 33, 16, device=DEVICE)
    expected = kernel_ladder.attention(q, k, v, backend="torch.naive")
    return kernel_ladder.attention(q, k, v, backend="triton"), expected


@pytest.mark.parametrize(("module", "call"), [(product, _matmul), (flash, _attention)])
def test_operands_met_before_are_chosen_for_once(monkeypatch, module, call):
    monkeypatch.setattr(module, "_launches", launch_cache.LaunchCache())
    calls = []
    choose = AutotunedKernel._choose
    monkeypatch.setattr(AutotunedKernel, "_choose", lambda *args: calls.append(args) or choose(*args))
    # Three times aligned, then at an address that kernels for aligned operands must not take, and back.
    for offset in (0, 0, 0, 1, 1, 0):
        torch.testing.assert_close(*call(offset), rtol=1e-4, atol=1e-4)
    assert len(calls) == 1


def test_choices_can_be_recorded(monkeypatch):
    monkeypatch.setattr(product, "_launches", launch_cache.LaunchCache())
    _matmul()
    monkeypatch.setattr(product, "_launches", launch_cache.LaunchCache())
    with launch_cache.recorded() as choices:
        _matmul()
        _matmul()
    if launch_cache.TUNING or interpreted():
        (choice,) = choices
        assert choice.kernel is tiled._matmul_kernel
        assert choice.config in tiled._matmul["ieee"]._configs
        assert not choice.timings or choice.timings[choice.config] == min(choice.timings.values())
    else:
        assert choices == []
    before = len(choices)
    _matmul(offset=1)
    assert len(choices) == before, "nothing is recorded past the block"


def test_switching_tf32_is_seen(monkeypatch):
    monkeypatch.setattr(product, "_launches", launch_cache.LaunchCache())
    for allowed in (False, True):
        monkeypatch.setattr(product, "tf32_allowed", lambda allowed=allowed: allowed)
        _matmul()
    assert len(product._launches) == 2


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(launch_cache, "MAX_LAUNCHES", 3)
    launches = launch_cache.LaunchCache()
    for key in range(10):
        launches.remember(key, key)
        assert len(launches) <= 3
        assert launches[key] == key


def _chooser() -> autotuner.Autotuner:
    return autotuner.Autotuner(tiled._matmul_kernel)


def test_a_choice_is_made_once_for_a_key(monkeypatch):
    monkeypatch.setattr(launch_cache, "TUNING", False)
    configs, ran = [triton.Config({"BLOCK": n}) for n in (64, 32, 16)], []

    def run(config, only_compile):
        assert not only_compile, "without tuning nothing is compiled for its own sake"
        ran.append(config.kwargs["BLOCK"])
        if config.kwargs["BLOCK"] > 16:
            raise triton.OutOfResources(2, 1, "shared memory")

    choose = _chooser()
    assert choose(("a",), configs, run) is configs[2]
    assert ran == [64, 32, 16]
    assert choose(("a",), configs, run) is configs[2]
    assert ran == [64, 32, 16, 16], "every call leaves the kernel run"
    with pytest.raises(triton.OutOfResources):
        choose(("b",), configs[:2], run)


def test_a_choice_on_disk_that_cannot_be_read_is_made_anew(tmp_path):
    configs = [triton.Config({"BLOCK": n}) for n in (64, 32)]
    path = tmp_path / "kernel.choice.json"
    path.write_text(json.dumps({str(configs[0]): 2.0, str(configs[1]): None}))
    assert autotuner._read(str(path), configs) == {configs[0]: 2.0, configs[1]: float("inf")}
    for text in ("{", "[]", json.dumps({str(configs[0]): 2.0})):
        path.write_text(text)
        with pytest.warns(UserWarning, match="cannot be read and is made anew"):
            assert autotuner._read(str(path), configs) is None
    assert autotuner._read(None, configs) is None


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (512, 512, 512), (64, 8192, 8192), (2048, 2048, 65536)], ids=str)
def test_the_cost_model_leaves_few_configurations(shape):
    m, n, k = shape
    configs = descriptors.CONFIGS
    found = tiles.likeliest(configs, 8, m, n, k, 1, 2, torch.device("cpu"))
    assert len(found) <= 9
    assert len(set(map(str, found))) == len(found)
    first = found[0].kwargs
    if min(shape) >= 2048:
        assert first["BLOCK_M"] * first["BLOCK_N"] == 128 * 256, "where tiles are many, the largest"
    if m == n == 512:
        assert first["BLOCK_M"] * first["BLOCK_N"] <= 64 * 128, "where they are few, more of them"


@alone
@needs_gpu
@pytest.mark.skipif(interpreted(), reason="the interpreter has nothing to tune")
def test_every_configuration_compiles_side_by_side_and_is_timed():
    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    run, configs, done = None, descriptors.CONFIGS[:4], []
    step = descriptors.DescriptorProduct(persistent.run.kernel, persistent=True)

    class First(autotuner.Autotuner):
        def __call__(self, key, candidates, given):
            nonlocal run
            run = given
            given(candidates[0], False)
            return candidates[0]

    step.choose = First(step.kernel)
    step(torch.empty_like(a), a, a)
    compiled = autotuner.compile_side_by_side(configs, lambda *args: done.append(args) or run(*args))
    assert compiled == dict.fromkeys(configs, True)
    assert all(only for _, only in done)
    timings = autotuner.time_in_rounds({**compiled, descriptors.CONFIGS[4]: False}, run)
    assert timings.pop(descriptors.CONFIGS[4]) == float("inf")
    assert all(0 < ms < 10 for ms in timings.values())


TUNE = """
import torch, kernel_ladder
a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
q = torch.randn(1, 1, 256, 64, device="cuda", dtype=torch.bfloat16)
kernel_ladder.matmul(a, a, backend="triton.tiled")
kernel_ladder.matmul(a, a, backend="triton.persistent")
w = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16)  # of a k that is worth sharing out
kernel_ladder.matmul(w.mT[:16], w, backend="triton.split_k")
kernel_ladder.attention(q, q, q, backend="triton.flash")
"""


@needs_gpu
@pytest.mark.skipif(interpreted(), reason="the interpreter has nothing to tune")
def test_a_second_process_does_not_tune_again(tmp_path):
    variables = {"KERNEL_LADDER_AUTOTUNE": "1", "TRITON_PRINT_AUTOTUNING": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    timed = []
    for _ in range(2):
        result = run(TUNE, **variables)
        assert result.returncode == 0, result.stderr
        timed.append([line for line in result.stdout.splitlines() if line.startswith("Autotuning kernel")])
    assert any("_matmul_kernel" in line for line in timed[0])
    assert any("_matmul_persistent_kernel" in line for line in timed[0])
    assert any("_matmul_split_kernel" in line for line in timed[0])
    assert any("_forward_kernel" in line for line in timed[0])
    assert timed[1] == []


KEYS = """
import importlib, triton
for name in FIRST:
    for value in list(vars(importlib.import_module("triton_impl." + name)).values()):
        if isinstance(value, triton.JITFunction):
            value.cache_key
for module, name in (kernel.rsplit(".", 1) for kernel in KERNELS):
    print(getattr(importlib.import_module("triton_impl." + module), name).cache_key)
"""


def test_a_kernels_key_does_not_depend_on_what_was_run_before():
    kernels = "linear._linear_kernel", "softmax.fused._fused_kernel", "bias_dropout_add_layer_norm.fused._fused_kernel"
    found = set()
    for first in (
        ["dropout", "gelu", "runtime.row_configs", "common.elementwise", "matmul.tma"],
        ["softmax"],
        ["linear", "norm.online"],
    ):
        result = run(f"FIRST, KERNELS = {first}, {kernels}\n{KEYS}", TRITON_INTERPRET="0")
        assert result.returncode == 0, result.stderr
        found.add(result.stdout)
    assert len(found) == 1
    assert len(found.pop().split()) == len(kernels)
