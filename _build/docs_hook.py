"""What pages of ``docs/`` may say for themselves: real source, and measured numbers from committed rows.

- ``{{ source FILE NAME }}`` becomes a code block of the function or kernel NAME as it stands in FILE.
- ``{{ source FILE }}`` becomes one of the whole file without its docstring.
- ``{{ us OP RUNG "SHAPE" [DTYPE] [PASS] }}`` becomes the measured median time of a row, with the GPU as its tooltip.
- ``{{ host OP RUNG ... }}`` becomes the time of the call on the host, ``{{ compile OP RUNG ... }}`` that of a shape's first
  call, ``{{ peak OP RUNG ... }}`` the memory that a call takes at most, ``{{ share OP RUNG ... }}`` the share of the
  measured ceiling.
- ``{{ ratio OP RUNG OTHER ... }}`` becomes the time of OTHER over that of RUNG.
- ``{{ counter OP RUNG NAME "SHAPE" [DTYPE] [PASS] }}`` becomes a hardware counter, by the heading that tables in
  ``docs/climb/`` give it.
- ``{{ kernels OP RUNG "SHAPE" [DTYPE] [PASS] }}`` becomes a table of a call's kernels: time, DRAM bytes and their rate, as
  Nsight Compute counted them.
- ``{{ ceiling copy }}`` and ``{{ ceiling tensor }}`` become the highest rates that a copy, and a product in bfloat16,
  reached. ``{{ least copy N [N…] }}`` becomes the time that as many bytes as the numbers' product take at that rate, and
  ``{{ least tensor N [N…] }}`` that of as many operations. ``{{ part tensor N OP RUNG ... }}`` becomes that time's share of a
  row's time.
- ``{{ machine OP RUNG ... }}`` becomes the GPU and the commit of a row, and those of its operation's counters.
- ``{{ predict us OP RUNG "SHAPE" [DTYPE] [PASS] by="FORMULA" }}`` becomes the answer to a prediction: the formula, its
  value, and the row. ``predict ratio …`` and ``predict counter …`` take what these markers take. It stands in a fold
  ``<details class="question predict" markdown="1">``, whose summary is the question.
- ``{{ table failures }}`` becomes the known failures of compilers, ``{{ table dynamic }}`` what a new length costs.
- ``{{ figure NAME }}`` becomes a figure of ``_build/figures``, drawn at this build, with its caption.

A name that is not there ends the build with an error. With a question mark, as in ``{{ us? ... }}``, a marker of rows or
counters says "not yet in the committed rows" where there is nothing of the rung at all.

Links to ``bench/results/pictures`` and to sources, right for a reader of the repository, become links into the site.
"""

from __future__ import annotations

import ast
import functools
import html
import math
import re
import shlex
import textwrap
from collections.abc import Callable
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import figures
import predictions
from figures.rows import ROOT, ROWS, best_ceiling, rows  # finds the packages at the top of the repository

from bench.profile import counters  # isort: skip
from bench.rows.renamed import current  # isort: skip
from bench.show import climb_counters, dynamic, markdown  # isort: skip
from bench.show.table import microseconds  # isort: skip
from kernel_ladder.inspection import failures  # isort: skip

