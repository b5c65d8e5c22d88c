"""What distributions pack: the CUDA sources, which ``inspect --source`` shows, and the declared torch of the CI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Runs setup.py as a build of a wheel does, without nvcc, and prints what setuptools would copy.
LISTED = """
import runpy, sys
from unittest import mock
import setuptools
sys.argv = ["setup.py", "bdist_wheel"]
sys.path.insert(0, "_build")
import environment
with mock.patch.object(environment, "cuda_home", lambda: None), mock.patch.object(setuptools, "setup") as setup:
    runpy.run_path("setup.py")
command = setuptools.Distribution(setup.call_args.kwargs).get_command_obj("build_py")
command.ensure_finalized()
for package, _, _, names in command.data_files:
    print(*(f"{package}/{name}" for name in names), sep="\\n")
"""


def test_a_wheel_packs_the_cuda_sources():
    done = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    sources = {f"cuda_impl.csrc/{p.relative_to(ROOT / 'csrc')}" for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert sources <= set(done.stdout.splitlines())


@pytest.mark.parametrize("folder", ["csrc", "_build"])
def test_a_source_distribution_packs_what_the_build_reads(folder):
    assert f"graft {folder}" in (ROOT / "MANIFEST.in").read_text().splitlines()


def test_a_job_has_the_oldest_torch_that_is_declared():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f'TORCH="torch=={oldest}.*"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
