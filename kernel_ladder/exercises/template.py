"""A solution as text: whole, or with its gaps open as a student starts from."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kernel_ladder.exercises.exercise import Exercise

SOURCES = Path(__file__).resolve().parent / "sources"

#: A gap's marks in a solution's file, each alone on its line, behind the comment sign of Python or of CUDA C++.
BEGIN, END = "gap", "end"
SIGNS = ("# ", "// ")
TODO = re.compile(r"(?:#|//) (TODO \d+):")
#: An open gap in a kernel's CUDA source, which the compiler refuses by the same words.
OPEN_IN_CUDA = re.compile(r'^ *#error "(TODO \d+)"$')


def solution(exercise: Exercise) -> str:
    """The solved file, without marks."""
    lines = _source(exercise).splitlines()
    return "\n".join(line for line in lines if _mark(line) is None) + "\n"


def template(exercise: Exercise) -> str:
    """The file to start from: each gap is one line that raises NotImplementedError with the number of its TODO."""
    lines: list[str] = []
    number, in_gap = "", False
    for line in _source(exercise).splitlines():
        if found := TODO.search(line):
            number = found[1]
        if _mark(line) == BEGIN:
            in_gap = True
            indent = line[: len(line) - len(line.lstrip())]
            is_python = line.strip().startswith("#")
            lines.append(f'{indent}raise NotImplementedError("{number}")' if is_python else f'#error "{number}"')
        elif _mark(line) == END:
            in_gap = False
        elif not in_gap:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _mark(line: str) -> str | None:
    """`BEGIN` or `END` where a line is such a mark."""
    found = next((line.strip().removeprefix(sign) for sign in SIGNS if line.strip().startswith(sign)), None)
    return found if found in (BEGIN, END) else None


def gaps(text: str) -> list[tuple[int, str]]:
    """The gaps that a file still has: line and TODO.

    Raises:
        SyntaxError: the file is not Python.
    """
    lines = enumerate(text.splitlines(), 1)
    found = [(number, match[1]) for number, line in lines if (match := OPEN_IN_CUDA.match(line))]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called, given = node.exc.func, node.exc.args
            if isinstance(called, ast.Name) and called.id == "NotImplementedError" and given:
                said = given[0].value if isinstance(given[0], ast.Constant) else None
                if isinstance(said, str) and said.startswith("TODO"):
                    found.append((node.lineno, said))
    return sorted(found)


def _source(exercise: Exercise) -> str:
    """The marked solution, with a head made from the exercise's data in place of its own."""
    text = (SOURCES / f"{exercise.name}.py").read_text()
    _, _, body = text.partition('"""\n')
    return _head(exercise) + body


_OPEN = {"triton": "raises NotImplementedError", "cuda": "is an #error or raises NotImplementedError"}


def _head(exercise: Exercise) -> str:
    formula = "\n".join(f"    {line}" for line in exercise.formula.splitlines())
    return f'''"""Exercise {exercise.name}: {exercise.teaches}

{formula}

Replace every line that {_OPEN[exercise.level]}; TODO comments say by what. Then run

    python -m kernel_ladder exercise check THIS_FILE
    python -m kernel_ladder exercise hint {exercise.name}
"""
'''
