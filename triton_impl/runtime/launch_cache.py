"""Launch a kernel with little more host work than Triton's own, and keep what is known of operands met before.

Which of a kernel's configurations a call takes is chosen elsewhere, once (autotuner.py). Here are what the environment
says of that, the list of choices that :func:`recorded` keeps, and :class:`Launch`, with which a call is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton

from kernel_ladder.tracing import shapes_only
from kernel_ladder.variables import switch
from triton_impl import interpreted
from triton_impl.common import pdl
from triton_impl.runtime.cache_key import stabilize

ENV_AUTOTUNE = "KERNEL_LADDER_AUTOTUNE"


#: Read once, when kernels and their lists of configurations are made.
TUNING = switch(ENV_AUTOTUNE)

#: Operands remembered per operation; past that, all are forgotten.
MAX_LAUNCHES = 4096


def to_time(configs: list[triton.Config]) -> list[triton.Config]:
    """The configurations to choose from: all, or without tuning the first, and the last where that one does not fit.

    So the first of a list is its best guess, and the last one fits in the shared memory of small GPUs.
    """
    return configs if TUNING or len(configs) <= 1 else [configs[0], configs[-1]]


class Launch:
    """A kernel with all but its tensors decided; whether it begins early, unless it is to be late, is decided here.

    What Triton compiles depends on tensors by their dtypes, and by whether each starts at a multiple of 16 bytes. Where
    all do, as is usual, the kernel compiled before is launched as it is, which saves Triton's look at every argument.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        options: dict[str, int],
        late: bool = False,
    ) -> None:
        self._kernel, self._run = kernel, kernel[grid]
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = (*arguments, *pdl.decided(kernel, late).values())
        self._options = {**options, **pdl.options(kernel, late)}
        self._aligned: dict[int, Callable[..., None]] = {}  # by device: a compiled kernel is loaded on one

    def __call__(self, *tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> None:
        """Launch on these tensors; `values` are arguments that follow them and change from call to call.

        The kernel must not specialise on those, and each must be of one type always.
        """
        address_bits = 0
        addresses = [t.data_ptr() for t in tensors]
        for address in addresses:
            address_bits |= address
        if address_bits % 16 or interpreted():
            self._run(*tensors, *values, *self._arguments, **self._options)
            return
        device = triton.runtime.driver.active.get_current_device()
        run = self._aligned.get(device)
        if run is None:
            compiled = self._run(*tensors, *values, *self._arguments, **self._options)
            self._aligned[device] = compiled[self._grid]
        else:
            # Of a tensor Triton would ask the address again, and the driver whether it is one.
            run(*addresses, *values, *self._arguments)

    def compile(self, *tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> Any:
        """Compile the kernel for these tensors, as a launch would."""
        return self._kernel.warmup(*tensors, *values, *self._arguments, grid=self._grid, **self._options)


class LaunchPlan(NamedTuple):
    """A launch that is worked out but for the tensors, of a kernel of one configuration that may begin early."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # the kernel's, after its tensors and in order, without the last

    def launch(self) -> Launch:
        """What repeats it at little cost."""
        return Launch(self.kernel, self.grid, self.arguments, {})


class LaunchCache(dict[Hashable, Any]):
    """What is known of operands met before. Bounded, for programs whose shapes never repeat."""

    def remember(self, key: Hashable, value: Any) -> None:
        if len(self) >= MAX_LAUNCHES:
            self.clear()
        self[key] = value

    def run(
        self,
        key: Hashable,
        make: Callable[[], Launch | None],
        tensors: tuple[torch.Tensor, ...],
        values: tuple[Any, ...] = (),
    ) -> Any:
        """Run the launch that goes by `key`, and return it; the first time `make` runs it, and gives it."""
        if shapes_only():
            return None
        known = self.get(key)
        if known is None:
            known = make()
            self.remember(key, known)
        else:
            known(*tensors, values=values)
        return known


class Choice(NamedTuple):
    """What was chosen for a kernel, and, in ms, the median time of each configuration that was timed for it."""

    kernel: Any
    config: triton.Config
    timings: dict[triton.Config, float]


_choices: list[Choice] | None = None


@contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Every choice made in the block. What was known before is looked up anew: on disk, where it was tuned there."""
    global _choices
    _choices = []
    try:
        yield _choices
    finally:
        _choices = None


def recording() -> list[Choice] | None:
    """Where choices are written down now, or None."""
    return _choices


class CachedKernel:
    """A kernel of one configuration, whose launches are kept by what Triton would find out anew in each call.

    It takes its tensors first, then `values` (see :class:`Launch`), then all other arguments by position. The tensors
    are of one dtype, save those that are of the same one always.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        stabilize(kernel)
        self.kernel, self.options, self.launches = kernel, options, LaunchCache()

    def __call__(
        self, programs: int, tensors: tuple[torch.Tensor, ...], arguments: tuple[Any, ...], values: tuple[Any, ...] = ()
    ) -> None:
        """Launch as many programs."""
        if shapes_only():
            return
        key = (tensors[0].dtype, programs, arguments)
        launch = self.launches.get(key)
        if launch is None:
            launch = Launch(self.kernel, (programs,), arguments, self.options)
            self.launches.remember(key, launch)
        launch(*tensors, values=values)
