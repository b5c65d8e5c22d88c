"""A GPU's ceilings: copy bandwidth and matrix rates. ``doctor --measure`` measures them in seconds and stores them.

They give a first impression. The benchmark measures ceilings of its own, in the run that it compares with them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_ladder.cli import device
from kernel_ladder.errors import UnavailableError
from kernel_ladder.semantics.precision import tf32_allowed

#: Bytes that a copy moves, half read and half written. Far larger than an L2 cache.
COPY_BYTES = 2**31
SIZE = 8192  # rows and columns of the square matrices
SETTLE_S = 0.3  # seconds of the same work before the first measurement, so that clocks settle
ROUNDS = 10

#: Matrix products by the name of their arithmetic. tf32 is float32 in memory.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}


def measure_all() -> None:
    """Measure every visible GPU and store the rates.

    Raises:
        UnavailableError: there is none.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("there is nothing to measure: no CUDA GPU is visible")
    for index in range(torch.cuda.device_count()):
        _remember(index, measure(index))


def measure(index: int) -> dict[str, float]:
    """Rates of a GPU: ``copy`` in GB/s, reads plus writes; matrix products in TFLOP/s."""
    gpu = torch.device("cuda", index)
    with torch.cuda.device(gpu):
        # A smaller GPU copies within a quarter of its free memory.
        count = min(COPY_BYTES // 2, torch.cuda.mem_get_info(gpu)[0] // 8) // 4
        found = {"copy": 2 * 4 * count / _copy_seconds(count) / 1e9}
        before = tf32_allowed()
        try:
            for name, dtype in DTYPES.items():
                _allow_tf32(name == "tf32")
                a, b = (torch.randn(SIZE, SIZE, device=gpu).to(dtype) for _ in range(2))
                found[name] = 2 * SIZE**3 / _seconds(functools.partial(torch.matmul, a, b)) / 1e12
        finally:
            _allow_tf32(before)
    return found


def _copy_seconds(count: int) -> float:
    source = torch.ones(count, device="cuda")
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source))


def _allow_tf32(allowed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this is the older switch; it sets the newer one too
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _seconds(call: Callable[[], object]) -> float:
    """The median time of a call on the current GPU, after its clocks have settled."""
    end = time.perf_counter() + SETTLE_S
    while time.perf_counter() < end:
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def in_words(found: dict[str, float] | None) -> str:
    """A GPU's ceilings in one line."""
    if found is None:
        return "nothing yet: `python -m kernel_ladder doctor --measure` takes some seconds a GPU"
    rates = [f"{name} {rate:.3g} TFLOP/s" for name, rate in found.items() if name != "copy"]
    return f"copy {found['copy']:,.0f} GB/s, matrix products: {', '.join(rates)}"


# ---- on disk -------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kernel_ladder")


def _key(index: int) -> dict[str, str | None]:
    """All that a stored ceiling depends on: the GPU, the software, and this file."""
    return {
        "gpu": torch.cuda.get_device_name(index),
        "driver": device.driver(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "source": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def _file(key: dict[str, str | None]) -> Path:
    return _folder() / f"ceilings-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def known(index: int) -> dict[str, float] | None:
    """The stored rates of such a GPU with this software, or None.

    A broken or foreign file is ignored with a warning.
    """
    return _read(_key(index))


def _read(key: dict[str, str | None]) -> dict[str, float] | None:
    path = _file(key)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"{path} is ignored: {error}", stacklevel=2)
        return None
    try:
        content = json.loads(text)
        found = {name: float(content["ceilings"][name]) for name in ("copy", *DTYPES)}
        ours = content["key"] == key and all(rate > 0 for rate in found.values())
    except (ValueError, TypeError, KeyError):
        ours = False
    if not ours:
        warnings.warn(f"{path} is ignored: it does not hold ceilings of this GPU and software", stacklevel=2)
        return None
    return found


def _remember(index: int, found: dict[str, float]) -> None:
    _write(_key(index), found)


def _write(key: dict[str, str | None], found: dict[str, float]) -> None:
    """Write the file atomically. If that fails, warn and continue."""
    path = _file(key)
    content: dict[str, Any] = {"key": key, "ceilings": found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        warnings.warn(f"ceilings could not be stored in {path}: {error}", stacklevel=2)
