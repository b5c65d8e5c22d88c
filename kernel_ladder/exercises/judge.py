"""Hold the rungs of a file to float64, sample by sample, and say what is wrong with the first that deviates.

``python -m kernel_ladder.exercises.judge`` is the process in which ``exercise check`` runs a student's code. A store
past the end of memory may end it, and a loop without end never does. It prints one JSON object a line.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kernel_ladder
from kernel_ladder import autograd, table, user_rungs
from kernel_ladder.errors import ExerciseError, RungFileError
from kernel_ladder.exercises import causes, timing
from kernel_ladder.exercises.catalog import named
from kernel_ladder.exercises.exercise import Exercise
from kernel_ladder.exercises.guards import Guards, guarded
from kernel_ladder.level_packages import load as load_package
from kernel_ladder.spec import Case, Inputs, Output, dtype_name, each
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import Results, Standards, evaluate, held, standards
from kernel_ladder.testing.samples import make_grad, make_inputs

#: What the check tells, as it goes on: a JSON object with the key "event".
Event = dict[str, Any]

#: The largest sample where kernels are interpreted, in elements of the first argument.
LARGEST_INTERPRETED = 50_000
#: How often a sample is run on a GPU: threads that race give another result now and then.
RUNS_ON_GPU = 4

#: Fewer elements than this tell little of what is wrong: such samples come after larger ones.
TELLING = 16

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter here."""
    return bool(load_package(table.LEVELS["triton"]).interpreted())


def samples(op: str, exercise: Exercise | None) -> list[tuple[Case, torch.dtype]]:
    """What is run, plain values and small shapes first.

    Of an exercise the samples that it asks for, in contiguous memory. Of a user's own rung all samples of its
    operation. Interpreted, the first has every dtype, and the others have one each by turns.
    """
    slow = device().type == "cpu"
    of_exercise = exercise is not None and (slow or exercise.level == "cuda")
    dtypes = tuple(exercise.dtypes) if exercise is not None and of_exercise else DTYPES
    cases = list(kernel_ladder.spec(op).samples)
    if exercise is not None:
        cases = [c for c in cases if c.layout == "contiguous" and not c.kinds and _computes(c) and exercise.asks(c)]
    if slow:
        cases = [c for c in cases if math.prod(c.shapes[0] or ()) <= LARGEST_INTERPRETED]
    sizes = {id(c): math.prod(c.shapes[0] or ()) for c in cases}
    cases.sort(key=lambda c: (c.values != "normal", c.layout != "contiguous", sizes[id(c)] < TELLING, sizes[id(c)]))
    return [
        (case, dtype)
        for i, case in enumerate(cases)
        for dtype in (dtypes if i == 0 or not slow else [dtypes[i % len(dtypes)]])
    ]


def _computes(case: Case) -> bool:
    return all(shape is None or math.prod(shape) > 0 for shape in case.shapes)


def judge(path: Path, with_files: list[Path], timed: bool = True) -> Iterator[Event]:
    """Check every rung that a file registers, until one is wrong, then time them.

    Raises:
        RungFileError, ExerciseError: the file cannot be checked at all.
    """
    for other in with_files:
        if other != path:
            user_rungs.load_file(other)
    found = user_rungs.load_file(path, "file")
    name = getattr(user_rungs.module_of(path), "EXERCISE", None)
    exercise = None if name is None else named(name, "file")
    if exercise is not None and (other_ops := [v for v in found if v.op != exercise.op]):
        raise ExerciseError(
            f"argument `file`: the exercise {name} is of {exercise.op}, and {path} registers {other_ops[0]!r}"
        )
    for variant in found:
        # An exercise in CUDA brings its own kernel: it needs no built extension, and without a GPU it is emulated.
        own_kernel = exercise is not None and exercise.level == "cuda"
        how = "gpu" if device().type == "cuda" else "emulated" if own_kernel else "interpreted"
        yield {"event": "rung", "op": variant.op, "name": variant.name, "exercise": name, "how": how}
        reason = None if own_kernel else table.unavailable(variant.op, variant.level) or variant.here()
        if exercise is not None and how == "gpu":
            found_here = torch.cuda.get_device_capability()
            if found_here < exercise.capability:
                least = ".".join(map(str, exercise.capability))
                reason = (
                    f"compute capability {least} or later is needed, and this GPU has {'.'.join(map(str, found_here))}"
                )
        if reason is not None:
            raise RungFileError(f"argument `file`: {variant.name} cannot run on this machine: {reason}")
        right = True
        for event in _run_samples(variant, exercise, path):
            right &= event["event"] not in ("wrong", "error")
            yield event
        if not right:
            return
    if how == "emulated":
        yield {"event": "emulated"}
    elif timed:
        for variant in found:
            yield from timing.times(variant, exercise, device())


