"""The compile level's name stands for `default`: what a user would compile, without minutes of tuning."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options
from kernel_ladder.table import OPS


def default(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """`default`; calls that it refuses go to the formula, since the other modes refuse them as well."""
    return ("compile.default",)


RULES = {(op, "compile"): default for op in OPS}
