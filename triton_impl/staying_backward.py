"""What the host does around a norm's backward pass by programs or clusters that stay, whichever kernel they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from triton_impl import cluster, multiprocessors, norms
from triton_impl.choosing import Chooser
from triton_impl.cluster import MULTIPLE
from triton_impl.norms import Kind, Needs
from triton_impl.staying import Staying
from triton_impl.tuning import Launches


def whole_vectors(size: int, weight: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether all begin on 16 bytes, and `size` times length and strides of the operands' rows are multiples of 16."""
    places = size * operands[0].shape[1] | weight.data_ptr()
    for rows in operands:
        places |= size * rows.stride(0) | rows.data_ptr()
    return places % MULTIPLE == 0


class StayingBackward:
    """A kernel's backward pass. Its programs add up columns over their rows, and a second kernel adds those sums up.

    Parameters
    ----------
    kernel
        Takes the gradient of the input, sums of columns, gradient, that of the sum, input, what is kept of rows, and
        the weight; three strides, count, length and what a sum is multiplied by for a mean; and as constants what the
        norm is, whether there is a weight, and whether gradients of input and of weights are wanted.
    configs
        By length and dtype, best first.
    slots
        Bytes of shared memory, by configuration and dtype (see :class:`triton_impl.staying.Staying`).
    more
        The kernel's constants after those, by the input and the strides.
    programs : int
        Clusters of a multiprocessor at most.
    """

    def __init__(
        self,
        kernel: Any,
        configs: Callable[[int, torch.dtype], list[triton.Config]],
        slots: Callable[[triton.Config, torch.dtype], int],
        more: Callable[[torch.Tensor, tuple[int, ...]], tuple[int, ...]],
        programs: int = 1,
    ) -> None:
        self._kernel, self._configs, self._slots, self._more, self._programs = kernel, configs, slots, more, programs
        self._choose = Chooser(kernel)
        self._launches = Launches()

    def __call__(
        self,
        kind: Kind,
        grad: torch.Tensor,
        grad_sum: torch.Tensor,
        x: torch.Tensor,
        stats: torch.Tensor,
        weight: torch.Tensor,
        has_weight: bool,
        needs: Needs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """As :func:`triton_impl.norms.backward`. For what is absent another tensor stands, which is not looked at."""
        count, length = x.shape
        grad_input, grad_weight, grad_bias = norms.unwritten(x, needs)
        weights = needs.weight or needs.bias
        strides = (grad.stride(0), grad_sum.stride(0), x.stride(0))
        key = (kind, count, length, strides, has_weight, needs, x.dtype, x.device)
        known = self._launches.get(key)
        groups = min(count, self._programs * multiprocessors(x.device, 1)) if known is None else known.programs
        kinds = 2 if kind.centred else 1
        partials = x.new_empty((kinds * groups * length,), dtype=torch.float32) if weights else stats
        tensors = (x if grad_input is None else grad_input, partials, grad, grad_sum, x, stats, weight)

        def make() -> Staying:
            constants = (*kind, has_weight, needs.input, weights, *self._more(x, strides))
            arguments = (*strides, count, length, 1.0 / length, *constants)
            # Whichever gradients are wanted, the choice is one, so that each has the same bits.
            alike = (length, str(x.dtype), *kind, not has_weight, cluster.fills_gpu(count, x.device))

            def launch(config: triton.Config) -> Staying:
                return Staying(self._kernel, groups, arguments, config, self._slots(config, x.dtype))

            return self._choose.launch(alike, self._configs(length, x.dtype), launch, *tensors)

        groups = self._launches.run(key, make, tensors).programs
        if weights:
            norms.add_up(x, partials[: kinds * groups * length].view(kinds, groups, length), grad_weight, grad_bias)
        return grad_input, grad_weight, grad_bias
