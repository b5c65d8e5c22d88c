"""Refuse home-made words in the source: each has a term of the field, which a reader can search for.

    python _build/retired_words.py            every tracked source file
    python _build/retired_words.py FILE…      these files alone

The exit code is 1 where a word is found. Every finding is one line, ``file:line: word: use …``.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cpp")
#: Folders whose identifiers are names of kernels, of their parameters and of their launches.
KERNELS = ("csrc/", "triton_impl/", "cuda_impl/")
#: These two files must name the words.
EXEMPT = ("_build/retired_words.py", "tests/packaging/test_retired_words.py")

REDUCE_SMEM = "ReduceSmem, or ClusterReduceSmem across a cluster"
PARTITION = "RowPartition, or a name for the rows of one block"
GEOMETRY = "warps_per_row and rows_per_block"
PDL = "pdl: USE_PDL, launch_pdl, griddepcontrol_wait"
POLICY = "the cache policy: EVICT_LAST, EVICTION_OF_SINGLE_USE"
UNSUPPORTED = "unsupported, or unavailable_reason"
PINGPONG = "ping-pong named barriers, mainloop"

#: Refused in comments, strings and identifiers, alone or as a part of an identifier, in either case.
WORDS = {
    "letterbox": REDUCE_SMEM,
    "mailbox": REDUCE_SMEM,
    "staying": "persistent, or persistent cluster",
    "crew": GEOMETRY,
    "crews": GEOMETRY,
    "team": GEOMETRY,
    "teams": GEOMETRY,
    "manieth": "every n-th",
}

#: Refused as a whole identifier, in comments and strings too.
IDENTIFIERS = {
    "SlotMail": REDUCE_SMEM,
    "StayMail": REDUCE_SMEM,
    "RowShare": PARTITION,
    "ShortShare": PARTITION,
    "SlotShare": PARTITION,
    "StayRows": PARTITION,
    "own_slots": "smem stages, staging buffer",
    "begin_early": PDL,
    "launch_early": PDL,
    "is_early": PDL,
    "EARLY": PDL + "; PRELOAD_PARAMS for a preload",
    "ONCE": POLICY,
    "in_units": "assume_divisible",
    "units_of": "divisibility_of",
    "lay_down": "store_partial",
    "add_up": "fixup",
    "TileOrder": "tile rasterization, TileScheduler",
    "done_with": "release_stage",
    "issue_scores": "gemm_qk",
    "issue_output": "gemm_pv",
    "begin_turns": PINGPONG,
    "attend_in_turns": PINGPONG,
    "found_together": "merge_moments",
    "sum_shares": "sum_partials",
    "row_shares": "row_groups",
    "CENTRED": "IS_LAYERNORM",
    "turn_few_rows": "transpose_small_a",
    "undescribable": UNSUPPORTED,
    "too_long": UNSUPPORTED,
}

#: Refused as a whole identifier of the code of kernels. In prose they are English.
NAMES_OF_KERNELS = {
    "once": POLICY,
    "write_once": POLICY,
    "read_once": POLICY,
    "RESIDUAL": "HAS_RESIDUAL",
    "KEEP": "SAVE_STATS, or what is saved",
    "HEAD": "PILOT",
    "WIDE": "INT64_OFFSETS",
    "WHOLE": "VECTORIZED",
    "LONE": "ONE_ROW_PER_CTA",
    "HELD": "IN_REGISTERS",
    "Bare": "IdentityEpilogue",
    "Layer": "BiasActEpilogue",
    "Ring": "PipelineState",
    "Resident": "OccupancyCache",
    "refused": UNSUPPORTED,
    "realign": "pad_operands",
    "settle": "stabilize",
}

#: Refused as a part of an identifier of the code of kernels. In prose they are English.
PARTS_OF_KERNELS = {
    "early": PDL,
    "together": "unity build, or what is joined",
    "hide": "apply_mask",
    "turn": "row iteration, work tile",
    "turns": "row iterations, work tiles",
    "slots": "smem stages",
    "letters": REDUCE_SMEM,
}

_WORD = re.compile(r"[A-Za-z_]\w*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NOT_CODE = re.compile(r"""#pragma once|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)


class Finding(NamedTuple):
    """One retired word at one line."""

    file: str
    line: int
    word: str
    use: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word}: use {self.use}"


def _identifiers(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and name of every identifier of the code, without comments and strings."""
    if file.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
        return
    blank = _NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    yield from _words(blank)


def _words(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        for found in _WORD.finditer(line):
            yield number, found[0]


def _parts(name: str) -> Iterator[str]:
    """The parts of ``snake_case`` and ``CamelCase``, in lower case."""
    return (part.lower() for part in _PART.findall(name))


def check(file: str, text: str) -> list[Finding]:
    """The retired words of one file, whose name is relative to the root."""
    found = {}
    for line, name in _words(text):
        for part in _parts(name):
            if part in WORDS:
                found[line, part] = WORDS[part]
        if name in IDENTIFIERS:
            found[line, name] = IDENTIFIERS[name]
    if file.startswith(KERNELS):
        for line, name in _identifiers(file, text):
            if name in NAMES_OF_KERNELS:
                found[line, name] = NAMES_OF_KERNELS[name]
            elif name not in IDENTIFIERS:
                for part in _parts(name):
                    if part in PARTS_OF_KERNELS:
                        found[line, name] = PARTS_OF_KERNELS[part]
    return [Finding(file, line, word, use) for (line, word), use in sorted(found.items())]


def sources() -> list[str]:
    """Every tracked source file; without git, every one below the folders of the project."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names: Iterable[str] = done.stdout.splitlines()
    else:
        folders = ("_build", "bench", "compile_impl", "csrc", "cuda_impl", "kernel_ladder", "tests", "torch_ref")
        paths = (path for folder in (*folders, "triton_impl", "xla_impl") for path in (ROOT / folder).rglob("*"))
        names = (path.relative_to(ROOT).as_posix() for path in paths)
    return sorted(n for n in names if n.endswith(SUFFIXES) and n not in EXEMPT and (ROOT / n).is_file())


def report(
    check: Callable[[str, str], Iterable[object]], root: Path, doc: str, argv: list[str] | None, prog: str | None = None
) -> int:
    """Print what `check` finds in the files that `argv` names, or in all; return 1 where it finds something.

    `doc` begins with what the command does.
    """
    parser = argparse.ArgumentParser(prog=prog, description=doc.partition("\n")[0])
    parser.add_argument("file", nargs="*", help="files relative to the root (default: every tracked source file)")
    args = parser.parse_args(argv)
    found = [f for file in args.file or sources() for f in check(file, (root / file).read_text(encoding="utf-8"))]
    for finding in found:
        print(finding)
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where a retired word is found."""
    return report(check, ROOT, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
