"""``python -m kernel_ladder inspect --backend NAME,NAME``: several rungs in one table, then each one's own report."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from kernel_ladder import table
from kernel_ladder.__main__ import main
from kernel_ladder.cli import side_by_side
from kernel_ladder.inspection.inspect import Inspection, Kernel


def inspection(backend: str, **found) -> Inspection:
    return Inspection("gelu", backend, "forward", "bfloat16", shape="8x16", **found)


def test_kernels_of_a_call_come_from_launches_or_the_compiler():
    fused, library = Kernel("triton_poi_fused_gelu_0"), Kernel("gemm")
    assert side_by_side.kernels_of(inspection("compile.default", kernel_count=2, library_count=1)) == 3
    assert side_by_side.kernels_of(inspection("compile.default", kernel_count=2, launches=[fused] * 4)) == 4
    assert side_by_side.kernels_of(inspection("triton.fused", kernels=[fused])) == 1
    assert side_by_side.kernels_of(inspection("cuda.naive", kernels=[fused, library])) is None, "all of the rung"
    assert side_by_side.kernels_of(inspection("torch.naive", operators=["aten.erf"])) is None


def test_a_line_has_kernels_bytes_over_the_least_and_names():
    fused = Kernel("triton_poi_fused_gelu_0")
    every = [
        inspection("compile.default", kernel_count=2, kernels=[fused, fused], counted_bytes=768.0, least_bytes=512),
        inspection("torch.naive", operators=["aten.erf.default"]),
    ]
    console = Console(record=True, width=160)
    side_by_side.show(console, every)
    shown = console.export_text()
    (line,) = (line for line in shown.splitlines() if "compile.default" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "compile.default", "8x16", "2", "1.50", "2 × triton_poi_fused_gelu_0"
    ]  # fmt: skip
    assert "aten.erf.default" in shown
    assert "python -m bench profile gelu --backend torch.naive --ncu" in shown


def test_the_command_prints_one_table_and_each_report(capsys, tmp_path):
    if (reason := table.unavailable("gelu", "xla")) is not None:
        pytest.skip(reason)
    arguments = ["inspect", "gelu", "--backend", "torch.naive, xla.jit", "--shape", "8x16 tanh"]
    assert main([*arguments, "--hlo"]) == 0
    text = capsys.readouterr().out
    assert text.index("bytes / least") < text.index("gelu torch.naive, forward") < text.index("gelu xla.jit, forward")
    assert text.count("ENTRY") == 2, "before and after XLA's passes; the torch level has none to show"
    assert main([*arguments, "--json", "--output", str(tmp_path)]) == 0
    naive, jit = json.loads(capsys.readouterr().out)
    assert (naive["backend"], jit["backend"]) == ("torch.naive", "xla.jit")
    assert jit["counted_bytes"] >= jit["least_bytes"] == 2 * 2 * 8 * 16
    assert json.loads((tmp_path / "xla.jit" / "inspection.json").read_text()) == jit
    assert json.loads((tmp_path / "torch.naive" / "inspection.json").read_text()) == naive


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "torch.naive,torch.naiv"], "did you mean 'torch.naive'"),
        (["--backend", "torch.naive,"], "unknown `backend` ''"),
        (["--backend", "torch.naive,torch.builtin", "--sass"], "the levels torch have no sass to show"),
    ],
)
def test_what_is_refused(capsys, arguments, message):
    assert main(["inspect", "gelu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
