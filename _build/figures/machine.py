"""The GPU: what its memories hold and deliver, and the roofline that follows."""

from __future__ import annotations

import math
from typing import Any

from figures.canvas import HBM, INK, L2, REGISTERS, SHARED, TENSOR, Canvas
from figures.rows import best, best_ceiling, gpu, rows

SMS = 132
# An H100's data sheet.
REGISTERS_KIB = 256
SHARED_KIB = 228
L2_MIB = 50
HBM_GB = 80
#: Bytes a clock that an SM's shared memory delivers: 32 banks of 4 bytes.
SHARED_BYTES_A_CLOCK = 128
OPERAND_BYTES_A_CLOCK = 128 * 3 * 4  # lanes, operands of an instruction, bytes of one


def memory_hierarchy(canvas: Canvas) -> str:
    canvas.size(3.5, 100, 54)
    clock = max(r["clock_mhz"] for r in rows() if r["backend"] == "ceiling.cuda_core" and r["clock_mhz"]) / 1e3
    shared = SHARED_BYTES_A_CLOCK * SMS * clock / 1e3
    operands = OPERAND_BYTES_A_CLOCK * SMS * clock / 1e3
    l2, hbm = best_ceiling("ceiling.l2", "gbs") / 1e3, best_ceiling("ceiling.copy", "gbs") / 1e3
    canvas.text(1, 3, "memory", weight="bold")
    canvas.text(61, 3, "holds", weight="bold")
    canvas.text(78, 3, "delivers", weight="bold")
    levels = (
        ("registers", REGISTERS, f"{REGISTERS_KIB} KiB per SM", f"{operands:.0f} TB/s"),
        ("shared memory, L1", SHARED, f"{SHARED_KIB} KiB per SM", f"{shared:.0f} TB/s"),
        ("L2 cache", L2, f"{L2_MIB} MB", f"{l2:.1f} TB/s, measured"),
        ("HBM", HBM, f"{HBM_GB} GB", f"{hbm:.1f} TB/s, measured"),
    )
    for i, (name, colour, holds, delivers) in enumerate(levels):
        y, width = 7 + 12 * i, 18 + 13 * i
        canvas.box(1, y, width, 9, colour, name)
        canvas.text(61, y + 4.5, holds, size=9.5)
        canvas.text(78, y + 4.5, delivers, size=9.5)
        if i < 3:
            canvas.arrow((10, y + 12), (10, y + 9), INK)
    return (
        f"The memories of one {gpu()}, nearest to the arithmetic first. Each is slower than the one above; L2 and HBM are "
        f"also much larger. Registers deliver {OPERAND_BYTES_A_CLOCK} bytes of operands a clock, shared memory "
        f"{SHARED_BYTES_A_CLOCK}, on each of {SMS} SMs at {clock:.2f} GHz."
    )


#: Operation, shape and where its name stands beside the point.
POINTS = (
    ("add", "16384x4096", (8, -4)),
    ("softmax", "16384x4096", (8, -6)),
    ("gelu", "16384x4096 tanh", (8, -6)),
    ("attention", "B64 H32/8 Q1 S4096 D128 decode", (8, -6)),
    ("attention", "B4 H16 S4096 D128 causal", (-4, -16)),
    ("matmul", "4096x4096x4096", (4, -16)),
)


def roofline(canvas: Canvas) -> str:
    axes = canvas.plot_area(3.9, (0.1, 0.13, 0.87, 0.83))
    bandwidth = best_ceiling("ceiling.copy", "gbs") / 1e3
    tensor = best_ceiling("ceiling.tensor", "tflops", "bfloat16")
    cores = best_ceiling("ceiling.cuda_core", "tflops", "float32")
    ridge = tensor / bandwidth
    axes.set_xscale("log")
    axes.set_yscale("log")
    left, right = 0.08, 10000
    axes.set_xlim(left, right)
    axes.set_ylim(0.2, 2500)
    axes.plot([left, ridge, right], [left * bandwidth, tensor, tensor], color=INK, linewidth=1.6)
    axes.plot([cores / bandwidth, right], [cores, cores], color=INK, linewidth=1, linestyle="--")
    axes.text(9000, tensor * 1.25, f"tensor cores, bfloat16: {tensor:.0f} TFLOP/s", size=9, ha="right")
    axes.text(9000, cores * 1.25, f"CUDA cores, float32: {cores:.0f} TFLOP/s", size=9, ha="right")
    place = 0.6
    axes.annotate(
        f"HBM: {bandwidth:.2f} TB/s",
        (place, place * bandwidth * 1.35),
        size=9,
        rotation=_angle(axes),
        rotation_mode="anchor",
        ha="center",
    )
    axes.plot([ridge, ridge], [0.2, tensor], color=INK, linewidth=0.8, linestyle=":")
    axes.text(ridge * 0.92, 0.28, f"ridge: {ridge:.0f} FLOP a byte", size=9, ha="right")
    for op, shape, offset in POINTS:
        row = best(op, shape)
        intensity = row["flops"] / row["bytes"]
        bound = HBM if intensity < ridge else TENSOR
        axes.plot(intensity, row["tflops"], marker="o", color=bound, markersize=6)
        name = "decode" if "Q1" in shape else op
        side = "right" if offset[0] < 0 else "left"
        axes.annotate(name, (intensity, row["tflops"]), xytext=offset, textcoords="offset points", size=9, ha=side)
    axes.set_xlabel("FLOP per byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    return (
        f"The roofline of an {gpu()} by its measured ceilings, and the fastest rung of six calls. Left of the ridge memory "
        "bounds a kernel, right of it the tensor cores."
    )


def _angle(axes: Any) -> float:
    """Degrees at which a line of slope 1 stands in log-log axes."""
    box = axes.get_position()
    width, height = axes.figure.get_size_inches()
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    per_x = box.width * width / math.log(x1 / x0)
    per_y = box.height * height / math.log(y1 / y0)
    return math.degrees(math.atan2(per_y, per_x))
