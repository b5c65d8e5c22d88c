"""What a page asks its reader to predict: a formula over the machine's constants, and the row that it is held against.

``docs/javascripts/predict.js`` finds the table that `answer` writes, and asks for a number before the fold opens.
"""

from __future__ import annotations

import ast
import html
import operator
import re
from collections.abc import Callable, Mapping

#: The tensor that lessons count transfers in: 16384 × 4096 elements of bfloat16.
T = 16384 * 4096 * 2
SIZES = {"TB/s": 1e12, "kB": 1e3, "MB": 1e6, "GB": 1e9, "GFLOP": 1e9, "µs": 1e-6}
QUANTITY = re.compile(rf"(\d+(?:\.\d+)?) ({'|'.join(SIZES)})\b")
OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(formula: str, constants: Mapping[str, float]) -> float:
    """What a formula such as ``12 · 2.147 GB / copy`` comes to, in bytes, operations and seconds.

    Args:
        formula: numbers, a unit of `SIZES` behind some of them, ``T`` and names of `constants`, joined by ``+ · /``.
        constants: rates a second, by name.

    Raises:
        ValueError: it holds something else.
    """
    text = QUANTITY.sub(lambda found: f"({found[1]} * {SIZES[found[2]]})", formula).replace("·", "*")

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.Name) and node.id in known:
            return known[node.id]
        raise ValueError(f"the formula {formula!r} may hold numbers, units, + · / and {', '.join(known)}")

    known = {"T": T, **constants}
    try:
        return of(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise ValueError(f"the formula {formula!r} cannot be read") from None


def answer(
    formula: str, expected: float, unit: str, measured: tuple[float, str, str], write: Callable[[float], str]
) -> str:
    """A table of the formula's value and the measured one, with both as data for the script.

    Args:
        formula: as a reader sees it.
        expected: what it comes to, in `unit`.
        unit: of the number that the reader types.
        measured: the measured number in `unit`, what was measured, and on which GPU.
        write: how a number reads with its unit.
    """
    number, what, gpu = measured
    off = max(number / expected, expected / number)
    steps = "" if formula.isdecimal() else f"{html.escape(formula)} = "
    lines = (
        ("By formula", f"{steps}<strong>{write(expected)}</strong>"),
        ("Measured", f"<strong>{write(number)}</strong>: {html.escape(what)}; {html.escape(gpu)}"),
        ("Factor", f"The formula is off by {off:.2f}×."),
    )
    cells = "".join(f'<tr><th scope="row">{head}</th><td>{cell}</td></tr>' for head, cell in lines)
    data = f'data-unit="{html.escape(unit)}" data-formula="{expected:.6g}" data-measured="{number:.6g}"'
    return f'<table class="prediction" {data}><tbody>{cells}</tbody></table>'
