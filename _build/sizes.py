"""Refuse source files and kernels that do not fit on a reader's screens: 500 lines a file, 100 lines a kernel.

    python _build/sizes.py            every tracked source file
    python _build/sizes.py FILE…      these files alone

A kernel is a function with ``__global__`` or ``__device__``, or one that Triton or Gluon compiles. Its lines are those
from its first specifier, or its ``def``, to its end. The exit code is 1 where something is too long. Every finding is
one line, ``file:line: name: what is wrong``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from retired_words import sources

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 500
KERNEL_LINES = 100
#: ``file:kernel`` -> why it is longer. There is none now; an entry that no long kernel needs is refused.
ARGUED: dict[str, str] = {}

_NOT_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])'""", re.DOTALL)
_SPECIFIER = re.compile(r"\b__(?:global|device)__\b")
_NAME = re.compile(r"(\w+)\s*$")


class Function(NamedTuple):
    """A function of a kernel file, with its first line and its number of lines."""

    name: str
    line: int
    lines: int


def _after(text: str, start: int, opening: str, closing: str) -> int:
    """The index behind the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    raise ValueError(f"no {closing} closes the {opening} at {start}")


def of_cuda(text: str) -> Iterator[Function]:
    """The device functions of a C++ source that have a body."""
    code = _NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in _SPECIFIER.finditer(code):
        name, i = "", found.end()
        while code[i] not in ";{}=":
            if code[i] == "(":
                called = _NAME.search(code, found.end(), i)
                if not name and called and called[1] != "__launch_bounds__":
                    name = called[1]
                i = _after(code, i, "(", ")")
            else:
                i += 1
        if name and code[i] == "{":
            lines = code.count("\n", found.start(), _after(code, i, "{", "}")) + 1
            yield Function(name, code.count("\n", 0, found.start()) + 1, lines)


def of_python(text: str) -> Iterator[Function]:
    """The functions of a Python source that Triton or Gluon compiles."""
    if "jit" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            assert node.end_lineno is not None
            yield Function(node.name, node.lineno, node.end_lineno - node.lineno + 1)


def check(file: str, text: str) -> Iterator[str]:
    """What is too long in one file, whose name is relative to the root."""
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{file}:1: {Path(file).name}: has {lines} lines; at most {FILE_LINES}"
    functions = list(of_python(text) if file.endswith(".py") else of_cuda(text))
    for function in functions:
        if function.lines > KERNEL_LINES and f"{file}:{function.name}" not in ARGUED:
            what = f"has {function.lines} lines; at most {KERNEL_LINES}: split it, or argue it in _build/sizes.py"
            yield f"{file}:{function.line}: {function.name}: {what}"
    long = {f"{file}:{function.name}" for function in functions if function.lines > KERNEL_LINES}
    for key in ARGUED:
        if key.partition(":")[0] == file and key not in long:
            yield f"{file}:1: {key.partition(':')[2]}: is argued in _build/sizes.py, but is no long kernel"


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where something is too long."""
    parser = argparse.ArgumentParser(prog="python _build/sizes.py", description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="*", help="files relative to the root (default: every tracked source file)")
    args = parser.parse_args(argv)
    found = [f for file in args.file or sources() for f in check(file, (ROOT / file).read_text(encoding="utf-8"))]
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
