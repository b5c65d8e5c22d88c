"""Why the extension is not there: what the build left on record, and what this machine has now."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import kernel_ladder

#: Written by the build where it leaves the extension out (``_build/environment.py``): the reason, in a line.
RECORD = Path(kernel_ladder.__file__).parent / "_not_built.txt"
#: That line where the switch ``KERNEL_LADDER_CUDA`` was 0.
SWITCHED_OFF = "KERNEL_LADDER_CUDA=0"

ROOT = Path(__file__).resolve().parent.parent


def nvcc() -> str | None:
    """The nvcc that a build would take now: of CUDA_HOME, of CUDA_PATH, else of the PATH."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            path = Path(home, "bin", "nvcc")
            return str(path) if path.exists() else None
    return shutil.which("nvcc")


def reason() -> str:
    """Why the extension was not built, as far as that is known, and what builds it."""
    try:
        recorded = RECORD.read_text(encoding="utf-8").strip()
    except OSError:
        recorded = ""
    found = nvcc()
    again = "run `pip install -e .`" if (ROOT / "setup.py").exists() else "install the package from its sources"
    what = "the extension kernel_ladder._C was not built"
    if recorded:
        what += f": {recorded}, when the package was installed"
    if recorded.startswith(SWITCHED_OFF):
        way = f"unset it and {again} again"
    else:
        way = f"{again} again" if recorded else again
    if found is None:
        return f"{what}; install nvcc or set CUDA_HOME, then {way}"
    return f"{what}; nvcc is here ({found}): {way}" if not recorded.startswith(SWITCHED_OFF) else f"{what}; {way}"
