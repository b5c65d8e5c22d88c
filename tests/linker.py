"""A quicker linker for what Inductor compiles, where there is one."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile


def choose() -> None:
    """Let the compiler find gold by the name of ld, in this process and those that it starts.

    Each of Inductor's kernels is a library of its own, linked with PyTorch's. To read the names in those takes GNU's ld
    0.4 s, a quarter of what such a kernel takes in all, and gold 0.13 s.
    """
    gold = shutil.which("ld.gold")
    if gold is None or "COMPILER_PATH" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="linker-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(gold, os.path.join(folder, "ld"))
    if _links(folder):
        os.environ["COMPILER_PATH"] = folder


def _links(folder: str) -> bool:
    """Whether Inductor's compiler makes a library with the linker in a folder. Some need the one they came with."""
    try:
        subprocess.run(
            [
                os.environ.get("CXX", "g++"),
                "-shared",
                "-fPIC",
                "-x",
                "c++",
                "-",
                "-o",
                os.path.join(folder, "tried.so"),
            ],
            input=b"#include <string>\nstd::string f() { return std::to_string(1); }",
            env={**os.environ, "COMPILER_PATH": folder},
            capture_output=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True
