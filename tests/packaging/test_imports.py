"""Imports point one way, and importing the package imports no level."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_ladder.table import LEVELS

from ..conftest import alone

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kernel_ladder", *LEVELS.values(), "tests", "bench"}
#: package -> what it may import of the project beside itself
ALLOWED = {
    "kernel_ladder": set(),
    "torch_ref": {"kernel_ladder"},
    "compile_impl": {"kernel_ladder", "torch_ref"},
    "xla_impl": {"kernel_ladder"},
    "triton_impl": {"kernel_ladder"},
    "cuda_impl": {"kernel_ladder"},
    "bench": PACKAGES - {"tests"},
    "tests": PACKAGES,
}


def imports_of(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    if package != "bench":
        assert files, f"no files in {package}"
    for path in files:
        foreign = imports_of(path) & PACKAGES - ALLOWED[package] - {package}
        assert not foreign, f"{path.relative_to(ROOT)} imports {', '.join(foreign)}"


def fresh(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return result.stdout.strip()


def test_importing_the_package_imports_no_level():
    heavy = [
        *LEVELS.values(),
        "triton",
        "torch._dynamo",
        "torch._inductor",
        "jax",
        "rich",
        "numpy.testing",
        "kernel_ladder._C",
    ]
    code = f"""
import sys, torch
before = set(sys.modules)
import kernel_ladder
print(*[m for m in {heavy!r} if m in sys.modules and m not in before])
"""
    assert fresh(code) == ""


def test_asking_for_one_level_imports_no_other():
    code = """
import sys, torch, kernel_ladder
kernel_ladder.gelu(torch.zeros(2), backend="torch")
print(*[m for m in ("compile_impl", "xla_impl", "triton_impl", "cuda_impl", "triton", "jax") if m in sys.modules])
"""
    assert fresh(code) == ""


@pytest.mark.parametrize("package", sorted(PACKAGES - {"xla_impl", "tests"}))
def test_only_the_xla_level_names_jax(package):
    """Nothing else imports an optional extra, nor waits for it."""
    users = [path for path in (ROOT / package).rglob("*.py") if imports_of(path) & {"jax", "jaxlib"}]
    assert not users, f"{', '.join(str(path.relative_to(ROOT)) for path in users)} import JAX"


@alone
def test_importing_is_quick():
    code = """
import gc, time, torch
gc.collect()  # else what torch has made may be searched for garbage meanwhile, which takes as long as the import
start = time.perf_counter()
import kernel_ladder
print(time.perf_counter() - start)
"""
    # The best of several: the first may find cold files and the machine may be busy. One that is quick is enough.
    assert any(float(fresh(code)) < 0.2 for _ in range(5))
