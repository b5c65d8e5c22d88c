"""The cards of ``docs/climb/OP.md``: one for every rung, of the same eight lines.

Idea and limit come from the head of the rung's file, the prediction and its reason from ``predictions.toml``, times
from rows. Counters are those that ``python -m bench profile --ncu --save`` keeps beside the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measure.environment import ROOT
from bench.rows.store import Row
from bench.show import climb_counters, predictions
from bench.show.climb import gain, in_order, with_step_before
from bench.show.climb_counters import Counters
from bench.show.headline import headline
from bench.show.table import microseconds, rate
from kernel_ladder.exercises.catalog import EXERCISES
from kernel_ladder.inspection.heads import Head, heads, ladder
from kernel_ladder.spec import TOGETHER
from kernel_ladder.table import LEVELS

#: The lines of a card, in this order. ``_build/cards.py`` refuses a page whose cards have others.
LINES = ("Idea", "Diff", "Prediction", "Measured", "Counters", "Verdict", "Limits it now", "Try this")
#: What a verdict means.
VERDICTS = (
    "*As predicted* means within 10 % of the predicted range, or within 3 % where that is a ratio to another rung."
)
#: Counters by call.
Source = Mapping[tuple[str, ...], Counters]
#: How the names of rungs begin whose kernels a compiler writes.
COMPILERS = ("compile.", "xla.")
#: Lines that say nothing. A compiler's rung has none of them, somebody's own rung has each until it says something.
SILENT = {
    "Prediction": "None was written.",
    "Verdict": "Nothing was predicted as a number.",
    "Limits it now": "Not known.",
}
#: Levels that have cards: first those whose kernels somebody wrote, then the compilers. PyTorch's functions stand in
#: the table alone.
CLIMBED = ("triton", "cuda", "compile", "xla")
assert {*CLIMBED, "torch"} == set(LEVELS)


def write(op: str, path: Path, found: Sequence[Row]) -> str:
    """The cards of an operation, a level's after another's, in the order of its ladder."""
    mine = [row for row in found if row.op == op]
    profiled = climb_counters.of_operation(op, path)
    parts = [VERDICTS]
    for level in CLIMBED:
        described = heads(op, level)
        before = ""
        for rung in ladder(op, level):
            name = f"{level}.{rung}"
            parts.append(_card(op, name, before, described, mine, profiled, found))
            before = name
    return "\n\n".join(parts)


def _card(
    op: str,
    name: str,
    before: str,
    described: Mapping[str, Head],
    mine: Sequence[Row],
    profiled: Source,
    found: Sequence[Row],
) -> str:
    note = predictions.notes().get(op, {}).get(name, {})
    head = described.get(name.partition(".")[2])
    forward = call_of(op, name, note, mine, "forward")
    row = forward.get(name)
    step = next((old for new, old in with_step_before(in_order([*forward.values()])) if new is row), None)
    if row is None or row.us is None:  # before it in the ladder, as far as that was timed
        step = forward.get(before) if before else None
    prediction = predictions.predict(note, forward, step, found)
    said = dict(zip(LINES, ("",) * len(LINES), strict=True))
    said["Idea"] = _sentence(head.idea if head else "")
    said["Diff"] = _diff(head, described.get(before.partition(".")[2]))
    why = _sentence(note.get("why") or (head.predicts if head else ""))
    said["Prediction"] = " ".join(filter(None, (why, f"{prediction}." if prediction else ""))) or SILENT["Prediction"]
    backward = call_of(op, name, note, mine, "backward")
    timed_backward = name in backward and backward[name].us is not None
    said["Measured"] = _measured(name, forward, step, backward)
    said["Counters"], shape = _counters(op, name, before, row, profiled, timed_backward, note)
    said["Verdict"] = _verdict(prediction, row, note, bool(shape))
    said["Limits it now"] = _sentence(note.get("limit") or (head.limit if head else "")) or SILENT["Limits it now"]
    said["Try this"] = _try(op, name, before, note, row, shape)
    silent = {**SILENT, "Counters": _sentence(_no_counters(op, name, row, note))} if name.startswith(COMPILERS) else {}
    lines = [f"- **{line}**: {said[line]}" for line in LINES if said[line] != silent.get(line)]
    return "\n".join([f"## {name}", "", *lines])


def call_of(op: str, name: str, note: Mapping[str, Any], mine: Sequence[Row], pass_: str) -> dict[str, Row]:
    """By rung, the rows of the call at which the card shows its rung: the note's, else the headline, else its last."""
    rows = [row for row in mine if row.pass_ == pass_]
    standing = headline(op, (row for row in rows if row.us is not None))
    if standing is None:
        return {}
    at = (note.get("shape", standing[0]), note.get("dtype", standing[1]))
    if "shape" not in note:
        timed = [row for row in rows if row.backend == name and row.us is not None and row.dtype == at[1]]
        if timed and at not in [(row.shape, row.dtype) for row in timed]:
            at = (timed[-1].shape, timed[-1].dtype)
    return {row.backend: row for row in rows if (row.shape, row.dtype) == at}


