"""Launches of persistent clusters: as many as the GPU holds at once, each of which loops over rows."""

from __future__ import annotations

from typing import Any

import torch
import triton

from triton_impl.common.gluon import cluster
from triton_impl.runtime.launch_cache import Launch


class PersistentLaunch:
    """A launch of as many clusters as the GPU holds, which is known once the kernel has been compiled.

    Args:
        kernel, arguments, config: what is launched, as :class:`triton_impl.runtime.launch_cache.Launch` and the
            autotuner take them.
        most: the largest number of clusters that have work.
        smem_bytes: bytes of shared memory, all of them stages (smem_stages.py).

    Raises:
        RuntimeError: at the first launch, if Triton allocated other shared memory. The address of the stages would not
            be known.
    """

    def __init__(
        self, kernel: Any, most: int, arguments: tuple[Any, ...], config: triton.Config, smem_bytes: int
    ) -> None:
        self.programs = most
        self._smem_bytes = smem_bytes
        self._kernel, self._arguments = kernel, (*arguments, *config.kwargs.values())
        self._options = cluster.options(config)
        self._launch: Launch | None = None

    def _of(self, programs: int) -> Launch:
        return Launch(self._kernel, (programs,), self._arguments, self._options)

    def _held(self, compiled: Any, device: torch.device) -> int:
        """How many clusters the GPU holds at once.

        Triton's query of the driver knows shared memory alone. Where registers limit how many blocks a multiprocessor
        holds, the query names as much shared memory as allows that many.
        """
        compiled._init_handles()
        utils = triton.runtime.driver.active.utils
        gpu = utils.get_device_properties(device.index)
        registers = self._options["num_warps"] * 32 * triton.cdiv(compiled.n_regs, 8) * 8
        most = gpu["max_num_regs"] // registers
        shared = max(compiled.metadata.shared, gpu["max_shared_mem"] // (most + 1))
        return utils.cuOccupancyMaxActiveClusters(compiled.function, shared, self._options["num_ctas"])

    def compile(self, *tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> Any:
        return self._of(self.programs).compile(*tensors, values=values)

    def __call__(self, *tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> None:
        if self._launch is None:
            compiled = self.compile(*tensors, values=values)
            if (shared := compiled.metadata.shared) != self._smem_bytes:
                raise RuntimeError(
                    f"Triton {triton.__version__} gave {compiled.metadata.name} {shared} bytes of shared memory, "
                    f"expected {self._smem_bytes}; the address of its stages is not known"
                )
            self.programs = max(1, min(self.programs, self._held(compiled, tensors[0].device)))
            self._launch = self._of(self.programs)
        self._launch(*tensors, values=values)
