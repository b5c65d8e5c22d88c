"""What moves: multicast in a cluster, the transfers that fusion removes, attention's memory."""

from __future__ import annotations

from figures.canvas import HBM, INK, L2, REGISTERS, SHARED, Canvas
from figures.rows import gpu, rows

#: A stage of csrc/matmul/cluster.cu: rows of A, columns of B, and k, of 16 bits.
BM = 128
BN = 256
BK = 64


def multicast(canvas: Canvas) -> str:
    a, b = BM * BK * 2 // 1024, BN * BK * 2 // 1024
    canvas.size(3.5, 100, 52)
    for left, title, half in ((2, "two blocks, each for itself", False), (53, "a cluster of two blocks", True)):
        canvas.text(left + 22, 2.5, title, weight="bold", ha="center", size=9.5)
        canvas.box(left, 6, 45, 7, L2, "L2 cache")
        for block in (0, 1):
            x = left + 23.5 * block
            canvas.box(x, 30, 21.5, 13, SHARED, pale=0.12)
            canvas.text(x + 10.7, 45.5, f"block {block}", ha="center", size=9)
            canvas.box(x + 1, 32, 7, 9, REGISTERS, f"A{block}", size=9)
            canvas.box(x + 9, 32, 5.7, 9, HBM, "B\nleft", size=8)
            canvas.box(x + 14.7, 32, 5.7, 9, HBM, "B\nright", size=8)
            canvas.arrow((x + 4.5, 13), (x + 4.5, 32), REGISTERS, 1.5)
            if not half:
                canvas.arrow((x + 14.7, 13), (x + 14.7, 32), HBM, 3)
        if half:
            for place, (near, far) in ((11.9, (11.9, 35.4)), (41.1, (41.1, 17.6))):
                canvas.axes.plot([left + place, left + place], [13, 20], color=HBM, linewidth=1.5)
                for end in (near, far):
                    canvas.arrow((left + place, 20), (left + end, 32), HBM, 1.5)
        asked = a + (b // 2 if half else b)
        canvas.text(left + 22, 49.5, f"each asks L2 for {asked} KiB a stage", ha="center", size=9.5)
    return (
        f"A stage of matmul: {BM} × {BK} of A ({a} KiB) and {BK} × {BN} of B ({b} KiB). Two blocks with the same columns need the "
        f"same part of B. In a cluster each loads half of it, and TMA's multicast writes that half into both: {a + b // 2} KiB a "
        f"block in place of {a + b}."
    )


#: The operators of swiglu, or a rung's kernels, with the tensors that each reads and writes.
CHAINS = (
    ("operators", (("sigmoid", 1, 1), ("× gate", 2, 1), ("× up", 2, 1))),
    ("torch.builtin", (("silu", 1, 1), ("× up", 2, 1))),
    ("cuda.vectorized", (("all in one", 2, 1),)),
)


def fusion_bytes(canvas: Canvas) -> str:
    times = {
        r["backend"]: r["us"]
        for r in rows()
        if (r["op"], r["shape"], r["dtype"], r["pass"]) == ("swiglu", "16384x4096", "bfloat16", "forward")
    }
    canvas.size(2.5, 100, 37)
    unit = 7.6
    for i, (rung, operators) in enumerate(CHAINS):
        y = 4 + 12 * i
        canvas.text(1, y + 2.5, rung, size=9.5)
        at = 19.0
        for name, reads, writes in operators:
            for count, colour, sign in ((reads, SHARED, "read"), (writes, HBM, "write")):
                for _ in range(count):
                    canvas.box(at, y, unit - 0.4, 5, colour, sign, size=8)
                    at += unit
            canvas.text(at - (reads + writes) * unit / 2, y - 1.8, name, ha="center", size=8.5)
            at += 0.9
        total = sum(reads + writes for _, reads, writes in operators)
        canvas.text(at + 0.5, y + 2.5, f"{total}T" + (f", {times[rung]:.0f} µs" if rung in times else ""), size=9.5)
    return (
        "The transfers of `silu(gate) · up`: a box is one tensor between HBM and the chip. Fusion removes what one operator "
        f"writes and the next reads. Times of 16384 × 4096 in bfloat16 on an {gpu()}."
    )


def attention_memory(canvas: Canvas) -> str:
    axes = canvas.plot_area(3.2, (0.1, 0.15, 0.7, 0.8))
    shown = {"torch.naive": HBM, "cuda.flash": REGISTERS}
    shapes = {f"B{16384 // s} H16 S{s} D128 causal": s for s in (512, 1024, 2048, 4096, 8192, 16384)}
    for rung, colour in shown.items():
        points = sorted(
            (shapes[r["shape"]], r["peak_mib"])
            for r in rows()
            if r["op"] == "attention" and r["backend"] == rung and r["shape"] in shapes and r["pass"] == "forward"
            if r["dtype"] == "bfloat16" and r["peak_mib"]
        )
        if len(points) < 2:
            raise LookupError(f"attention {rung} has rows with peak_mib at {len(points)} lengths; two are needed")
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, marker="o", linewidth=1.8)
        axes.annotate(
            f"{rung}\n{ys[-1]:,.0f} MiB", (xs[-1], ys[-1]), xytext=(8, 0), textcoords="offset points", va="center", size=9.5
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(shapes.values()), [f"{s:,}" for s in shapes.values()])
    axes.minorticks_off()
    axes.tick_params(colors=INK)
    axes.set_xlabel("length of a sequence; 16,384 tokens in all")
    axes.set_ylabel("MiB at the peak")
    return (
        f"Memory that a forward pass allocates, measured on an {gpu()}: 16 heads of dimension 128. The formula stores scores, "
        "length² of them; the fused kernel stores its output."
    )
