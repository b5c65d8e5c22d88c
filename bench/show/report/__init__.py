"""``python -m bench report``: rows as one HTML page that needs no network and no server.

The page consists of the files beside this one: ``page.html``, ``style.css``, the scripts in the order of `SCRIPTS`, and
Plotly, which draws the charts of ``figures.py``. Rows go in as compressed JSON: no string of theirs is read as markup.
A policy in the page allows these scripts alone, by their hashes, and no request. The same rows make the same page.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from bench.measure import environment
from bench.rows import store
from bench.rows.ratio import Estimate, baseline_of
from bench.rows.store import Row, latest, to_json
from bench.show import headlines
from bench.show.climb import by_call, gains
from bench.show.headline import headline_shape
from bench.show.readme import default_results
from bench.show.report.figures import figures
from bench.show.roofline import CAPTION, CEILING, intensity, operations, roofline
from bench.show.table import fastest, microseconds, rate, speeds
from kernel_ladder.errors import UnavailableError

HERE = Path(__file__).resolve().parent
#: A script comes after those that it uses.
SCRIPTS = ("format.js", "dom.js", "state.js", "details.js", "charts.js", "table.js", "sections.js", "main.js")
STYLE_OF_MAPS = re.compile(r'document\.getElementById\("([0-9a-f]{64})"\)')


def page(found: Iterable[Row]) -> str:
    """The page over rows, the newest of each key."""
    found = latest(found)
    style = (HERE / "style.css").read_text(encoding="utf-8")
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    library = _plotly()
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; style-src {_hash(style)} {_hash('')}; "
        f"script-src {_hash(library)} {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        style=style,
        # Plotly adds style sheets of its own for maps, which the policy refuses, unless an element has their name.
        reserved="".join(f'<style id="{name}"></style>' for name in sorted(set(STYLE_OF_MAPS.findall(library)))),
        script=script,
        packed=_packed({"library": library, "data": data(found)}),
        fallback=_fallback(found),
        glance=_glance(found),
    )


def _plotly() -> str:
    """Plotly's JavaScript library, from the Python package that carries it.

    Raises:
        UnavailableError: the package is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnavailableError(f"the report needs plotly to draw its charts ({error}): `pip install plotly`") from None
    return get_plotlyjs()


def data(found: Sequence[Row]) -> dict[str, Any]:
    """What the scripts show: rows with what follows from them, figures, the shape that stands for each operation."""
    # The scripts choose by the machine's name, and so must have one.
    found = [row if row.gpu else dataclasses.replace(row, gpu="unknown machine") for row in found]
    calls = by_call(operations(found))
    measured = [row for steps in calls for row in steps]
    gained = gains(measured)
    ranked = {key: speed for steps in calls for key, speed in _ranked(steps).items()}
    headlines = _headlines(measured)
    limits = {
        (row.gpu, row.dtype): roofline((other for other in found if other.gpu == row.gpu), row.dtype)
        for row in {(row.gpu, row.dtype): row for row in measured}.values()
    }
    return {
        "rows": [_fields(row) | ranked[row.key] | _gain(*gained.get(row.key, (None, None))) for row in measured],
        "ceilings": [_fields(row) for row in found if row.op == CEILING],
        "figures": figures(measured, headlines, limits, gained),
        "headlines": headlines,
        "baselines": {op: baseline_of(op) for op in dict.fromkeys(row.op for row in measured)},
        "caption": CAPTION,
    }


def _fields(row: Row) -> dict[str, Any]:
    fields = {name: value for name, value in json.loads(to_json(row)).items() if value is not None}
    return fields | {"least_us": row.least_us, "bytes_bound": row.bytes_bound, "intensity": intensity(row)}


def _ranked(steps: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """By the key of each row of a call: what it is compared by, and whether it is one of the fastest."""
    known, best = speeds(steps), fastest(steps)
    return {
        row.key: {"speed": known[row.backend][0], "fastest": row.backend in best} if row.backend in known else {}
        for row in steps
    }


def _gain(before: Row | None, gain: Estimate | None) -> dict[str, Any]:
    """How many times as fast as the step before, as the climbs of KERNEL_LOG.md have it."""
    if before is None or gain is None:
        return {}
    return {"step_before": before.backend, "gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}


def _headlines(measured: Sequence[Row]) -> list[dict[str, str | None]]:
    groups: dict[tuple[str | None, ...], list[Row]] = {}
    for row in measured:
        groups.setdefault((row.gpu, row.op, row.dtype, row.pass_), []).append(row)
    return [
        {"gpu": gpu, "op": op, "dtype": dtype, "pass": pass_, "shape": headline_shape(op, members)}
        for (gpu, op, dtype, pass_), members in groups.items()
    ]


def _packed(value: Any) -> str:
    """JSON, compressed and in base64, which no string of a row can leave; the same value gives the same text."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _glance(found: Sequence[Row]) -> str:
    """The README's table of each machine, which needs no scripts."""
    tables = []
    for gpu in dict.fromkeys(row.gpu or "unknown machine" for row in operations(found)):
        rows = headlines.lines([row for row in found if (row.gpu or "unknown machine") == gpu])
        if not rows:
            continue
        heading = "".join(f"<th>{html.escape(title)}</th>" for title in headlines.HEADER)
        lines = "\n".join(
            f"<tr><td><code>{html.escape(op).replace('_', '_<wbr>')}</code> <small>{html.escape(shape)}</small></td>"
            + "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in cells)
            + "</tr>"
            for op, shape, *cells in rows
        )
        tables.append(
            f'<h3>{html.escape(gpu)}</h3>\n<div class="scroll" tabindex="0" role="region" aria-label="The best of each '
            f'operation"><table>\n<thead><tr>{heading}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>\n'
        )
    return "".join(tables)


def _fallback(found: Sequence[Row]) -> str:
    """A plain table, for where scripts do not run."""
    lines = []
    for row in operations(found):
        note = f"wrong: {row.wrong}" if row.wrong else row.unsupported or ""
        timed = [microseconds(row.us) if row.us is not None else "", _rate(row)]
        speedup = f"{row.speedup:.2f}" if row.speedup is not None else ""
        cells = [row.op, row.pass_, row.dtype, row.shape, row.backend, *timed, speedup, note, row.gpu or ""]
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return "\n".join(lines)


def _rate(row: Row) -> str:
    known = row.gbs if row.bytes_bound else row.tflops
    return rate(row) if row.us is not None and known is not None else ""


def main(argv: Sequence[str]) -> int:
    """Returns 0.

    Raises:
        rows.ResultsError: a file is missing, cannot be read or holds other lines than rows; or none can be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench report", description="Write the rows as one HTML page that needs no network."
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="rows (default: this machine's in bench-results; before it has any, the committed ones in bench/results); "
        "of two rows that measure the same on the same machine the newer counts",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: report.html)"
    )
    args = parser.parse_args(argv)
    files, own = args.files, environment.results_file()
    if not files and own.exists():
        files = [own]
    elif not files:
        files = default_results()
        if not files:
            raise store.ResultsError(f"{own} does not exist and bench/results is empty; `python -m bench` writes rows")
        print(f"This machine has no rows yet ({own} does not exist): the page shows the committed rows of others")
    text = page([row for path in files for row in store.read_given(path)])
    try:
        store.replace(args.output, text)
    except OSError as error:
        raise store.ResultsError(f"--output: cannot write {args.output}: {error.strerror}") from None
    print(f"wrote {args.output}")
    return 0
