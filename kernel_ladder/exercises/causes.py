"""From a wrong result to its probable cause: a known mistake of the exercise, or what the wrong elements look like."""

from __future__ import annotations

import torch

from kernel_ladder.exercises.exercise import Exercise
from kernel_ladder.exercises.guards import unwritten
from kernel_ladder.spec import Inputs, Options, Output, as_tuple
from kernel_ladder.testing.agreement import named

#: A mistake that another sample shows by large deviations may look like it in this one.
ROUNDING = "Nearly right: rounding. Convert to float32 after loading, sum in float32, and round once, at the store."


def known_mistake(
    exercise: Exercise,
    name: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    bound: float,
    inputs: Inputs,
    options: Options,
    grad: Output | None,
) -> str | None:
    """The explanation of the mistake whose formula gives what was got in the output or gradient `name`, or None."""
    from_right = _distance(got, exact)
    best, explanation = torch.inf, None
    for mistake in exercise.mistakes:
        try:
            if grad is None:
                wrong = named(as_tuple(mistake.formula(*inputs, **options)))
            else:
                wrong = mistake.formula(*inputs, grad, **options)
        except (RuntimeError, ValueError):  # a mistake that cannot be made on these inputs
            continue
        if name not in wrong or wrong[name].shape != got.shape:
            continue
        distance = _distance(got, wrong[name].double())
        size = wrong[name][wrong[name].isfinite()].abs().max().item() if wrong[name].isfinite().any() else 0.0
        allowed = 4 * bound + 8 * torch.finfo(got.dtype).eps * size
        if distance <= min(allowed, from_right / 4) and distance < best:
            best, explanation = distance, mistake.explanation
    return explanation


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest deviation; infinite where NaN or infinity stand in different places."""
    a, b = a.double(), b.double()
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return difference.nan_to_num(nan=torch.inf).max().item() if difference.numel() else 0.0


def symptom(got: torch.Tensor, exact: torch.Tensor, wrong: torch.Tensor, bound: float) -> str | None:
    """What typically makes results deviate in this way, or None. `wrong` says of each element whether it does."""
    never = unwritten(got) & wrong
    if never.any():
        share = f"{int(never.sum())} of {got.numel()} elements were never written"
        if never.all():
            return f"{share}: the kernel stores nothing here. Is it launched, and is the store's mask ever true?"
        return f"{share}. The grid has too few programs, a loop ends too early, or the store's mask is too strict."
    value = got.double()
    lost = wrong & value.isnan() & ~exact.isnan()
    if lost.any():
        return (
            "There is NaN where none is expected. Memory past every input is NaN here: a load without a mask, or with "
            "one that is too wide, brings it in. Otherwise look for inf − inf or 0 / 0."
        )
    if (wrong & exact.isnan() & ~value.isnan()).any():
        return "NaN in the inputs must reach the output. A comparison or a maximum that drops NaN loses it."
    if (wrong & value.isinf() & exact.isfinite()).any():
        return "There is infinity where none is expected. Does an exponential overflow? Subtract the maximum first."
    v, e = value[wrong], exact[wrong]
    if (v == 0).all():
        return "Every wrong element is zero. Is the accumulator kept across the loop, and is the result stored?"
    ratio = (v / e)[e != 0]
    common = ratio.numel() > 1 and wrong.float().mean() > 0.5 and (ratio - ratio.median()).abs().max() < 0.02
    if common and (ratio.median() - 1).abs() > 0.02:  # nearer to 1 it is rounding
        return (
            f"Every wrong element is {ratio.median().item():.4g} times what is expected: a factor is missing or wrong. "
            "Check the scale, and whether a mean is over the true length rather than over BLOCK."
        )
    if got.dim() > 1 and got.shape[-1] > 1:
        columns = wrong.reshape(-1, got.shape[-1]).any(0).nonzero().flatten()
        first = int(columns[0])
        if first > 0 and bool((columns[-1] == got.shape[-1] - 1).item()) and len(columns) > (got.shape[-1] - first) / 2:
            return (
                f"All wrong elements are in the last columns, from {first} on: check the tail, its mask "
                "and the value that masked lanes get (`other`)."
            )
    largest = e.abs().max().item() if e.numel() else 0.0
    if (v - e).abs().max().item() <= max(8 * bound, 0.02 * largest):
        return ROUNDING
    return None
