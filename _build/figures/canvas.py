"""What the figures share: a blank canvas, its colours, and SVG that follows the page's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

#: Stands for the page's text colour; `as_svg` writes `currentColor` in its place.
INK = "#0a0b0c"
#: One colour per part of the machine, legible on white and on dark grey.
HBM, L2, SHARED, REGISTERS, TENSOR = "#d1662a", "#b58900", "#2a8fd1", "#12a67c", "#9a5fd0"
PALE = 0.28
WIDTH = 6.9  # inches; 660 pixels

STYLE = {
    "font.size": 10,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Canvas:
    """Axes in units of the drawing, without a frame. `size` sets the figure's height in inches and its limits."""

    def __init__(self) -> None:
        self.figure = plt.figure(figsize=(WIDTH, 3))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.axis("off")

    def size(self, inches: float, width: float, height: float) -> None:
        self.figure.set_size_inches(WIDTH, inches)
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)

    def plot_area(self, inches: float, rectangle: tuple[float, float, float, float]) -> Any:
        """Ordinary axes with ticks, for a chart; `rectangle` in shares of the figure."""
        self.figure.set_size_inches(WIDTH, inches)
        self.axes.set_position(rectangle)
        self.axes.axis("on")
        self.axes.patch.set_visible(False)
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)
        return self.axes

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "", **more: Any) -> None:
        size = more.pop("size", 10)
        pale = more.pop("pale", PALE)
        self.axes.add_patch(
            Rectangle((x, y), width, height, facecolor=(*mpl.colors.to_rgb(colour), pale), edgecolor=colour, **more)
        )
        if text:
            self.text(x + width / 2, y + height / 2, text, ha="center", size=size)

    def rounded(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", facecolor="none", edgecolor=colour)
        )

    def text(self, x: float, y: float, text: str, **more: Any) -> None:
        self.axes.text(x, y, text, **({"va": "center"} | more))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = INK, width: float = 1.2) -> None:
        line = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", xy=end, xytext=start, arrowprops=line)


def as_svg(name: str, drawing: Callable[[Canvas], str]) -> tuple[str, str]:
    """The SVG element of a drawing, without sizes of its own and with the page's font and text colour."""
    with plt.rc_context({**STYLE, "svg.hashsalt": name}):
        canvas = Canvas()
        caption = drawing(canvas)
        found = io.StringIO()
        canvas.figure.savefig(found, format="svg", transparent=True, metadata={"Date": None})
        plt.close(canvas.figure)
    text = found.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would hold for every SVG of the page
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{name.replace("_", " ")}" stroke-linejoin="round"', 1)
    text = text.replace(INK, "currentColor")
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", text)
    text = re.sub(r'id="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', text)
    return re.sub(r"\n\s*\n+", "\n", text), caption
