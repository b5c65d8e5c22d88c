"""The ladder pictures: one bar a rung, in per cent of the best kernel that others offer, above the idea of its file.

Narrow, so that a phone shows it legibly; its texts are legible on white and on black.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.rows.store import Row, latest, of_one_machine, picture_file, read
from bench.show.climb import in_order
from bench.show.headline import headline
from bench.show.panels import source_of, step_of
from bench.show.pictures import COLOURS, OTHER, shade
from bench.show.roofline import operations
from kernel_ladder.inspection.heads import heads
from kernel_ladder.table import LEVELS

TEXT = "#7d7d7d"
WIDTH_INCHES = 5.8  # 557 pixels in a browser; on a phone two thirds of that
LINE_INCHES = 0.165
BAR_INCHES = 0.19
GAP_INCHES = 0.085
HEAD_INCHES = 0.72
#: Where bars begin, as a share of the width, and how much of it 100 % take, unless a longer bar needs the room.
BARS_FROM = 0.36
FULL = 0.5
LONGEST = 1.2 * FULL - 0.07  # with its label
CHARACTERS = 84  # of an idea


def draw(results: Path, gpu: str | None = None) -> list[Path]:
    """Draw the ladder of each operation that has forward times in a file of rows. Returns the files."""
    rows = of_one_machine(latest(read(results)), gpu)
    paths = []
    for op in dict.fromkeys(row.op for row in operations(rows)):
        if bars := bars_of(op, rows):
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
    here = in_order([row for row in mine if (row.shape, row.dtype) == standing])
    others = [row.us for row in here if row.level in ("torch", "peer") and row.us is not None]
    if not others:
        return []
    return [(row, min(others) / row.us) for row in here if row.us is not None]


def idea_of(op: str, backend: str) -> str:
    """What fits on a line of a rung's idea: its first sentence without brackets, or that up to a comma or colon.

    Empty where there is none, as of peers.
    """
    level, _, rung = backend.partition(".")
    head = heads(op, level).get(rung) if level in LEVELS else None
    if head is None:
        return ""
    text = re.sub(r" ?\([^()]*\)", "", head.idea).replace("`", "")
    sentence = re.split(r"(?<=[.;]) ", text)[0].rstrip(".;")
    if len(sentence) <= CHARACTERS:
        return sentence
    breaks = [found.start() for found in re.finditer(r"[,:;] | so that ", sentence) if found.start() <= CHARACTERS]
    return sentence[: breaks[-1]] if breaks else textwrap.shorten(sentence, CHARACTERS, placeholder=" …")


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure without axes to see: 0 to 1 across, inches from the top down."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0.01, 0, 0.98, 1))
    axes.set_xlim(0, 1)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def _picture(op: str, bars: Sequence[tuple[Row, float]], path: Path) -> None:
    ideas = [idea_of(op, row.backend) for row, _ in bars]
    inches = HEAD_INCHES + sum(BAR_INCHES + LINE_INCHES * bool(idea) + GAP_INCHES for idea in ideas)
    with plt.rc_context({"font.size": 9.5, "svg.hashsalt": "kernel_ladder", "svg.fonttype": "none"}):
        figure, axes = blank(WIDTH_INCHES, inches)
        _title(axes, op, bars)
        at = HEAD_INCHES
        backends = [row.backend for row, _ in bars]
        full = min(FULL, LONGEST / max(share for _, share in bars))
        for (row, share), idea in zip(bars, ideas, strict=True):
            middle = at + BAR_INCHES / 2
            axes.text(0, middle, row.backend, va="center", color=TEXT, fontweight="bold")
            level, _, strength = step_of(row.backend, backends)
            colour = shade(level, strength)
            axes.barh(middle, full * share, height=BAR_INCHES * 0.8, left=BARS_FROM, color=colour)
            label = f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"
            axes.text(BARS_FROM + full * share + 0.01, middle, label, va="center", color=TEXT)
            axes.text(0, at + BAR_INCHES + LINE_INCHES / 2, idea, va="center", color=TEXT, fontsize=9)
            at += BAR_INCHES + LINE_INCHES * bool(idea) + GAP_INCHES
        line = BARS_FROM + full
        axes.plot([line, line], [HEAD_INCHES, inches], color=TEXT, linewidth=0.8, linestyle=":", alpha=0.6)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def _title(axes: Axes, op: str, bars: Sequence[tuple[Row, float]]) -> None:
    first = bars[0][0]
    source = source_of([row for row, _ in bars])
    axes.text(0, 0.12, f"{op} {first.shape}, {first.dtype}", color=TEXT, va="center", fontsize=11, fontweight="bold")
    libraries = any(row.level == "peer" or (row.level == "torch" and row.backend != "torch.naive") for row, _ in bars)
    of = "the best other library's rate" if libraries else "the naive formula's rate"
    axes.text(0, 0.33, f"% of {of}; {source}", color=TEXT, va="center")
    x = 0.0
    for level in dict.fromkeys(row.level for row, _ in bars):
        axes.text(x, 0.54, "■", color=COLOURS.get(level, OTHER), va="center")
        axes.text(x + 0.03, 0.54, level, color=TEXT, va="center")
        x += 0.05 + 0.015 * len(level)
    axes.text(x, 0.54, "darker: later rungs", color=TEXT, va="center")
