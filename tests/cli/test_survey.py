"""The hardware survey of ``doctor``, and the ceilings that it measures and remembers."""

from __future__ import annotations

import json

import pytest
import torch

from kernel_ladder import table
from kernel_ladder.__main__ import main
from kernel_ladder.cli import ceilings, doctor, survey

from ..conftest import DEVICE, alone, needs_gpu

KEY = {"gpu": "NVIDIA Test", "driver": "1.2", "torch": "2.11.0", "cuda": "13.0", "source": "abc"}
RATES = {"copy": 4000.0, "bfloat16": 700.0, "float16": 710.0, "tf32": 350.0, "float32": 50.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kernel_ladder"


def test_ceilings_are_remembered_by_what_they_depend_on(folder):
    assert ceilings._read(KEY) is None
    ceilings._write(KEY, RATES)
    assert ceilings._read(KEY) == RATES
    for name in KEY:
        assert ceilings._read({**KEY, name: "another"}) is None
    assert len(list(folder.iterdir())) == 1, "nothing is left beside the file"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"key": ',
        "[]",
        "{}",
        json.dumps({"key": KEY, "ceilings": {"copy": "fast"}}),
        json.dumps({"key": KEY, "ceilings": None}),
        json.dumps({"key": {**KEY, "gpu": "another"}, "ceilings": RATES}),
        json.dumps({"key": KEY, "ceilings": {**RATES, "copy": -1}}),
    ],
)
def test_a_broken_or_foreign_file_is_passed_over_with_one_warning(folder, text):
    ceilings._write(KEY, RATES)
    (path,) = folder.iterdir()
    path.write_text(text)
    with pytest.warns(UserWarning, match="is ignored") as warned:
        assert ceilings._read(KEY) is None
    assert len(warned) == 1
    ceilings._write(KEY, RATES)  # measuring anew mends it
    assert ceilings._read(KEY) == RATES


def test_a_folder_that_cannot_be_written_loses_nothing_else(folder):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="could not be stored"):
        ceilings._write(KEY, RATES)
    assert folder.read_text() == "a file where the folder should be"


def test_in_words():
    assert "doctor --measure" in ceilings.in_words(None)
    assert ceilings.in_words(RATES).startswith("copy 4,000 GB/s, matrix products: bfloat16 700 TFLOP/s")


def test_what_is_not_known_is_left_away():
    unknown = dict.fromkeys([*survey._PROPERTIES, "sm_clock_mhz", "memory_clock_mhz"])
    gpu = {**unknown, "multiprocessors": 132, "memory": 141 * 2**30, "enables": ["TMA", "wgmma"]}
    assert dict(survey.in_words(gpu)) == {"memory": "141.0 GiB", "SMs": "132", "enables": "TMA, wgmma"}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU to measure")
def test_measuring_needs_a_gpu(capsys):
    assert main(["doctor", "--measure"]) == 2
    assert "no CUDA GPU is visible" in capsys.readouterr().err


@needs_gpu
def test_the_survey_of_a_gpu(capsys, folder):
    assert main(["doctor", "--json"]) == 0
    gpu = json.loads(capsys.readouterr().out)["gpus"][0]
    properties = torch.cuda.get_device_properties(0)
    assert gpu["multiprocessors"] == properties.multi_processor_count
    assert gpu["memory"] == properties.total_memory
    for name in ("l2", "shared_per_sm", "shared_per_block", "registers_per_sm", "threads_per_sm"):
        assert gpu[name] > 0, name
    assert "cp.async" in gpu["enables"]
    assert gpu["ceilings"] is None
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "doctor --measure" in text
    assert gpu["name"] in text


@alone
@needs_gpu
def test_measured_ceilings_are_shown_from_then_on(capsys, folder):
    before = torch.backends.cuda.matmul.allow_tf32
    assert main(["doctor", "--measure", "--json"]) == 0
    assert torch.backends.cuda.matmul.allow_tf32 == before
    measured = json.loads(capsys.readouterr().out)["gpus"][0]["ceilings"]
    assert set(measured) == {"copy", *ceilings.DTYPES}
    assert all(rate > 0 for rate in measured.values())
    assert measured["bfloat16"] > measured["float32"], "tensor cores beat CUDA cores"
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["ceilings"] == measured


@pytest.mark.parametrize(
    ("backend", "said"), [("tritn", "did you mean 'triton'"), ("triton.fused", ""), ("cuda", "unavailable")]
)
def test_doctor_says_that_no_operation_takes_the_environments_backend(monkeypatch, capsys, backend, said):
    monkeypatch.setenv("KERNEL_LADDER_BACKEND", backend)
    monkeypatch.setattr(doctor, "kernels", list)
    if backend == "cuda":
        monkeypatch.setattr(table, "unavailable", lambda op, level: "not here")
        monkeypatch.setattr(table, "at_level", lambda op, level: ("not here", {}))
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("KERNEL_LADDER_BACKEND is" in text) == bool(said)
    assert said in text
