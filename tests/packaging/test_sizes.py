"""`_build/sizes.py` finds files and kernels that are too long, and argued exceptions that are none."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("sizes", ROOT / "_build" / "sizes.py")
sizes = importlib.util.module_from_spec(SPEC)
sys.path.insert(0, str(ROOT / "_build"))  # it imports its neighbour
try:
    SPEC.loader.exec_module(sizes)
finally:
    sys.path.remove(str(ROOT / "_build"))

LONG = "\n" * 98
CUDA = f"""/* __device__ void comment() {{{LONG}


}} */
template <int N>
__global__ void __launch_bounds__(N, (2 + 1))
    short_kernel(const char* text = "{{");
__device__ inline float shorter(float x) {{ return x; }}
template <int N>
__global__ void __launch_bounds__(N)
    long_kernel(int n) {{
    if (n > 0) {{
    {LONG}}}
}}
void host() {{{LONG}


}}
"""
TRITON = f"@triton.jit\ndef long_kernel(x):{LONG}\n\n    return x\n\n\ndef host(x):{LONG}{LONG}\n    return x\n"


@pytest.mark.parametrize(("file", "text", "line"), [("csrc/a.cu", CUDA, 108), ("triton_impl/a.py", TRITON, 2)])
def test_a_long_kernel_is_found(file, text, line, monkeypatch):
    (finding,) = sizes.check(file, text)
    lines = 103 if file.endswith(".cu") else 101
    assert finding.startswith(f"{file}:{line}: long_kernel: has {lines} lines; at most 100")
    monkeypatch.setitem(sizes.ARGUED, f"{file}:long_kernel", "its steps share one pipeline")
    assert not list(sizes.check(file, text))


def test_functions_of_a_source():
    assert [(f.name, f.lines) for f in sizes.of_cuda(CUDA)] == [("shorter", 1), ("long_kernel", 103)]
    assert [f.name for f in sizes.of_python(TRITON)] == ["long_kernel"]


def test_a_long_file_is_found():
    (finding,) = sizes.check("bench/a.py", "x = 1\n" * 501)
    assert finding == "bench/a.py:1: a.py: has 501 lines; at most 500"


def test_an_exception_without_need_is_found(monkeypatch):
    monkeypatch.setitem(sizes.ARGUED, "csrc/a.cu:shorter", "none")
    assert "csrc/a.cu:1: shorter: is argued in _build/sizes.py, but is no long kernel" in sizes.check("csrc/a.cu", CUDA)


def test_the_source_holds_none(capsys):
    assert sizes.main([]) == 0, capsys.readouterr().out
