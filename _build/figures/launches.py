"""A call in time: what the host does, what the GPU does, and what a clock shows."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from bench.profile.chain import Chain
from figures.canvas import HBM, INK, REGISTERS, SHARED, TENSOR, Canvas
from figures.rows import gpu, rows
from torch_ref import gelu

SHAPE = "16384x4096 tanh"
SLOW, FAST = "torch.naive", "cuda.vectorized"


def row(op: str, rung: str, shape: str) -> dict[str, Any]:
    """The row of a rung, forward in bfloat16."""
    wanted = (op, rung, shape, "forward", "bfloat16")
    for each in rows():
        mine = tuple(each[key] for key in ("op", "backend", "shape", "pass", "dtype"))
        if mine == wanted and each["host_us"]:
            return each
    raise LookupError(f"no row of {op} {rung} {shape!r} with host_us")


@functools.cache
def operators() -> tuple[tuple[str, float, float], ...]:
    """The operators of gelu's formula: name, and how many T each reads and writes. T is the input in bfloat16."""
    x = torch.zeros(64, dtype=torch.bfloat16)
    with Chain() as chain:
        gelu.naive(x, approximate="tanh")
    names = ("convert" if "copy" in step.name else step.name.split(".")[1] for step in chain.steps)
    return tuple(
        (name, sum(step.read) / x.nbytes, sum(step.written) / x.nbytes)
        for name, step in zip(names, chain.steps, strict=True)
    )


def launch_timelines(canvas: Canvas) -> str:
    slow, fast = (row("gelu", rung, SHAPE) for rung in (SLOW, FAST))
    chain = operators()
    moved = sum(reads + writes for _, reads, writes in chain)
    canvas.size(3.9, 100, 58)
    left, width = 8, 91
    scale = width / (slow["host_us"] / len(chain) + slow["us"])

    def timeline(y: float, call: dict[str, Any], kernels: tuple[tuple[str, float, float], ...], scale: float) -> None:
        canvas.text(1, y + 1.5, "host", size=9.5)
        canvas.text(1, y + 10.5, "GPU", size=9.5)
        canvas.axes.plot([left, left + width], [y + 4.2] * 2, color=INK, linewidth=0.4)
        canvas.box(left, y, call["host_us"] * scale, 3.2, REGISTERS, pale=0.6, linewidth=0.8)
        at = left + call["host_us"] / len(kernels) * scale
        total = sum(reads + writes for _, reads, writes in kernels)
        for _, reads, writes in kernels:
            long = call["us"] * scale * (reads + writes) / total
            canvas.box(at, y + 8, long, 5, SHARED, pale=0.35, linewidth=0.8)
            wide = math.sqrt(reads), math.sqrt(writes)
            canvas.arrow((at + 0.3 * long, y + 4.8), (at + 0.3 * long, y + 8), HBM, 1.1 * wide[0])
            canvas.arrow((at + 0.75 * long, y + 13), (at + 0.75 * long, y + 16.2), HBM, 1.1 * wide[1])
            at += long

    zoom = 12
    one = (("gelu", 1.0, 1.0),)
    for y, title, call, kernels, by in (
        (6.5, f"{SLOW}: {len(chain)} kernels, {moved:.0f}T, {slow['us']:,.0f} µs", slow, chain, 1),
        (33.5, f"{FAST}: one kernel, 2T, {fast['us']:.0f} µs; drawn {zoom} × longer", fast, one, zoom),
    ):
        canvas.text(1, y - 4, title, weight="bold", size=9.5)
        timeline(y, call, kernels, scale * by)
    end = left + (slow["host_us"] / len(chain) + slow["us"]) * scale
    canvas.arrow((left, 52.5), (end, 52.5), INK, 0.8)
    canvas.text(99, 55.5, "time", ha="right", size=9)
    canvas.text(left + slow["host_us"] * scale + 1, 8.2, f"all launched after {slow['host_us']:.0f} µs", size=9)
    canvas.text(left + fast["host_us"] * scale * zoom + 1, 35.2, f"launched after {fast['host_us']:.0f} µs", size=9)
    return (
        f"gelu of 16384 × 4096 in bfloat16 on an {gpu()}. Arrows are transfers between HBM (orange) and the chip. "
        "The host queues kernels and goes on; the GPU runs them one after the other. A kernel of the formula is "
        "drawn as long as its share of the bytes."
    )


def four_clocks(canvas: Canvas) -> str:
    call = row("softmax", "triton.fused", "16384x4096")
    empty = {r["shape"]: r["us"] for r in rows() if r["backend"] == "ceiling.launch"}
    canvas.size(3.4, 100, 50)
    left, right = 12, 99
    launch, after = 5.0, 4.0  # schematic: no clock reads them alone
    scale = (right - left - launch - after) / (call["host_us"] + call["us"])
    host = left + call["host_us"] * scale
    start = host + launch
    end = start + call["us"] * scale
    canvas.text(1, 4.5, "host", size=9.5)
    canvas.text(1, 15.5, "GPU", size=9.5)
    canvas.box(left, 2, host - left, 5, REGISTERS, "the call", pale=0.5)
    canvas.box(host, 2, end + after - host, 5, REGISTERS, "waits in synchronize()", pale=0.08, linestyle="--")
    canvas.box(start, 13, end - start, 5, SHARED, "the kernel", pale=0.5)
    canvas.arrow((host, 7), (start, 13), INK, 1)
    canvas.arrow((end, 13), (end + after, 7), INK, 1)
    for x in (left, host, start, end, end + after):
        canvas.axes.plot(
            [x, x], [7 if x in (left, host, end + after) else 18, 47], color=INK, linewidth=0.5, linestyle=":"
        )
    spans = (
        ("host", left, host, f"{call['host_us']:.0f} µs: a clock without synchronize()", "right", REGISTERS),
        ("launch", host, start, "queued, not yet running", "right", TENSOR),
        ("GPU", start, end, f"{call['us']:.0f} µs: events, or a graph of many calls", "in", SHARED),
        ("wall", left, end + after, "a clock with synchronize(): all of it", "in", HBM),
    )
    for i, (name, a, b, text, side, colour) in enumerate(spans):
        y = 24 + 7 * i
        canvas.text(1, y, name, size=9.5, weight="bold")
        canvas.axes.plot([a, b], [y, y] if side == "right" else [y + 1.7] * 2, color=colour, linewidth=3.5)
        if side == "right":
            canvas.text(b + 1, y, text, size=9.5)
        else:
            canvas.text((a + b) / 2, y - 1, text, size=9.5, ha="center")
    return (
        f"Four clocks for one call of softmax, `triton.fused` at 16384 × 4096 on an {gpu()}; host and GPU time are "
        f"to scale. Empty kernels start every {empty['stream']:.1f} µs in a stream and every "
        f"{empty['CUDA graph']:.1f} µs in a CUDA graph: a graph removes the host's part from the clock of a short "
        "kernel."
    )
