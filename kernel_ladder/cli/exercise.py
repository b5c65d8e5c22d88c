"""``python -m kernel_ladder exercise``: list, start, check, hint and solution."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.text import Text

from kernel_ladder import table, user_rungs
from kernel_ladder.cli.columns import Column, LeftOut, Line, fit, say
from kernel_ladder.cli.listing import summary
from kernel_ladder.errors import ExerciseError
from kernel_ladder.exercises import catalog, template

#: Seconds that a check may take, unless ``--limit`` says otherwise. The interpreter needs half a minute at most; on a
#: GPU each sample may compile kernels.
LIMIT = 300 if torch.cuda.is_available() else 90

EMULATED = (
    "There is no GPU here: a C++ compiler built the kernel and the CPU ran its threads in turn. Times, races between "
    "blocks and the cost of loads need a GPU: run the same command there."
)

EPILOG = """\
  exercise                   list the exercises
  exercise start add         write add.py: the signature, the formula and gaps
  exercise hint add          the first hint; `exercise hint add 2` is the next
  exercise check add.py      agreement with float64, the first wrong sample and why, times
  exercise solution add      the rung that solves it; --source prints a solved file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``exercise``, on its parser."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", metavar="action")
    lister = actions.add_parser("list", help="every exercise: what it teaches, and the rung that solves it")
    starter = actions.add_parser("start", help="write the file to fill in")
    starter.add_argument("name", help="an exercise")
    starter.add_argument("file", nargs="?", type=Path, help="where to write it (default: NAME.py in this folder)")
    starter.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    checker = actions.add_parser("check", help="test a file of rungs, then time it beside the ladder's rungs")
    checker.add_argument("file", nargs="?", type=Path, help="a started exercise, or any file of rungs")
    checker.add_argument("--no-time", action="store_true", help="test only")
    checker.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help=f"stop the check after (default: {LIMIT})"
    )
    hinter = actions.add_parser("hint", help="one hint at a time")
    hinter.add_argument("name", help="an exercise")
    hinter.add_argument("number", nargs="?", type=int, default=1, help="which hint (default: the first)")
    solver = actions.add_parser("solution", help="the rung that solves an exercise")
    solver.add_argument("name", help="an exercise")
    solver.add_argument("--source", action="store_true", help="print a solved file")
    for each in (lister, checker):
        each.add_argument(
            "--with", dest="files", action="append", default=[], type=Path, metavar="FILE", help="a file of rungs too"
        )


def run(chosen: argparse.Namespace, console: Console) -> int:
    """Returns the exit code: 0, or 1 where a check finds a rung wrong.

    Raises:
        ExerciseError, RungFileError: bad use.
    """
    if chosen.action == "start":
        return _start(chosen, console)
    if chosen.action == "check":
        return _check(chosen, console)
    if chosen.action == "hint":
        return _hint(chosen, console)
    if chosen.action == "solution":
        return _solution(chosen, console)
    return _list(getattr(chosen, "files", []), console)


def _list(files: list[Path], console: Console) -> int:
    found = [variant for path in files for variant in user_rungs.load_file(path)]
    left_out = LeftOut()
    lines = [
        Line([Text(each.name, style="bold"), each.difficulty, each.op, each.rung, each.teaches])
        for each in catalog.EXERCISES
    ]
    columns = [
        Column("exercise"),
        Column("difficulty", spare=1),
        Column("operation", spare=3),
        Column("solved by", spare=2),
        Column("teaches", spare=1, folds=True),
    ]
    console.print(fit(console, columns, lines, left_out))
    left_out.show(console)
    if found:
        console.print()
        rungs = [
            Line([v.op, Text(v.name, style="bold"), table.unavailable(v.op, v.level) or summary(v)]) for v in found
        ]
        console.print(fit(console, [Column("operation"), Column("rung"), Column("idea", folds=True)], rungs, LeftOut()))
    say(console, "\nStart with: python -m kernel_ladder exercise start add")
    return 0


