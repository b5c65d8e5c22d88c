"""Rows of the xla level beside plain JAX, one JSON object a line, in the folder `bridge` beside the sweep's rows."""

from __future__ import annotations

import dataclasses

from bench.rows.own import RowsOf

FOLDER = "bridge"


@dataclasses.dataclass(frozen=True)
class BridgeRow:
    """A pass of an operation: the program of `xla.jit` on JAX's own arrays, and on tensors. Times in microseconds."""

    op: str
    pass_: str
    dtype: str
    shape: str
    plain_us: float  # a call of many, on JAX's arrays: until the device is done
    ours_us: float  # the same of the rung, on tensors
    ratio: float  # ours over plain, the median over rounds
    host_shape: str  # so small that the host is what takes time
    host_plain_us: float  # to issue the program on JAX's arrays
    host_run_us: float  # to issue it on tensors, through the bridge
    host_call_us: float  # forward the public call, backward what autograd calls
    host_import_us: float  # part of host_run_us: operands to JAX, in order
    host_export_us: float  # part of host_run_us: finished results to tensors
    gpu: str | None
    torch: str
    jax: str
    commit: str | None
    dirty: bool | None
    when: str

    @property
    def bridge_us(self) -> float:
        """What passing tensors costs the host."""
        return self.host_run_us - self.host_plain_us


_KEPT: RowsOf[BridgeRow] = RowsOf(FOLDER, BridgeRow, "a row of the bridge", ("op", "pass_", "dtype", "shape", "gpu"))
results_file, read, save = _KEPT.results_file, _KEPT.read, _KEPT.save
