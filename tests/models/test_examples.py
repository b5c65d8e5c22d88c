"""``examples/``: a small GPT trains at each level that runs here, along the same curve."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kernel_ladder.errors import BackendError

from ..conftest import DEVICE, skip_unless_available

PATH = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_gpt"]


@pytest.fixture
def tiny(example):
    return example.Config(width=32, layers=1, heads=2, context=16, batch=2, steps=2)


@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
def test_each_level_follows_the_formulas_curve(example, tiny, level):
    for op in ("layer_norm", "linear", "attention", "cross_entropy"):
        skip_unless_available(op, level)
    expected = example.train(tiny, "torch.naive", autocast=False).losses
    found = example.train(tiny, level, autocast=False).losses
    assert len(found) == 2
    assert found == pytest.approx(expected, rel=1e-3)


def test_the_loss_falls_and_autocast_stays_near(example):
    config = example.Config(width=32, layers=1, heads=2, context=32, batch=8, steps=60, learning_rate=3e-3)
    plain = example.train(config, "torch", autocast=False).losses
    assert plain[0] == pytest.approx(5.545, abs=0.2), "ln 256: every byte alike"
    assert sum(plain[-5:]) / 5 < 3.6
    mixed = example.train(config, "torch", autocast=True).losses
    assert mixed == pytest.approx(plain, rel=0.05)


def test_distance_is_that_of_smoothed_curves(example):
    jumps = example.Run(losses=[1.0, 3.0] * 50)
    assert example.distance(jumps, example.Run(losses=[2.0] * 100)) == pytest.approx(1 / example.SMOOTHED)
    assert example.distance(jumps, example.Run(losses=[2.5, 4.5] * 50)) == pytest.approx(1.5)


def test_a_curve_farther_from_float32_than_eager_bfloat16_is_astray(example):
    def run(away):
        return example.Run(losses=[3.0 - step / 100 + away for step in range(100)])

    runs = {example.REFERENCE: run(0.0), "torch": run(0.01), "triton": run(0.014), "cuda": run(-0.016)}
    assert example.astray(runs) == ["cuda"]
    assert example.astray({**runs, "xla": run(float("nan"))}) == ["cuda", "xla"]
    assert example.astray({name: each for name, each in runs.items() if name != "torch"}) == []


def test_the_command(example, tmp_path, capsys):
    sizes = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "2"]
    picture = tmp_path / "curves.png"
    runs = example.main(["--backends", "torch.naive", "torch", *sizes, "--out", str(picture)])
    assert list(runs)[-2:] == ["torch.naive", "torch"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("torch.naive      loss 5.")
    assert lines[-1] == f"wrote {picture} and {tmp_path / 'curves.md'}"
    table = (tmp_path / "curves.md").read_text().splitlines()
    assert table[0].startswith("1 layers, 32 wide, 2 heads; 2 × 16 bytes a step, 2 steps; ")
    assert [line.split(" | ")[0] for line in table[4:]] == [f"| {name}" for name in runs]
    assert " | 0.0000 | " in table[4], "of the first run from itself"
    with pytest.raises(BackendError, match="did you mean 'triton'"):
        example.main(["--backends", "tritn", *sizes])
    if DEVICE.type == "cpu":
        with pytest.raises(SystemExit):
            example.main(["--backends", "cuda", *sizes])
        assert "left out" in capsys.readouterr().out