def _start(chosen: argparse.Namespace, console: Console) -> int:
    exercise = catalog.named(chosen.name)
    path: Path = chosen.file or Path(f"{exercise.name}.py")
    if path.is_dir():
        path = path / f"{exercise.name}.py"
    if path.suffix != ".py":
        raise ExerciseError(f"argument `file`: {path} must be a Python file, whose name ends in .py")
    if path.exists() and not chosen.force:
        raise ExerciseError(f"argument `file`: {path} exists; --force overwrites it, another name keeps it")
    try:
        path.write_text(template.template(exercise))
    except OSError as error:
        raise ExerciseError(f"argument `file`: {path} cannot be written: {error.strerror}") from error
    number = len(template.gaps(path.read_text()))
    say(console, f"Wrote {path}: {exercise.teaches}. It has {number} gap{'s' * (number > 1)}, marked TODO.")
    say(console, f"Next: python -m kernel_ladder exercise check {path}")
    return 0


def _hint(chosen: argparse.Namespace, console: Console) -> int:
    exercise = catalog.named(chosen.name)
    count = len(exercise.hints)
    if not 1 <= chosen.number <= count:
        raise ExerciseError(f"argument `number` must be from 1 to {count}, got {chosen.number}")
    say(console, f"Hint {chosen.number} of {count}: {exercise.hints[chosen.number - 1]}")
    if chosen.number < count:
        say(console, f"Next: python -m kernel_ladder exercise hint {exercise.name} {chosen.number + 1}", "dim")
    else:
        say(console, f"That was the last. Next: python -m kernel_ladder exercise solution {exercise.name}", "dim")
    return 0


def _solution(chosen: argparse.Namespace, console: Console) -> int:
    exercise = catalog.named(chosen.name)
    if chosen.source:
        text = template.solution(exercise)
        console.print(Syntax(text, "python")) if console.is_terminal else print(text, end="")
        return 0
    say(console, f"{exercise.name} is solved by the rung {exercise.rung} of {exercise.op}.")
    say(console, f"Its source: python -m kernel_ladder inspect {exercise.op} --backend {exercise.rung} --source")
    say(console, f"A solved file: python -m kernel_ladder exercise solution {exercise.name} --source")
    return 0


# ---- check -----------------------------------------------------------------------------------------------------------


def _check(chosen: argparse.Namespace, console: Console) -> int:
    files = [*chosen.files] if chosen.file is None else [chosen.file]
    if not files:
        raise ExerciseError("argument `file`: name a file to check, or --with FILE")
    if not chosen.limit > 0:
        raise ExerciseError(f"argument `--limit` must be a positive number of seconds, got {chosen.limit:g}")
    status = 0
    for path in files:
        status = max(status, _check_file(path, chosen, console))
    return status


