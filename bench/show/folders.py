"""``python -m bench readme --folders``: a README.md for every folder of rungs.

A page lists the ladders of its folder in order, one line per rung. It tells the idea, what limits the rung now, and the
measured gain over the rung before. Ideas and limits come from the heads of the files, gains from committed rows of one
GPU and one commit.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import kernel_ladder
from bench.measure.environment import ROOT
from bench.rows.store import Row
from bench.show import climb, markdown
from bench.show.headline import headline
from kernel_ladder.inspection import heads
from kernel_ladder.spec import PASSES
from kernel_ladder.table import LEVELS

NOTE = "<!-- `python -m bench readme --folders` writes this page from the files' heads and the committed rows. -->"
#: What a level's root says of itself.
TITLES = {
    "torch": "the formulas, and PyTorch's own functions",
    "compile": "what a user would write, and the formulas, under torch.compile",
    "xla": "the formulas in JAX, what JAX offers fused, and kernels in Pallas",
    "triton": "kernels in Triton and Gluon",
    "cuda": "kernels in CUDA C++",
}
#: The folder of the CUDA level's Python functions, which has no kernels.
FACE = LEVELS["cuda"]


def pages(found: Sequence[Row]) -> dict[Path, str]:
    """Every page with its text, from the rows of one machine."""
    written: dict[Path, str] = {}
    for level in LEVELS:
        folders: dict[Path, list[str]] = {ROOT / heads.SOURCES[level]: []}
        for op in kernel_ladder.OPS:
            if heads.ladder(op, level):
                folders.setdefault(heads.folder_of(op, level), []).append(op)
        for folder, ops in folders.items():
            written[folder / "README.md"] = _page(folder, level, ops, folders, found)
    written[ROOT / FACE / "README.md"] = _face()
    return written


def abandoned(written: Mapping[Path, str]) -> list[Path]:
    """Pages that an earlier run wrote into folders that hold no ladder any more."""
    roots = {ROOT / folder for folder in heads.SOURCES.values()}
    found = sorted(page for root in roots for page in root.rglob("README.md") if page not in written)
    return [page for page in found if NOTE in page.read_text(encoding="utf-8")]


def faults() -> list[str]:
    """Rungs without a head, and heads whose place on the ladder is not theirs."""
    said = []
    for level in ("triton", "cuda"):
        for op in kernel_ladder.OPS:
            rungs, known = heads.ladder(op, level), heads.heads(op, level)
            for number, rung in enumerate(rungs, 1):
                head, place = known.get(rung), f"{number} of {len(rungs)}"
                if head is None:
                    said.append(f"{op} {level}.{rung} has no head with an idea")
                elif head.place not in ("", place):
                    where = head.file.relative_to(ROOT)
                    said.append(f"{where}: {op} {level}.{rung} is rung {place}, its head says {head.place}")
    return said


def _page(folder: Path, level: str, ops: Sequence[str], folders: Mapping[Path, list[str]], found: Sequence[Row]) -> str:
    root = ROOT / heads.SOURCES[level]
    parts = [f"# {folder.relative_to(ROOT)}", NOTE]
    if folder == root:
        parts.append(f"The {level} level: {TITLES[level]}. Each ladder is in reading order, one idea a rung.")
        links = [
            f"- {', '.join(names)}: [{other.name}/]({other.name}/README.md)"
            for other, names in folders.items()
            if other != root
        ]
        if links:
            parts.append("\n".join(links))
    else:
        parts.append(f"Rungs of the {level} level in reading order, one idea a rung.")
    parts += [f"## {op}\n\n{_ladder(op, level, folder, found)}" for op in ops]
    return "\n\n".join(parts) + "\n"


def _face() -> str:
    """The page of the CUDA level's Python functions: where the kernels of each operation are described."""
    lines = []
    for op in kernel_ladder.OPS:
        rungs = heads.ladder(op, "cuda")
        page = heads.folder_of(op, "cuda") / "README.md"
        link = f"[{page.parent.relative_to(ROOT)}]({os.path.relpath(page, ROOT / FACE)}#{op})"
        lines.append([f"[{op}]({op}.py)", ", ".join(f"`{rung}`" for rung in rungs), link])
    table = markdown.grid(["operation", "rungs in order", "kernels"], lines, [False] * 3)
    intro = (
        "The Python functions of the cuda level: they check a call, launch the operators of `csrc`, and register them."
    )
    return "\n\n".join([f"# {FACE}", NOTE, intro, table]) + "\n"


def _ladder(op: str, level: str, folder: Path, found: Sequence[Row]) -> str:
    """The table of one ladder, and what its gains were measured with."""
    rungs, known = heads.ladder(op, level), heads.heads(op, level)
    gained, notes = {}, []
    for pass_ in PASSES:
        cells, note = _gains(op, level, pass_, rungs, found)
        if cells:
            gained[pass_] = cells
            notes.append(note)
    limits = any(head.limit for head in known.values())
    header = ["#", "rung", "idea", *(["limit now"] if limits else []), *(f"{p}, × rung before" for p in gained)]
    lines = []
    for number, rung in enumerate(rungs, 1):
        head = known.get(rung)
        name = f"[`{level}.{rung}`]({os.path.relpath(head.file, folder)})" if head else f"`{level}.{rung}`"
        texts = [_capital(head.idea) if head else "", *([_capital(head.limit) if head else ""] if limits else [])]
        lines.append([str(number), name, *texts, *(cells.get(rung, "") for cells in gained.values())])
    table = markdown.grid(header, lines, [True, *[False] * (len(header) - 1 - len(gained)), *[True] * len(gained)])
    return "\n\n".join([table, *(["\\\n".join(notes)] if notes else [])])


def _capital(text: str) -> str:
    """A cell's text: a capital first, save for a name in code, and no full stop."""
    text = text.strip().rstrip(".")
    first = text.split(" ")[0]
    return text if not first.isalpha() or not first.islower() else text[:1].upper() + text[1:]


def _gains(op: str, level: str, pass_: str, rungs: Sequence[str], found: Sequence[Row]) -> tuple[dict[str, str], str]:
    """By rung the gain over the timed rung before it, and the sentence that says how it was measured.

    All rows are of one commit: the one that timed most rungs at the headline shape, the newest among equals.
    """
    mine = [row for row in found if (row.op, row.pass_) == (op, pass_) and row.us is not None and not row.interpreted]
    standing = headline(op, mine)
    steps = [row for row in mine if row.level == level and (row.shape, row.dtype) == standing]
    steps = [row for row in steps if row.backend.partition(".")[2] in rungs]
    if not steps:
        return {}, ""
    counts = Counter(row.commit for row in steps)
    newest = {row.commit: row.when for row in sorted(steps, key=lambda row: row.when)}
    commit = max(counts, key=lambda each: (counts[each], newest[each]))
    order = {f"{level}.{rung}": number for number, rung in enumerate(rungs)}
    steps = sorted((row for row in steps if row.commit == commit), key=lambda row: order[row.backend])
    cells = {}
    for row in steps:
        before, gain = climb.gains(steps).get(row.key, (None, None))
        if before is not None:
            next_to = order[row.backend] - order[before.backend] == 1
            over = "" if next_to else f" over `{before.backend.partition('.')[2]}`"
            cells[row.backend.partition(".")[2]] = f"{gain.value:.3g}{over}"
    changed = " with changes" if any(row.dirty for row in steps) else ""
    shape, dtype = steps[0].shape, steps[0].dtype
    note = f"{pass_.capitalize()}: {shape}, {dtype}, {steps[0].gpu}, commit `{(commit or 'unknown')[:12]}`{changed}."
    return cells, note
