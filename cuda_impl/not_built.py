"""Why the extension is not there, or not usable: what the build left on record, and what this machine has now."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import kernel_ladder

#: Written by the build where it leaves the extension out (``_build/environment.py``): the reason, in a line.
RECORD = Path(kernel_ladder.__file__).parent / "_not_built.txt"
#: That line where the switch ``KERNEL_LADDER_CUDA`` was 0.
SWITCHED_OFF = "KERNEL_LADDER_CUDA=0"

ROOT = Path(__file__).resolve().parent.parent
#: The table of operators, which the Python functions of this level call by name. A build leaves its hash beside the
#: extension, in a file of this ending.
OPERATORS, OF_OPERATORS = ROOT / "csrc" / "core" / "bindings.cpp", ".operators"
STALE = "the extension kernel_ladder._C is older than this package; run `pip install -e .` again"


def is_stale(extension: str | None) -> bool:
    """Whether the table of operators has changed since the extension was built, as after a ``git pull``.

    Only a checkout can tell: an installed package has neither the table nor its hash.
    """
    try:
        built = Path(f"{extension}{OF_OPERATORS}").read_text(encoding="utf-8").strip()
        return built != hashlib.sha256(OPERATORS.read_bytes()).hexdigest()
    except OSError:
        return False


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
