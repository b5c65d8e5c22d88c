"""The ladder pictures of README.md: one bar a rung, in per cent of the best kernel that others offer, with its idea."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show.climb import in_order
from bench.show.headline import headline

#: Operation -> rung -> its idea in a few words. Operations without an entry have no such picture.
IDEAS: dict[str, dict[str, str]] = {
    "matmul": {
        "torch.builtin": "cuBLAS",
        "triton.naive": "one small tile a program",
        "triton.tiled": "large tiles, pipelined loads",
        "triton.tma": "tiles fetched by TMA",
        "triton.persistent": "programs loop over tiles",
        "triton.split_k": "programs share a tile's k",
        "cuda.naive": "one thread an output",
        "cuda.coalesced": "a warp reads one line",
        "cuda.tiled": "operands reused in shared memory",
        "cuda.thread_tile": "8 × 8 outputs a thread",
        "cuda.vectorized": "16-byte loads",
        "cuda.double_buffered": "loads under arithmetic",
        "cuda.registers": "register tiles, two buffers",
        "cuda.mma": "tensor cores (mma.sync)",
        "cuda.wgmma": "wgmma on tiles fetched by TMA",
        "cuda.warp_specialized": "a producer warp loads",
        "cuda.cluster": "blocks share loads by multicast",
        "cuda.persistent": "epilogue under the next mainloop",
        "cuda.split_k": "blocks share a tile's k",
        "cuda.stream_k": "equal shares of all work",
    },
    "attention": {
        "torch.naive": "scores go through memory",
        "torch.builtin": "PyTorch's choice (cuDNN)",
        "torch.flash": "FlashAttention-2",
        "torch.cudnn": "cuDNN",
        "triton.flash": "online softmax over tiles",
        "triton.tma": "tiles fetched by TMA",
        "triton.warp_specialized": "warps with different work",
        "cuda.flash": "online softmax on mma.sync",
        "cuda.wgmma": "wgmma on tiles fetched by TMA",
        "cuda.warp_specialized": "a producer warp loads",
        "cuda.pingpong": "softmax under products",
        "cuda.persistent": "blocks loop over tiles",
        "peer.flash-attn-4": "FlashAttention-4",
    },
}
COLOURS = {"torch": "#8c8c8c", "triton": "#3a8fd0", "cuda": "#12a67c", "peer": "#e0712a"}
#: Text that is legible on white and on black.
TEXT = "#7d7d7d"
WIDTH_INCHES = 8.0  # 576 points: under 880 pixels in a browser
BAR_INCHES = 0.3


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw the ladder of each operation of `IDEAS` that has forward times in a file of rows. Returns the files."""
    rows = of_one_machine(latest(read(results)), gpu)
    paths = []
    for op in IDEAS:
        bars = bars_of(op, rows)
        if bars:
            paths.append(picture_file(results, f"ladder-{op}"))
            paths[-1].parent.mkdir(exist_ok=True)
            _picture(op, bars, paths[-1])
    return paths


def bars_of(op: str, rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """The timed rungs of an operation at its headline shape, and each one's rate over the best of others' kernels."""
    mine = [row for row in rows if row.op == op and row.pass_ == "forward" and row.us is not None]
    standing = headline(op, mine)
    if standing is None:
        return []
    here = in_order([row for row in mine if (row.shape, row.dtype) == standing and row.backend in IDEAS[op]])
    others = [row.us for row in here if row.level in ("torch", "peer") and row.us is not None]
    if not others:
        return []
    return [(row, min(others) / row.us) for row in here if row.us is not None]


def _picture(op: str, bars: Sequence[tuple[Row, float]], path: Path) -> None:
    first = bars[0][0]
    with plt.rc_context({"font.size": 11, "svg.hashsalt": "kernel_ladder", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(WIDTH_INCHES, BAR_INCHES * len(bars) + 0.9), layout="constrained")
        for place, (row, share) in enumerate(bars):
            axes.barh(place, 100 * share, height=0.72, color=COLOURS.get(row.level, TEXT))
            label = f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"
            axes.text(100 * share + 1, place, f"{label}  {IDEAS[op][row.backend]}", va="center", color=TEXT)
        axes.set_yticks(range(len(bars)), [row.backend for row, _ in bars], color=TEXT)
        axes.invert_yaxis()
        axes.set_xlim(0, 190)
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.tick_params(colors=TEXT, length=0)
        axes.axvline(100, color=TEXT, linewidth=0.8, linestyle=":", alpha=0.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
        commits = sorted({(row.commit or "")[:7] for row, _ in bars})
        source = commits[0] if len(commits) == 1 else f"{len(commits)} commits"
        title = f"{op} {first.shape}, {first.dtype}: % of the best other kernel's rate"
        axes.set_title(f"{title}\n{first.gpu}, {source}", color=TEXT, fontsize=11, loc="left")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
