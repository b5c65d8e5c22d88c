"""A wrong kernel gets no time: hold a variant to the float64 oracle on the very inputs that will be timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_ladder import agreement
from kernel_ladder.agreement import Agreement, Results
from kernel_ladder.samples import make_inputs
from kernel_ladder.spec import Case, Inputs, Options, Spec


@dataclass
class Expected:
    """Inputs, output gradient, the oracle's results and those that set the bound: made once for all variants."""

    spec: Spec
    inputs: Inputs
    options: Options
    grad: torch.Tensor | None
    exact: Results
    naive: Results

    @classmethod
    def of(cls, spec: Spec, case: Case, dtype: torch.dtype, device: torch.device, backward: bool) -> Expected:
        inputs, options = make_inputs(case, dtype, device), case.options
        grad = None
        if backward:
            shape = spec.builtin(*(torch.empty_like(x, device="meta") for x in inputs), **options).shape
            grad = make_inputs(Case("grad", (tuple(shape),)), dtype, device, seed=1)[0]
        exact = agreement.oracle(spec, inputs, options, grad)
        return cls(spec, inputs, options, grad, exact, agreement.baseline(spec, inputs, options, grad, exact))

    def check(self, results: Results) -> Agreement:
        """The agreement of what a call returned: the output, gradients, or both, by the names of the oracle's."""
        return Agreement(
            tuple(
                agreement.compare(
                    name, value, self.exact[name], self.naive.get(name), None if name == "output" else self.grad
                )
                for name, value in results.items()
            )
        )
