"""The heads of the rungs' files: each rung's idea, what it predicts, and what limits it now.

Three forms are read, the first of them wins:

- a head, ``softmax, rung 3 of 6: shared``, followed by the fields ``Idea``, ``Predicts``, ``Limit now`` and ``Next``;
- a table in a CUDA source, ``variant | the one idea it adds | what limits it now``, by columns of text;
- a docstring: a list ``rung  idea`` of the operation's module, else the first sentence of the rung's own module or
  function, else a list of the level's package.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from kernel_ladder import OPS
from kernel_ladder.table import LEVELS, variants

ROOT = Path(__file__).resolve().parents[2]

#: Folders of the levels' sources. The Python package of the CUDA level holds no kernels.
SOURCES = {level: package if level != "cuda" else "csrc" for level, package in LEVELS.items()}
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cpp")
NORMS = ("layer_norm", "rms_norm", "add_rms_norm")
#: The folder of an operation that has none of its own, where another's kernels serve it.
SHARED = {
    "linear": "matmul",
    "attention_varlen": "attention",
    "attention_paged": "attention",
    "bias_dropout_add_layer_norm": "norm",
    **dict.fromkeys(NORMS, "norm"),
}

_HEAD = re.compile(r'^(?:""")?(?P<ops>[a-z_][a-z0-9_, /]*?),? rung (?P<place>\d+ of \d+): `?(?P<rung>[\w.]+)`?\.?\s*$')
_FIELD = re.compile(r"^(?P<name>Idea|Predicts|Limit now|Limit|Next)\b:?\s+(?P<text>.*)$")
_LEADER = re.compile(r"^(?:///?|\*|#:?)(?: |$)")
_CELLS = re.compile(r"^//   (?P<rung>\w+) +(?P<idea>\S.*?) {2,}(?P<limit>\S.*)$")
_SCHEMA = re.compile(r'KL_OP\(\s*"(\w+)\.(\w+)\(|KL_NORM\((\w+),\s*(\w+)\b')


@dataclass(frozen=True)
class Head:
    """What a rung's file says of it."""

    file: Path
    idea: str
    limit: str = ""
    place: str = ""  # "3 of 6", where the head says so
    predicts: str = ""
    next: str = ""


def ladder(op: str, level: str) -> list[str]:
    """The rungs of an operation at a level, in reading order, without the level's name.

    CUDA's are read from the schema table in ``csrc/core/bindings.cpp``, so that no build of the extension is asked.
    """
    if level != "cuda":
        return [v.name.partition(".")[2] for v in variants(op, level)]
    schemas = ROOT / "csrc" / "core" / "bindings.cpp"
    if not schemas.exists():  # a package installed without its sources
        return []
    text = schemas.read_text(encoding="utf-8")
    found = ((m[1] or m[3], m[2] or m[4]) for m in _SCHEMA.finditer(text))
    return [rung for name, rung in found if name == op]


def folder_of(op: str, level: str) -> Path:
    """Where an operation's rungs stand: its own folder, one that it shares, or the level's."""
    root = ROOT / SOURCES[level]
    for name in (op, SHARED.get(op, op)):
        if (root / name).is_dir():
            return root / name
    return root


def heads(op: str, level: str) -> dict[str, Head]:
    """The head of every rung that has one, by rung."""
    rungs = ladder(op, level)
    found: dict[str, Head] = {}
    for file in _files(op, level):
        text = file.read_text(encoding="utf-8")
        for ops, rung, head in _heads_in(file, text):
            if op in ops and rung in rungs:
                found[rung] = head
    for read in (_of_tables, _of_docstrings):
        for rung, head in read(op, level, rungs).items():
            found.setdefault(rung, head)
    return found


def _files(op: str, level: str) -> list[Path]:
    """The sources that may describe an operation's rungs."""
    root, folder = ROOT / SOURCES[level], folder_of(op, level)
    inside = folder.rglob("*") if folder != root else ()
    return sorted({*root.glob(f"{op}.*"), *inside} & {p for s in SUFFIXES for p in root.rglob(f"*{s}")})


def _heads_in(file: Path, text: str) -> Iterator[tuple[tuple[str, ...], str, Head]]:
    """The operations, the rung and the head of each ``rung n of m`` in a file."""
    lines = [_LEADER.sub("", line.strip("\n")) for line in text.splitlines()]
    for number, line in enumerate(lines):
        if title := _HEAD.match(line.strip()):
            # Titles that follow one another, of operations whose ladders differ in length, share their fields.
            fields = _fields([*dropwhile(lambda x: _HEAD.match(x.strip()), lines[number + 1 :])])
            names = set(re.findall(r"\w+", title["ops"]))
            ops = (*names, *(NORMS if names & {"norm", "norms"} else ()))
            limit = fields.get("Limit now", fields.get("Limit", ""))
            head = Head(
                file, fields.get("Idea", ""), limit, title["place"], fields.get("Predicts", ""), fields.get("Next", "")
            )
            yield ops, title["rung"].rpartition(".")[2], head


