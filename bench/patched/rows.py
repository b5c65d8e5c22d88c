"""Rows of whole models, one JSON object a line, in the folder `patched` beside the sweep's rows."""

from __future__ import annotations

import dataclasses

from bench.rows.own import RowsOf

FOLDER = "patched"
#: Who replaced parts of a model: nobody, or Liger; else a backend of this package.
PLAIN, LIGER = "plain", "liger"
#: What is measured of a model. Decoding anew: at lengths of the cache that the process has not met.
FORWARD, STEP, DECODE, ANEW = "forward", "training step", "decode", "decode anew"


@dataclasses.dataclass(frozen=True)
class PatchedRow:
    """One pass of one model, one way."""

    model: str
    like: str
    shape: str  # layers and batch
    by: str
    compiled: bool
    pass_: str
    dtype: str
    us: float | None  # median of the wall time of a call; of decoding, of one token of every sequence
    low_us: float | None  # quartiles
    high_us: float | None
    tokens_per_s: float | None
    peak_bytes: int | None  # of GPU memory, of training with its optimizer, what the first step compiles and tunes too
    first_s: float | None  # the first call, with all that it compiles
    gpu: str | None
    torch: str
    triton: str | None
    transformers: str
    liger: str | None
    commit: str | None
    dirty: bool | None
    when: str
    wrong: str | None = None  # how results deviate; such a way has no times
    unsupported: str | None = None
    later_peak_bytes: int | None = None  # of the steps after the first


_KEPT: RowsOf[PatchedRow] = RowsOf(
    FOLDER, PatchedRow, "a row of a patched model", ("model", "by", "compiled", "pass_", "gpu")
)
results_file, read, save = _KEPT.results_file, _KEPT.read, _KEPT.save
