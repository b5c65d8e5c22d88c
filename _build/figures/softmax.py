"""The online softmax, worked with numbers."""

from __future__ import annotations

import math

from figures.canvas import INK, REGISTERS, SHARED, TENSOR, Canvas

SCORES = ((1.0, 3.0), (4.0, 2.0), (0.0, 5.0))
VALUES = ((10.0, 20.0), (30.0, 40.0), (50.0, 60.0))


def steps() -> list[tuple[float, float, float, float]]:
    """After each tile: the factor for what was there, then maximum m, sum l and output O."""
    m, total, output = -math.inf, 0.0, 0.0
    found = []
    for scores, values in zip(SCORES, VALUES, strict=True):
        new = max(m, *scores)
        factor = math.exp(m - new)
        weights = [math.exp(s - new) for s in scores]
        total = total * factor + sum(weights)
        output = output * factor + sum(w * v for w, v in zip(weights, values, strict=True))
        m = new
        found.append((factor, m, total, output))
    return found


def direct() -> float:
    """The same by the formula over the whole row."""
    scores = [s for tile in SCORES for s in tile]
    values = [v for tile in VALUES for v in tile]
    weights = [math.exp(s - max(scores)) for s in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def online_softmax(canvas: Canvas) -> str:
    found = steps()
    result = found[-1][3] / found[-1][2]
    if not math.isclose(result, direct(), rel_tol=1e-12):
        raise ArithmeticError(f"the online softmax gives {result}, the formula {direct()}")
    canvas.size(3.3, 100, 48)
    for name, y in (("scores", 5.5), ("values", 12.5)):
        canvas.text(1, y, name, size=9.5)
    for name, y in (("rescale by", 22), ("maximum m", 28), ("sum l", 34), ("output O", 40)):
        canvas.text(1, y, name, size=9.5)
    for tile, (scores, values) in enumerate(zip(SCORES, VALUES, strict=True)):
        left = 17 + 28 * tile
        for i in (0, 1):
            canvas.box(left + 11 * i, 3, 10.5, 5, TENSOR, f"{scores[i]:g}")
            canvas.box(left + 11 * i, 10, 10.5, 5, SHARED, f"{values[i]:g}")
        factor, m, total, output = found[tile]
        before = found[tile - 1][1] if tile else None
        rescaled = "–" if before is None else f"exp({before:g} − {m:g}) = {factor:.3f}"
        for text, y in ((rescaled, 22), (f"{m:g}", 28), (f"{total:.3f}", 34), (f"{output:.2f}", 40)):
            canvas.text(left + 11, y, text, ha="center", size=9.5)
        canvas.rounded(left - 0.7, 19, 23.4, 24.5, REGISTERS)
        if tile:
            canvas.arrow((left - 4.8, 31), (left - 0.9, 31), INK)
    canvas.text(99, 46.5, f"O / l = {result:.3f}, as the formula over the whole row gives", ha="right", size=9.5)
    return (
        "One row of attention in three tiles of two keys. Green: what registers hold of the row. A tile with a larger maximum "
        "scales down what was summed before it. The scores of a tile are never stored."
    )
