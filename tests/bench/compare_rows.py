"""Rows of two runs, for the tests of `bench compare`."""

from __future__ import annotations

import json
import random

from bench.rows.store import Row

SHAPES = [f"{2**i}x1024" for i in range(6, 14)]
BACKENDS = ("torch.builtin", "torch.naive", "triton.fused", "cuda.naive", "cuda.vectorized")


def timed_row(backend: str = "cuda.vectorized", us: float | None = 100.0, width: float = 0.004, **fields) -> Row:
    """A row whose interval reaches `width` to each side of its time."""
    base = {"op": "gelu", "backend": backend, "level": backend.partition(".")[0], "pass_": "forward"}
    base |= {"dtype": "bfloat16", "shape": SHAPES[0], "gpu": "GPU 1", "torch": "2.11.0", "cuda": "13.0", "rounds": 25}
    if us is not None:
        ends = (us * (1 - width), us * (1 + width))
        base |= {"us": us, "us_q1": ends[0], "us_q3": ends[1], "us_low": ends[0], "us_high": ends[1]}
        base |= {"bytes": 2**20, "flops": 2**20, "gbs": 2**20 / us / 1e3, "tflops": 2**20 / us / 1e6}
    return Row(**{**base, "when": "2026-01-01T00:00:00+00:00", **fields})


def run_of(drift: float = 1.0, noise: float = 0.002, seed: int = 0, slow: dict[str, float] | None = None) -> list[Row]:
    """Rows of one run: every time has the drift and noise of its own, and `slow` backends a factor more."""
    random_ = random.Random(seed)
    found = []
    for i, shape in enumerate(SHAPES):
        times = {
            name: 10.0 * 2**i * (1 + BACKENDS.index(name)) * drift * random_.lognormvariate(0, noise)
            for name in BACKENDS
        }
        for name, factor in (slow or {}).items():
            times[name] *= factor
        for name, us in times.items():
            speedup = times["torch.builtin"] / us
            bounds = {"speedup_low": 0.998 * speedup, "speedup_high": 1.002 * speedup}
            found.append(timed_row(name, us, 2 * noise, shape=shape, speedup=speedup, **bounds))
    return found


def json_of(compare, *args) -> dict:
    return json.loads(compare(*args, "--json")[1])
