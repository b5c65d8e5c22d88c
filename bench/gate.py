"""A wrong kernel gets no time: hold a variant to the float64 oracle on the very inputs that will be timed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from kernel_ladder import agreement, autograd
from kernel_ladder.agreement import Agreement, Results
from kernel_ladder.samples import make_grad, make_inputs
from kernel_ladder.spec import Case, Inputs, Options, Output, Spec
from kernel_ladder.table import Variant


@dataclass
class Expected:
    """Inputs, output gradient, the oracle's results and those that set the bound: made once for all variants."""

    spec: Spec
    inputs: Inputs
    options: Options
    grad: Output | None
    exact: Results
    naive: Results

    @classmethod
    def of(cls, spec: Spec, case: Case, dtype: torch.dtype, device: torch.device, backward: bool) -> Expected:
        inputs, options = make_inputs(case, dtype, device), case.options
        grad = make_grad(spec, inputs, options) if backward else None
        exact = agreement.oracle(spec, inputs, options, grad)
        return cls(spec, inputs, options, grad, exact, agreement.baseline(spec, inputs, options, grad, exact))

    def check(self, variant: Variant, backward: bool) -> Agreement:
        """The agreement of the output alone, or of output and gradients."""
        names = [name for name in self.exact if backward or name.startswith("output")]
        return agreement.agreement(
            self.spec,
            runner(variant),
            self.inputs,
            self.options,
            self.grad if backward else None,
            exact={name: self.exact[name] for name in names},
            naive=self.naive,
        )

    def first_call(self, variant: Variant, backward: bool) -> Results:
        """One call as the check makes it."""
        return agreement.evaluate(runner(variant), self.inputs, self.options, self.grad if backward else None)


def one_line(error: Exception) -> str:
    """An exception's type and the first line that it says, without a terminal's colours."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return ": ".join(filter(None, (type(error).__name__, said.partition("\n")[0])))


def runner(variant: Variant) -> agreement.Implementation:
    """A variant as a function of inputs and options, differentiable."""

    def run(*inputs: torch.Tensor | None, **options: Any) -> Output:
        return autograd.run(variant, inputs, options)

    return run
