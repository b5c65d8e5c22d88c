"""Read compiled CUDA code with ``cuobjdump``: each kernel's registers and memory, its SASS and its PTX.

No GPU is needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_ladder.errors import InspectError
from kernel_ladder.inspection.architecture import SHARED_RESERVED


@dataclass(frozen=True)
class Resources:
    """The resources that ptxas gave one kernel. Memory in bytes; ``local`` is per thread: spills and local arrays."""

    symbol: str
    arch: str  # "sm_90a"
    registers: int
    shared: int
    local: int


def _places() -> Iterator[Path]:
    """Possible paths of cuobjdump: the PATH's, the toolkit's, and the one that Triton ships."""
    if (on_path := shutil.which("cuobjdump")) is not None:
        yield Path(on_path)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home, "bin", "cuobjdump")
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        yield Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@functools.cache
def cuobjdump() -> Path | None:
    """The first cuobjdump that is executable, or None."""
    return next((path for path in _places() if os.access(path, os.X_OK) and path.is_file()), None)


def _dump(path: Path, *options: str) -> str:
    tool = cuobjdump()
    if tool is None:
        raise InspectError(
            "no cuobjdump was found: not on the PATH, in CUDA_HOME or in Triton; "
            "install the CUDA toolkit or Triton, or set CUDA_HOME"
        )
    run = subprocess.run([str(tool), *options, str(path)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise InspectError(f"{tool} could not read {path}: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


@functools.cache
def resources(path: Path, arch: str = "") -> tuple[Resources, ...]:
    """Every kernel in a cubin, which does not name its `arch`, or in each cubin of a library, which does."""
    symbol, found = "", []
    for line in _dump(path, "--dump-resource-usage").splitlines():
        words = line.split()
        if line.startswith("arch = "):
            arch = words[2]
        elif words[:1] == ["Function"]:
            symbol = words[1].rstrip(":")
        elif "REG:" in line:
            fields = dict(word.split(":") for word in words)
            local, shared = int(fields["STACK"]) + int(fields["LOCAL"]), int(fields["SHARED"])
            # From 9.0 on the assembler counts what the driver keeps of each block.
            if int(re.sub(r"\D", "", arch)) >= 90 and shared >= SHARED_RESERVED:
                shared -= SHARED_RESERVED
            found.append(Resources(symbol, arch, int(fields["REG"]), shared, local))
    return tuple(found)


@functools.cache  # both passes of a variant, and variants of one operation, share kernels
def sass(path: Path, symbol: str, arch: str | None = None) -> str:
    """The instructions of one kernel, without their encoding. `arch` chooses where a library has several."""
    options = ["--gpu-architecture", arch] if arch else []
    text = _dump(path, "-sass", "-fun", symbol, *options)
    lines = [re.sub(r"\s*/\* 0x[0-9a-f]{16} \*/", "", line).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if re.match(r"/\*[0-9a-f]{4,}\*/", line)) + "\n"


def ptx(path: Path, symbol: str, arch: str | None = None) -> str | None:
    """The PTX of one kernel, or None where the library was built without."""
    options = ["--gpu-architecture", arch] if arch else []
    text = _dump(path, "-ptx", *options)
    start = re.search(rf"^(\.visible )?\.entry {re.escape(symbol)}\(", text, re.MULTILINE)
    if start is None:
        return None
    return text[start.start() : text.index("\n}", start.start()) + 2] + "\n"


def demangle(symbol: str) -> str:
    """The C++ name of a mangled symbol, from the C++ runtime; the symbol itself if it cannot be demangled."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return symbol
    function = library.__cxa_demangle
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    status = ctypes.c_int()
    text = function(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    name = ctypes.string_at(text).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(text)
    return name
