"""What the host does around a norm's backward pass by programs or clusters that stay, whichever kernel they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from kernel_ladder.tracing import address, shapes_only
from triton_impl import multiprocessors
from triton_impl.common.divisibility import divisibility_of
from triton_impl.common.gluon import cluster
from triton_impl.common.gluon.cluster import MULTIPLE
from triton_impl.norm import rows as norms
from triton_impl.norm.rows import Gradients, Kind, Needs
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import LaunchCache
from triton_impl.runtime.persistent_launch import PersistentLaunch


def _whole_vectors(weight: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether all begin on 16 bytes, and length and strides of the operands' rows are multiples of as many."""
    size = operands[0].dtype.itemsize
    places = size * operands[0].shape[1] | address(weight)
    for rows in operands:
        places |= size * rows.stride(0) | address(rows)
    return places % MULTIPLE == 0


class StayingBackward:
    """A kernel's backward pass. Its programs add up columns over their rows, and a second kernel adds those sums up.

    Parameters
    ----------
    kernel
        Takes the gradient of the input, sums of columns, gradient, that of the sum, input, what is kept of rows, and
        the weight; three strides, count, length and what a sum is multiplied by for a mean; and as constants what the
        norm is, whether there is a weight, whether gradients of input and of weights are wanted, what `more` gives, and
        what divides length and strides (divisibility.py).
    takes
        Whether rows (count, length) are for it. They have to consist of whole vectors besides.
    otherwise
        The backward pass of those that are not.
    configs
        By length and dtype, best first.
    slots
        Bytes of shared memory, by configuration and dtype (see :class:`triton_impl.runtime.persistent_launch.Staying`).
    more
        The constants that it has by dtype.
    programs : int
        Clusters of a multiprocessor at most.
    """

    def __init__(
        self,
        kernel: Any,
        takes: Callable[[torch.Tensor], bool],
        otherwise: Callable[..., Gradients],
        configs: Callable[[int, torch.dtype], list[triton.Config]],
        slots: Callable[[triton.Config, torch.dtype], int],
        more: Callable[[torch.dtype], tuple[int, ...]] = lambda dtype: (),
        programs: int = 1,
    ) -> None:
        self._kernel, self._takes, self._otherwise = kernel, takes, otherwise
        self._configs, self._slots, self._more, self._programs = configs, slots, more, programs
        self._choose = Autotuner(kernel)
        self._launches = LaunchCache()

    def __call__(
        self,
        kind: Kind,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        stats: torch.Tensor,
        grad: torch.Tensor,
        grad_sum: torch.Tensor | None,
        needs: Needs,
    ) -> Gradients:
        """As :func:`triton_impl.norm.rows.backward`."""
        if shapes_only() or not any(needs):
            return norms.unwritten(x, needs)
        # For what is absent another tensor stands, which is not looked at.
        s, w = (grad if grad_sum is None else grad_sum), (x if weight is None else weight)
        if not self._takes(x) or not _whole_vectors(w, x, grad, s):
            return self._otherwise(kind, x, weight, stats, grad, grad_sum, needs)
        count, length = x.shape
        grad_input, grad_weight, grad_bias = norms.unwritten(x, needs)
        weights = needs.weight or needs.bias
        strides = (grad.stride(0), s.stride(0), x.stride(0))
        key = (kind, count, length, strides, weight is None, needs, x.dtype, x.device)
        known = self._launches.get(key)
        groups = min(count, self._programs * multiprocessors(x.device, 1)) if known is None else known.programs
        kinds = 2 if kind.centred else 1
        partials = x.new_empty((kinds * groups * length,), dtype=torch.float32) if weights else stats
        tensors = (x if grad_input is None else grad_input, partials, grad, s, x, stats, w)

        def make() -> PersistentLaunch:
            constants = (*kind, weight is not None, needs.input, weights, *self._more(x.dtype))
            arguments = (*strides, count, length, 1.0 / length, *constants, divisibility_of(length, *strides))
            # Whichever gradients are wanted, the choice is one, so that each has the same bits.
            alike = (length, str(x.dtype), *kind, weight is None, cluster.fills_gpu(count, x.device))

            def launch(config: triton.Config) -> PersistentLaunch:
                return PersistentLaunch(self._kernel, groups, arguments, config, self._slots(config, x.dtype))

            return self._choose.launch(alike, self._configs(length, x.dtype), launch, *tensors)

        groups = self._launches.run(key, make, tensors).programs
        if weights:
            norms.add_up(x, partials[: kinds * groups * length].view(kinds, groups, length), grad_weight, grad_bias)
        return grad_input, grad_weight, grad_bias
