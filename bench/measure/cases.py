"""Which calls are measured: a spec's sweep on a GPU, the same cases shrunk without one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import torch

from bench.measure.sets import Member
from kernel_ladder.spec import Case, Spec, each
from kernel_ladder.testing.cases import fitted

#: Limits of a case without a GPU: Triton's interpreter takes milliseconds per block.
TINY_BYTES = 2**16
TINY_FLOPS = 2**22
TINY_BATCH = 4  # of each dimension before the last two
#: Largest dimension of the case on which host cost is measured, where the case itself takes the GPU too long.
HOST_DIM = 64


def _resized(case: Case, sizes: dict[int, int]) -> Case:
    """`case` with dimensions replaced by size, in its id too. Equal sizes stay equal, so that shapes still fit."""

    def resized(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sizes.get(n, n) for n in shape)

    shapes = each(resized, case.shapes)
    options = {name: resized(value) if isinstance(value, tuple) else value for name, value in case.options.items()}
    name = re.sub(r"\d+", lambda digits: str(sizes.get(int(digits[0]), int(digits[0]))), case.id)
    return fitted(dataclasses.replace(case, id=name, shapes=shapes, options=options))


def shrink(case: Case, spec: Spec) -> Case:
    """`case` with its batch dimensions halved together, so that their ratios stay, then its largest one, until tiny."""
    while batch := [n for shape in filter(None, case.shapes) for n in shape[:-2] if n > 1]:
        if max(batch) <= TINY_BATCH:
            break
        case = _resized(case, {n: n // 2 for n in batch})
    while spec.bytes(case, 4, False) > TINY_BYTES or spec.flops(case, False) > TINY_FLOPS:
        largest = max(n for shape in filter(None, case.shapes) for n in shape)
        if largest == 1:
            raise ValueError(f"{spec.name}: {case.id!r} cannot be shrunk: what it costs is not in its shapes")
        case = _resized(case, {largest: largest // 2})
    return case


def layouts_of(case: Case) -> list[str]:
    """The layout of each argument, as rows keep them; none where all are contiguous."""
    layouts = [case.layout_of(place) for place in range(len(case.shapes))]
    return [] if set(layouts) == {"contiguous"} else layouts


def host_case(case: Case) -> Case:
    """`case` with no dimension larger than `HOST_DIM`."""
    sizes = {n: min(n, HOST_DIM) for shape in filter(None, case.shapes) for n in shape}
    return _resized(case, sizes)


def sweep_members(spec: Spec, members: Iterable[Member], device: torch.device, quick: bool) -> list[Member]:
    """The cases of a set to measure, or of its quick subset.

    Without a GPU the same, each case shrunk to a tiny one; those that shrink to the same are measured once, with the
    names of all. A quick sweep measures only the first of them.
    """
    chosen = [member for member in members if member.case.quick or not quick]
    if device.type == "cuda":
        return chosen
    tiny: dict[str, Member] = {}
    for case, names in chosen:
        small = shrink(case, spec)
        known = tiny.get(small.id, Member(small))
        tiny[small.id] = Member(small, tuple(dict.fromkeys((*known.names, *names))))
        if quick:
            break
    return list(tiny.values())


def sweep_cases(spec: Spec, device: torch.device, quick: bool) -> list[Case]:
    """The cases of a spec's own set to measure: see :func:`sweep_members`."""
    return [case for case, _ in sweep_members(spec, map(Member, spec.sweep), device, quick)]


#: Operations whose quick cases are measured in float16 too: other libraries have kernels of their own for it.
IN_FLOAT16 = ("matmul", "linear")


def default_dtypes(op: str, case: Case, device: torch.device, quick: bool) -> list[torch.dtype]:
    """bfloat16; in a sweep that is not quick, for the quick cases float32 too, and float16 of some operations.

    Without a GPU float32 alone.
    """
    if device.type != "cuda":
        return [torch.float32]
    if quick or not case.quick:
        return [torch.bfloat16]
    return [torch.bfloat16, torch.float32, *([torch.float16] if op in IN_FLOAT16 else [])]