def _check_file(path: Path, chosen: argparse.Namespace, console: Console) -> int:
    if not path.is_file():
        raise ExerciseError(f"argument `file`: {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    try:
        gaps = template.gaps(path.read_text())
    except SyntaxError as error:
        console.print(f"[red]{escape(str(path))}, line {error.lineno}: SyntaxError: {escape(error.msg)}[/]")
        return 1
    except UnicodeDecodeError as error:
        raise ExerciseError(f"argument `file`: {path} is no text: {error.reason}") from error
    if gaps:
        word = "gap is" if len(gaps) == 1 else "gaps are"
        say(console, f"{len(gaps)} {word} still open in {path}: fill them in, then check again.", "yellow")
        for line, todo in gaps:
            say(console, f"  line {line}: {todo}")
        return 1
    status, last, judged = 0, "", False
    for event in _events(path, chosen):
        kind = event["event"]
        if kind == "running":
            last = f"sample {event['sample']!r} ({event['number']} of {event['of']})"
        elif kind == "rung":
            _print_rung(event, path, console)
            judged = False
        elif kind == "unusable":
            raise ExerciseError(event["reason"])
        elif kind == "passed" and not event["passed"]:
            console.print(f"[yellow]Its `unsupported` refuses all {event['of']} samples: nothing was checked.[/]")
            status = 1
        elif kind == "passed":
            refused = f", {event['refused']} refused by its `unsupported`" if event["refused"] else ""
            console.print(f"[green]Passed {event['passed']} of {event['of']} samples[/]{refused}.")
        elif kind in ("wrong", "error"):
            _print_wrong(event, console)
            status = 1
        elif kind == "emulated" and not status:
            say(console, EMULATED, "yellow")
        elif kind == "times":
            _print_times(event, console)
        elif kind == "ended":
            console.print(f"[red]{escape(event['reason'])}[/] It ran {last or 'before the first sample'}.")
            status = 1
        judged = judged or kind in ("passed", "wrong", "error")
    if not status and not judged:
        where = last or "before the first sample"
        console.print(f"[red]The process ended without a result.[/] It ran {where}: does it exit, or need more memory?")
        status = 1
    return status


def _events(path: Path, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the process says that runs the file. What the file prints goes to standard error."""
    timed = "untimed" if chosen.no_time else "timed"
    command = [sys.executable, "-m", "kernel_ladder.exercises.judge", str(path), timed, *map(str, chosen.files)]
    folder = str(Path(__file__).resolve().parents[2])
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *others])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(chosen.limit, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        finally:
            timer.cancel()
            process.kill()
    if late.is_set():
        yield {"event": "ended", "reason": f"Stopped after {chosen.limit:g} s: does a loop end? --limit allows more."}
    elif process.returncode > 0:
        yield {"event": "ended", "reason": "The check itself failed; its error stands above."}
    elif process.returncode < 0 and process.returncode != -signal.SIGKILL:
        name = signal.Signals(-process.returncode).name
        yield {"event": "ended", "reason": f"The process died of {name}: a load or store far outside of its tensor?"}


def _print_rung(event: dict[str, Any], path: Path, console: Console) -> None:
    what = f"exercise {event['exercise']}, " if event["exercise"] else ""
    where = "on the GPU" if event["how"] == "gpu" else f"{event['how']} on the CPU"
    console.print(f"[bold]{escape(event['op'])} {escape(event['name'])}[/] ({what}{escape(str(path))}), {where}")


def _print_wrong(event: dict[str, Any], console: Console) -> None:
    """The first wrong sample, a fact a line."""
    console.print(f"[red]Passed {event['passed']} of {event['of']} samples. The first wrong one:[/]")
    shapes = " and ".join("x".join(map(str, shape)) or "a scalar" for shape in event["shapes"] if shape is not None)
    facts = [("sample", event["sample"]), ("shapes", shapes), ("dtype", event["dtype"])]
    if event["values"] != "normal":
        facts.append(("values", event["values"]))
    if event["layout"] != "contiguous":
        facts.append(("layout", event["layout"]))
    if event["options"]:
        facts.append(("options", ", ".join(f"{name}={value}" for name, value in event["options"].items())))
    if event.get("reason"):
        facts.append(("wrong", event["reason"]))
    if "index" in event:
        facts.append(("wrong", f"{event['wrong']} of {event['elements']} elements of {_what(event['what'])}"))
        facts.append(("first at", str(event["index"])))
        facts.append(("expected", f"{event['expected']:.8g}"))
        facts.append(("got", f"{event['got']:.8g}"))
        if event["norm"] is None:
            facts.append(("bound", f"a deviation of {event['bound']:.3g}"))
        else:
            facts.append(("bound", f"a norm of all deviations of {event['bound']:.3g}; it is {event['norm']:.3g}"))
    if event.get("cause"):
        facts.append(("cause", event["cause"]))
    for title, text in facts:
        line = Text(f"  {title:<9} ", style="dim").append(Text(text, style="yellow" if title == "cause" else "default"))
        console.print(line, soft_wrap=not console.is_terminal)


def _what(name: str) -> str:
    kind, _, number = name.partition(" ")
    if kind == "grad":
        return f"the gradient of argument {int(number) + 1}"
    return f"output {int(number) + 1}" if number else "the output"


def _print_times(event: dict[str, Any], console: Console) -> None:
    own = event["us"][event["rung"]]
    on_gpu = event["device"] != "cpu"
    console.print(
        f"\n{escape(event['op'])} {escape(event['case'])} {event['dtype']} {event['pass']}, {escape(event['device'])}"
    )
    lines = []
    for name, us in sorted(event["us"].items(), key=lambda item: item[1]):
        mark = "yours" if name == event["rung"] else "solves it" if name == event["solution"] else ""
        rate = f"{event['bytes'] / us / 1e3:.0f}" if on_gpu else ""
        style = "bold" if name == event["rung"] else ""
        lines.append(Line([name, f"{us:.1f}", f"{own / us:.2f}x", rate, mark], style))
    columns = [
        Column("rung"),
        Column("us", True),
        Column("faster than yours", True),
        Column("GB/s", True, spare=2),
        Column(""),
    ]
    console.print(fit(console, columns, lines, LeftOut()))
    if on_gpu and event["slow"]:
        say(console, event["slow"], "yellow")
    if not on_gpu:
        say(console, "Triton is interpreted here: these times mean nothing. On a GPU they do.", "dim")
