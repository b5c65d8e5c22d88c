"""``python -m kernel_ladder inspect``: which rung and which call it takes, its output, and its errors."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from pygments.lexers import get_lexer_by_name
from rich.console import Console

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.__main__ import main
from kernel_ladder.cli import inspect_command
from kernel_ladder.inspection import cubin
from kernel_ladder.inspection.inspect import CODE, Code, Request, select
from kernel_ladder.testing.cases import case_named

from ..conftest import DEVICE, needs_gpu, typical_case
from .test_inspect import needs_cuobjdump, needs_extension

# ---- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "text", "shapes"),
    [
        ("gelu", "16384x1024 tanh", ((16384, 1024),)),
        ("gelu", "7x9", ((7, 9),)),
        ("matmul", "10x20x30", ((10, 30), (30, 20))),
        ("matmul", "8x8x8", ((8, 8), (8, 8))),
        ("attention", "B2 H4 S100 D64 causal", ((2, 4, 100, 64),) * 3),
        ("attention", "B2 H8/2 S100 D64 causal", ((2, 8, 100, 64), (2, 2, 100, 64), (2, 2, 100, 64))),
    ],
)
def test_a_shape_is_known_or_made_like_a_known_one(op, text, shapes):
    case = case_named(table.spec(op), text)
    assert case.shapes == shapes
    assert case.id.startswith(text)


def test_options_follow_the_text():
    spec = table.spec("attention")
    assert case_named(spec, "B2 H4 S100 D64 causal").options["is_causal"] is True
    assert case_named(spec, "B2 H4 S100 D64").options["is_causal"] is False
    assert case_named(table.spec("gelu"), "5x6 tanh").options == {"approximate": "tanh"}


# ---- the command ---------------------------------------------------------------------------------------------------

BAD = [
    (["gel", "--backend", "torch"], "unknown operation 'gel'; did you mean 'gelu'?"),
    (["gelu", "--backend", "torhc"], "unknown `backend` 'torhc'; did you mean 'torch' or"),
    (["gelu", "--backend", "torch.naiv"], "did you mean 'torch.naive'"),
    (["gelu", "--backend", "auto"], "unknown `backend` 'auto'"),
    (["matmul", "--backend", "torch", "--shape", "10x20"], "matmul: unknown `shape` '10x20'"),
    (["matmul", "--backend", "torch", "--shape", "0x1x1"], "unknown `shape` '0x1x1'"),
    (["gelu", "--backend", "torch", "--shape", f"{10**11}x{10**11}"], "cannot be made: Storage size calculation"),
    (["gelu", "--backend", "triton", "--shape", f"{10**11}x{10**11}"], "cannot be made: Storage size calculation"),
    (["gelu", "--backend", "torch", "--shape", f"{10**9}x{10**8}"], "cannot be made: "),
    (["gelu", "--backend", "torch", "--dtype", "int8"], "unknown `dtype` 'int8'"),
    (["gelu", "--backend", "torch", "--pass", "backwards"], "unknown `pass` 'backwards'; did you mean 'backward'?"),
    (["gelu", "--backend", "triton", "--arch", "sm_91"], "unknown `arch` 'sm_91'; did you mean 'sm_90'?"),
    (["gelu", "--backend", "torch", "--arch", "sm_90"], "`arch` is for cuda and triton"),
    (["gelu", "--backend", "compile", "--sass"], "the compile level has no sass to show; it has source"),
    (["gelu", "--backend", "torch", "--kernel", "x"], "`kernel` chooses among those of other levels"),
    (["softmax", "--backend", "triton.fused", "--shape", "4x70000"], "rows of 70000 elements are too long"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_arguments(capsys, arguments, message):
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


@needs_extension
@needs_cuobjdump
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gelu", "--backend", "cuda", "--arch", "sm_120"], "was not built for `arch` 'sm_120'; it has"),
        (["attention", "--backend", "cuda.flash", "--dtype", "fp32"], "has no kernel for float32; it has bfloat16"),
        (
            ["gelu", "--backend", "cuda", "--kernel", "nothing"],
            "no kernel of cuda.vectorized has 'nothing' in its name",
        ),
        (["gelu", "--backend", "cuda", "--ttgir"], "the cuda level has no ttgir to show"),
    ],
)
def test_bad_arguments_of_the_cuda_level(capsys, arguments, message):
    assert main(["inspect", *arguments]) == 2
    assert message in capsys.readouterr().err


@needs_extension
def test_without_cuobjdump_the_reason(capsys, monkeypatch):
    from cuda_impl.inspect import instances

    monkeypatch.setattr(cubin, "cuobjdump", lambda: None)
    cubin.resources.cache_clear()
    instances.cache_clear()
    try:
        assert main(["inspect", "gelu", "--backend", "cuda"]) == 2
    finally:
        cubin.resources.cache_clear()
        instances.cache_clear()
    assert "no cuobjdump was found" in capsys.readouterr().err


def test_a_level_that_was_not_built(capsys, monkeypatch):
    monkeypatch.setattr(table, "variants", lambda op, level=None: [])
    monkeypatch.setattr(table, "unavailable", lambda op, level: "it was not built")
    assert main(["inspect", "gelu", "--backend", "cuda"]) == 2
    assert "gelu: backend 'cuda' cannot be looked into: it was not built" in capsys.readouterr().err


def test_json_and_text_tell_the_same(capsys):
    assert main(["inspect", "gelu", "--backend", "torch.naive", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["op"], found["backend"], found["pass"], found["dtype"]) == (
        "gelu",
        "torch.naive",
        "forward",
        "bfloat16",
    )
    assert main(["inspect", "gelu", "--backend", "torch.naive", "--source"]) == 0
    text = capsys.readouterr().out
    assert found["source"] in text
    for operator in found["operators"]:
        assert operator in text
    assert "torch.erf(x / math.sqrt(2))" in text


def test_code_goes_into_a_folder(capsys, tmp_path):
    folder = tmp_path / "new" / "folder"
    arguments = ["inspect", "gelu", "--backend", "torch.naive", "--source", "--output", str(folder)]
    assert main(arguments) == 0
    assert "torch.erf" not in capsys.readouterr().out
    (code,) = folder.glob("*.py")
    assert "torch.erf" in code.read_text()
    assert json.loads((folder / "inspection.json").read_text())["backend"] == "torch.naive"
    (tmp_path / "file").write_text("mine")
    assert main([*arguments[:-1], str(tmp_path / "file")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    assert main([*arguments[:-1], str(tmp_path / "file" / "folder")]) == 2
    assert f"`output` {tmp_path}/file/folder cannot be written: Not a directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("language", inspect_command.LEXERS)
def test_code_is_highlighted_in_a_terminal_alone(language):
    get_lexer_by_name(inspect_command.LEXERS[language])
    code = Code("title", language, "mov.b32 %r1, 1; // [bold]not markup[/]\n")
    for terminal in (True, False):
        with open(os.devnull, "w") as nowhere:
            console = Console(file=nowhere, force_terminal=terminal, record=True, width=100)
            inspect_command.show_code(console, code)
            shown = console.export_text(styles=True)
        if terminal:
            assert "[bold]not markup[/]" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
            assert "\x1b[" in shown
    assert set(inspect_command.LEXERS) == set(inspect_command.SUFFIXES)


def test_names_of_kernels_are_readable():
    pytest.importorskip("cuda_impl.inspect")
    from cuda_impl.inspect import readable

    mangled = "_ZN2kl12_GLOBAL__N_117gelu_naive_kernelI13__nv_bfloat16NS0_5ExactEEEvPT_PKS4_NS_7StridedEl"
    assert readable(mangled) == "gelu_naive_kernel<bfloat16, Exact>"
    assert readable("plain_kernel") == "plain_kernel"


def test_every_level_has_its_part():
    import importlib

    for level, package in kernel_ladder.LEVELS.items():
        module = importlib.import_module(f"{package}.inspect")
        assert set(module.CODE) <= set(CODE), level
        assert callable(module.inspect)


# ---- what a level's name stands for ---------------------------------------------------------------------------------


def test_a_levels_name_stands_for_what_a_shape_selects():
    spec = table.spec("attention")

    def selected(shape: str, arch: str) -> str:
        request = Request(table.named("attention", "triton")[0], case_named(spec, shape), arch=arch)
        return select(table.named("attention", "triton"), request).variant.name

    assert selected("B2 H4 S1024 D64 causal", "sm_80") != "triton.split_kv"
    decode = next(case.id for case in spec.sweep if case.shapes[0][2] == 1)
    assert selected(decode, "sm_90") == "triton.split_kv"
    assert selected("B2 H4 S1024 D64 causal", "sm_90") == "triton.flash", "few tiles"
    assert selected("B4 H16 S4096 D128 causal", "sm_90") == "triton.warp_specialized"
    assert selected("B4 H16 S4096 D128 causal", "sm_80") != "triton.warp_specialized", "which has no code for it"


@pytest.mark.parametrize("level", ["torch", "compile", "triton"])
@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_what_is_inspected_takes_the_shape(op, level):
    """A level's name and a small shape of every operation: the variant that is chosen takes it."""
    request = Request(
        table.named(op, level)[0], typical_case(op), torch.bfloat16, arch="sm_90" if level == "triton" else None
    )
    chosen = select(table.named(op, level), request).variant
    import triton_impl.inspect as of_triton
    from kernel_ladder import selection
    from kernel_ladder.inspection.inspect import refusal_here
    from kernel_ladder.testing.samples import make_inputs

    refusal = of_triton.judge(request) if level == "triton" else refusal_here(request)
    assert refusal(chosen) is None
    inputs = make_inputs(request.case, torch.bfloat16, DEVICE)
    order = selection.preferred_first(table.named(op, level), inputs, request.case.options)
    assert all(refusal(v) is not None for v in order[: order.index(chosen)])


@pytest.mark.parametrize("variant", ["attention triton.warp_specialized", "softmax triton.cluster"])
def test_a_triton_rung_without_code_for_an_architecture_says_so(variant, capsys):
    op, backend = variant.split()
    assert main(["inspect", op, "--backend", backend, "--arch", "sm_80"]) == 2
    assert f"{op}: {backend} has no code for sm_80" in capsys.readouterr().err


@needs_gpu
@needs_extension
def test_a_shape_selects_the_kernels_of_a_call_at_cuda(capsys):
    assert main(["inspect", "softmax", "--backend", "cuda", "--shape", "16384x4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {k["name"] for k in found["kernels"]} <= {k["name"] for k in found["launches"]}
    from kernel_ladder.selection import choose

    x = torch.empty(16384, 4096, dtype=torch.bfloat16, device="cuda")
    assert found["backend"] == choose("softmax", "cuda", (x,), {"dim": -1}, False).name
