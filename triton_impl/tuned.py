"""A kernel that takes its tensors as pointers, and the configurations to choose from for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from triton_impl import early
from triton_impl.choosing import Chooser
from triton_impl.tuning import Launch, to_time


class Tuned:
    """A kernel and its configurations. `key` and `prune` are as for :func:`triton.autotune`.

    `late` tells by a call's constants whether the kernel, which may begin early (early.py), is faster if it does not.
    """

    def __init__(
        self,
        kernel: Any,
        configs: list[triton.Config],
        key: Sequence[str],
        prune: Callable[..., Any] | None = None,
        late: Callable[[dict[str, Any]], bool] = lambda constants: False,
    ) -> None:
        self.kernel, self._late = kernel, late
        # For torch.compile, which traces no other kind of choice, and makes its own.
        self.autotuner = triton.autotune(
            # Where configurations are pruned, `prune` ends with to_time.
            configs if prune else to_time(configs),
            key=list(key),
            prune_configs_by={"early_config_prune": prune} if prune else None,
        )(kernel)
        self._chooser = Chooser(kernel)
        self._never = early.never(kernel)  # torch.compile cannot ask a kernel

    def __call__(
        self,
        grid: Callable[[dict[str, Any]], tuple[int, ...]],
        tensors: tuple[torch.Tensor, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        values: tuple[Any, ...] = (),
    ) -> Launch | None:
        """Run the kernel, tuning it first where that is due; what is returned repeats it with other tensors.

        The kernel takes its tensors first, then `values` (see :class:`Launch`), then the other `arguments`, then
        constants. Inside torch.compile, which knows how to trace an autotuner, nothing is returned.
        """
        if torch.compiler.is_compiling():
            self.autotuner[grid](*tensors, *values, *arguments, **constants, **self._never)
            return None
        late = self._late(constants)
        config = self._choose(grid, (*tensors, *values, *arguments), constants, late)
        decided = {**constants, **config.kwargs}
        names = self.kernel.arg_names[len(tensors) + len(values) + len(arguments) :]
        # By position, because every keyword costs host time in each launch.
        positional = (*arguments, *(decided[name] for name in names if name != early.NAME))
        options = {name: value for name, value in config.all_kwargs().items() if name not in config.kwargs}
        return Launch(self.kernel, grid(decided), positional, options, late)

    def _choose(self, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], late: bool) -> triton.Config:
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        configs, prune = self.autotuner.configs, self.autotuner.early_config_prune
        if prune is not None:
            configs = prune(configs, named, **constants)
        of_key = {**named, **constants}
        dtypes = (str(a.dtype) for a in arguments if isinstance(a, torch.Tensor))
        key = (*(of_key[name] for name in self.autotuner.keys if name in of_key), *dtypes)

        def run(config: triton.Config, only_compile: bool) -> Any:
            decided = {**constants, **config.all_kwargs(), **early.decided(self.kernel, late)}
            decided |= early.options(self.kernel, late)
            if only_compile:
                return self.kernel.warmup(*arguments, grid=grid, **decided)
            return self.kernel[grid](*arguments, **decided)

        return self._chooser(key, configs, run)
