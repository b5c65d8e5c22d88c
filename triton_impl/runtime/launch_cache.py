"""Launch a kernel with little more host work than Triton's own, and cache launches by the operands they served.

:class:`Launch` repeats one launch on other tensors. :class:`LaunchCache` finds it by a key: shapes,
strides, dtypes and options. ``autotuner.py`` chooses the configuration of a kernel. The environment variable that
switches tuning off, and the list of choices that :func:`recorded` keeps, are here.
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

#: Whether configurations are timed. Read once, when kernels and their lists of configurations are made.
TUNING = switch(ENV_AUTOTUNE)

#: An option of every launch: a multiplication and an addition become one instruction. It is Triton's default to 3.9,
#: which warns where nobody asks for it.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}

#: Entries of one cache, at most; when it is full it is emptied.
MAX_LAUNCHES = 4096


def to_time(configs: list[triton.Config]) -> list[triton.Config]:
    """The configurations to choose from: all, or without tuning the first and the last.

    So the first of a list must be its best guess, and the last must fit in the shared memory of small GPUs.
    """
    return configs if TUNING or len(configs) <= 1 else [configs[0], configs[-1]]


class Launch:
    """One launch of a kernel with all arguments but its tensors; appends the PDL argument of a kernel that opts in.

    Triton specialises a kernel on its tensors' dtypes and on whether each starts on 16 bytes. Where all do, as usual,
    the compiled kernel is launched directly, which saves Triton's look at every argument.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._kernel, self._run = kernel, kernel[grid]
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = (*arguments, *pdl.constexprs(kernel, pdl.possible()).values())
        self._options = {**FUSED, **options, **pdl.options(kernel)}
        self._aligned: dict[int, Callable[..., None]] = {}  # by device: a compiled kernel is loaded on one

    def __call__(self, *tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> None:
        """Launch on these tensors. `values` are the arguments after them, which change from call to call.

        The kernel must not specialise on `values`, and each of them must always have one type.
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
            # Addresses, not tensors: Triton would ask each tensor for its address and the driver whether it is valid.
            run(*addresses, *values, *self._arguments)

    def compile(self, *tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> Any:
        """Compile the kernel for these tensors, as a launch would."""
        return self._kernel.warmup(*tensors, *values, *self._arguments, grid=self._grid, **self._options)


class LaunchPlan(NamedTuple):
    """Kernel, grid and arguments of a launch that is not made yet; of a kernel with one configuration."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # the kernel's, after its tensors and in order, without USE_PDL

    def launch(self) -> Launch:
        """The launch, ready to be repeated."""
        return Launch(self.kernel, self.grid, self.arguments, {})


class LaunchCache(dict[Hashable, Any]):
    """Launches, or tuples that hold some, by the key that decides them. Bounded: shapes may never repeat."""

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
        """Run the launch with this `key` and return it. The first time `make` runs it and returns it."""
        if shapes_only():
            return None
        known = self.get(key)
        if known is None:
            known = make()
            self.remember(key, known)
        else:
            known(*tensors, values=values)
        return known


class TuningRecord(NamedTuple):
    """The configuration chosen for a kernel, and the median time in ms of each that was timed."""

    kernel: Any
    config: triton.Config
    timings: dict[triton.Config, float]


_choices: list[TuningRecord] | None = None


@contextmanager
def recorded() -> Iterator[list[TuningRecord]]:
    """Every choice made in the block. Choices that the process knows are looked up again, on disk where tuned."""
    global _choices
    _choices = []
    try:
        yield _choices
    finally:
        _choices = None


def recording() -> list[TuningRecord] | None:
    """The list that takes choices now, or None outside of :func:`recorded`."""
    return _choices


class CachedKernel:
    """A kernel of one configuration, with a cache of its launches.

    The kernel takes its tensors first, then `values` (see :class:`Launch`), then all other arguments by position. All
    tensors have the dtype of the first, except those whose dtype never changes.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        stabilize(kernel)
        self.kernel, self.options, self.launches = kernel, options, LaunchCache()

    def __call__(
        self, programs: int, tensors: tuple[torch.Tensor, ...], arguments: tuple[Any, ...], values: tuple[Any, ...] = ()
    ) -> None:
        """Launch a grid of so many programs."""
        if shapes_only():
            return
        key = (tensors[0].dtype, programs, arguments)
        launch = self.launches.get(key)
        if launch is None:
            launch = Launch(self.kernel, (programs,), arguments, self.options)
            self.launches.remember(key, launch)
        launch(*tensors, values=values)
