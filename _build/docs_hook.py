"""What pages of ``docs/`` may say for themselves: real source, and measured numbers from committed rows.

``{{ source FILE NAME }}`` becomes a code block of the function or kernel NAME in FILE, as it stands in the repository.
``{{ us OP RUNG "SHAPE" [DTYPE] [PASS] }}`` becomes the measured median time of a row, with the GPU as its tooltip, and
``{{ host ... }}`` the time of the call on the host. A name that is not there ends the build with an error.
``{{ us? ... }}`` and ``{{ host? ... }}`` say "not yet in the committed rows" where there is no row of the rung at all.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.rows.renamed import current  # noqa: E402

#: What stands for a time that no committed row has.
UNMEASURED = "*not yet in the committed rows*"
#: The rows that pages quote.
ROWS = ROOT / "bench" / "results" / "nvidia-h200.jsonl"
DIRECTIVE = re.compile(r"\{\{ *(source|us\??|host\??) ([^}]*?) *\}\}")
LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def replaced(match: re.Match[str]) -> str:
        kind, arguments = match[1], shlex.split(match[2])
        try:
            return source(*arguments) if kind == "source" else measured(kind, *arguments)
        except (LookupError, TypeError, OSError) as error:
            raise PluginError(f"{page.file.src_path}: {match[0]}: {error}") from None

    return DIRECTIVE.sub(replaced, markdown)


def source(file: str, name: str) -> str:
    """A function of a file as a code block, with the file's name above it."""
    path = ROOT / file
    text = path.read_text()
    body = _python(text, name) if path.suffix == ".py" else _cuda(text, name)
    if body is None:
        raise LookupError(f"{file} has no function {name}")
    return f'```{LANGUAGES[path.suffix]} title="{file}"\n{body}\n```'


def _python(text: str, name: str) -> str | None:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(lines[first - 1 : node.end_lineno])
    return None


def _cuda(text: str, name: str) -> str | None:
    """From the line that begins the definition's statement to the brace that closes it."""
    found = re.search(rf"^(?:template[^\n]*\n)?(?:[^\n;{{}}]*\n)?[^\n;{{}}]*\b{re.escape(name)}\(", text, re.MULTILINE)
    if found is None:
        return None
    start, depth = found.start(), 0
    for place in range(text.index("{", found.end()), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1].strip("\n")
    return None


@functools.cache
def _rows() -> dict[tuple[str, str, str, str, str], dict[str, Any]]:
    rows = (json.loads(line) for line in ROWS.read_text().splitlines())
    return {
        (r["op"], current(r["op"], r["backend"], r["when"]), r["shape"], r["dtype"], r["pass"]): r
        for r in rows
        if r.get("us") is not None
    }


def measured(kind: str, op: str, rung: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> str:
    """A time in µs or ms, to three digits."""
    row = _rows().get((op, rung, shape, dtype, pass_))
    if row is None and kind.endswith("?") and not any(key[:2] == (op, rung) for key in _rows()):
        return UNMEASURED
    if row is None:
        raise LookupError(f"no row of {op} {rung} {shape!r} {dtype} {pass_} in {ROWS.name}")
    us = row["us"] if kind.rstrip("?") == "us" else row["host_us"]
    text = f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} µs"
    return f'<span title="{row["gpu"]}, commit {row["commit"][:12]}">{text}</span>'