def _measured(name: str, forward: Mapping[str, Row], step: Row | None, backward: Mapping[str, Row]) -> str:
    row = forward.get(name)
    if row is None:
        return "not yet in the committed rows."
    if row.us is None:
        return f"refused at {row.shape}: {row.wrong or row.unsupported}."
    parts = [f"{microseconds(row.us)}, {rate(row)}"]
    if row.of_ceiling is not None:
        parts.append(f"{row.of_ceiling:{'.2f' if row.of_ceiling >= 0.01 else '.1g'}} of the ceiling")
    if step is not None and step is not row:
        parts.append(f"{gain(row, step).value:.3g} × `{step.backend}`")
    after = backward.get(name)
    if after is not None and after.us is not None:
        parts.append(f"{TOGETHER if after.shape.endswith(TOGETHER) else 'backward'} {microseconds(after.us)}")
    return f"{', '.join(parts)} ({row.shape}, {row.dtype})."


def _counters(
    op: str,
    name: str,
    before: str,
    row: Row | None,
    profiled: Source,
    timed_backward: bool,
    note: Mapping[str, Any],
) -> tuple[str, str]:
    """Before → after of both passes, and the shape that was profiled; without counters the reason."""
    calls = [key for key in profiled if key[:3] == (op, name, "forward")]
    if not calls:
        return _sentence(_no_counters(op, name, row, note)), ""
    at = (row.dtype, row.shape) if row is not None else ("", "")
    key = next((key for key in calls if key[3:] == at), calls[0])
    mine, old = profiled[key], profiled.get((op, before, *key[2:]), {})
    since = f", since `{before}`" if climb_counters.comparable(mine, old) else ""
    said = f"{' · '.join(climb_counters.changes(mine, old))} ({key[4]}{since}{_on(mine)})."
    backward = (op, name, "backward", *key[3:])
    if backward in profiled:
        changed = climb_counters.changes(profiled[backward], profiled.get((op, before, *backward[2:]), {}))
        gpu = _on(profiled[backward]).removeprefix(_on(mine)).removeprefix(", ")
        said += f" Backward: {' · '.join(changed)}{gpu and f' ({gpu})'}."
    elif timed_backward:
        said += f" Backward: {_sentence(_no_counters(op, name, row, note))}"
    return said, key[4]


def _on(mine: Counters) -> str:
    """Where counters are of another GPU than the times: its name, after a comma."""
    return f", {mine[climb_counters.GPU]}" if climb_counters.GPU in mine else ""


def _no_counters(op: str, name: str, row: Row | None, note: Mapping[str, Any]) -> str:
    """Why a rung has none. Somebody wrote the kernels of CUDA and Triton: there it is a person who says why."""
    if name.startswith(COMPILERS):
        return f"none committed yet: on a GPU `python -m bench counters --op {op} --backend {name}` counts its kernels"
    if "no_counters" in note:
        return f"none committed yet: {note['no_counters']}"
    return "none, and no reason: `no_counters` in bench/show/predictions.toml"


def _verdict(prediction: predictions.Prediction | None, row: Row | None, note: Mapping[str, Any], counted: bool) -> str:
    compared = "Open: not measured yet."
    if row is not None and row.us is not None:
        compared = prediction.verdict(row.us) if prediction else SILENT["Verdict"]
        if "predicted." in compared and "than" in compared and "verdict" not in note and not counted:
            compared += " Why is open: no counters yet."
    elif row is not None:
        compared = "Open: refused at this shape."
    return " ".join(filter(None, (compared, _sentence(note.get("verdict", "")))))


def _diff(head: Head | None, previous: Head | None) -> str:
    if head is None:
        return "no file of its own."
    file = head.file.relative_to(ROOT)
    if previous is None:
        return f"the first of its level: read `{file}`."
    if previous.file == head.file:
        return f"both rungs are in `{file}`; read one after the other."
    return f"`diff {previous.file.relative_to(ROOT)} {file}`"


def _try(op: str, name: str, before: str, note: Mapping[str, Any], row: Row | None, shape: str) -> str:
    exercise = next((each for each in EXERCISES if (each.op, each.rung) == (op, name)), None)
    parts = [_sentence(note.get("try", ""))]
    if exercise:
        parts.append(f"Write it yourself: `python -m kernel_ladder exercise start {exercise.name}`.")
    elif not parts[0]:
        if name.startswith(COMPILERS):
            said = f"python -m kernel_ladder inspect {op} --backend {name} --source"
            parts.append(f"`{said}` shows the generated kernels.")
        else:
            at = shape or (row.shape if row is not None and row.us is not None else "")
            since = f"moved since `{before}`" if before else "is nearest its limit"
            call = f'{name} --shape "{at}"' if at else name
            parts.append(f"`python -m bench profile {op} --backend {call} --ncu` on a GPU. Which counter {since}?")
    return " ".join(filter(None, parts))


def _sentence(text: str) -> str:
    text = " ".join(text.split()).replace("``", "`")
    return text if not text or text[-1] in ".?!" else f"{text}."
