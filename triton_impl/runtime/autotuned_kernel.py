"""A kernel that takes its tensors as pointers, tuned over its configurations for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from triton_impl.common import pdl
from triton_impl.runtime.autotuner import Autotuner
from triton_impl.runtime.launch_cache import FUSED, Launch, to_time


class AutotunedKernel:
    """A kernel and its configurations. `key` names the arguments that tell calls apart, as for :func:`triton.autotune`.

    ``prune(configs, named, **constants)`` returns those that suit a call, and ends with :func:`to_time`.
    """

    def __init__(
        self,
        kernel: Any,
        configs: list[triton.Config],
        key: Sequence[str],
        prune: Callable[..., Any] | None = None,
    ) -> None:
        self.kernel, self._key, self._prune = kernel, tuple(key), prune
        self._configs = configs if prune else to_time(configs)
        self._autotuner = Autotuner(kernel)

    def __call__(
        self,
        grid: Callable[[dict[str, Any]], tuple[int, ...]],
        tensors: tuple[torch.Tensor, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        values: tuple[Any, ...] = (),
    ) -> Launch:
        """Run the kernel, tuned first where no choice is known. The returned launch repeats it with other tensors.

        The kernel takes its tensors first, then `values` (see :class:`Launch`), then the other `arguments`, then
        constants.
        """
        config = self._choose(grid, (*tensors, *values, *arguments), constants)
        decided = {**constants, **config.kwargs}
        names = self.kernel.arg_names[len(tensors) + len(values) + len(arguments) :]
        # By position, because every keyword costs host time in each launch.
        positional = (*arguments, *(decided[name] for name in names if name != pdl.PARAMETER))
        options = {name: value for name, value in config.all_kwargs().items() if name not in config.kwargs}
        return Launch(self.kernel, grid(decided), positional, options)

    def _choose(self, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> triton.Config:
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        configs = self._configs if self._prune is None else self._prune(self._configs, named, **constants)
        of_key = {**named, **constants}
        dtypes = (str(a.dtype) for a in arguments if isinstance(a, torch.Tensor))
        key = (*(of_key[name] for name in self._key if name in of_key), *dtypes)

        def run(config: triton.Config, only_compile: bool) -> Any:
            decided = {**constants, **config.all_kwargs(), **pdl.constexprs(self.kernel, pdl.possible())}
            decided |= {**FUSED, **pdl.options(self.kernel)}
            if only_compile:
                return self.kernel.warmup(*arguments, grid=grid, **decided)
            return self.kernel[grid](*arguments, **decided)

        return self._autotuner(key, configs, run)
