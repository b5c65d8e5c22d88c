"""Refuse a page of ``docs/climb`` whose cards are not whole.

Every card, a heading of the second level with the name of a rung, has the same lines in the same order, at most 25 of
them; that of a compiler's rung lacks those that would say nothing. Its counters are there, those of a timed backward
pass too, or the line says why they are not. A verdict far off its prediction says why.

    python _build/cards.py            every page
    python _build/cards.py FILE…      these pages alone

The exit code is 1 where a page is refused. Every finding is one line, ``file:line: rung: what is wrong``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = ("Idea", "Diff", "Prediction", "Measured", "Counters", "Verdict", "Limits it now", "Try this")
LONGEST = 25
#: How the names of rungs begin whose kernels a compiler writes, and the lines that their cards have as well.
COMPILERS = ("compile.", "xla.")
ALWAYS = {"Idea", "Diff", "Measured", "Try this"}
HEADING = re.compile(r"^## (\w+\.\w+)$")
FIELD = re.compile(r"^- \*\*([^*]+)\*\*: *(.*)$")
#: A counter with its value, as `registers 32 → 64`; or the reason for having none.
COUNTERS = re.compile(r"\d.* · .*\d")
NONE = re.compile(r"^none committed yet: \w.{8,}")
#: A time of the backward pass; beside it stand that pass's counters, or the reason for having none.
TIMED_BACKWARD = re.compile(r"\bbackward \d")
OF_BACKWARD = re.compile(r" Backward: (?:[^:]*\d.* · .*\d|none committed yet: \w.{8,})")
#: A verdict that is off by a factor, and what follows it.
OFF = re.compile(r"^(\d+(?:\.\d+)?) × (?:slower|faster) than predicted\.\s*(.*)$")
#: A prediction off by more needs a sentence that says why.
FAR = 5.0


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, rung and what is wrong, of every fault of a page."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if HEADING.match(line)]
    if not starts:
        yield 1, "page", "has no card; `python -m bench readme` writes them"
    for start in starts:
        name = HEADING.match(lines[start])[1]
        end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith(("#", "<!--"))), len(lines))
        card = [line for line in lines[start:end] if line.strip()]
        if len(card) > LONGEST:
            yield start + 1, name, f"{len(card)} lines; at most {LONGEST}"
        found = [match for line in card[1:] if (match := FIELD.match(line))]
        names = [match[1] for match in found]
        wanted = [line for line in LINES if line in names] if name.startswith(COMPILERS) else list(LINES)
        if names != wanted or not ALWAYS <= set(names):
            yield start + 1, name, f"has the lines {', '.join(m[1] for m in found)}; wanted are {', '.join(LINES)}"
            continue
        for match in found:
            if not match[2]:
                yield start + 1, name, f"{match[1]} is empty"
        said = {match[1]: match[2] for match in found}
        off = OFF.match(said.get("Verdict", ""))
        if off and float(off[1]) > FAR and (not off[2] or off[2].startswith("Why is open")):
            yield start + 1, name, f"is {off[1]} × off its prediction and does not say why; `verdict` in predictions.toml"
        counters = said.get("Counters")
        if counters is None:
            continue
        if not COUNTERS.search(counters) and not NONE.match(counters):
            yield start + 1, name, "has no counters and does not say why: `none committed yet: …`"
        elif TIMED_BACKWARD.search(said["Measured"]) and not (
            NONE.match(counters) or OF_BACKWARD.search(counters)
        ):
            yield start + 1, name, "times its backward pass, has no counters of it and does not say why"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python _build/cards.py", description="Check the cards of docs/climb.")
    parser.add_argument("file", type=Path, nargs="*", help="pages (default: docs/climb/*.md)")
    pages = parser.parse_args(arguments).file or sorted((ROOT / "docs" / "climb").glob("*.md"))
    refused = False
    for page in pages:
        for line, name, fault in faults(page.read_text(encoding="utf-8")):
            refused = True
            print(f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}:{line}: {name}: {fault}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