def _run_samples(variant: Variant, exercise: Exercise | None, path: Path) -> Iterator[Event]:
    todo = samples(variant.op, exercise)
    passed = refused = 0
    nearly: Event | None = None  # the first wrong sample, while a later one may tell more than that it is nearly right
    for number, (case, dtype) in enumerate(todo, 1):
        about = _about(case, dtype)
        yield {"event": "running", "number": number, "of": len(todo), **about}
        inputs = each(guarded, make_inputs(case, dtype, device()))
        if (reason := variant.unsupported(*inputs, **case.options)) is not None:
            refused += 1
            if exercise is not None:
                yield {"event": "wrong", "passed": passed, "of": len(todo), **about, "reason": f"refused: {reason}"}
                return
            continue
        backward = exercise.backward if exercise is not None else variant.backward is not None
        try:
            wrong = check_sample(variant, exercise, case, inputs, backward)
        except Exception as error:
            said = user_rungs.told(error, path)
            yield {"event": "error", "passed": passed, "of": len(todo), **about, "reason": said}
            return
        if wrong is not None:
            event = {"event": "wrong", "passed": passed, "of": len(todo), **about, **wrong}
            if wrong["cause"] != causes.ROUNDING:
                yield event
                return
            nearly = nearly or event
        passed += nearly is None
    yield nearly or {"event": "passed", "passed": passed, "refused": refused, "of": len(todo)}


def _about(case: Case, dtype: torch.dtype) -> Event:
    options = {name: value for name, value in case.options.items() if value is not None}
    return {
        "sample": case.id,
        "shapes": [None if shape is None else list(shape) for shape in case.shapes],
        "dtype": dtype_name(dtype),
        "values": case.values,
        "layout": str(case.layout),
        "options": {name: str(value) for name, value in options.items()},
    }


def check_sample(
    variant: Variant, exercise: Exercise | None, case: Case, inputs: Inputs, backward: bool
) -> Event | None:
    """What is wrong with a variant on a sample, or None."""
    spec = kernel_ladder.spec(variant.op)
    grad = make_grad(spec, inputs, case.options) if backward else None
    to = standards(spec, inputs, case.options, grad)
    for _ in range(RUNS_ON_GPU if device().type == "cuda" else 1):
        with Guards() as guards:
            results = evaluate(lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
        if (overrun := guards.overrun()) is not None:
            return {"reason": overrun, "cause": "A store without a mask, or with one that is too wide."}
        agreement = held(results, to)
        if not agreement.agrees:
            return _deviation(exercise, results, to, inputs, case, grad)
    return None


def _deviation(
    exercise: Exercise | None, results: Results, to: Standards, inputs: Inputs, case: Case, grad: Output | None
) -> Event:
    """The first output or gradient that deviates: where, by how much, and the probable cause."""
    for name, got in results.items():
        standard = to[name]
        deviation = standard.deviation(name, got)
        if deviation.agrees:
            continue
        exact = standard.exact
        if got.shape != exact.shape or got.dtype != standard.dtype:
            return {"what": name, "reason": deviation.reason, "cause": "Check how the host code makes the output."}
        value = got.double()
        same = (value == exact) | (value.isnan() & exact.isnan())
        error = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(nan=torch.inf)
        wrong = error > standard.bound
        by_norm = not bool(wrong.any())
        if by_norm:  # no element alone is past its bound, all together are
            wrong = error == error.max()
        lost = wrong & (value.isnan() | value.isinf()) & exact.isfinite()
        index = (lost if lost.any() else wrong).nonzero()[0].tolist()
        cause, otherwise = None, Exercise.otherwise
        if exercise is not None:
            otherwise = exercise.otherwise
            cause = causes.known_mistake(exercise, name, got, exact, standard.bound, inputs, case.options, grad)
        return {
            "what": name,
            "wrong": int(wrong.sum()),
            "elements": got.numel(),
            "index": index,
            "expected": exact[tuple(index)].item(),
            "got": value[tuple(index)].item(),
            "bound": deviation.norm_bound if by_norm else standard.bound,
            "norm": deviation.norm_error if by_norm else None,
            "cause": cause or causes.symptom(got, exact, wrong, standard.bound) or otherwise,
        }
    raise AssertionError("some result deviates")


def main(arguments: list[str]) -> int:
    """``FILE timed [WITH…]``, one event a line on standard output."""
    path, timed, *others = arguments
    out = sys.stdout
    sys.stdout = sys.stderr  # what a student prints must not stand among the events

    def tell(event: Event) -> None:
        print(json.dumps(event), file=out, flush=True)

    try:
        for event in judge(Path(path), [Path(other) for other in others], timed == "timed"):
            tell(event)
    except (RungFileError, ExerciseError) as error:
        tell({"event": "unusable", "reason": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