#: What stands for a time that no committed row has.
UNMEASURED = "*not yet in the committed rows*"
DIRECTIVE = re.compile(
    r"\{\{ *(source|us\??|peak\??|host\??|compile\??|share\??|ratio|counter\??|kernels|ceiling|least|part|machine|table|figure|predict) ([^}]*?) *\}\}"
)
FIGURE = re.compile(r'<svg data-figure="(\w+)"></svg>')
PICTURE = re.compile(r"\]\((?:\.\./)+bench/results/pictures/([\w.-]+\.svg)\)")
#: Pages of the site that stand at the top of the repository, for its readers.
OUTSIDE = {"results.md": "RESULTS.md", "log.md": "KERNEL_LOG.md"}
LINK = re.compile(r"(`)?docs/([\w/-]+\.md)(?(1)`)")
CODE = re.compile(r"<pre.*?</pre>", re.DOTALL)
RAW_TABLE = re.compile(r"^.*\n\|[-:| ]+\|$", re.MULTILINE)
PICTURES = ROOT / "bench" / "results" / "pictures"
LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Pages from the top of the repository join the site, and committed pictures where a page shows them."""
    for place, name in OUTSIDE.items():
        files.append(File.generated(config, place, content=from_the_top(name)))
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        for name in PICTURE.findall(page.content_string):
            place = f"assets/pictures/{name}"
            if place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(PICTURES / name)))
    return files


def from_the_top(name: str) -> str:
    """A page of the top of the repository, with the site's links. What it folds would stay Markdown without a mark."""
    text = (ROOT / name).read_text().replace("](bench/results/", "](../bench/results/").replace("](docs/", "](")
    return LINK.sub(r"[\2](\2)", text).replace("<details>", '<details markdown="1">')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = "../" * page.file.src_uri.count("/")
    markdown = PICTURE.sub(rf"]({depth}assets/pictures/\1)", markdown)

    def replaced(match: re.Match[str]) -> str:
        kind, arguments = match[1], shlex.split(match[2])
        try:
            if kind == "source":
                return _indented(
                    source(*arguments), markdown[markdown.rfind("\n", 0, match.start()) + 1 : match.start()]
                )
            made = MADE.get(kind)
            if made is not None:
                return made(*arguments)
            return (counter if kind.startswith("counter") else measured)(kind, *arguments)
        except (LookupError, TypeError, ValueError, OSError) as error:
            raise PluginError(f"{page.file.src_path}: {match[0]}: {error}") from None

    return DIRECTIVE.sub(replaced, markdown)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """No table stays Markdown, as one would inside an element of HTML that does not say ``markdown="1"``."""
    if found := RAW_TABLE.search(CODE.sub("", content)):
        raise PluginError(f"{page.file.src_path}: a table is not rendered: {found[0][:80]}")
    return content


def on_post_page(output: str, **_: Any) -> str:
    """Figures enter after the search index was made: their labels are not what a reader searches for."""
    return FIGURE.sub(lambda found: drawn(found[1])[0], output)


@functools.cache
def drawn(name: str) -> tuple[str, str]:
    return figures.draw(name)


def figure(name: str) -> str:
    """A figure's place in the page, and its caption."""
    caption = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(drawn(name)[1], quote=False))
    image = f'<div class="drawing"><svg data-figure="{name}"></svg></div>'
    return f'<figure class="drawn" markdown="0">{image}<figcaption>{caption}</figcaption></figure>'


def _indented(text: str, before: str) -> str:
    """A block whose first line stands behind `before`: inside a tab or a list every line is indented."""
    return text if before.strip() else text.replace("\n", f"\n{before}")


def source(file: str, name: str = "") -> str:
    """A function of a file, or the file, as a code block with the file's name above it."""
    path = ROOT / file
    text = path.read_text()
    if not name:
        body = text.partition('"""\n\n')[2].strip("\n")
    else:
        body = _python(text, name) if path.suffix == ".py" else _cuda(text, name)
    if not body:
        raise LookupError(f"{file} has no {f'function {name}' if name else 'code behind a docstring'}")
    return f'```{LANGUAGES[path.suffix]} title="{file}"\n{body}\n```'


def _python(text: str, name: str) -> str | None:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
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
    return {(r["op"], current(r["op"], r["backend"], r["when"]), r["shape"], r["dtype"], r["pass"]): r for r in rows()}


#: What a marker of a row shows.
SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "us": lambda row: microseconds(row["us"]),
    "host": lambda row: microseconds(row["host_us"]),
    "compile": lambda row: f"{row['compile_s']:.2g} s",
    "peak": lambda row: f"{row['peak_mib']:,.0f} MiB",
    "share": lambda row: f"{row['of_ceiling']:.2f}",
}


