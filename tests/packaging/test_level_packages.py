"""The levels are found beside kernel_ladder, whatever has their names elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_ladder.level_packages import load
from kernel_ladder.table import LEVELS

ROOT = Path(__file__).resolve().parents[2]


def run_beside(folder: Path, code: str) -> str:
    """Run a user's script in a folder of its own, which stands first on sys.path.

    Only kernel_ladder is found by way of sys.path, as an editable install's finder finds it after all folders there.
    """
    script, site = folder / "script.py", folder / "site"
    script.write_text(code)
    site.mkdir()
    (site / "kernel_ladder").symlink_to(ROOT / "kernel_ladder")
    environment = {**os.environ, "PYTHONPATH": str(site), "KERNEL_LADDER_REQUIRE": ""}
    result = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(params=["module", "package", "folder"])
def shadowed(request, tmp_path) -> Path:
    """A folder that has something of its own by the name of every level's package."""
    for name in LEVELS.values():
        if request.param == "module":
            (tmp_path / f"{name}.py").write_text("MINE = True\n")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text("mine\n")
        if request.param == "package":
            (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    return tmp_path


def test_what_lies_beside_a_script_does_not_shadow_the_levels(shadowed):
    code = """
import sys, torch, kernel_ladder
kernel_ladder.gelu(torch.zeros(3))
for level, package in kernel_ladder.LEVELS.items():
    reason = kernel_ladder.table.unavailable("gelu", level)
    assert "imported" not in (reason or ""), reason
    print(sys.modules[package].__file__)
"""
    found = run_beside(shadowed, code).splitlines()
    assert found == [str(ROOT / package / "__init__.py") for package in LEVELS.values()]


def test_a_module_in_the_way_is_named(shadowed):
    code = """
import sys, torch
import triton_impl, torch_ref
import kernel_ladder
print(kernel_ladder.table.unavailable("gelu", "triton"))
try:
    kernel_ladder.gelu(torch.zeros(3))
except kernel_ladder.UnavailableError as error:
    print(error)
"""
    triton, torch = run_beside(shadowed, code).splitlines()
    for line, package in ((triton, "triton_impl"), (torch, "torch_ref")):
        assert f"a module {package!r} has been imported from {shadowed / package}" in line
        assert line.endswith(f"in the way of kernel_ladder's own in {ROOT}; rename it")


def test_a_package_is_loaded_once_and_not_kept_where_it_fails(tmp_path, monkeypatch):
    assert load("torch_ref") is load("torch_ref") is sys.modules["torch_ref"]
    broken = tmp_path / "no_level_of_ours"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setattr("kernel_ladder.level_packages.FOLDER", tmp_path)
    with pytest.raises(ImportError, match="broken"):
        load("no_level_of_ours")
    assert "no_level_of_ours" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="No module named 'absent' beside kernel_ladder in"):
        load("absent")
