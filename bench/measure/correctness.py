"""A wrong kernel gets no time: compare a variant with the float64 oracle, on the inputs that will be timed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kernel_ladder.spec import Case, Inputs, Options, Output, Spec
from kernel_ladder.testing import agreement
from kernel_ladder.testing.agreement import Agreement, Results
from kernel_ladder.testing.samples import make_grad, make_inputs


@dataclass
class Expected:
    """Inputs, output gradient and the bounds that results must meet, made once for all variants."""

    inputs: Inputs
    options: Options
    grad: Output | None
    standards: agreement.Standards

    @classmethod
    def of(cls, spec: Spec, case: Case, dtype: torch.dtype, device: torch.device, backward: bool) -> Expected:
        inputs, options = make_inputs(case, dtype, device), case.options
        grad = make_grad(spec, inputs, options) if backward else None
        return cls(inputs, options, grad, agreement.standards(spec, inputs, options, grad))

    def check(self, results: Results) -> Agreement:
        """The agreement of a call's results with the oracle: outputs, gradients or both, matched by name."""
        return agreement.held(results, self.standards)


def one_line(error: Exception) -> str:
    """An exception's type and the first line of its message, without terminal colours."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return ": ".join(filter(None, (type(error).__name__, said.partition("\n")[0])))


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an error was raised over an interrupt: what cleans up after one may fail, and hide it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