def _row(op: str, rung: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> dict[str, Any]:
    row = _rows().get((op, rung, shape, dtype, pass_))
    if row is None:
        raise LookupError(f"no row of {op} {rung} {shape!r} {dtype} {pass_} in {ROWS.name}")
    return row


def _call(op: str, rung: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> str:
    return f"{op} {rung}, {shape}, {dtype}, {pass_}"


def _where(row: dict[str, Any]) -> str:
    return f"{row['gpu']}, commit {row['commit'][:12]}"


def _measured(text: str, row: dict[str, Any]) -> str:
    return f'<span title="{_where(row)}">{text}</span>'


def measured(kind: str, op: str, rung: str, *call: str) -> str:
    """What a row says: a time, or a share of the ceiling."""
    if kind.endswith("?") and not any(key[:2] == (op, rung) for key in _rows()):
        return UNMEASURED
    row = _row(op, rung, *call)
    return _measured(SHOWN[kind.rstrip("?")](row), row)


def ratio(op: str, rung: str, other: str, *call: str) -> str:
    """The time of `other` over that of `rung`, to three digits."""
    row = _row(op, rung, *call)
    return _measured(f"{_row(op, other, *call)['us'] / row['us']:.3g}", row)


#: Rows of a ceiling, their field and dtype, its unit, and how many of the field's units that is.
CEILINGS = {
    "copy": (("ceiling.copy", "gbs", None), "TB/s", 1e3),
    "tensor": (("ceiling.tensor", "tflops", "bfloat16"), "TFLOP/s", 1.0),
    "l2": (("ceiling.l2", "gbs", None), "TB/s", 1e3),
}


def ceiling(name: str) -> str:
    """A measured ceiling, as plain text: it may stand in a title."""
    which, unit, size = CEILINGS[name]
    return f"{best_ceiling(*which) / size:.3g} {unit}"


def _a_second(name: str) -> float:
    """A measured ceiling in bytes or operations a second."""
    which, _, size = CEILINGS[name]
    return best_ceiling(*which) / size * 1e12  # all units are of 10^12


def least(name: str, *factors: str) -> str:
    """The time at a measured ceiling of as many bytes or operations as the numbers' product."""
    return microseconds(1e6 * math.prod(map(float, factors)) / _a_second(name))


def part(name: str, number: str, *call: str) -> str:
    """The time at a measured ceiling of as many bytes or operations, as a share of a row's time."""
    row = _row(*call)
    return _measured(f"{100 * 1e6 * float(number) / _a_second(name) / row['us']:.2g} %", row)


def machine(*call: str) -> str:
    """The GPU and the commit of a row, and those of its operation's counters, as text: a phone shows no tooltip."""
    row = _row(*call)
    return f"{_where(row)}; counters: {climb_counters.origin(row['op'], ROWS, row['pass'])}"


def predict(kind: str, *arguments: str) -> str:
    """The answer to a prediction: its formula, what that comes to, and what was measured."""
    *call, last = arguments
    if kind not in ASKED or not last.startswith("by="):
        raise ValueError(f'predict takes {", ".join(ASKED)}, and at its end by="FORMULA"')
    formula = last.removeprefix("by=")
    expected = predictions.value(formula, {name: _a_second(name) for name in CEILINGS})
    shown = re.sub(r"\b(?:" + "|".join(CEILINGS) + r")\b", lambda found: ceiling(found[0]), formula)
    return ASKED[kind](shown, expected, *call)


def _predict_time(formula: str, expected: float, *call: str) -> str:
    row = _row(*call)
    measured = row["us"], _call(*call), _where(row)
    return predictions.answer(formula, 1e6 * expected, "µs", measured, microseconds)


def _predict_ratio(formula: str, expected: float, op: str, rung: str, other: str, *call: str) -> str:
    row = _row(op, rung, *call)
    measured = _row(op, other, *call)["us"] / row["us"], f"{_call(op, rung, *call)} against {other}", _where(row)
    return predictions.answer(formula, expected, "times", measured, "{:.3g} times".format)


def _predict_counter(formula: str, expected: float, op: str, rung: str, name: str, *call: str) -> str:
    found = counted(op, rung, name, *call)
    if not isinstance(found, int | float) or not found:
        raise LookupError(f"{name} of {op} {rung} is {found}: nothing to predict")
    gpu = _counted_on(op, rung, *call) or _row(op, rung, *call)["gpu"]
    measured = float(found), f"{name}, {_call(op, rung, *call)}", gpu
    return predictions.answer(formula, expected, _COLUMN[name][2], measured, _COLUMN[name][1].format)


#: What a reader may be asked for.
ASKED: dict[str, Callable[..., str]] = {"us": _predict_time, "ratio": _predict_ratio, "counter": _predict_counter}


def table(name: str) -> str:
    """A table that is generated: from a list in the package, or from rows of a file of its own."""
    return {"failures": _failures, "dynamic": _dynamic}[name]()


def _failures() -> str:
    return markdown.grid(
        ["cause", "way out"], [[known.cause, known.remedy] for known in failures.KNOWN], [False, False]
    )


def _dynamic() -> str:
    return dynamic.write({ROWS: ()}) or f"*No rows yet: `{dynamic.COMMAND}` writes them.*"


@functools.cache
def _counters(op: str) -> dict[tuple[str, ...], Any]:
    return climb_counters.of_operation(op, ROWS)


#: By heading: a counter's value, how it is written, and the unit of a number that stands for it.
_COLUMN: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    name: (value, form, "%" if form.endswith(" %") else "times" if "/" in name else name)
    for name, value, form in climb_counters.COLUMNS
}


def counted(op: str, rung: str, name: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> Any:
    """A hardware counter's value."""
    if name not in _COLUMN:
        raise LookupError(f"no counter {name!r}; known are {', '.join(_COLUMN)}")
    value = _COLUMN[name][0](_counters(op).get((op, rung, pass_, dtype, shape), {}))
    if value is None:
        raise LookupError(f"no {name} of {op} {rung} {shape!r} {dtype} {pass_} was counted")
    return value


def _counted_on(op: str, rung: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> str | None:
    """The GPU of a call's counters; None where it is that of the rows."""
    return _counters(op).get((op, rung, pass_, dtype, shape), {}).get(climb_counters.GPU)


def counter(kind: str, op: str, rung: str, name: str, *call: str) -> str:
    """A hardware counter as the climb writes it."""
    if kind.endswith("?") and not any(key[:2] == (op, rung) for key in _counters(op)):
        return UNMEASURED
    value = counted(op, rung, name, *call)
    return f'<span title="{_counted_on(op, rung, *call) or "of the GPU of the times"}">{_COLUMN[name][1].format(value)}</span>'


def kernels(op: str, rung: str, shape: str, dtype: str = "bfloat16", pass_: str = "forward") -> str:
    """A table of the kernels of a call, in the order in which they ran."""
    call = (op, rung, pass_, dtype, shape)
    for path in counters.files_beside(ROWS):
        for row in counters.read(path):
            if tuple(row[name] for name in counters.KEY if name != "gpu") == call:
                lines = [
                    [
                        f"`{kernel['short']}`",
                        microseconds(kernel["us"]),
                        f"{kernel['dram_bytes'] / 1e6:,.0f} MB",
                        f"{kernel['dram_bytes'] / kernel['us'] / 1e6:.2f} TB/s",
                    ]
                    for kernel in row["kernels"]
                ]
                table = markdown.grid(["kernel", "time", "DRAM bytes", "rate"], lines, [False, True, True, True])
                return f"{html.unescape(table)}\n\nCounted on {_where(row)}."  # code takes no entities
    raise LookupError(f"no kernels of {_call(op, rung, shape, dtype, pass_)} were counted")


#: Markers whose arguments a function of their own takes.
MADE: dict[str, Callable[..., str]] = {
    "figure": figure,
    "table": table,
    "kernels": kernels,
    "ratio": ratio,
    "ceiling": ceiling,
    "least": least,
    "part": part,
    "machine": machine,
    "predict": predict,
}
