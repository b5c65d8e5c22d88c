"""Find or make the case of an operation that a short text names, such as ``"4096x4096x14336"``."""

from __future__ import annotations

import dataclasses
import difflib
import re

from kernel_ladder.errors import InspectError
from kernel_ladder.spec import Case, Spec, each


def _form(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def case_named(spec: Spec, text: str) -> Case:
    """A case of the sweep or the samples by its id, or a case of the sweep with other sizes.

    ``"4096x4096x14336"`` is a case of matmul's sweep. ``"1000x2000x3000"`` is made from the first case of the sweep
    with the same form and no two equal sizes. Each size is then identified by its number. If the text omits the end of
    an id, the case keeps that of the sweep's case.
    """
    text = text.strip()
    cases = [*spec.sweep, *spec.samples]
    for case in cases:
        if case.id == text:
            return case
    sizes = [int(digits) for digits in re.findall(r"\d+", text)]
    if sizes and min(sizes) > 0:
        for case in (*(c for c in spec.sweep if _form(c.id) == _form(text)), *spec.sweep):
            numbers = [int(digits) for digits in re.findall(r"\d+", case.id)]
            starts = _form(case.id) == _form(text) or _form(case.id).startswith(_form(text) + " ")
            if starts and len(numbers) == len(sizes) == len(set(numbers)):
                return _resized(case, text, dict(zip(numbers, sizes, strict=True)))
    ids = [case.id for case in cases]
    near = difflib.get_close_matches(text, ids, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    known = ", ".join(repr(case.id) for case in spec.sweep)
    raise InspectError(f"{spec.name}: unknown `shape` {text!r}; {hint}Give one of {known}, or the like in other sizes")


def _resized(case: Case, text: str, sizes: dict[int, int]) -> Case:
    given = re.match(r"\d+".join(re.escape(part) for part in re.split(r"\d+", text)), case.id)
    ending = case.id[given.end() :] if given else ""
    shapes = each(lambda shape: tuple(sizes.get(n, n) for n in shape), case.shapes)
    return fitted(dataclasses.replace(case, id=text + ending, shapes=shapes, quick=False))


def fitted(case: Case) -> Case:
    """A case whose sizes have changed, with tables of rotations that fit its first argument's rows."""
    rows = case.shapes[0]
    assert rows is not None
    shapes = tuple(
        (rows[-2] + case.options["offset"], min(shape[1], rows[-1] // 2))
        if shape is not None and case.kinds.get(place) == "rotations"
        else shape
        for place, shape in enumerate(case.shapes)
    )
    return dataclasses.replace(case, shapes=shapes)
