"""The rungs of layer_norm, rms_norm and add_rms_norm beyond `naive`, in reading order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from kernel_ladder.tracing import wants_gradient
from triton_impl.common.column_sum import sum_partials_kernel, sum_tile, sum_warps
from triton_impl.common.gluon import requirements
from triton_impl.norm import cluster, cluster_backward, fused, online, persistent_cluster
from triton_impl.norm.common import Backward, Forward, Kind, not_one_dtype
from triton_impl.runtime.aot import Entry, entry


class Rung(NamedTuple):
    """A rung: its forward and backward pass, why it takes no such rows, and why this machine cannot run it.

    `one_dtype`: it takes no float32 parameters beside 16-bit rows.
    """

    forward: Forward
    backward: Backward | None
    unsupported_rows: Callable[..., str | None]
    here: Callable[[], str | None] = lambda: None
    one_dtype: bool = False

    def unsupported(self, kind: Kind, n_cols: int, *inputs: torch.Tensor | None) -> str | None:
        """Why a call with these inputs, the first of which is there, cannot be taken, or None."""
        if self.one_dtype and (reason := not_one_dtype(*inputs)) is not None:
            return reason
        return self.unsupported_rows(kind, inputs[0], n_cols, wants_gradient(*inputs))


def rungs(kind: Kind) -> dict[str, Rung]:
    """The rungs of a normalisation by name."""
    found = {
        "online": Rung(online.forward, online.backward, online.unsupported_rows),
        "fused": Rung(fused.forward, fused.backward, fused.unsupported_rows),
        "cluster": Rung(cluster.forward, cluster_backward.backward, cluster.unsupported_rows, requirements.here, True),
    }
    if kind == persistent_cluster.KIND:
        unsupported = persistent_cluster.unsupported_rows
        found["persistent_cluster"] = Rung(persistent_cluster.forward, None, unsupported, requirements.here, True)
    return found


def ahead_of_time(kind: Kind) -> list[Entry]:
    """Specialisations that stand for the calls of a normalisation."""
    modules = [online, fused, cluster, *([persistent_cluster] if kind == persistent_cluster.KIND else [])]
    height, width = sum_tile(256)
    tile = {"DIVISIBILITY": 16, "BLOCK_M": height, "BLOCK_N": width}
    config = triton.Config({}, num_warps=sum_warps(256), num_stages=1)
    column_sum = entry(sum_partials_kernel, "bf16", tile, config, {"partials_ptr": "*fp32"})
    return [*(e for module in modules for e in module.ahead_of_time(kind)), column_sum]
