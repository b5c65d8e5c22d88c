"""``python -m kernel_ladder inspect``: inspect a rung, print what was found, or write it to a folder."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from kernel_ladder import table
from kernel_ladder.cli import side_by_side
from kernel_ladder.cli.columns import Column, LeftOut, Line, fit
from kernel_ladder.errors import BackendError, InspectError
from kernel_ladder.inspection import failures
from kernel_ladder.inspection.inspect import CODE, Code, Inspection, Kernel, Request, code_of, inspect, select, tensors
from kernel_ladder.spec import PASSES
from kernel_ladder.testing.cases import case_named
from kernel_ladder.testing.samples import empty_inputs

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
#: Pygments' names of these languages, and their file suffixes.
LEXERS = {
    "hlo": "text",
    "mlir": "text",
    "sass": "gas",
    "ptx": "gas",
    "ttgir": "llvm",
    "cuda": "cuda",
    "cpp": "cpp",
    "python": "python",
}
SUFFIXES = {
    "hlo": "hlo",
    "mlir": "mlir",
    "sass": "sass",
    "ptx": "ptx",
    "ttgir": "ttgir",
    "cuda": "cu",
    "cpp": "cpp",
    "python": "py",
}

#: What a kind of code is called in the help, where its name alone does not say it.
SHOWN = {
    "source": "the code as written, or as torch.compile wrote it",
    "hlo": "XLA's HLO, before and after its passes",
    "tpu": "the program lowered for a TPU, which is not run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help=f"operation: {', '.join(table.OPS)}")
    parser.add_argument(
        "--backend",
        required=True,
        metavar="NAME[,NAME]",
        help="a variant; or a level, for the variant that a call of --shape selects there (without --shape its "
        "default, or the most optimised one); several are set side by side first",
    )
    parser.add_argument(
        "--shape",
        metavar="CASE",
        help="a case of the sweep, or the like in other sizes (default: the first that fits); "
        "at the cuda level it needs a GPU, which alone tells what a call launches",
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (default: bfloat16)")
    parser.add_argument("--pass", dest="pass_", default="forward", metavar="PASS", help="forward or backward")
    parser.add_argument(
        "--arch", metavar="SM", help="sm_90a and the like (default: this machine's GPU, else the newest that is built)"
    )
    parser.add_argument("--kernel", metavar="PART", help="only kernels with this in their names")
    for kind in CODE:
        text = SHOWN.get(kind, f"the {kind.upper()}")
        parser.add_argument(f"--{kind}", action="store_true", help=f"show {text}")
    parser.add_argument(
        "--explain", action="store_true", help="where a compiler fails, say why and what to do instead of a traceback"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write each code and inspection.json there")


def _known(kind: str, given: str, known: list[str]) -> str:
    if given in known:
        return given
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InspectError(f"unknown `{kind}` {given!r}; {hint}Known are {', '.join(known)}")


def requests_of(chosen: argparse.Namespace) -> list[Request]:
    """The requests that the command line describes, one for each backend. Of several, each shows the code that it has.

    Raises:
        InspectError, BackendError: it names something that does not exist.
    """
    names = list(dict.fromkeys(name.strip() for name in chosen.backend.split(",")))
    if len(names) == 1:
        return [request_of(chosen, names[0])]
    requests = [request_of(chosen, name) for name in names]
    kinds = {level: set(code_of(level)) for level in dict.fromkeys(request.variant.level for request in requests)}
    if foreign := sorted(requests[0].code - set().union(*kinds.values())):
        raise InspectError(f"the levels {', '.join(kinds)} have no {', '.join(foreign)} to show")
    return [dataclasses.replace(each, code=each.code & kinds[each.variant.level]) for each in requests]


def request_of(chosen: argparse.Namespace, backend: str) -> Request:
    """The request for one backend.

    Raises:
        InspectError, BackendError: it names something that does not exist.
    """
    named = table.named(chosen.op, backend)
    if not named:
        reason = table.unavailable(chosen.op, backend.partition(".")[0]) or "it has no variant"
        raise InspectError(f"{chosen.op}: backend {backend!r} cannot be looked into: {reason}")
    dtype = DTYPES[_known("dtype", chosen.dtype, list(DTYPES))]
    case = None if chosen.shape is None else case_named(table.spec(chosen.op), chosen.shape)
    if case is not None:
        tensors(empty_inputs, case, dtype, torch.device("meta"))  # takes no memory
    code = frozenset(kind for kind in CODE if getattr(chosen, kind))
    pass_ = _known("pass", chosen.pass_, list(PASSES))
    return select(named, Request(named[0], case, dtype, pass_, chosen.arch, code, chosen.kernel))


def run(chosen: argparse.Namespace, console: Console) -> int:
    """Returns the exit code: 0, or 2 if the request cannot be met."""
    try:
        requests = requests_of(chosen)
        folder = chosen.output
        if folder is not None and folder.exists() and not folder.is_dir():
            raise InspectError(f"`output` {folder} is a file; name a folder")
        every = [inspect(request) for request in requests]
        folders = {} if folder is None else {each.backend: folder for each in every}
        if len(every) > 1:
            folders = {backend: folder / backend for backend, folder in folders.items()}
        written = [write(folders[each.backend], each) if folders else [] for each in every]
    except (InspectError, BackendError) as error:
        print(f"python -m kernel_ladder inspect: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if not chosen.explain:
            raise
        for line in failures.in_words(error):
            print(f"python -m kernel_ladder inspect: {line}", file=sys.stderr)
        return 2
    if chosen.json:
        found = [each.to_json() for each in every]
        print(json.dumps(found if len(found) > 1 else found[0], indent=1))
        return 0
    if len(every) > 1:
        side_by_side.show(console, every)
    for each, files in zip(every, written, strict=True):
        if len(every) > 1:
            console.print()
        show(console, each)
        for path in files:
            console.print(f"wrote {path}", soft_wrap=True, markup=False)
        for code in [] if files else each.code:
            show_code(console, code)
    return 0


def write(folder: Path, found: Inspection) -> list[Path]:
    """Write each code to its own file, numbered in the order of the report, and the whole inspection as JSON."""
    files = {}
    for number, code in enumerate(found.code, 1):
        name = re.sub(r"\W+", "-", code.title).strip("-")[:80]
        files[folder / f"{number:02}-{name}.{SUFFIXES[code.language]}"] = code.text
    files[folder / "inspection.json"] = json.dumps(found.to_json(), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise InspectError(f"`output` {folder} cannot be written: {error.strerror}; name a folder") from None
    return list(files)


def show(console: Console, found: Inspection) -> None:
    what = [f"[bold]{found.op} {escape(found.backend)}[/]", found.pass_, found.dtype]
    what += [escape(part) for part in (found.shape, found.arch) if part]
    console.print(", ".join(what), soft_wrap=True)
    facts = _grid("")
    if found.source is not None:
        facts.add_row("source", escape(found.source))
    if found.chosen is not None:
        facts.add_row("chosen by", escape(found.chosen))
    if found.kernel_count is not None:
        library = f", {found.library_count} of a library" if found.library_count else ""
        facts.add_row("kernels", f"{found.kernel_count} generated{library}")
    if found.compile_s is not None:
        facts.add_row("first call", f"{found.compile_s:.2f} s, compilation included")
    if facts.row_count:
        console.print(facts)
    if found.kernels:
        console.print("\n[bold]kernels[/] (memory in bytes: local a thread, shared a block)")
        _show_kernels(console, found.kernels)
    if found.launches:
        console.print("\n[bold]launched by one call[/]")
        _show_kernels(console, found.launches)
    for choice in found.choices:
        _show_choice(console, choice)
    if found.operators:
        console.print("\n[bold]operators[/], in the order of their calls")
        for operator in found.operators:
            console.print(f"  {operator}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"\n{note}", markup=False, soft_wrap=True)


def _grid(header: str) -> Table:
    return Table(box=None, pad_edge=False, header_style="dim", show_header=bool(header), padding=(0, 2, 0, 0))


#: Column, how a kernel's value is formatted, and the column's priority for being left out.
COLUMNS: dict[str, tuple[Any, int]] = {
    "registers": (lambda k: k.registers, 1),
    "local": (lambda k: k.local, 3),
    "static shared": (lambda k: k.static_shared, 8),
    "dynamic shared": (lambda k: k.dynamic_shared, 4),
    "threads": (lambda k: k.threads, 5),
    "grid": (lambda k: None if k.grid is None else "×".join(str(n) for n in k.grid), 6),
    "blocks per SM": (lambda k: k.blocks_per_sm, 7),
    "occupancy": (lambda k: None if k.occupancy is None else f"{100 * k.occupancy:.3g} %", 2),
    "limited by": (lambda k: ", ".join(k.limited_by) or None, 9),
}


def _show_kernels(console: Console, kernels: list[Kernel]) -> None:
    """One row per kernel, without columns that hold no value; then each kernel's source line and notes."""
    columns = {name: each for name, each in COLUMNS.items() if any(each[0](k) is not None for k in kernels)}
    if columns:
        apart = any(k.static_shared is not None for k in kernels)
        heads = [Column("kernel", folds=True)]
        for name, (_, spare) in columns.items():
            shown = "shared" if name == "dynamic shared" and not apart else name
            heads.append(Column(shown, right=name != "limited by", spare=spare))
        lines = []
        for kernel in kernels:
            values = [value(kernel) for value, _ in columns.values()]
            lines.append(Line([kernel.name, *("?" if value is None else str(value) for value in values)]))
        left_out = LeftOut()
        console.print(fit(console, heads, lines, left_out))
        left_out.show(console, "; so does --json")
    remarks = [(k.name.partition("<")[0] if columns else k.name, k.source, k.note) for k in kernels]
    for name, source, note in dict.fromkeys(remarks) if columns else remarks:
        more = ", ".join(part for part in (source, note) if part)
        if more or not columns:
            console.print(f"  {name}" + (f": {more}" if more else ""), markup=False, soft_wrap=True)


def _show_choice(console: Console, choice: Any) -> None:
    console.print(f"\n[bold]autotuner of {escape(choice.kernel)}[/]")
    grid = _grid("configurations")
    grid.add_column("configuration", overflow="fold")
    grid.add_column("time", justify="right")
    for timed in choice.timed:
        chosen = timed.config == choice.config
        time = "does not fit" if timed.us is None else f"{timed.us:.1f} µs"
        grid.add_row(("→ " if chosen else "  ") + escape(timed.config), time, style="green" if chosen else None)
    if not choice.timed:
        grid.add_row("→ " + escape(choice.config), "the only one")
    console.print(grid)


def show_code(console: Console, code: Code) -> None:
    """Print code: highlighted in a terminal, unchanged in a pipe."""
    console.print(f"\n[bold]{escape(code.title)}[/] ({code.language})", soft_wrap=True)
    if console.is_terminal:
        console.print(Syntax(code.text, LEXERS[code.language], background_color="default", word_wrap=True))
    else:
        print(code.text, end="", file=console.file)
