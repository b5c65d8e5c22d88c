"""What compilers make of a formula: the stages of torch.compile, a graph break, and HLO before and after fusion."""

from __future__ import annotations

from figures.canvas import HBM, INK, REGISTERS, SHARED, TENSOR, Canvas
from figures.launches import operators

STAGES = (
    ("your function", "Python", "", INK),
    ("Dynamo", "a graph,\nand guards", "calls", REGISTERS),
    ("AOTAutograd", "forward and\nbackward", "operators", SHARED),
    ("Inductor", "fused loops", "loop", TENSOR),
    ("Triton, C++", "a kernel", "kernel", HBM),
)


def compile_stages(canvas: Canvas) -> str:
    chain = operators()
    canvas.size(3.7, 100, 54)
    wide, step = 16.6, 20.6
    canvas.text(1, 2.5, "stages", weight="bold", size=9.5)
    for i, (name, made, _, colour) in enumerate(STAGES):
        x = 0.6 + step * i
        canvas.box(x, 5.5, wide, 14, colour, pale=0.15)
        canvas.text(x + wide / 2, 8.6, name, ha="center", size=9.5, weight="bold")
        canvas.text(x + wide / 2, 14.6, made, ha="center", size=9.5)
        if i:
            canvas.arrow((x - step + wide, 12.5), (x, 12.5), INK)
    canvas.text(1, 24.5, "gelu (tanh), one graph", weight="bold", size=9.5)
    canvas.box(1, 28, 30, 6, SHARED, f"{len(chain)} operators")
    canvas.arrow((31, 31), (40, 31), INK)
    canvas.box(40, 28, 30, 6, HBM, "1 kernel: 2T")
    canvas.text(1, 39.5, "the same with a print(x.sum()) inside: a graph break", weight="bold", size=9.5)
    half = len(chain) // 2
    for x, count, kernel in ((1, half, "kernel 1"), (58, len(chain) - half, "kernel 2")):
        canvas.box(x, 43, 19, 6, SHARED, f"{count} operators")
        canvas.arrow((x + 19, 46), (x + 23, 46), INK)
        canvas.box(x + 23, 43, 13, 6, HBM, kernel)
    canvas.box(40.5, 42, 14, 8, INK, "Python;\nx in memory", pale=0.05, size=9, linestyle="--")
    canvas.arrow((37, 46), (40.5, 46), HBM, 1.8)
    canvas.arrow((54.5, 46), (58, 46), HBM, 1.8)
    return (
        f"Above: who makes what of a compiled function. Below: the {len(chain)} operators of gelu's formula become "
        "one kernel. Code that Dynamo cannot trace breaks the graph: Python runs it, nothing is fused across it, "
        "and what stands between goes through memory."
    )


#: XLA's instructions for gelu (tanh) without constants: opcode, and the numbers of its operands; -1 is the input.
INSTRUCTIONS = (
    ("convert", (-1,)),
    ("multiply", (0, 0)),
    ("minimum", (1,)),
    ("multiply", (0,)),
    ("multiply", (3, 2)),
    ("add", (0, 4)),
    ("multiply", (5,)),
    ("negate", (6,)),
    ("exponential", (7,)),
    ("add", (8,)),
    ("divide", (9,)),
    ("multiply", (0, 10)),
    ("convert", (11,)),
)


def unfused() -> int:
    """How many T the instructions would move one by one: 16 bits at both ends, 32 between; T is the input."""
    size = {-1: 1, len(INSTRUCTIONS) - 1: 1}
    return sum(
        size.get(i, 2) + sum(size.get(operand, 2) for operand in set(operands))
        for i, (_, operands) in enumerate(INSTRUCTIONS)
    )


def hlo_fusion(canvas: Canvas) -> str:
    canvas.size(4.3, 100, 62)
    columns, step = 7, 14.1
    for top, title, fused in (
        (3, f"before: {len(INSTRUCTIONS)} instructions, {unfused()}T one by one", False),
        (34, "after: one fusion, 2T", True),
    ):
        canvas.text(1, top, title, weight="bold", size=9.5)
        if fused:
            canvas.box(0.4, top + 5, 99.2, 19, REGISTERS, pale=0.1)
        for i, (opcode, operands) in enumerate(INSTRUCTIONS):
            x, y = 1.2 + step * (i % columns), top + 7 + 10.5 * (i // columns) + (0 if fused else 0.5)
            canvas.box(x, y, 12.6, 4.5, REGISTERS if fused else SHARED, opcode, size=9)
            ends = (-1, len(INSTRUCTIONS))
            reads = len(set(operands)) if not fused else int(operands[0] == ends[0])
            for n in range(reads):
                at = x + 3 + 3 * n
                canvas.arrow((at, y - 3.4), (at, y), HBM, 1.3)
            if not fused or i == len(INSTRUCTIONS) - 1:
                canvas.arrow((x + 10, y + 4.5), (x + 10, y + 7.9), HBM, 1.3)
    return (
        "gelu (tanh) in bfloat16 as JAX lowers it, constants left out. Orange: tensors read from and written to "
        "memory. In a fusion every value between stays in a register, and the instructions are one loop in one "
        "kernel."
    )