def _fields(lines: Sequence[str]) -> dict[str, str]:
    """The fields that follow a head's title; a line that is neither a field nor indented ends them."""
    found: dict[str, str] = {}
    name = ""
    # Titles that follow each other, of operations that share a file, share their fields.
    for line in itertools.dropwhile(lambda line: _HEAD.match(line.strip()), lines):
        text = line.rstrip().removesuffix('"""')
        if field := _FIELD.match(text):
            name, found[field["name"]] = field["name"], field["text"].strip()
        elif name and text.startswith("  ") and text.strip():
            found[name] += " " + text.strip()
        elif name or (text.strip() and _HEAD.match(text)):
            break
    return found


def _of_tables(op: str, level: str, rungs: Sequence[str]) -> dict[str, Head]:
    """Rows of the tables at the head of CUDA sources."""
    found: dict[str, Head] = {}
    for file in _files(op, level):
        if file.suffix not in (".cu", ".cuh") or op not in _ops_of(file):
            continue
        starts: tuple[int, int] | None = None
        cells: dict[str, list[str]] = {}
        rung = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if "the one idea it adds" in line:
                starts = line.index("the one idea"), line.index("what limits")
            elif starts and line.startswith("//   "):
                name = line[5 : starts[0]].strip()
                rung = name or rung
                cells.setdefault(rung, []).append(line)
            elif starts:
                break
            elif (row := _CELLS.match(line)) and row["rung"] in rungs:
                found.setdefault(row["rung"], Head(_own(op, file, row["rung"]), row["idea"], row["limit"]))
        for name, lines in cells.items() if starts else ():
            assert starts is not None
            idea = " ".join(line[starts[0] : starts[1]].strip() for line in lines).strip()
            limit = " ".join(line[starts[1] :].strip() for line in lines).strip()
            if name in rungs:
                found[name] = Head(_own(op, file, name), idea, limit)
    return found


def _ops_of(file: Path) -> tuple[str, ...]:
    """The operations that a CUDA source is about, by its name, else by its folder's."""
    if file.stem in OPS:
        return (file.stem,)
    of_attention = next((op for op in ("varlen", "paged") if file.stem.startswith(op)), None)
    return (f"attention_{of_attention}",) if of_attention else (file.parent.name,)


def _own(op: str, file: Path, rung: str) -> Path:
    """The rung's own file beside `file`, where there is one."""
    own = file.with_name(f"{rung}.cu")
    return own if file.parent.name == op and own.exists() else file


def _of_docstrings(op: str, level: str, rungs: Sequence[str]) -> dict[str, Head]:
    """What Python's docstrings say: lists of rungs, then a rung's own module or function."""
    root, folder = ROOT / SOURCES[level], folder_of(op, level)
    is_own = folder.name in (op, *(("norm",) if op in NORMS else ()))
    modules = [root / f"{op}.py", *((folder / "__init__.py", folder / "rows.py") if is_own else ())]
    modules = [file for file in modules if file.exists()]
    found: dict[str, Head] = {}

    def add(rung: str, file: Path, idea: str) -> None:
        if rung in rungs and idea:
            own = folder / f"{rung}.py"
            found.setdefault(rung, Head(own if is_own and own.exists() else file, idea))

    for file in modules:
        for rung, idea in _listed(_docstring(file)).items():
            add(rung, file, idea)
    for rung in rungs:
        if is_own and (own := folder / f"{rung}.py").exists():
            add(rung, own, _sentence(_docstring(own)))
    for file in modules if level == "torch" else ():
        for rung, text in _functions(file).items():
            add(rung, file, _sentence(text))
    package = root / "__init__.py"
    shared = _listed(_docstring(package)) if package.exists() else {}  # modes that every operation of the level has
    missing = [rung for rung in rungs if rung not in found]
    if modules and missing and (len(missing) == 1 or set(missing[1:]) <= set(shared)):
        add(missing[0], modules[-1], _sentence(_docstring(modules[-1])))
    for rung in missing:
        if modules and rung in shared:
            add(rung, modules[-1], shared[rung])
    return found


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _functions(file: Path) -> dict[str, str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}


def _listed(text: str) -> dict[str, str]:
    """The items ``rung  idea`` of a docstring; lines that are indented go on with the item before."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if item := re.match(r"^(\w+) {2,}(\S.*)$", line):
            name, found[item[1]] = item[1], item[2]
        elif name and line.startswith("   "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def _sentence(text: str) -> str:
    """The first sentence of a docstring, without the name of the operation before its colon, in Markdown."""
    first = " ".join(text.partition("\n\n")[0].split()).replace("``", "`")
    first = re.sub(r":\w+:`", "`", first)
    before, colon, after = first.partition(": ")
    if colon and re.search(r"\b(in Triton|in Gluon|compiled)$", before):
        first = after
    return (re.split(r"(?<=\.) ", first)[0].rstrip(".")) if first else ""
